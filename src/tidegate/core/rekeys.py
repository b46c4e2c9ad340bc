"""Keys of those who run, asked for again when their outputs have changed them.

An order that is `Lapsing` says after how many outputs. Nobody emits more than once a plan, so a
request is looked at when as many plans have been made, and again later if it skipped some: exact
for steady decodes, and nothing is done for the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from math import ceil, inf

from tidegate.core.policy import Lapsing, Order, PolicyContext
from tidegate.core.request import Request
from tidegate.core.running import Running
from tidegate.core.view import RequestView


def lapse_of(order: Order) -> Callable[[RequestView, PolicyContext], float] | None:
    """How outputs change the keys of `order` (`Lapsing.lapse`), or of the order it wraps; None if they do not."""
    if isinstance(order, Lapsing):
        return order.lapse
    inner: Order | None = getattr(order, "order", None)
    return None if inner is None else lapse_of(inner)


class RunningKeys:
    """A calendar of running requests by the plan in which their key may have changed."""

    def __init__(self, running: Running, order: Order, ctx: PolicyContext) -> None:
        self._running = running
        self._order = order
        self._lapse = lapse_of(order)
        self._ctx = ctx
        self._plans = 0
        self._serials = count()
        self._due: list[tuple[int, int, Request, int]] = []  # (plan, serial, request, outputs it has by then)
        self._latest: dict[Request, int] = {}  # the serial of each one's valid entry
        if self._lapse is not None:
            running.on_decode = self.follow

    def follow(self, r: Request) -> None:
        """`r` begins to decode: find out when its key changes."""
        assert self._lapse is not None
        outputs = self._lapse(r, self._ctx)
        if outputs != inf:
            self._enter(r, max(1, ceil(outputs)))

    def settle(self, limit: int) -> None:
        """A plan is to be made: ask again for the keys that are due, at most `limit` of them."""
        self._plans += 1
        while self._due and self._due[0][0] <= self._plans and limit:
            _, serial, r, outputs = heapq.heappop(self._due)
            if self._latest.get(r) != serial:
                continue
            del self._latest[r]
            if r.lease is None:
                continue
            if r.sampled < outputs:
                self._enter(r, outputs - r.sampled)
                continue
            self.rekey(r)
            self.follow(r)
            limit -= 1

    @property
    def quiet_plans(self) -> float:
        """How many plans may be made before a key is due; inf if none ever is."""
        while self._due and self._latest.get(self._due[0][2]) != self._due[0][1]:
            heapq.heappop(self._due)
        return self._due[0][0] - self._plans - 1 if self._due else inf

    def pass_plans(self, plans: int) -> None:
        """So many plans were made without a key being due."""
        self._plans += plans

    def rekey(self, r: Request) -> None:
        """Ask again for the tier and the key of the running `r`, because outputs or an event changed them."""
        tier, key = self._order.tier(r, self._ctx), self._order.key(r, self._ctx)
        if r.key is None or tier != r.tier or key[:2] != r.key[:2]:
            self._running.move(r, tier, key)

    def _enter(self, r: Request, outputs: int) -> None:
        serial = self._latest[r] = next(self._serials)
        heapq.heappush(self._due, (self._plans + outputs, serial, r, r.sampled + outputs))
        if len(self._due) > 4 * len(self._running) + 64:  # those of requests that ended long before
            self._due = [d for d in self._due if d[2].lease is not None and self._latest.get(d[2]) == d[1]]
            heapq.heapify(self._due)
            self._latest = {r: serial for _, serial, r, _ in self._due}
