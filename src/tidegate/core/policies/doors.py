"""Who may wait at all, and in whose place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from tidegate.core.policy import ACCEPT, Accept, Displace, PolicyContext, Reject
from tidegate.core.request import Rejection
from tidegate.core.view import LoadView, RequestView, Work

_ROUNDING = 1e-9  # a promise that is met on the dot is met


@dataclass(frozen=True, slots=True)
class ClassLimit:
    """What may wait of one class at once: requests, and tokens of work (None: no end)."""

    max_waiting: int | None = None
    max_waiting_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class QueueLimit:
    """At most `max_waiting` requests and `max_waiting_tokens` tokens of work wait (None: no end).

    Work is the prompt without what the prefix cache holds, and the predicted outputs. Preempted requests do
    not count. Where nobody waits, everybody may, however large. `classes` limits single classes besides.

    displace: if the queue is full, whoever is of a strictly better tier waits in place of the worst tier's newest
    refuse_hopeless: who is predicted to miss its TTFT or E2E promise, because of those ahead, is told at once
    shed_hopeless: who waits until even a free machine could not keep its promise any more is given up

    A refused client is told to come back after the seconds in which those who wait now would be served, or, of
    a promise, after those by which it would be missed. Both are as good as the predictor and the step-time model.
    """

    max_waiting: int | None = None
    max_waiting_tokens: int | None = None
    classes: Mapping[str, ClassLimit] = field(default_factory=dict)
    displace: bool = False
    refuse_hopeless: bool = False
    shed_hopeless: bool = False

    @property
    def open(self) -> bool:
        return self.max_waiting is None and not self.weighs

    @property
    def weighs(self) -> bool:
        return self.max_waiting_tokens is not None or bool(self.classes) or self.displace or self.refuse_hopeless

    @property
    def sheds(self) -> bool:
        return self.shed_hopeless

    def decide(self, r: RequestView, load: LoadView, ctx: PolicyContext) -> Accept | Displace | Reject:
        refusal = self._class_full(r, load, ctx)
        if refusal is None and self.refuse_hopeless:
            refusal = hopeless(r, load, ctx)
        return refusal or self._full(r, load, ctx)

    def _class_full(self, r: RequestView, load: LoadView, ctx: PolicyContext) -> Reject | None:
        limit = self.classes.get(r.slo_class)
        if limit is None:
            return None
        waits = load.of_class
        places, tokens = _excess(limit.max_waiting, limit.max_waiting_tokens, waits, load.own)
        if places <= 0 and tokens <= 0:
            return None
        what = f"max_waiting is {limit.max_waiting}" if places > 0 else f"max_waiting_tokens {limit.max_waiting_tokens}"
        message = f"{waits.requests} requests of class {r.slo_class!r} wait with {waits.tokens} tokens; {what}"
        return Reject(Rejection.QUEUE_FULL, message, seconds(waits, load, ctx))

    def _full(self, r: RequestView, load: LoadView, ctx: PolicyContext) -> Accept | Displace | Reject:
        waits = load.queued if self.weighs else Work(load.waiting)
        places, tokens = _excess(self.max_waiting, self.max_waiting_tokens, waits, load.own)
        if places <= 0 and tokens <= 0:
            return ACCEPT
        if self.displace and load.worse.requests >= places and load.worse.tokens >= tokens:
            return Displace(places, tokens)
        if places > 0:
            message = f"the queue is full: {load.waiting} requests wait, max_waiting is {self.max_waiting}"
        else:
            message = (
                f"the queue is full: {waits.tokens} tokens of work wait and this request has {load.own.tokens}, "
                f"max_waiting_tokens is {self.max_waiting_tokens}"
            )
        if not self.weighs:  # what waits was not weighed: as if all of it were like this request
            outputs = ctx.predictor.output_tokens(r)
            waits = Work(load.waiting, load.waiting * r.prompt_tokens, ceil(load.waiting * outputs))
        return Reject(Rejection.QUEUE_FULL, message, seconds(waits, load, ctx))


def _excess(max_waiting: int | None, max_tokens: int | None, waits: Work, own: Work) -> tuple[int, int]:
    """(places, tokens) by which one more request would be too much; where nobody waits, any work is accepted."""
    places = 0 if max_waiting is None else waits.requests + 1 - max_waiting
    tokens = 0 if max_tokens is None or not waits.requests else waits.tokens + own.tokens - max_tokens
    return places, tokens


def seconds(work: Work, load: LoadView, ctx: PolicyContext) -> float:
    """Seconds in which `work` is served: prompts one after another, outputs on all seats side by side."""
    return ctx.step_time.service(work.prefill, work.outputs / load.seats)


def predicted_ttft(load: LoadView, ctx: PolicyContext) -> float:
    """Seconds from now to the first token, behind those ahead.

    The later of two: the prompts ahead and its own are computed, each step decoding for the running ones as
    well; and so many seats come free as are wanted before it and by it, each after the mean of the predicted outputs.
    """
    service, ahead, own = ctx.step_time.service, load.ahead, load.own
    tokens = ahead.prefill + own.prefill
    steps = ceil(tokens / max(1, load.budget - load.running)) if load.running else 0
    seats = max(0, ahead.requests + 1 - (load.seats - load.running))
    mean = (ahead.outputs + own.outputs) / (ahead.requests + 1)
    return max(service(tokens, steps), service(0, seats * mean / load.seats))


def hopeless(r: RequestView, load: LoadView, ctx: PolicyContext) -> Reject | None:
    """The refusal of a request whose promise those ahead of it will break. An idle machine refuses nobody."""
    if not load.ahead.tokens and load.running < load.seats:
        return None
    waited = load.now - r.arrival
    first = waited + predicted_ttft(load, ctx)
    whole = first + ctx.step_time.service(0, load.own.outputs)
    for name, predicted, promised in (("first", first, r.slo.ttft), ("last", whole, r.slo.e2e)):
        if promised is not None and predicted > promised * (1 + _ROUNDING):
            told = (
                f"its {name} token is predicted {predicted:.3g} s after its arrival, and promised after {promised:g} s"
            )
            return Reject(Rejection.DEADLINE, f"{told}: {load.ahead.requests} requests are ahead", predicted - promised)
    return None
