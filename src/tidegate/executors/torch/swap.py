"""KV blocks on their way to the host and back: a pool in memory, a file beyond it.

Host memory and file hold a block as one piece, all layers after each other, although the device's tensor
has the layer first: a block is then one transfer over the link and one write to the file.
docs/swap.md says what overlaps with what, and what fails how.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tidegate.core.plan import Copy, StepPlan
from tidegate.errors import ConfigError
from tidegate.executors.torch.hardware import available_memory
from tidegate.executors.torch.kvcache import GIB, PagedKv
from tidegate.executors.torch.link import CpuLink, CudaLink, Link, allocate
from tidegate.executors.torch.swapfile import SwapFile

_log = logging.getLogger(__name__)

BOUNCE_BYTES = 16 << 20  # the most memory through which blocks pass on their way between device and file
FAILURES = (OSError, RuntimeError, MemoryError)  # whatever else a copy raises is a fault of ours, not of the machine


@dataclass(frozen=True, slots=True)
class Copied:
    """What the copies of one step did: ids of requests whose copy failed, and the seconds that all took."""

    failed: list[str]
    seconds: float


class HostPool:
    """Host blocks 0 .. host_blocks-1 in memory, the next `disk_blocks` in a file in `directory`.

    What memory it may use and the file's whole length are settled at the start: ConfigError where there is too little.
    `directory` is the system's for temporary files where None. Use it from one thread.

    copied_bytes, copy_seconds: what was copied so far both ways, failed copies left out of the bytes.
    """

    def __init__(self, kv: PagedKv, host_blocks: int, disk_blocks: int, directory: Path | None = None) -> None:
        self.host_blocks = host_blocks
        self.disk_blocks = disk_blocks
        self.block_bytes = kv.shape.block_bytes
        self.copied_bytes = 0
        self.copy_seconds = 0.0
        on_gpu = kv.data.device.type == "cuda"
        bounce = max(1, min(disk_blocks, BOUNCE_BYTES // self.block_bytes)) if disk_blocks else 0
        self.nbytes = (host_blocks + bounce) * self.block_bytes
        _check_memory(self.nbytes, 0 if on_gpu else kv.data.nbytes)
        self._link: Link = CudaLink(kv.data) if on_gpu else CpuLink(kv.data)
        self._memory = allocate(host_blocks, kv.data)
        self._bounce = allocate(bounce, kv.data)
        self._file = SwapFile(disk_blocks, self.block_bytes, directory) if disk_blocks else None
        self._holds = np.zeros(host_blocks + disk_blocks, np.bool_)
        self._failed: list[str] = []
        self._seconds = 0.0

    def start(self, plan: StepPlan) -> None:
        """Copy what `plan` swaps out and in. Call it before anything of the plan is computed.

        What is copied to or from memory may go on beside the plan's compute; `finish` waits for it.
        """
        started = time.perf_counter()
        self._link.start()
        for copy in plan.swapped_out:
            self._try(copy, out=True)
        for copy in plan.swapped_in:
            self._try(copy, out=False)
        self._seconds = time.perf_counter() - started

    def finish(self) -> Copied:
        """Wait until every copy that was started is done."""
        seconds = self._link.finish()
        seconds = self._seconds if seconds is None else seconds
        self.copy_seconds += seconds
        failed, self._failed, self._seconds = self._failed, [], 0.0
        return Copied(failed, seconds)

    def close(self) -> None:
        """Give the file back. Idempotent."""
        if self._file is not None:
            self._file.close()

    def _try(self, copy: Copy, out: bool) -> None:
        """One request's copy; if it fails only that request is told."""
        host = np.asarray(copy.host)
        try:
            if out:
                self._holds[host] = False
                self._swap_out(copy.device, copy.host)
                self._holds[host] = True
            elif self._holds[host].all():
                self._swap_in(copy.device, copy.host)
            else:
                raise OSError("the copy that was to bring it to the host failed")
        except FAILURES as error:
            direction = "to" if out else "from"
            _log.warning("copying the KV of request %s %s the host failed: %s", copy.request_id, direction, error)
            self._failed.append(copy.request_id)
        else:
            self.copied_bytes += len(host) * self.block_bytes

    def _swap_out(self, device: Sequence[int], host: Sequence[int]) -> None:
        memory, file = self._by_tier(device, host)
        if memory:
            self._link.out([d for d, _ in memory], [h for _, h in memory], self._memory)
        for piece in self._pieces(file):
            rows = range(len(piece))
            self._link.out([d for d, _ in piece], rows, self._bounce)
            self._link.wait()
            for row, (_, block) in zip(rows, piece, strict=True):
                self._swap_file.write(block, self._bounce.bytes[row])

    def _swap_in(self, device: Sequence[int], host: Sequence[int]) -> None:
        memory, file = self._by_tier(device, host)
        if memory:
            self._link.back([d for d, _ in memory], [h for _, h in memory], self._memory)
        for piece in self._pieces(file):
            rows = range(len(piece))
            for row, (_, block) in zip(rows, piece, strict=True):
                self._swap_file.read(block, self._bounce.bytes[row])
            self._link.back([d for d, _ in piece], rows, self._bounce)
            self._link.wait()

    def _by_tier(
        self, device: Sequence[int], host: Sequence[int]
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(device block, row in memory) and (device block, block of the file) pairs."""
        pairs = list(zip(device, host, strict=True))
        first = self.host_blocks
        return [p for p in pairs if p[1] < first], [(d, h - first) for d, h in pairs if h >= first]

    def _pieces(self, pairs: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """As many pairs at once as the bounce buffer holds."""
        size = len(self._bounce)
        return [pairs[i : i + size] for i in range(0, len(pairs), size)] if pairs else []

    @property
    def _swap_file(self) -> SwapFile:
        if self._file is None:
            raise IndexError("a host block beyond the pool")
        return self._file


def _check_memory(wanted: int, promised: int) -> None:
    """ConfigError unless `wanted` bytes are free beside those promised to the KV pool of a CPU."""
    available = available_memory(torch.device("cpu"))
    if available is not None and wanted + promised > available:
        beside = f" beside {promised / GIB:,.1f} GiB of KV" if promised else ""
        raise ConfigError(
            f"swapped KV takes {wanted / GIB:,.1f} GiB{beside}, and {available / GIB:,.1f} GiB of memory are free: "
            "lower host_kv_memory (or host_blocks)"
        )
