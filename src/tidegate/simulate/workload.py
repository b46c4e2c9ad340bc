"""What arrives when: a `Workload` is a named list of requests in order of arrival.

Times are seconds from the start of the workload, sizes are tokens. A workload says nothing about
policies or machines, so that one workload serves a simulation and a replay alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tidegate.core.slo import DEFAULT_CLASS
from tidegate.errors import InputError

if TYPE_CHECKING:
    from tidegate.simulate.closed_loop import ClosedLoop

DEFAULT_HASH_BLOCK = 512


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request.

    `hash_ids` name the prompt's blocks of `hash_block_tokens` tokens, the last one possibly partial;
    two requests whose ids agree from the start share that much of their prompt. What no id covers is
    the request's own; without any, nothing is known to be shared. `priority` None takes the class's.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = "default"
    slo_class: str = DEFAULT_CLASS
    priority: int | None = None
    hash_ids: tuple[int, ...] = ()
    hash_block_tokens: int = DEFAULT_HASH_BLOCK


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, and the name under which results report them.

    `loops` are closed loops beside them: their requests arrive when earlier ones finish, so only who
    serves them knows when (see `ClosedLoop`). Length, iteration, duration and rate leave them out.
    """

    name: str
    requests: tuple[WorkloadRequest, ...]
    loops: tuple[ClosedLoop, ...] = ()

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[WorkloadRequest]:
        return iter(self.requests)

    @property
    def total(self) -> int:
        """Number of requests, those of the closed loops included."""
        return len(self.requests) + sum(len(loop) for loop in self.loops)

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last; 0 for fewer than two requests."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s if self.requests else 0.0

    @property
    def rate(self) -> float:
        """Mean arrivals per second; 0 where all arrive at once."""
        return (len(self) - 1) / self.duration_s if self.duration_s else 0.0

    def limited(self, count: int) -> Workload:
        """The first `count` requests."""
        self.refuse_loops("cut")
        return replace(self, requests=self.requests[:count])

    def rate_scaled(self, factor: float) -> Workload:
        """The same requests arriving `factor` times as fast."""
        if not factor > 0:
            raise InputError(f"a rate scale must be above 0, not {factor:g}")
        if factor == 1:
            return self
        self.refuse_loops("scaled")
        return replace(self, requests=tuple(replace(r, arrival_s=r.arrival_s / factor) for r in self.requests))

    def refuse_loops(self, what: str) -> None:
        """Raise InputError where there is a closed loop, whose arrivals nobody knows yet."""
        if self.loops:
            raise InputError(f"a closed loop cannot be {what}: its arrivals follow its answers; set clients or count")
