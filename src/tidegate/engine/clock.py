"""Where `now` comes from. The scheduler never looks: every time is passed to it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some fixed moment, never going back."""

    def now(self) -> float: ...


class RealClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """Time that passes only when it is told to: for scenarios, simulations and tests."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        """Let `seconds` pass and return the new time. ValueError if they are negative."""
        if seconds < 0:
            raise ValueError(f"time does not go back: advance({seconds})")
        self._now += seconds
        return self._now
