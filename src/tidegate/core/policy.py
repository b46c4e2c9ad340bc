"""The policy vocabulary: one shape per decision, each a small pure object.

What a policy remembers (served lengths, predictions) lives in a `PolicyContext` that the host owns and
passes in, so the same object serves our engine, a foreign engine and a gateway. In every order
**lower comes first**.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol, runtime_checkable

from tidegate.core.copy_time import CopyTime
from tidegate.core.predict import Predictor
from tidegate.core.request import Rejection
from tidegate.core.service import Service
from tidegate.core.step_time import StepModel
from tidegate.core.view import Candidate, HostView, LoadView, Need, RequestView, StepView


class Key(NamedTuple):
    """Place in the order: lower first by (tier, score, arrival sequence).

    `until` is the time (seconds) at which the passing of time alone changes the key; the queue asks
    again then, so it lies after `PolicyContext.now`. Otherwise a key stands from when its request is queued;
    a host whose events change keys re-keys those whom they concern (`WaitingQueue.rekey`).
    """

    tier: int
    score: float
    until: float = inf


def nothing_cached(r: RequestView) -> int:
    """The answer of a host that knows of no prefix cache."""
    return 0


class TriageView(Protocol):
    """What is known of promised first tokens."""

    def gives_up(self, r: RequestView) -> bool:
        """Whether that of `r` cannot be kept, or only at the cost of more others."""
        ...


class NoTriage:
    """The answer of a host that gives nobody up."""

    def gives_up(self, r: RequestView) -> bool:
        return False


NO_TRIAGE = NoTriage()


@dataclass(slots=True)
class PolicyContext:
    """What policies remember and assume; owned by the host.

    predictor:  output lengths (tokens), fed by finished requests
    step_time:  seconds a step takes, for scores and budgets; learns where steps are measured
    now:        seconds on the scheduler's clock
    copy_time:  seconds a KV block takes to the host or back
    service:    tokens served to each tenant
    triage:     which promised first tokens are given up for others; see core/triage.py
    cached:     tokens of a waiting request's prefix that the cache holds; whoever asks is asked for the key
                again when the first block that is missing now appears
    """

    predictor: Predictor
    step_time: StepModel
    now: float = 0.0
    copy_time: CopyTime = field(default_factory=CopyTime)
    service: Service = field(default_factory=Service)
    cached: Callable[[RequestView], int] = nothing_cached
    triage: TriageView = NO_TRIAGE


class Order(Protocol):
    """Who comes first, waiting and running alike."""

    def tier(self, r: RequestView, ctx: PolicyContext) -> int:
        """The class of `r`, ageing left out: only a strictly better class displaces a running request."""
        ...

    def key(self, r: RequestView, ctx: PolicyContext) -> Key:
        """The place of `r`. Computed from absolute times, so that it stays right until `Key.until`."""
        ...


@runtime_checkable
class Grouping(Protocol):
    """An order whose requests move by groups: a group has a score, and it moves all its requests at once.

    Within a group the order's own key decides. The score of a group that waits never falls, so that the
    queue may look at it again only when the group would come first.
    """

    def group(self, r: RequestView) -> str: ...

    def group_score(self, group: str, ctx: PolicyContext) -> float:
        """Lower first; a group's first request stands at this score now."""
        ...

    def enter(self, group: str, least: float | None, ctx: PolicyContext) -> None:
        """`group` begins to wait; `least` is the lowest score of the groups that wait, None if none does."""
        ...

    def leave(self, group: str, ctx: PolicyContext) -> None:
        """Nobody of `group` waits any more who was never admitted."""
        ...


@runtime_checkable
class Lapsing(Protocol):
    """An order whose key of a *running* request changes as it emits.

    An order that wraps one in its attribute `order` need not repeat it.
    """

    def lapse(self, r: RequestView, ctx: PolicyContext) -> float:
        """Outputs, at least 1, after which the tier and key of the running `r` are asked for again; inf is never."""
        ...


@runtime_checkable
class Triaging(Protocol):
    """An order that puts off whose promised first token cannot be kept, and so wants `PolicyContext.triage` kept."""

    @property
    def triages(self) -> bool: ...


class Victim(Protocol):
    """Who gives way, given what is short."""

    def choose(self, candidates: Sequence[Candidate], need: Need, ctx: PolicyContext) -> Sequence[Candidate]:
        """A set that covers `need` and of which nobody could be let off; empty if nothing covers it.

        `candidates` come first in the order first. Ties go to the newest.
        """
        ...


class Budget(Protocol):
    """How many prefill tokens a step computes beside its decodes, and who decodes in it."""

    @property
    def max_stride(self) -> int:
        """Everybody decodes at least once in so many steps; 1: everybody in every step."""
        ...

    def tokens(self, step: StepView, ctx: PolicyContext) -> int:
        """Prefill tokens of this step in all."""
        ...

    def chunk(
        self, r: RequestView, remaining: int, left: int, step: StepView, contended: bool, ctx: PolicyContext
    ) -> int:
        """The most tokens of `r`'s prompt to compute in this step.

        `remaining` of its known tokens are not computed, `left` of the step's prefill tokens may be spent
        on it, and `contended` says that these are too few while another prompt of its class or better waits
        for some. What nobody else takes is offered again without `contended`.
        """
        ...

    def decode_tokens(self, step: StepView, ctx: PolicyContext) -> int:
        """The most decode tokens of one step, of `step.decodes` that there would be if all decoded."""
        ...

    def stride(self, r: RequestView, step: StepView, ctx: PolicyContext) -> int:
        """1 if `r` must decode in every step, else the most steps for one token of it.

        Asked where it begins to decode and where `decode_tokens` begins or ceases to suffice.
        """
        ...


class Accept(NamedTuple):
    """The request may wait."""


ACCEPT = Accept()


class Reject(NamedTuple):
    """The request is refused; `retry_after` is in seconds, None where trying again cannot help."""

    reason: Rejection
    message: str
    retry_after: float | None = None


class Displace(NamedTuple):
    """The request may wait in place of others of worse tiers, the worst tier first, the newest of a tier first.

    So many of them end as make `requests` places and `tokens` tokens of work free; the policy has seen that
    they suffice (`LoadView.worse`).
    """

    requests: int
    tokens: int


class Admit(Protocol):
    """Who may wait at all, for how long, and in whose place."""

    @property
    def open(self) -> bool:
        """Whether everybody may wait, so that `decide` need not be asked."""
        ...

    @property
    def weighs(self) -> bool:
        """Whether `decide` looks at work, which costs a prediction and a prefix look-up for each arrival."""
        ...

    @property
    def sheds(self) -> bool:
        """Whether whoever waits is given up once nothing can keep its promise any more."""
        ...

    def decide(self, r: RequestView, load: LoadView, ctx: PolicyContext) -> Accept | Displace | Reject: ...


class Price(NamedTuple):
    """What it takes to bring a victim back.

    mode:    "recompute" drops the KV and computes again what the prefix cache does not hold; "swap" keeps it
             on the host
    seconds: until it is back, from now
    why:     the comparison behind it, for whoever asks; empty where there was none
    """

    mode: str
    seconds: float
    why: str = ""


class Restore(Protocol):
    """How one victim will get its KV back."""

    def price(self, victim: Candidate, host: HostView, ctx: PolicyContext) -> Price:
        """The way to bring `victim` back, with its cost."""
        ...


@dataclass(frozen=True, slots=True)
class Features:
    """What a scheduling design has or lacks; presets of known designs switch off what those lack.

    displace:  an urgent waiting head may take the seat or the blocks of a running request of a worse class
    displace_slack: seconds; whoever could start later than that from now and yet keep its promises displaces nobody
        until then. None: it displaces at once, as whoever was promised nothing does
    keep_ends: nobody starts where a running request of its class would miss its promised end beside it, and else not
    backfill:  requests that cannot delay a blocked head may pass it
    hold_pending: a prompt whose next prefix block is being computed by another waits for it
    spare:     whoever is about to end, or gave way last, gives way only where nobody else can
    mixed_batches: prefill chunks and decodes share a step; without it every step is one or the other
    max_prefill_steps: without mixed batches, prefill steps in a row while decodes wait
    """

    displace: bool = True
    displace_slack: float | None = None
    keep_ends: bool = False
    backfill: bool = True
    hold_pending: bool = True
    spare: bool = True
    mixed_batches: bool = True
    max_prefill_steps: int = 4


@dataclass(frozen=True, slots=True)
class Policy:
    """A whole policy, composed from config or in Python."""

    name: str
    order: Order
    victim: Victim
    budget: Budget
    admit: Admit
    restore: Restore
    features: Features = Features()
