"""Picks: who of the scored candidates gets the request."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol, TypeAlias

from tidegate.routing.view import ReplicaView

Scored: TypeAlias = tuple[float, ReplicaView]


class Pick(Protocol):
    """Chooses one of at least one candidates."""

    def pick(self, scored: Sequence[Scored]) -> ReplicaView: ...


class Cheapest:
    """The lowest cost; ties go to the one with the fewest outstanding requests, then to the one sent the fewest."""

    def pick(self, scored: Sequence[Scored]) -> ReplicaView:
        return min(scored, key=_order)[1]


class Anybody:
    """Any of the candidates, by a generator that is passed in."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def pick(self, scored: Sequence[Scored]) -> ReplicaView:
        return scored[self._random.randrange(len(scored))][1]


class InTurn:
    """Each of the candidates in turn: whoever was picked the longest ago."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._turns = 0

    def pick(self, scored: Sequence[Scored]) -> ReplicaView:
        self._turns += 1
        chosen = min((replica for _, replica in scored), key=lambda c: self._last.get(c.name, 0))
        self._last[chosen.name] = self._turns
        return chosen


def _order(candidate: Scored) -> tuple[float, int, int]:
    cost, replica = candidate
    return cost, replica.outstanding, replica.sent
