"""When each advance of a decode set was applied, from which gaps between tokens are read at the end.

One entry a step instead of one a token: a request's gaps are a slice of what all of them share.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from math import ceil
from operator import sub


class StepTimes:
    """Times (seconds) of consecutive clocks, the oldest of which are forgotten on request.

    Arrays of doubles: there are as many gaps as tokens, and a list would hold an object for each.
    """

    __slots__ = ("_first", "_gaps", "_times")

    def __init__(self) -> None:
        self._first = 1
        self._times = array("d")
        self._gaps = array("d")

    def __len__(self) -> int:
        return len(self._times)

    def record(self, now: float) -> None:
        """The next clock was applied at `now`."""
        self._gaps.append(now - self._times[-1] if self._times else 0.0)
        self._times.append(now)

    def record_all(self, times: Sequence[float]) -> None:
        """As many next clocks were applied at these times."""
        before = self._times[-1] if self._times else times[0]
        self._gaps.extend(map(sub, times, chain((before,), times)))
        self._times.extend(times)

    def at(self, clock: int) -> float:
        """When `clock` was applied."""
        return self._times[clock - self._first]

    def gaps(self, since: int, until: int) -> array[float]:
        """Gaps that end at clocks since+1 .. until, each from the clock before."""
        return self._gaps[since + 1 - self._first : until + 1 - self._first]

    def forget(self, before: int) -> None:
        """Drop the times of clocks under `before`."""
        drop = max(0, min(before - self._first, len(self._times)))
        del self._times[:drop], self._gaps[:drop]
        self._first += drop


def nearest_rank(ascending: Sequence[float], share: float) -> float | None:
    """The smallest of sorted values that at least `share` of them do not exceed; None of nothing."""
    return ascending[ceil(share * len(ascending)) - 1] if ascending else None
