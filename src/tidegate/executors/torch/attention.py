"""Attention over the paged KV tensor, called by every layer of an unmodified transformers model.

A step packs its rows as decodes first (one row each), then chunks. The model passes the `StepBatch`
through to each attention layer as the keyword `paged`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tidegate.executors.torch.kernels import as_array, decode_kernel
from tidegate.executors.torch.kvcache import PagedKv

NAME = "tidegate_paged"


@dataclass(slots=True)
class ChunkSpan:
    """One chunk's rows in the batch: `row .. row+length` at KV positions `start .. start+length`.

    blocks: ids of the blocks that hold positions 0 .. start+length.
    """

    row: int
    length: int
    start: int
    blocks: torch.Tensor
    masks: dict[int, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int) -> torch.Tensor:
        """Which keys each query sees, `[length, start + length]` bool; `window` keys at most (0 = all)."""
        found = self.masks.get(window)
        if found is None:
            keys = torch.arange(self.start + self.length, device=self.blocks.device)
            queries = keys[self.start :, None]
            found = keys <= queries
            if window:
                found &= keys > queries - window
            self.masks[window] = found
        return found


@dataclass(slots=True)
class StepBatch:
    """Where a step's rows read and write KV.

    slots:     `[S]` int64, the decoding slots; their rows come first
    tables:    `[slots, width]` int32 block ids; positions: `[slots]` int64, KV position of the row
    kv_rows:   `[T]` int64, flat KV position (block * block_size + offset) that each row writes
    """

    kv: PagedKv
    slots: np.ndarray
    tables: np.ndarray
    positions: np.ndarray
    kv_rows: torch.Tensor
    chunks: list[ChunkSpan]
    numba: bool

    def attend(
        self,
        rows: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        """Attention of the step's queries `[T, heads, D]` over a layer's KV, which holds the step's own -> the same.

        window: keys a query sees at most, itself included; softcap: as the model has it; 0 is none.
        """
        decodes = len(self.slots)
        parts = []
        if decodes:
            decode = decode_numba if self.numba else decode_torch
            where = (self.tables, self.positions, self.slots)
            parts.append(decode(rows[:decodes].contiguous(), keys, values, *where, scaling, window, softcap))
        parts += [
            _attend_chunk(rows[c.row : c.row + c.length], keys, values, c, scaling, window, softcap)
            for c in self.chunks
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    paged: StepBatch,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer: query `[1, heads, T, D]`, key and value `[1, kv_heads, T, D]` -> `[1, T, heads, D]`.

    Writes the rows' keys and values into the paged tensor before anything is read.
    """
    keys, values = paged.kv.layer(module.layer_idx)
    flat = (-1, *keys.shape[2:])
    keys.view(flat).index_copy_(0, paged.kv_rows, key[0].transpose(0, 1))
    values.view(flat).index_copy_(0, paged.kv_rows, value[0].transpose(0, 1))
    rows = query[0].transpose(0, 1)
    return paged.attend(rows, keys, values, scaling, sliding_window or 0, softcap or 0.0)[None], None


def decode_numba(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: np.ndarray,
    positions: np.ndarray,
    slots: np.ndarray,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Decode attention by the CPU kernel: q `[S, heads, D]` -> `[S, heads, D]`; see `kernels.decode_kernel`."""
    kernel = decode_kernel(q.shape[2], q.shape[1] // keys.shape[2], q.dtype == torch.bfloat16)
    out = torch.empty_like(q)
    arrays = (as_array(out), as_array(q), as_array(keys), as_array(values), tables, positions, slots)
    kernel(*arrays, np.float32(scaling), window, np.float32(softcap))
    return out


def decode_torch(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: np.ndarray,
    positions: np.ndarray,
    slots: np.ndarray,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """The same on any device: gathers every context, padded to the longest, and masks."""
    block_size = keys.shape[1]
    last = torch.from_numpy(positions[slots]).to(q.device)
    width = int(positions[slots].max()) // block_size + 1
    blocks = torch.from_numpy(tables[slots, :width]).to(q.device).long()
    k = keys[blocks].flatten(1, 2).transpose(1, 2)
    v = values[blocks].flatten(1, 2).transpose(1, 2)
    at = torch.arange(k.shape[2], device=q.device)
    mask = at <= last[:, None]
    if window:
        mask &= at > last[:, None] - window
    return _attend(q[:, :, None], k, v, mask[:, None, None], scaling, softcap)[:, :, 0]


def _attend_chunk(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chunk: ChunkSpan,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """A chunk's queries `[length, heads, D]` over the gathered context -> `[length, heads, D]`."""
    total = chunk.start + chunk.length
    k = keys.index_select(0, chunk.blocks).flatten(0, 1)[:total].transpose(0, 1)[None]
    v = values.index_select(0, chunk.blocks).flatten(0, 1)[:total].transpose(0, 1)[None]
    causal = chunk.start == 0 and not 0 < window < total
    mask = None if causal else chunk.mask(window if window < total else 0)
    if softcap and causal:
        mask, causal = chunk.mask(0), False
    return _attend(q.transpose(0, 1)[None], k, v, mask, scaling, softcap, causal)[0].transpose(0, 1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float,
    causal: bool = False,
) -> torch.Tensor:
    """Grouped-query attention of `[N, heads, T, D]` over `[N, kv_heads, C, D]`, softcap included."""
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scaling, enable_gqa=True)
    n, heads, length, dim = q.shape
    grouped = q.reshape(n, k.shape[1], -1, length, dim)
    scores = torch.matmul(grouped, k[:, :, None].transpose(-1, -2)).float() * scaling
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~(mask if mask.dim() == 2 else mask[:, None]), float("-inf"))
    weights = torch.softmax(scores, dim=-1).to(q.dtype)
    return torch.matmul(weights, v[:, :, None]).reshape(n, heads, length, dim)
