"""The way between a device's KV tensor and host memory: plain copies on a CPU, a side stream on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from tidegate.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HostRows:
    """Host memory for KV blocks, one a row.

    blocks: `[rows, layers, 2, block_size, kv_heads, head_dim]`; bytes: the same memory, `[rows, block_bytes]` uint8
    """

    blocks: torch.Tensor
    bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.bytes)


def allocate(rows: int, data: torch.Tensor) -> HostRows:
    """Memory for `rows` blocks of the KV tensor `data`, pinned where that lies on a GPU.

    Raises ConfigError if there is too little.
    """
    shape = (rows, *data.shape[:2], *data.shape[3:])
    size = data[:, :, 0].nbytes
    try:
        blocks = torch.empty(shape, dtype=data.dtype, pin_memory=data.device.type == "cuda" and rows > 0)
    except (RuntimeError, TypeError) as error:  # no memory after all, or a size beyond 64 bits
        raise ConfigError(
            f"host memory for {rows:,} KV blocks of {size:,} bytes cannot be allocated: "
            "lower host_kv_memory (or host_blocks)"
        ) from error
    return HostRows(blocks, blocks.view(torch.uint8).reshape(rows, size).numpy())


class Link(Protocol):
    """Moves whole KV blocks between the device and rows of host memory."""

    def start(self) -> None:
        """What follows sees all that earlier steps wrote."""
        ...

    def out(self, blocks: Sequence[int], rows: Sequence[int], memory: HostRows) -> None:
        """Copy device blocks to rows of memory; later compute may overwrite the blocks at once."""
        ...

    def back(self, blocks: Sequence[int], rows: Sequence[int], memory: HostRows) -> None:
        """Copy rows of memory to device blocks, which nobody computes on until `finish`."""
        ...

    def wait(self) -> None:
        """Until the copies so far are done, so that memory may be read or overwritten."""
        ...

    def finish(self) -> float | None:
        """The same at the end of a step; the seconds that the copies took, None where the caller's clock says it."""
        ...


class CpuLink:
    """Device blocks are memory as well: each is copied by one strided assignment, done when it returns.

    Per block and not the whole list at once: index_select and index_copy_ over the list go through a second copy
    that is allocated anew, and were measured at a tenth of this on two cores (bench/swap_bandwidth.py times this).
    """

    def __init__(self, data: torch.Tensor) -> None:
        layers, two, blocks = data.shape[:3]
        self._blocks = data.view(layers, two, blocks, -1).view(torch.uint8).numpy().transpose(2, 0, 1, 3)

    def start(self) -> None:
        """Nothing to wait for: earlier steps are computed."""

    def out(self, blocks: Sequence[int], rows: Sequence[int], memory: HostRows) -> None:
        """See `Link.out`."""
        host = memory.bytes.reshape(-1, *self._blocks.shape[1:])
        for block, row in zip(blocks, rows, strict=True):
            host[row] = self._blocks[block]

    def back(self, blocks: Sequence[int], rows: Sequence[int], memory: HostRows) -> None:
        """See `Link.back`."""
        host = memory.bytes.reshape(-1, *self._blocks.shape[1:])
        for block, row in zip(blocks, rows, strict=True):
            self._blocks[block] = host[row]

    def wait(self) -> None:
        """Nothing to wait for."""

    def finish(self) -> float | None:
        """Nothing to wait for."""
        return None


class CudaLink:
    """Copies on a stream of their own through pinned memory, so that compute goes on beside them.

    Events order what must be: a copy starts after the compute of earlier steps, and compute that may overwrite
    blocks starts after they were gathered on the device (not after they crossed the link). Blocks that come
    back are computed on by later steps alone, and those start after `finish`.
    """

    PIECE_BYTES = 64 << 20  # device memory through which blocks are gathered and scattered

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._stream = torch.cuda.Stream(data.device)
        self._piece = max(1, self.PIECE_BYTES // data[:, :, 0].nbytes)
        self._began = torch.cuda.Event(enable_timing=True)
        self._ended = torch.cuda.Event(enable_timing=True)
        self._gathered = torch.cuda.Event()

    def start(self) -> None:
        """The side stream waits for the compute of earlier steps."""
        self._stream.wait_stream(torch.cuda.current_stream(self._data.device))
        self._began.record(self._stream)

    def out(self, blocks: Sequence[int], rows: Sequence[int], memory: HostRows) -> None:
        """See `Link.out`. Pieces share a stretch of device memory in turn: each is gathered once the last has left."""
        with torch.cuda.stream(self._stream):
            for at in range(0, len(blocks), self._piece):
                ids = torch.tensor(blocks[at : at + self._piece], device=self._data.device)
                gathered = self._data.index_select(2, ids).movedim(2, 0).contiguous()
                self._gathered.record(self._stream)
                for row, block in zip(rows[at : at + self._piece], gathered, strict=True):
                    memory.blocks[row].copy_(block, non_blocking=True)
        torch.cuda.current_stream(self._data.device).wait_event(self._gathered)

    def back(self, blocks: Sequence[int], rows: Sequence[int], memory: HostRows) -> None:
        """See `Link.back`."""
        with torch.cuda.stream(self._stream):
            for at in range(0, len(blocks), self._piece):
                piece = rows[at : at + self._piece]
                shape = (len(piece), *memory.blocks.shape[1:])
                staged = torch.empty(shape, dtype=self._data.dtype, device=self._data.device)
                for block, row in zip(staged, piece, strict=True):
                    block.copy_(memory.blocks[row], non_blocking=True)
                ids = torch.tensor(blocks[at : at + self._piece], device=self._data.device)
                self._data.index_copy_(2, ids, staged.movedim(0, 2))

    def wait(self) -> None:
        """See `Link.wait`."""
        self._stream.synchronize()

    def finish(self) -> float | None:
        """See `Link.finish`. Seconds between the first copy's start and the last one's end on the device."""
        self._ended.record(self._stream)
        self._ended.synchronize()
        return self._began.elapsed_time(self._ended) / 1000.0
