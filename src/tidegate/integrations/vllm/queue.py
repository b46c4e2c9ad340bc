"""What vLLM finds where its waiting queue was: exactly those whom the plan admits, in its order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue


class OfferedQueue(RequestQueue):
    """Nobody is in it but while vLLM schedules; `__len__` and `__iter__` are about all who wait.

    `waiting()` are vLLM's requests that wait, in no particular order, and `count()` how many those are. Adding and
    removing is not its business: the mixin hears of arrivals, preemptions and ends where they happen.
    """

    def __init__(self, waiting: Callable[[], Iterable[Any]], count: Callable[[], int]) -> None:
        self._waiting = waiting
        self._count = count
        self._offered: deque[Any] = deque()

    def offer(self, requests: Sequence[Any]) -> None:
        """These may be admitted in the step that is about to be scheduled."""
        self._offered = deque(requests)

    def close(self) -> None:
        """The step is scheduled: whoever is left was not admitted."""
        self._offered.clear()

    def add_request(self, request: Any) -> None:
        pass

    def pop_request(self) -> Any:
        return self._offered.popleft()

    def peek_request(self) -> Any:
        return self._offered[0]

    def prepend_request(self, request: Any) -> None:
        pass

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        pass

    def remove_request(self, request: Any) -> None:
        pass

    def remove_requests(self, requests: Iterable[Any]) -> None:
        pass

    def __bool__(self) -> bool:
        return bool(self._offered)

    def __len__(self) -> int:
        return self._count()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._waiting())
