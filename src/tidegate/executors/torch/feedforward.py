"""Feed-forward blocks `down(silu(gate(x)) * up(x))` with the activation and the product in one pass over memory."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import njit, prange
from torch import nn

from tidegate.executors.torch.kernels import as_array, exp, narrow, rounded, same, widen
from tidegate.executors.torch.linear import FusedFirst, FusedPart
from tidegate.executors.torch.onepass import TOLERANCE, TRIAL_ROWS, Kernels, computable, exchange


@cache
def gate_kernels(bits16: bool) -> Kernels:
    """Called as `kernel(out, both)`: `[T, width]` and `[T, 2 * width]`, gates first, float32 or bfloat16 as its bits.

    Rounds where the model's own operations round.
    """
    load, store, halfway = (widen, narrow, rounded) if bits16 else (same, same, same)

    @njit(fastmath=True, nogil=True, error_model="numpy")
    def gate_row(out, both):  # type: ignore[no-untyped-def]
        width = out.shape[0]
        for i in range(width):
            x = load(both[i])
            small = exp(-abs(x))  # x / (1 + e**-x), with an exponent that never overflows
            top = np.float32(1.0) if x >= np.float32(0.0) else small
            out[i] = store(halfway(x * top / (np.float32(1.0) + small)) * load(both[width + i]))

    @njit(nogil=True)
    def one_thread(out, both):  # type: ignore[no-untyped-def]
        for row in range(out.shape[0]):
            gate_row(out[row], both[row])

    @njit(nogil=True, parallel=True)
    def all_threads(out, both):  # type: ignore[no-untyped-def]
        for row in prange(out.shape[0]):
            gate_row(out[row], both[row])

    return Kernels(one_thread, all_threads)


def warm_up(dtype: torch.dtype) -> None:
    """Compile the kernels for `dtype` now, in the threads of the caller."""
    both = as_array(torch.zeros((1, 32), dtype=dtype))
    for kernel in gate_kernels(dtype == torch.bfloat16):
        kernel(both[:, :16].copy(), both)


class OnePassFeedForward(nn.Module):
    """Stands in for a block whose gate and up projections were fused: `[.., in] -> [.., out]`."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        first = own.gate_proj
        self.gate_up, self.down_proj = first.linear, own.down_proj
        self._width = first.sizes[0]
        self._kernels = gate_kernels(first.linear.weight.dtype == torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up(x)
        out = both.new_empty((*both.shape[:-1], self._width))
        rows = as_array(out).reshape(-1, self._width)
        self._kernels.run(out.numel(), rows, as_array(both).reshape(-1, 2 * self._width))
        return self.down_proj(out)


def exchange_feed_forward(model: nn.Module) -> int:
    """Exchange, in place, every block of `model` that one pass on a CPU can compute; returns how many.

    Projections must have been fused, and not yet prepacked. A block is exchanged only if both give the same for trial
    rows: there are other activations.
    """
    return exchange(model, _one_pass)


def _one_pass(module: nn.Module) -> OnePassFeedForward | None:
    first, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if not (isinstance(first, FusedFirst) and isinstance(up, FusedPart) and isinstance(down, nn.Linear)):
        return None
    weight = down.weight
    if not computable(weight):
        return None
    ours = OnePassFeedForward(module)
    generator = torch.Generator().manual_seed(1)
    trial = (torch.randn((TRIAL_ROWS, first.linear.in_features), generator=generator) * 3).to(weight.dtype)
    with torch.inference_mode():
        theirs, one_pass = module(trial).float(), ours(trial).float()
    tolerance = TOLERANCE[weight.dtype]
    close = torch.allclose(theirs, one_pass, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))
    return ours if close else None
