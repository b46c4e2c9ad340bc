"""The read-only facts a policy may look at. Our engine's `Request` satisfies `RequestView` as it is."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tidegate.core.slo import Slo


class RequestView(Protocol):
    """One request as a policy sees it. Times are seconds, sizes tokens.

    Hosts that cannot know a field say so: `max_tokens` None is an undeclared end, `oracle_tokens`
    is None outside a simulation. `first_token_at` is None before the first output, `waiting_since`
    while it runs; `seq` numbers arrivals.
    """

    @property
    def id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def slo_class(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def slo(self) -> Slo: ...
    @property
    def arrival(self) -> float: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def max_tokens(self) -> int | None: ...
    @property
    def oracle_tokens(self) -> int | None: ...
    @property
    def computed(self) -> int: ...
    @property
    def emitted(self) -> int: ...
    @property
    def first_token_at(self) -> float | None: ...
    @property
    def waiting_since(self) -> float | None: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def seq(self) -> int: ...
    @property
    def tier(self) -> int: ...


class StepView(NamedTuple):
    """The step being planned, as a `Budget` sees it.

    budget:  tokens the step may hold in all
    decodes: tokens taken by decodes
    """

    now: float
    budget: int
    decodes: int


class LoadView(NamedTuple):
    """The load at the door, as an `Admit` sees it."""

    now: float
    waiting: int
    running: int
    free_blocks: int


class Need(NamedTuple):
    """What is short. A victim frees one seat and some blocks."""

    blocks: int
    seats: int


class Candidate(NamedTuple):
    """A running request that may give way.

    blocks: blocks that come free if it goes (its own growth in this step included)
    lost:   computed KV tokens that would have to be computed again
    """

    request: RequestView
    blocks: int
    lost: int
