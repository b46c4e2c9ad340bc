"""The read-only facts a policy may look at. Our engine's `Request` satisfies `RequestView` as it is."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tidegate.core.decode_load import NOBODY, DecodeLoad
from tidegate.core.slo import Slo


class Described(Protocol):
    """As much of a request as a predictor learns from when it ends; a route knows that much as well."""

    @property
    def id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def slo_class(self) -> str: ...
    @property
    def prompt_tokens(self) -> int: ...


class RequestView(Described, Protocol):
    """One request as a policy sees it. Times are seconds, sizes tokens.

    Hosts that cannot know a field say so: `max_tokens` None is an undeclared end, `oracle_tokens`
    is None outside a simulation. `first_token_at` is None before the first output, `waiting_since`
    while it runs; `seq` numbers arrivals.
    """

    @property
    def priority(self) -> int: ...
    @property
    def slo(self) -> Slo: ...
    @property
    def arrival(self) -> float: ...
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
    load:    what was promised to those who decode, and the KV tokens that their step reads
    due:     prompt tokens after which the step had better end, so that promised first tokens come in time; None
             where it may be full
    crowd:   tokens of the unfinished prompts, all of which hold memory, where the first who waits lacks it; None where
             it does not
    """

    now: float
    budget: int
    decodes: int
    load: DecodeLoad = NOBODY
    due: int | None = None
    crowd: int | None = None


class Settled(NamedTuple):
    """What is known of a step before it is planned.

    due:     prompt tokens after which it had better end (`StepView.due`)
    tokens:  what the budget lets prompts have beside `decodes` tokens of decodes that hold `context` KV tokens by now
    """

    due: int | None
    tokens: int
    decodes: int
    context: int


class Work(NamedTuple):
    """Requests, prompt tokens to compute, and outputs to decode one by one."""

    requests: int = 0
    prefill: int = 0
    outputs: int = 0

    @property
    def tokens(self) -> int:
        """Tokens to compute."""
        return self.prefill + self.outputs

    def plus(self, other: Work, sign: int = 1) -> Work:
        """Both together, or this one less the other."""
        return Work(
            self.requests + sign * other.requests,
            self.prefill + sign * other.prefill,
            self.outputs + sign * other.outputs,
        )


NOTHING = Work()


class LoadView(NamedTuple):
    """The load at the door, as an `Admit` sees it.

    waiting:  requests that were never admitted
    running, seats: requests that run, and that may run at once
    budget:   tokens that one step may compute

    The rest is known only to a policy that weighs what waits (`Admit.weighs`):

    own:      what the request at the door needs
    queued:   what waits in all, and
    of_class: of its class, and
    worse:    of strictly worse tiers
    ahead:    who waits ahead of it in the order; `prefill` includes the unfinished prompts of those who run
    """

    now: float
    waiting: int
    running: int
    free_blocks: int
    seats: int = 1
    budget: int = 1
    own: Work = NOTHING
    queued: Work = NOTHING
    of_class: Work = NOTHING
    worse: Work = NOTHING
    ahead: Work = NOTHING


class Need(NamedTuple):
    """What is short. A victim frees one seat and some blocks."""

    blocks: int
    seats: int


class Candidate(NamedTuple):
    """A running request that may give way.

    blocks:  blocks that come free if it goes (its own growth in this step included)
    lost:    computed KV tokens that would have to be computed again
    held:    blocks that hold computed KV of it, which a swap would copy
    seconds: what the cheaper way to bring it back takes; policies of restoring fill it in
    """

    request: RequestView
    blocks: int
    lost: int
    held: int = 0
    seconds: float = 0.0


class HostView(NamedTuple):
    """The host's KV pool, as a `Restore` sees it: free blocks of its tiers, seconds of the copies that are planned
    and not done, and seconds a block takes one way."""

    free_memory: int
    free_disk: int
    queued: float
    memory_seconds: float
    disk_seconds: float

    def round_trip(self, blocks: int) -> float | None:
        """Seconds until `blocks` blocks are out and in again, those before them in the queue included.

        None where no tier has room for them.
        """
        if blocks <= self.free_memory:
            return self.queued + 2 * blocks * self.memory_seconds
        if blocks <= self.free_disk:
            return self.queued + 2 * blocks * self.disk_seconds
        return None
