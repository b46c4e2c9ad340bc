"""Picks: who of the scored candidates gets the request."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

from tidegate.routing.view import ReplicaView

MOST_NAMES = 4096
"""Engines whose last turn is remembered."""


class Pick(Protocol):
    """Chooses one of at least one candidates, whose costs stand beside them in the same order."""

    def pick(self, replicas: Sequence[ReplicaView], costs: Sequence[float]) -> ReplicaView: ...


class Cheapest:
    """The lowest cost. Whoever is at most the `near`th part above it is as good; of those who are, the one with the
    fewest outstanding requests; of those, anybody, by a generator that is passed in.

    The lot is what keeps two gateways apart that see the same idle engines.
    """

    def __init__(self, random: Random, near: float = 0.0) -> None:
        self._random = random
        self._near = near

    def pick(self, replicas: Sequence[ReplicaView], costs: Sequence[float]) -> ReplicaView:
        most = min(costs) * (1.0 + self._near)
        least, best = -1, []
        for replica, cost in zip(replicas, costs, strict=True):
            if cost > most:
                continue
            if least < 0 or replica.outstanding < least:
                least, best = replica.outstanding, [replica]
            elif replica.outstanding == least:
                best.append(replica)
        return best[0] if len(best) == 1 else best[int(self._random.random() * len(best))]


class Anybody:
    """Any of the candidates, by a generator that is passed in."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def pick(self, replicas: Sequence[ReplicaView], costs: Sequence[float]) -> ReplicaView:
        return replicas[self._random.randrange(len(replicas))]


class InTurn:
    """Each of the candidates in turn: whoever was picked the longest ago. Those who never were come first, by lot."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._last: dict[str, int] = {}  # by name, the longest ago first
        self._turns = 0

    def pick(self, replicas: Sequence[ReplicaView], costs: Sequence[float]) -> ReplicaView:
        self._turns += 1
        turns = [(self._last.get(c.name, 0), self._random.random(), n) for n, c in enumerate(replicas)]
        chosen = replicas[min(turns)[2]]
        self._last.pop(chosen.name, None)
        self._last[chosen.name] = self._turns
        if len(self._last) > MOST_NAMES:  # of engines that are long gone
            del self._last[next(iter(self._last))]
        return chosen
