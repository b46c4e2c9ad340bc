"""A closed loop: a fixed number of clients, each of whom waits for its answer and thinks before it asks again.

Its arrivals depend on whoever serves it, so it is no list of requests but a source that a simulator or a
replay drives: `first()` once, then `after(...)` whenever one of its requests has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tidegate.simulate.workload import WorkloadRequest


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """The loop before anybody serves it.

    clients:  how many ask at a time
    requests: what they ask, in the order in which it is asked, whoever comes to ask it; their `arrival_s`
              mean nothing yet
    think_s:  seconds that the client of each of `requests` thinks before it asks
    start_s:  when the clients begin to think about their first request
    """

    clients: int
    requests: tuple[WorkloadRequest, ...]
    think_s: tuple[float, ...]
    start_s: float = 0.0

    def __len__(self) -> int:
        return len(self.requests)

    def start(self) -> Clients:
        """A fresh run of the loop."""
        return Clients(self)

    def changed(self, change: Callable[[WorkloadRequest], WorkloadRequest]) -> ClosedLoop:
        """The same loop with every request changed."""
        return replace(self, requests=tuple(map(change, self.requests)))


class Clients:
    """One run of a closed loop. At no time are more requests out than there are clients.

    The n-th request to be asked has the same lengths and the same thinking before it in every run; when it
    arrives, and of which client, follows from the answers. So equal answers make equal runs.
    """

    def __init__(self, loop: ClosedLoop) -> None:
        self._loop = loop
        self._asked = 0

    def first(self) -> list[WorkloadRequest]:
        """The first request of every client, in order of arrival. Call it once, at the start."""
        firsts = [self._ask(self._loop.start_s) for _ in range(min(self._loop.clients, len(self._loop)))]
        return sorted(firsts, key=lambda r: r.arrival_s)

    def after(self, ended: WorkloadRequest, end_s: float) -> WorkloadRequest | None:
        """What the client of `ended` asks next, given that its answer ended (or failed) at `end_s`; None if nothing."""
        if self._asked == len(self._loop):
            return None
        return replace(self._ask(end_s), tenant=ended.tenant)

    def _ask(self, from_s: float) -> WorkloadRequest:
        request, think_s = self._loop.requests[self._asked], self._loop.think_s[self._asked]
        self._asked += 1
        return replace(request, arrival_s=from_s + think_s)
