"""Who may wait at all."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.core.policy import ACCEPT, Accept, PolicyContext, Reject
from tidegate.core.request import Rejection
from tidegate.core.view import LoadView, RequestView


@dataclass(frozen=True, slots=True)
class QueueLimit:
    """At most `max_waiting` requests wait (None: no end); preempted ones do not count.

    `retry_after` (seconds) is what a refused client is told.
    """

    max_waiting: int | None = None
    retry_after: float = 1.0

    def decide(self, r: RequestView, load: LoadView, ctx: PolicyContext) -> Accept | Reject:
        if self.max_waiting is not None and load.waiting >= self.max_waiting:
            message = f"the queue is full: {load.waiting} requests wait, max_waiting is {self.max_waiting}"
            return Reject(Rejection.QUEUE_FULL, message, self.retry_after)
        return ACCEPT
