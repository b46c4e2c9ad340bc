"""What this process may use of the machine: cores, and the number format that is faster here."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import torch

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available_cores() -> int:
    """Cores this process really has: its affinity mask, cut by a cgroup v2 quota (at least 1)."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(affinity, _quota_cores()))


def _quota_cores() -> int:
    """Whole cores of the cgroup's CPU quota; very many where there is none."""
    try:
        quota, period = CGROUP_QUOTA.read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return 1 << 16


def faster_dtype(threads: int) -> torch.dtype:
    """bfloat16 or float32, whichever multiplies a batch of 16 rows faster on this CPU (about 50 ms).

    Without bfloat16 instructions a bfloat16 product is several times slower than a float32 one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return min((torch.bfloat16, torch.float32), key=_product_seconds)
    finally:
        torch.set_num_threads(before)


def _product_seconds(dtype: torch.dtype) -> float:
    """Seconds of one 16 x 1024 by 1024 x 1024 product, the least of five."""
    x, w = torch.ones(16, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        torch.nn.functional.linear(x, w)
        best = min(best, time.perf_counter() - start)
    return best
