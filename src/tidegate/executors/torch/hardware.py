"""What this process may use of the machine: cores, and the number format that suits it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16", "svebf16"})
CPU_INFO = Path("/proc/cpuinfo")
MEMORY_INFO = Path("/proc/meminfo")
CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")
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


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes with the calling thread alone, so that it gets no pool of OpenMP threads of its own.

    A thread that once computed with several keeps its pool. GNU's OpenMP counts the pools' threads together, and where
    there are more than cores, no pool waits busily for its next work any more: every operation of a step then
    begins with waking threads (measured here: 1.5 times the time of a step on two cores).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def available_memory(device: torch.device) -> int | None:
    """Bytes that may be allocated on `device` without pushing anything out; None where nobody can tell.

    For a CPU that is what the kernel calls available, and at most the cgroup v2 limit.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    return min((known for known in (_kernel_available(), _memory_limit()) if known is not None), default=None)


def _kernel_available() -> int | None:
    try:
        for line in MEMORY_INFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None
    return None


def _memory_limit() -> int | None:
    try:
        return int(CGROUP_MEMORY.read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return None


def native_dtype(cpu_info: str) -> torch.dtype:
    """bfloat16 where the CPU described by `cpu_info` multiplies it by instructions of its own, else float32.

    Without them a bfloat16 product is several times slower than a float32 one.
    cpu_info: as in /proc/cpuinfo, whose lines `flags` (x86) or `Features` (Arm) name the instructions.
    """
    for line in cpu_info.splitlines():
        key, _, names = line.partition(":")
        if key.strip() in ("flags", "Features") and BFLOAT16_FLAGS & set(names.split()):
            return torch.bfloat16
    return torch.float32


def read_cpu_info() -> str:
    """What the kernel says about the CPU; empty on systems without /proc."""
    try:
        return CPU_INFO.read_text()
    except OSError:
        return ""
