"""When something must have happened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """Calls `missed` when it has passed. It is moved more often than it passes: a timer that goes off too early is set
    anew then."""

    __slots__ = ("_at", "_loop", "_missed", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, missed: Callable[[], None]) -> None:
        self._loop = loop
        self._missed: Callable[[], None] | None = missed
        self._at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def within(self, seconds: float) -> None:
        """It is so many seconds from now."""
        self._at = self._loop.time() + seconds
        if self._timer is not None and self._timer.when() > self._at:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(self._at, self._due)

    def drop(self) -> None:
        """There is none."""
        self._at = None

    def end(self) -> None:
        """There will be none: whoever was to be called is let go, with all that it holds."""
        self._at = self._missed = None
        if self._timer is not None:
            self._timer.cancel()

    def _due(self) -> None:
        self._timer = None
        if self._at is None or self._missed is None:
            return
        left = self._at - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._due)
        else:
            self._missed()
