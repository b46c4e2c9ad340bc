"""Promises first: who must start when, to keep what it was promised.

The measure of all three orders is an absolute time, so that it stays right while time passes: the
latest moment at which a request can go on, at the predicted speed, and yet keep its promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nextafter
from typing import ClassVar

from tidegate.core.policy import Key, PolicyContext
from tidegate.core.slo import NO_SLO
from tidegate.core.view import RequestView
from tidegate.errors import ConfigError

_SECONDS = "ages by deadlines of its own"


def latest_start(r: RequestView, ctx: PolicyContext, cached: int = 0) -> float:
    """The last moment (seconds) at which `r` can go on and yet keep its promises; inf where it has none.

    Before its first output that is `arrival + ttft - predicted prefill seconds` (slack is this minus now),
    after it `first token + pace * gaps - predicted seconds of what remains`, `pace` being its tpot or tbt.
    An e2e promise counts in both. `cached` prompt tokens need no computing.
    """
    if r.slo is NO_SLO:
        return inf
    prefill = _prefill_left(r, cached)
    return _latest_start(r, ctx, prefill, ctx.step_time.service(prefill, 0))


def _latest_start(r: RequestView, ctx: PolicyContext, prefill: int, seconds: float) -> float:
    """The same; `prefill` tokens are to be computed before the next output, which takes `seconds`."""
    slo, first, latest = r.slo, r.first_token_at, inf
    if first is None and slo.ttft is not None:
        latest = r.arrival + slo.ttft - seconds
    pace = slo.tpot if slo.tpot is not None else slo.tbt
    if slo.e2e is not None or (first is not None and pace is not None):
        outputs = max(ctx.predictor.output_tokens(r), r.emitted + 1.0)
        service = ctx.step_time.service(prefill, outputs - r.emitted)
        if slo.e2e is not None:
            latest = min(latest, r.arrival + slo.e2e - service)
        if first is not None and pace is not None:
            latest = min(latest, first + pace * (outputs - 1) - service)
    return latest


def _prefill_left(r: RequestView, cached: int) -> int:
    """Tokens of `r` to compute before its next output."""
    return max(0, r.prompt_tokens + r.emitted - (cached if r.waiting_since is not None else max(cached, r.computed)))


@dataclass(frozen=True, slots=True)
class EarliestDeadline:
    """`(0, deadline)` in seconds: earliest deadline first, of TTFT and E2E; whoever was promised nothing comes last.

    Optimal where everybody can be served in time. Under overload it serves those who are already late first
    and so misses nearly every deadline, and who was promised nothing starves: the baseline for `Deadlines`.
    Source: Liu and Layland, "Scheduling Algorithms for Multiprogramming", JACM 1973.
    """

    unwrapped: ClassVar[str] = "orders by absolute times"
    score_unit: ClassVar[str] = "s"

    def tier(self, r: RequestView, ctx: PolicyContext) -> int:
        return 0

    def key(self, r: RequestView, ctx: PolicyContext) -> Key:
        slo = r.slo
        return Key(0, r.arrival + min(inf if slo.ttft is None else slo.ttft, inf if slo.e2e is None else slo.e2e))


@dataclass(frozen=True, slots=True)
class Deadlines:
    """`(0, min(latest start, arrival + patience))` in seconds: less slack first, for waiting and running alike.

    A request without a promise, and one that can no longer keep its own (the door may end it: `shed_hopeless`
    of `QueueLimit`), stands at `arrival + patience`: it fills what the others leave, and nobody who arrives more
    than `patience` seconds later passes it. Those who can keep a promise are of tier 0, the others of tier 1 and
    so the ones who give way. A running request is asked again at 1, 16, 32, 64, ... outputs: nearer to its
    limit, more protected. Bad at: promises tighter than the step-time model knows.
    """

    unwrapped: ClassVar[str] = _SECONDS
    score_unit: ClassVar[str] = "s"

    patience: float = 300.0

    def __post_init__(self) -> None:
        _check(patience=self.patience)

    def tier(self, r: RequestView, ctx: PolicyContext) -> int:
        return 0 if ctx.now <= latest_start(r, ctx) < inf else 1

    def key(self, r: RequestView, ctx: PolicyContext) -> Key:
        patience = r.arrival + self.patience
        latest = latest_start(r, ctx)
        if latest == inf:
            return Key(0, patience)
        if ctx.now <= latest:
            return Key(0, min(latest, patience), nextafter(latest, inf) if r.waiting_since is not None else inf)
        return Key(0, patience)

    def lapse(self, r: RequestView, ctx: PolicyContext) -> float:
        if r.slo is NO_SLO:
            return inf
        return 1.0 if not r.emitted else max(16.0, r.emitted)


@dataclass(frozen=True, slots=True)
class Joint:
    """SLA as the hard constraint, cache affinity as the soft one; scores are seconds.

    slack = latest start - now, as `latest_start` has it with what is cached. Then:

    urgent, 0 <= slack < urgent_slack:  (-1, due - the seconds that the cached prefix spares, urgent_slack at most)
    otherwise:  (0, w_wait * (arrival + priority * aging_window) - w_cache * cached share)
    lost, slack < 0 or given up:  (0, the same as if its class were one worse)
    overdue, max(1, priority + 2) * aging_window after its arrival:  (-1, that time)

    Given up are those whose first token could only be kept at the cost of others': the most are kept (core/triage.py).
    `due` is when what is left of the prompt has to be computed: the order in which they were found to be in time
    together. So among the urgent that are due at about the same time the longest cached prefix comes first, nobody
    who is lost is served before one who is not, and where nothing was promised the order is priority, then arrival,
    with ageing and a cache bonus. The class for displacement is the priority.
    With `first_token_within`, whoever was promised nothing and has had no output so many seconds after its arrival
    counts as of a class better by one until it has: it takes the place of an equal that runs, whose tokens are computed
    again. That bounds the longest wait for a first token, and costs throughput where many wait that long.
    Nobody who arrives more than `max(1, priority + 2) * aging_window + urgent_slack` seconds later passes, whatever
    it was promised (by classes, `(difference + 1) * aging_window + w_cache / w_wait`, while nobody is urgent).
    """

    unwrapped: ClassVar[str] = _SECONDS
    triages: ClassVar[bool] = True
    tier_name: ClassVar[str] = "priority"
    score_unit: ClassVar[str] = "s"

    aging_window: float = 60.0
    urgent_slack: float = 0.5
    w_wait: float = 1.0
    w_cache: float = 0.5
    first_token_within: float | None = None

    def __post_init__(self) -> None:
        _check(aging_window=self.aging_window, w_wait=self.w_wait)
        if self.first_token_within is not None:
            _check(first_token_within=self.first_token_within)
        for name in ("urgent_slack", "w_cache"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0, not {getattr(self, name)}")

    def tier(self, r: RequestView, ctx: PolicyContext) -> int:
        return r.priority if self.first_token_within is None else r.priority - (ctx.now >= self._unheard(r))

    def lapse(self, r: RequestView, ctx: PolicyContext) -> float:
        return inf if r.tier == r.priority else 1.0

    def key(self, r: RequestView, ctx: PolicyContext) -> Key:
        now, window, priority = ctx.now, self.aging_window, self.tier(r, ctx)
        cached = ctx.cached(r)
        overdue = r.arrival + max(1, priority + 2) * window
        if now >= overdue:
            return Key(-1, overdue)
        latest = inf
        if r.slo is not NO_SLO:
            prefill = _prefill_left(r, cached)
            seconds = ctx.step_time.service(prefill, 0)
            latest = _latest_start(r, ctx, prefill, seconds)
        lost = now > latest or ctx.triage.gives_up(r)
        if lost:
            priority += 1
        elif now >= latest - self.urgent_slack:
            due = latest + seconds
            spared = min(ctx.step_time.service(cached, 0), self.urgent_slack) if cached else 0.0
            return Key(-1, due - spared, min(nextafter(latest, inf), overdue))
        share = min(1.0, cached / r.prompt_tokens)
        score = self.w_wait * (r.arrival + priority * window) - self.w_cache * share
        if lost:
            return Key(0, score, overdue)
        until = min(latest - self.urgent_slack, overdue)
        if self.first_token_within is not None and now < (unheard := self._unheard(r)):
            until = min(until, unheard)
        return Key(0, score, until)

    def _unheard(self, r: RequestView) -> float:
        """When `r` counts as of a better class for want of an output (seconds); inf if it never does."""
        if self.first_token_within is None or r.slo is not NO_SLO or r.emitted:
            return inf
        return r.arrival + self.first_token_within


def _check(**positive: float) -> None:
    for name, value in positive.items():
        if not value > 0:
            raise ConfigError(f"{name} must be above 0, not {value}")
