"""RMS norms in one pass over memory; plain torch operations take seven."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit, prange
from torch import nn

from tidegate.executors.torch.kernels import as_array, narrow, rounded, same, widen

ONE_THREAD_VALUES = 1 << 14
"""Up to this many values one thread is done before another would have started."""

TRIAL_ROWS = 8

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
"""Number formats the kernels know, and how far apart results may lie, relatively.

The squares are summed in another order, which may tip both roundings of a bfloat16 result.
"""


class NormKernels(NamedTuple):
    """Called as `kernel(out, x, weight, eps)` with `[T, width]` twice and `[width]`; compiled at their first call."""

    one_thread: Any
    all_threads: Any


@cache
def norm_kernels(bits16: bool) -> NormKernels:
    """The kernels for float32, or for bfloat16 as its bits (uint16)."""
    load, store, halfway = (widen, narrow, rounded) if bits16 else (same, same, same)

    @njit(fastmath=True, nogil=True, error_model="numpy")
    def norm_row(out, x, weight, eps):  # type: ignore[no-untyped-def]
        squares = np.float32(0.0)
        for i in range(x.shape[0]):
            value = load(x[i])
            squares += value * value
        scale = np.float32(1.0) / np.sqrt(squares / np.float32(x.shape[0]) + eps)
        for i in range(x.shape[0]):
            out[i] = store(halfway(load(x[i]) * scale) * load(weight[i]))

    @njit(nogil=True)
    def one_thread(out, x, weight, eps):  # type: ignore[no-untyped-def]
        for row in range(x.shape[0]):
            norm_row(out[row], x[row], weight, eps)

    @njit(nogil=True, parallel=True)
    def all_threads(out, x, weight, eps):  # type: ignore[no-untyped-def]
        for row in prange(x.shape[0]):
            norm_row(out[row], x[row], weight, eps)

    return NormKernels(one_thread, all_threads)


class OnePassNorm(nn.Module):
    """`weight * (x / rms(x))` over the last dimension, `[.., width] -> [.., width]`.

    Rounds where the model's own operations round: to the number format before the weight, and after it.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = weight.detach()
        self._array = as_array(self.weight)
        self._eps = np.float32(eps)
        self._kernels = norm_kernels(weight.dtype == torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        rows = (-1, len(self._array))
        run = self._kernels.one_thread if x.numel() <= ONE_THREAD_VALUES else self._kernels.all_threads
        run(as_array(out).reshape(rows), as_array(x).reshape(rows), self._array, self._eps)
        return out


def warm_up(dtype: torch.dtype) -> None:
    """Compile the kernels for `dtype` now, in the threads of the caller."""
    row = as_array(torch.zeros((1, 16), dtype=dtype))
    for kernel in norm_kernels(dtype == torch.bfloat16):
        kernel(row, row, row[0], np.float32(1.0))


def exchange_norms(model: nn.Module) -> int:
    """Exchange, in place, every RMS norm of `model` that one pass on a CPU can compute; returns how many.

    A norm is exchanged only if both give the same for trial rows: architectures differ in where they round and in
    what they do to the weight.
    """
    exchanged = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            ours = _one_pass(child)
            if ours is not None:
                setattr(module, name, ours)
                exchanged += 1
    return exchanged


def _one_pass(module: nn.Module) -> OnePassNorm | None:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if eps is None or not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return None
    if weight.device.type != "cpu" or weight.dtype not in TOLERANCE:
        return None
    ours = OnePassNorm(weight, eps)
    trial = torch.linspace(-4, 4, TRIAL_ROWS * len(weight)).reshape(TRIAL_ROWS, -1).to(weight.dtype)
    with torch.inference_mode():
        theirs, one_pass = module(trial).float(), ours(trial).float()
    return ours if torch.allclose(theirs, one_pass, rtol=TOLERANCE[weight.dtype], atol=1e-6) else None
