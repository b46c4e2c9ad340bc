"""How fast KV goes to the host and back, by tier, beside a plain memcpy of as many bytes in the same run.

    python bench/swap_bandwidth.py [--json] [--blocks 256] [--repeats 5] [--disk-path DIR] [--threads N]

Blocks have the shape of SmolLM2-135M (30 layers, 3 KV heads of 64, 16 tokens, bfloat16: 368,640 bytes) and
lie scattered on both sides. `file` is what a swap costs while the system's page cache has room; `file, on
disk` is with its writes brought to the disk (fdatasync) and its reads brought from there (pages dropped
first). A row's figure is the best of its repeats, because noise only ever adds. On a machine with CUDA,
`--device cuda` measures the link; figures are then by the device's events.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tidegate.core.plan import Copy, StepPlan
from tidegate.executors.torch.hardware import available_cores
from tidegate.executors.torch.kvcache import KvShape, PagedKv
from tidegate.executors.torch.swap import HostPool

SHAPE = KvShape(layers=30, kv_heads=3, head_dim=64, block_size=16, dtype=torch.bfloat16)
GB = 1e9


class Pool:
    """A filled KV tensor with a host pool of one tier, and copies between scattered blocks of both."""

    def __init__(self, blocks: int, disk: bool, device: torch.device, directory: Path | None) -> None:
        rng = random.Random(1)
        kv = PagedKv(SHAPE, 2 * blocks, device)
        kv.data.fill_(1.0)
        self.pool = HostPool(kv, 0 if disk else blocks, blocks if disk else 0, directory)
        here, there = rng.sample(range(2 * blocks), blocks), rng.sample(range(blocks), blocks)
        self.plans = {
            "out": StepPlan(0, 0.0, swapped_out=[Copy("a", here, there)]),
            "in": StepPlan(1, 0.0, swapped_in=[Copy("a", here, there)]),
        }

    def copy(self, way: str) -> float:
        """Seconds of one copy."""
        self.pool.start(self.plans[way])
        copied = self.pool.finish()
        assert not copied.failed
        return copied.seconds

    def sync(self) -> float:
        """Bring what was written to the disk; seconds."""
        start = time.perf_counter()
        os.fdatasync(self._fd)
        return time.perf_counter() - start

    def drop(self) -> None:
        """Let the page cache forget what is on the disk."""
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    @property
    def _fd(self) -> int:
        assert self.pool._file is not None
        return self.pool._file.fileno()


def memcpy_seconds(size: int) -> Callable[[], float]:
    """Copies `size` contiguous bytes to memory that was written before."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)

    def once() -> float:
        start = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - start

    return once


def measure(blocks: int, repeats: int, device: torch.device, directory: Path | None) -> list[dict[str, object]]:
    memory, disk = Pool(blocks, False, device, None), Pool(blocks, True, device, directory)
    memcpy = memcpy_seconds(blocks * SHAPE.block_bytes)
    best: dict[tuple[str, str], float] = {}

    def note(tier: str, way: str, seconds: float) -> None:
        best[tier, way] = min(best.get((tier, way), float("inf")), seconds)

    for _ in range(repeats + 1):  # the first touches every page and counts only where it is the best after all
        note("memcpy", "", memcpy())
        note("memory", "out", memory.copy("out"))
        note("memory", "in", memory.copy("in"))
        seconds = disk.copy("out")
        note("file", "out", seconds)
        note("file, on disk", "out", seconds + disk.sync())
        note("file", "in", disk.copy("in"))
        disk.drop()
        note("file, on disk", "in", disk.copy("in"))
    memory.pool.close()
    disk.pool.close()
    size = blocks * SHAPE.block_bytes
    return [
        {
            "tier": tier,
            "way": way,
            "gb_per_s": round(size / seconds / GB, 3),
            "us_per_block": round(seconds / blocks * 1e6, 1),
        }
        for (tier, way), seconds in best.items()
    ]


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--json", action="store_true")
    args.add_argument("--blocks", type=int, default=256)
    args.add_argument("--repeats", type=int, default=5)
    args.add_argument("--device", default="cpu")
    args.add_argument("--disk-path", type=Path)
    args.add_argument("--threads", type=int, default=available_cores())
    options = args.parse_args()
    torch.set_num_threads(options.threads)
    rows = measure(options.blocks, options.repeats, torch.device(options.device), options.disk_path)
    if options.json:
        machine = platform.processor() or platform.machine()
        size = SHAPE.block_bytes
        print(json.dumps({"machine": machine, "blocks": options.blocks, "block_bytes": size, "rows": rows}))
        return
    print(f"{options.blocks} blocks of {SHAPE.block_bytes:,} bytes")
    for row in rows:
        print(f"{row['tier']:<14} {row['way']:<4} {row['gb_per_s']:>8} GB/s  {row['us_per_block']:>8} us/block")


if __name__ == "__main__":
    main()
