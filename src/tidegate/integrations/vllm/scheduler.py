"""The core's scheduler inside vLLM: the same door, queue, orders, planner and diary, over vLLM's requests and blocks.

A step is planned, vLLM schedules what the plan allows, and what vLLM really did is told back. Where it did less, the
next plan starts from that: all counts are vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, Protocol

from tidegate.core.events import Emitted
from tidegate.core.expected import ExpectedGrowth
from tidegate.core.lifecycle import Lifecycle
from tidegate.core.limits import Limits
from tidegate.core.plan import StepPlan
from tidegate.core.policy import Policy, PolicyContext
from tidegate.core.reasons import Why
from tidegate.core.request import FinishReason, Request, Status
from tidegate.core.running import place
from tidegate.core.scheduler import Scheduler
from tidegate.integrations.vllm.hosted import HostedRequest
from tidegate.integrations.vllm.planner import VllmPlanner
from tidegate.integrations.vllm.pool import VllmPool
from tidegate.integrations.vllm.seats import Expected, VllmSeats
from tidegate.integrations.vllm.streams import Streams


class Hands(Protocol):
    """What the scheduler has done in vLLM."""

    def preempt(self, r: HostedRequest) -> None:
        """`r` gives way at once."""

    def end(self, r: HostedRequest, reason: FinishReason) -> None:
        """`r` has ended by our word; vLLM frees it and tells its client, if it has not ended there."""


class VllmLifecycle(Lifecycle):
    """A `Lifecycle` whose preemptions and ends happen in vLLM as well."""

    hands: Hands

    def preempt(self, r: Request, mode: str, reason: str, step: int, now: float) -> None:
        super().preempt(r, mode, reason, step, now)
        assert isinstance(r, HostedRequest)
        self.hands.preempt(r)

    def note_preempted(self, r: Request, reason: str, now: float) -> None:
        """vLLM preempts `r` by itself."""
        super().preempt(r, "recompute", reason, -1, now)

    def finish(self, r: Request, reason: FinishReason, now: float) -> None:
        super().finish(r, reason, now)
        assert isinstance(r, HostedRequest)
        self.hands.end(r, reason)


def without_turns(policy: Policy) -> Policy:
    """`policy` with everybody decoding in every step, as vLLM has it."""
    if policy.budget.max_stride > 1 and "max_stride" in {f.name for f in fields(policy.budget)}:  # type: ignore[arg-type]
        return replace(policy, budget=replace(policy.budget, max_stride=1))  # type: ignore[type-var]
    return policy


class Output(Protocol):
    """What vLLM tells a client of a request after a step."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: Any


# What is asked of every output in every step, without a line of Python for each.
_ID = attrgetter("request_id")
_REASON = attrgetter("finish_reason")


class VllmScheduler(Scheduler):
    """`engine` is vLLM's scheduler, of which only the requests, the running list and the pool are read."""

    kv: VllmPool
    running: VllmSeats
    _planner: VllmPlanner
    _lifecycle: VllmLifecycle

    def __init__(self, policy: Policy, limits: Limits, ctx: PolicyContext, engine: Any, hands: Hands) -> None:
        self._engine = engine
        self._clipped: set[Request] = set()
        self._streams = Streams()
        super().__init__(without_turns(policy), limits, ctx)
        self._lifecycle.hands = hands
        self._order_version = -1

    def _make_kv(self) -> VllmPool:
        return VllmPool(self._engine.kv_cache_manager, self.limits.block_size)

    def _make_running(self, expected: ExpectedGrowth | None) -> VllmSeats:
        grows = None if expected is None else Expected(self.limits, self.ctx)
        return VllmSeats(self.kv, self.limits, self._engine, grows)

    def _make_lifecycle(self) -> VllmLifecycle:
        return VllmLifecycle(self.waiting, self.running, self.swap, self.ctx)

    def _make_planner(self) -> VllmPlanner:
        lifecycle, swap = self._lifecycle, self.swap
        return VllmPlanner(self.policy, self.limits, self.ctx, self.kv, self.waiting, self.running, lifecycle, swap)

    # Before vLLM schedules

    def plan(self, now: float) -> StepPlan:
        """What vLLM is to do in the next step, from what it did until now. `offered` and `limits_of` say the rest."""
        if self._clipped:
            for r in [r for r in self._clipped if r.emitted >= r.target]:
                self._end(r, FinishReason.LENGTH_KV, now)
        self.kv.refresh()
        self.running.refresh()
        return super().plan(now)

    @property
    def offered(self) -> Mapping[HostedRequest, Why]:
        """Who is to be admitted by the last plan, in order, and why."""
        return self._planner.offered

    @property
    def limits_of(self) -> dict[str, int]:
        """Tokens of single requests that vLLM may schedule at most, by the last plan."""
        return self._planner.limits_of

    def ready(self, r: HostedRequest, now: float) -> None:
        """What the parked `r` waited for is there."""
        r.not_before = now
        self._leave_parking(r)
        self.ctx.now = now
        self._begin_to_wait(r, now)

    def known(self, request_id: str) -> HostedRequest | None:
        """The request of that id, if it has come and not ended."""
        return self._lifecycle.requests.get(request_id)  # type: ignore[return-value]

    def by_place(self, running: list[Any]) -> list[Any]:
        """vLLM's running list with whoever comes last in the order at its end, where vLLM looks for victims."""
        if self._order_version != self.running.version:
            requests = self._lifecycle.requests
            known = [r for h in running if (r := requests.get(h.request_id)) is not None and r.lease is not None]
            if len(known) == len(running):
                self._order_version = self.running.version
                return [r.handle for r in sorted(known, key=place)]
        return running

    # After vLLM scheduled

    def scheduled(self, tokens: Mapping[str, int], step: int, now: float) -> None:
        """vLLM has scheduled `tokens` by request: whoever it admitted has a seat, the others wait on."""
        for r, why in self.offered.items():
            if r.id in tokens:
                r.rewind(0)
                self._lifecycle.start(r, step, r.handle.num_computed_tokens - tokens[r.id], now, why)
                self.running.settle(r)
                if r.clip and r.handle.max_tokens > r.target:
                    self._clipped.add(r)
            else:
                self.running.unseat(r)
                self.waiting.add(r)
        self.kv.settle()

    def gave_way(self, request_id: str, reason: str, now: float) -> None:
        """vLLM preempts a request by itself."""
        r = self.known(request_id)
        if r is not None and r.status is Status.RUNNING:
            self._lifecycle.note_preempted(r, reason, now)

    def computed(self, outputs: Iterable[Output], step: int, now: float) -> list[Output]:
        """A step was computed: the tokens, as vLLM tells them. Returns the outputs that end a request."""
        self.ctx.now = now
        known = self._lifecycle.requests
        told = list(outputs)
        ids = list(map(_ID, told))
        ended = len(told) - list(map(_REASON, told)).count(None)
        if ended or not self._streams.go_on(ids):  # else each of them has a token
            ids = [o.request_id for o in told if o.new_token_ids and o.request_id in known]
        if ids:
            requests, first = self._streams.emitted(ids, known, now)
            self._lifecycle.events.append(Emitted(now, step, requests, (), len(requests) - len(first), first))
        return [o for o in told if o.finish_reason is not None] if ended else []

    def _end(self, r: Request, reason: FinishReason, now: float) -> None:
        self._clipped.discard(r)
        self._streams.end(r)
        super()._end(r, reason, now)

    def ended(self, request_id: str, reason: FinishReason, now: float) -> None:
        """vLLM has ended a request; unknown and ended ones are ignored."""
        r = self.known(request_id)
        if r is not None:
            self._end(r, reason, now)
