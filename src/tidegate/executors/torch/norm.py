"""RMS norms in one pass over memory; plain torch operations take seven."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import njit, prange
from torch import nn

from tidegate.executors.torch.kernels import as_array, narrow, rounded, same, widen
from tidegate.executors.torch.onepass import TOLERANCE, TRIAL_ROWS, Kernels, computable, exchange


@cache
def norm_kernels(bits16: bool) -> Kernels:
    """Called as `kernel(out, x, weight, eps)`: `[T, width]` twice and `[width]`, float32 or bfloat16 as its bits."""
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

    return Kernels(one_thread, all_threads)


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
        self._kernels.run(x.numel(), as_array(out).reshape(rows), as_array(x).reshape(rows), self._array, self._eps)
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
    return exchange(model, _one_pass)


def _one_pass(module: nn.Module) -> OnePassNorm | None:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if eps is None or not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return None
    if not computable(weight):
        return None
    ours = OnePassNorm(weight, eps)
    trial = torch.linspace(-4, 4, TRIAL_ROWS * len(weight)).reshape(TRIAL_ROWS, -1).to(weight.dtype)
    with torch.inference_mode():
        theirs, one_pass = module(trial).float(), ours(trial).float()
    return ours if torch.allclose(theirs, one_pass, rtol=TOLERANCE[weight.dtype], atol=1e-6) else None
