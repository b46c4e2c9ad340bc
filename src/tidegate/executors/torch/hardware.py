"""What this process may use of the machine: cores, and the number format that suits it."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16", "svebf16"})
CPU_INFO = Path("/proc/cpuinfo")
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
