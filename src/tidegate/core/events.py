"""What happened, as the scheduler tells it. Observers fold these; nobody answers back.

`now` is seconds on the scheduler's clock: the `now` that was passed to add, abort, plan or apply.
`request` is the live object; observers read it and never change it. Decisions have it second, so that
what follows it can be kept without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from tidegate.core.reasons import Why
from tidegate.core.request import FinishReason, Rejection, Request
from tidegate.core.timing import nearest_rank


class Timing(NamedTuple):
    """What the client saw, in seconds; None where it never happened.

    tpot is the mean gap after the first token; `gaps` are those between consecutive tokens, preemptions
    included, in order; `max_gap` and `p99_gap` (nearest rank) are computed when they are asked for.
    `queued` is arrival to admission, `preempted` the total from each preemption to the readmission after it.
    """

    queued: float | None
    ttft: float | None
    tpot: float | None
    e2e: float
    preempted: float
    gaps: Sequence[float] = ()

    @property
    def max_gap(self) -> float | None:
        """The longest wait between two tokens."""
        return max(self.gaps, default=None)

    @property
    def p99_gap(self) -> float | None:
        """The 99th percentile of the waits between two tokens."""
        return nearest_rank(sorted(self.gaps), 0.99)


class Arrived(NamedTuple):
    """A request passed the door and waits."""

    now: float
    request: Request


class Rejected(NamedTuple):
    """A request was refused at the door. It never waited and gets no Finished event."""

    now: float
    request: Request
    reason: Rejection
    message: str
    retry_after: float | None


class Admitted(NamedTuple):
    """A waiting request took a seat for the first time; `cached` of its tokens need no computing."""

    now: float
    request: Request
    step: int
    cached: int
    why: Why


class Restored(NamedTuple):
    """A preempted request took a seat again with `cached` KV tokens in place, from the prefix cache or on their way
    from the host; `recompute` known tokens are computed once more."""

    now: float
    request: Request
    step: int
    cached: int
    recompute: int
    why: Why


class Computed(NamedTuple):
    """A prefill chunk was computed: KV positions start .. start+length."""

    now: float
    step: int
    request: Request
    start: int
    length: int


class Emitted(NamedTuple):
    """Tokens of one step, one event a step. `tokens[i]` is the next output of `requests[i]`; there are none in it where
    an engine that hosts the scheduler delivers them itself.

    The first `decodes` entries come from decodes, the rest from prompts that ended in this step;
    `first` are the requests whose very first output this is.
    """

    now: float
    step: int
    requests: Sequence[Request]
    tokens: Sequence[int]
    decodes: int
    first: Sequence[Request]


class Preempted(NamedTuple):
    """A running request gave its seat and blocks back. `mode` says how it will be restored."""

    now: float
    request: Request
    step: int
    mode: str
    reason: str


class Finished(NamedTuple):
    """A request that had arrived ended; it gets no further event. `missed` names broken promises."""

    now: float
    request: Request
    reason: FinishReason
    timing: Timing
    missed: tuple[str, ...]


Event: TypeAlias = Arrived | Rejected | Admitted | Restored | Computed | Emitted | Preempted | Finished
