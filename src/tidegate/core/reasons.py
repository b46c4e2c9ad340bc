"""Why a request took a seat. Told as plain facts with the decision; put into words only for whoever asks (`str`)."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from tidegate.core.policy import Key

NAMED = 4
"""Requests that a sentence names; of more it says how many."""


class InTurn(NamedTuple):
    """It was the first of those that could start. `unit` is that of the order's score, `seq` counts arrivals."""

    key: Key | None
    seq: int
    unit: str

    def __str__(self) -> str:
        if self.key is None:
            return f"first in turn, arrival {self.seq}"
        unit = f" {self.unit}" if self.unit else ""
        return f"first in turn: tier {self.key.tier}, score {self.key.score:.6g}{unit}, arrival {self.seq}"


class InPlaceOf(NamedTuple):
    """Others gave way to it."""

    victims: tuple[str, ...]

    def __str__(self) -> str:
        more = len(self.victims) - NAMED
        return f"in the place that {', '.join(self.victims[:NAMED])} gave" + (f" (and {more} more)" if more > 0 else "")


class BesideWaiting(NamedTuple):
    """Those before it, `first` and perhaps others, wait for a prefix that somebody else computes."""

    first: str

    def __str__(self) -> str:
        return f"beside {self.first}, which waits for a prefix that another computes, its seat and blocks left to it"


class PastBlocked(NamedTuple):
    """`head` is blocked and not delayed by it: it lasts `steps` and the head cannot start for `start`, or its `blocks`
    are among the `spare` that the head leaves free when it starts."""

    head: str
    held_by: str
    steps: int
    start: int
    blocks: int
    spare: int

    def __str__(self) -> str:
        past = f"past {self.head}, held back by {self.held_by}"
        if self.steps <= self.start:
            return f"{past}: over in {self.steps} steps, {self.head} cannot start for {self.start}"
        return (
            f"{past}: its {self.blocks} blocks are among the {self.spare} that {self.head} leaves free when it starts"
        )


class ByHost(NamedTuple):
    """The engine that hosts us took it by itself."""

    host: str

    def __str__(self) -> str:
        return f"{self.host} took it by itself"


Why: TypeAlias = InTurn | InPlaceOf | BesideWaiting | PastBlocked | ByHost


def score_unit(order: object) -> str:
    """The unit of an order's scores, which it says in a class variable `score_unit`; "" where it says none."""
    return str(getattr(order, "score_unit", ""))


def tier_name(order: object) -> str:
    """What the tiers of an order are, which it says in a class variable `tier_name`; those of one that wraps another
    are that one's."""
    inner = getattr(order, "order", None)
    return str(getattr(order, "tier_name", "tier")) if inner is None else tier_name(inner)
