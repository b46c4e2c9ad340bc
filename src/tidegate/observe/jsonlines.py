"""JSON lines to a file: at once, or from a thread that must not wait for a disk."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from logging.handlers import QueueListener, RotatingFileHandler
from pathlib import Path
from queue import Queue
from typing import Any, Protocol

from tidegate.errors import InputError

_log = logging.getLogger(__name__)

BACKLOG = 10_000
"""Lines that may wait for the disk; what comes on top of them is dropped and counted."""


class Lines(Protocol):
    """Whatever takes objects one by one."""

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one object."""


class LineFile:
    """Writes every object to `path`, one a line: for a simulation, which may wait for a disk and loses nothing.

    A file that is there is replaced. Raises InputError if it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror or error}") from error

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one object."""
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Write what waits. Idempotent."""
        self._file.close()


class JsonLines:
    """Writes objects to `path`, one a line. At `max_bytes` the file becomes `path.1`, over the one before.

    Raises InputError if the file cannot be opened. `write` never blocks: where the disk is slower than what
    happens, lines are dropped, and `close` says how many.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.dropped = 0
        try:
            self._file = RotatingFileHandler(path, maxBytes=max_bytes, backupCount=1, encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror or error}") from error
        self._file.setFormatter(logging.Formatter("%(message)s"))
        self._lines: Queue[logging.LogRecord | None] = Queue()
        self._listener = QueueListener(self._lines, self._file)
        self._listener.start()
        self._open = True

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one object."""
        if self._lines.qsize() >= BACKLOG:  # not the queue's own bound: the listener's end mark must always fit
            self.dropped += 1
            return
        self._lines.put_nowait(logging.makeLogRecord({"msg": json.dumps(line), "levelno": logging.INFO}))

    def close(self) -> None:
        """Write what waits, then close the file. Idempotent."""
        if self._open:
            self._open = False
            self._listener.stop()
            self._file.close()
            if self.dropped:
                _log.warning("%s: %d lines were dropped, the disk was too slow", self.path, self.dropped)
