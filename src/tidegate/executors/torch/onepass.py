"""What one-pass replacements of a model's modules share: threads, trial, and how they get in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

ONE_THREAD_VALUES = 1 << 14
"""Up to this many values one thread is done before another would have started."""

TRIAL_ROWS = 8

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
"""Number formats the kernels know, and how far apart results may lie, relatively.

Sums are taken in another order, which may tip each of two roundings of a bfloat16 result.
"""


class Kernels(NamedTuple):
    """One computation twice, compiled at their first call: by the calling thread, and by all."""

    one_thread: Any
    all_threads: Any

    def run(self, values: int, *arguments: Any) -> None:
        """Compute `values` values with as many threads as pay."""
        (self.one_thread if values <= ONE_THREAD_VALUES else self.all_threads)(*arguments)


def computable(weight: torch.Tensor) -> bool:
    """Whether the kernels know the number format of `weight`, and can reach it."""
    return weight.device.type == "cpu" and weight.dtype in TOLERANCE


def exchange(model: nn.Module, one_pass: Callable[[nn.Module], nn.Module | None]) -> int:
    """Exchange, in place, every module of `model` for which `one_pass` has another; returns how many."""
    exchanged = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            ours = one_pass(child)
            if ours is not None:
                setattr(module, name, ours)
                exchanged += 1
    return exchanged
