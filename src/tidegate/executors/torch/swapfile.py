"""KV blocks in a file: one block, one piece of it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from tidegate.errors import ConfigError


class SwapFile:
    """`blocks` blocks of `block_bytes` bytes in an unnamed file in `directory` (None: the system's for such files).

    The file has no name from the start (or loses it at once where the file system cannot do that), is readable by
    its owner alone (mode 0600), and is gone with the process, however that ends. Its space is allocated whole:
    ConfigError where there is too little of it. Reads and writes raise OSError.
    """

    def __init__(self, blocks: int, block_bytes: int, directory: Path | None = None) -> None:
        self.block_bytes = block_bytes
        size = blocks * block_bytes
        where = directory if directory is not None else Path(tempfile.gettempdir())
        try:
            self._file = tempfile.TemporaryFile(dir=where, buffering=0)  # noqa: SIM115 - as long as the pool lives
        except OSError as error:
            raise ConfigError(f"disk_kv_path {where}: no file can be made there: {error.strerror}") from error
        self._fd = self._file.fileno()
        try:
            _allocate(self._fd, size)
        except (OSError, OverflowError) as error:
            self._file.close()
            raise ConfigError(
                f"disk_kv_path {where} has no room for {size / 2**30:,.1f} GiB of KV ({error}): "
                "lower disk_kv_memory (or disk_blocks)"
            ) from error

    def fileno(self) -> int:
        """The open file's descriptor."""
        return self._fd

    def write(self, block: int, content: np.ndarray) -> None:
        """Write a block's bytes, `[block_bytes]` uint8."""
        view, offset = content.data, block * self.block_bytes
        while view:
            written = os.pwrite(self._fd, view, offset)
            if not written:
                raise OSError("the file takes nothing more")
            view, offset = view[written:], offset + written

    def read(self, block: int, content: np.ndarray) -> None:
        """Fill `content`, `[block_bytes]` uint8, with a block's bytes."""
        view, offset = content.data, block * self.block_bytes
        while view:
            read = os.preadv(self._fd, [view], offset)
            if not read:
                raise OSError("the file ends before the block does")
            view, offset = view[read:], offset + read

    def close(self) -> None:
        """Close the file, and with that remove it. Idempotent."""
        self._file.close()


def _allocate(fd: int, size: int) -> None:
    """Take `size` bytes of the disk now; where the system cannot, set the length and let writes fail later."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:
        os.ftruncate(fd, size)
