"""What a `Budget` may want to know of those who decode: kept where somebody comes or goes, read on demand."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf
from typing import NamedTuple, Protocol

from tidegate.core.slo import NO_SLO, Slo


class Pace(NamedTuple):
    """Seconds between tokens that were promised to somebody, and that request's tier."""

    seconds: float
    tier: int


class Decoder(Protocol):
    """As much of a request as counts here."""

    @property
    def slo(self) -> Slo: ...
    @property
    def tier(self) -> int: ...


class Decodes(Protocol):
    """As much of a set of decodes as counts here: how many, and the KV tokens that one decode of each reads."""

    def __len__(self) -> int: ...
    @property
    def context(self) -> int: ...


class DecodeLoad:
    """The promises of all who decode. Coming and going costs O(log n) for n promises; a step costs nothing.

    paces:   every promise, tightest first
    due:     the sets that decode in the step being planned
    changes: grows whenever somebody comes or goes
    news:    grows whenever somebody comes with a promise that nobody else has
    """

    __slots__ = ("changes", "due", "news", "paces")

    def __init__(self, due: Sequence[Decodes] = ()) -> None:
        self.paces: list[Pace] = []
        self.due = due
        self.changes = 0
        self.news = 0

    @property
    def context(self) -> int:
        """KV tokens that the decodes of the step being planned read."""
        due = self.due
        return due[0].context if len(due) == 1 else sum(decodes.context for decodes in due)

    @property
    def context_of_one(self) -> float:
        """KV tokens that one of them reads, on average."""
        due = self.due
        if len(due) == 1:
            return due[0].context / (len(due[0]) or 1)
        return self.context / max(1, sum(map(len, due)))

    def tightest(self, least: float) -> Pace | None:
        """The tightest promise of at least `least` seconds; None without one."""
        paces = self.paces
        if not paces or paces[0].seconds >= least:  # as nearly always
            return paces[0] if paces else None
        at = bisect_left(paces, (least,))
        return paces[at] if at < len(paces) else None

    def add(self, r: Decoder) -> None:
        """`r` begins to decode."""
        self.changes += 1
        if r.slo is not NO_SLO and (seconds := pace_of(r.slo)) < inf:
            pace = Pace(seconds, r.tier)
            at = bisect_left(self.paces, pace)
            self.news += at == len(self.paces) or self.paces[at] != pace
            self.paces.insert(at, pace)

    def drop(self, r: Decoder) -> None:
        """`r` decodes no more."""
        self.changes += 1
        if r.slo is not NO_SLO and (seconds := pace_of(r.slo)) < inf:
            del self.paces[bisect_left(self.paces, (seconds, r.tier))]


def pace_of(slo: Slo) -> float:
    """Seconds between tokens that were promised, on the mean or at most; inf without a promise."""
    least = inf if slo.tpot is None else slo.tpot
    return least if slo.tbt is None or slo.tbt > least else slo.tbt


NOBODY = DecodeLoad()
