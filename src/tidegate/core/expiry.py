"""Time limits of those who wait: a request that waited too long ends before it computes anything.

Only requests that were never admitted expire. One that was preempted has begun: its tokens are paid for and its
client reads them, so a time limit for the queue no longer concerns it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TypeAlias

from tidegate.core.request import FinishReason, Request, Status

# (seconds, arrival sequence, reason, request): no two entries of one request have the same reason.
Due: TypeAlias = tuple[float, int, str, Request]

_WAITS = (Status.PARKED, Status.WAITING)


class Expiry:
    """A lazy heap of times at which requests end if they still wait: O(log n) to watch one, nothing to forget one.

    `heap` is empty where nobody is watched.
    """

    def __init__(self) -> None:
        self.heap: list[Due] = []
        self._bound = 64

    def watch(self, r: Request, at: float, reason: FinishReason) -> None:
        """`r` ends with `reason` if it still waits at `at` (seconds)."""
        heapq.heappush(self.heap, (at, r.seq, reason.value, r))
        if len(self.heap) > self._bound:
            self.heap = [due for due in self.heap if due[3].status in _WAITS]
            heapq.heapify(self.heap)
            self._bound = 2 * len(self.heap) + 64

    def expired(self, now: float) -> Iterator[tuple[Request, FinishReason]]:
        """Those who still wait although their time has come by `now`, with the reason; each is told once."""
        while (due := self.next_due()) is not None and due <= now:
            _, _, reason, r = heapq.heappop(self.heap)
            ends = FinishReason(reason)
            if ends is FinishReason.TIMEOUT and r.status is Status.PARKED:
                ends = FinishReason.DEPENDENCY_TIMEOUT
            yield r, ends

    def next_due(self) -> float | None:
        """When the next of those who wait expires (seconds); None if nobody does."""
        while self.heap and self.heap[0][3].status not in _WAITS:
            heapq.heappop(self.heap)
        return self.heap[0][0] if self.heap else None
