"""Self-attention of one layer with rotation and KV write in one pass; plain torch takes some twenty operations.

Only for the rotation of halves over whole heads that most decoder models share. A layer is exchanged if it agrees with
ours on trial rows; what it asks of attention (scaling, window, soft-cap) is noted in the same trial.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit, prange
from torch import nn

from tidegate.executors.torch.attention import ChunkSpan, StepBatch
from tidegate.executors.torch.kernels import as_array, narrow, rounded, same, widen
from tidegate.executors.torch.kvcache import KvShape, PagedKv
from tidegate.executors.torch.linear import FusedFirst
from tidegate.executors.torch.onepass import TOLERANCE, TRIAL_ROWS, Kernels, computable, exchange


@cache
def rotate_kernels(bits16: bool) -> Kernels:
    """Called as `kernel(q, keys, values, qkv, cos, sin, kv_rows)`, float32 or bfloat16 as its bits.

    Writes q `[T, heads, D]`, and rows `kv_rows` `[T]` of keys and values `[rows, kv_heads, D]`;
    reads qkv `[T, heads + 2 * kv_heads, D]`, cos and sin `[T, D]`.
    """
    load, store, halfway = (widen, narrow, rounded) if bits16 else (same, same, same)

    @njit(nogil=True, error_model="numpy")
    def rotate(out, x, cos, sin):  # type: ignore[no-untyped-def]
        half = x.shape[0] // 2
        for i in range(half):
            low, high = load(x[i]), load(x[half + i])
            out[i] = store(halfway(low * load(cos[i])) - halfway(high * load(sin[i])))
            out[half + i] = store(halfway(high * load(cos[half + i])) + halfway(low * load(sin[half + i])))

    @njit(nogil=True, error_model="numpy")
    def row(q, keys, values, qkv, cos, sin):  # type: ignore[no-untyped-def]
        heads, kv_heads = q.shape[0], keys.shape[0]
        for h in range(heads):
            rotate(q[h], qkv[h], cos, sin)
        for h in range(kv_heads):
            rotate(keys[h], qkv[heads + h], cos, sin)
            for i in range(values.shape[1]):
                values[h, i] = qkv[heads + kv_heads + h, i]

    @njit(nogil=True)
    def one_thread(q, keys, values, qkv, cos, sin, kv_rows):  # type: ignore[no-untyped-def]
        for t in range(q.shape[0]):
            row(q[t], keys[kv_rows[t]], values[kv_rows[t]], qkv[t], cos[t], sin[t])

    @njit(nogil=True, parallel=True)
    def all_threads(q, keys, values, qkv, cos, sin, kv_rows):  # type: ignore[no-untyped-def]
        for t in prange(q.shape[0]):
            row(q[t], keys[kv_rows[t]], values[kv_rows[t]], qkv[t], cos[t], sin[t])

    return Kernels(one_thread, all_threads)


def warm_up(dtype: torch.dtype) -> None:
    """Compile the kernels for `dtype` now, in the threads of the caller."""
    heads, rows = as_array(torch.zeros((1, 3, 2), dtype=dtype)), np.zeros(1, np.int64)
    one = heads[:, :1]
    for kernel in rotate_kernels(dtype == torch.bfloat16):
        kernel(one.copy(), one.copy(), one.copy(), heads, one[0], one[0], rows)


class OnePassSelfAttention(nn.Module):
    """Stands in for `own`, which is still asked where the rotation is not over whole heads.

    Its keyword arguments and result are those of transformers' layers; hidden states are `[1, T, width]`.
    """

    def __init__(self, own: nn.Module, asked: Asked) -> None:
        super().__init__()
        self.own = own
        self.qkv, self.o_proj, self.layer_idx = own.q_proj.linear, own.o_proj, own.layer_idx
        self._asked = asked
        self._kernels = rotate_kernels(own.o_proj.weight.dtype == torch.bfloat16)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any = None, *, paged: StepBatch, **others: Any
    ) -> tuple[torch.Tensor, None]:
        cos, sin = position_embeddings
        shape = paged.kv.shape
        if cos.shape[-1] != shape.head_dim or cos.dtype != shape.dtype:
            result: tuple[torch.Tensor, None] = self.own(
                hidden_states=hidden_states, position_embeddings=position_embeddings, paged=paged, **others
            )
            return result
        rows = hidden_states.shape[1]
        qkv = self.qkv(hidden_states)[0].view(rows, -1, shape.head_dim)
        q = qkv.new_empty((rows, qkv.shape[1] - 2 * shape.kv_heads, shape.head_dim))
        keys, values = paged.kv.layer(self.layer_idx)
        flat = (-1, shape.kv_heads, shape.head_dim)
        keys_array, values_array = as_array(keys).reshape(flat), as_array(values).reshape(flat)
        angles = as_array(cos).reshape(rows, -1), as_array(sin).reshape(rows, -1)
        written = (as_array(q), keys_array, values_array)
        self._kernels.run(qkv.numel(), *written, as_array(qkv), *angles, paged.kv_rows.numpy())
        out = paged.attend(q, keys, values, *self._asked)
        return self.o_proj(out.reshape(1, rows, -1)), None


class Asked(NamedTuple):
    """What a layer asks of attention; 0 is none for the window (tokens) and the soft-cap."""

    scaling: float
    window: int
    softcap: float


@dataclass
class TrialBatch(StepBatch):
    """A step of one chunk that notes what it was asked."""

    asked: Asked | None = None

    def attend(
        self,
        rows: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        self.asked = Asked(scaling, window, softcap)
        return StepBatch.attend(self, rows, keys, values, *self.asked)


def exchange_self_attention(model: nn.Module, shape: KvShape) -> int:
    """Exchange, in place, every self-attention of `model` that one pass on a CPU can compute; returns how many.

    The model attends by `attention.paged_attention`; its projections are fused, and not yet prepacked.
    """
    return exchange(model, partial(_one_pass, shape=shape))


def _one_pass(module: nn.Module, shape: KvShape) -> OnePassSelfAttention | None:
    first, out = getattr(module, "q_proj", None), getattr(module, "o_proj", None)
    if not isinstance(first, FusedFirst) or type(out) is not nn.Linear or not hasattr(module, "layer_idx"):
        return None
    weight = first.linear.weight
    if not computable(weight):
        return None
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn((1, TRIAL_ROWS, weight.shape[1]), generator=generator).to(weight.dtype)
    angles = [torch.randn((1, TRIAL_ROWS, shape.head_dim), generator=generator).to(weight.dtype) for _ in range(2)]
    step, again = _trial(shape), _trial(shape)
    arguments = {"hidden_states": hidden, "position_embeddings": tuple(angles), "attention_mask": None}
    with torch.inference_mode():
        theirs = module(**arguments, paged=step)[0].float()
        if step.asked is None:
            return None
        ours = OnePassSelfAttention(module, step.asked)
        one_pass = ours(**arguments, paged=again)[0].float()
    close = torch.allclose(theirs, one_pass, rtol=TOLERANCE[weight.dtype], atol=1e-2 * float(theirs.abs().max()))
    return ours if close and torch.equal(step.kv.data, again.kv.data) else None


def _trial(shape: KvShape) -> TrialBatch:
    kv = PagedKv(shape, -(-TRIAL_ROWS // shape.block_size), torch.device("cpu"))
    none = np.zeros(0, np.int64)
    chunk = ChunkSpan(0, TRIAL_ROWS, 0, torch.arange(kv.blocks))
    rows = torch.arange(TRIAL_ROWS)
    return TrialBatch(kv, none, np.zeros((0, 1), np.int32), none, rows, [chunk], numba=True)
