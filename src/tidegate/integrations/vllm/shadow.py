"""Shadow mode: everything is decided and logged, and vLLM acts as if it were alone.

The plan is made from what vLLM really did, and taken back before vLLM schedules. So every line says what ours would
have done at that moment, in the state that stock vLLM has led to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tidegate.core.plan import StepPlan
from tidegate.core.policy import Reject
from tidegate.core.reasons import ByHost
from tidegate.core.request import UNSERVED, FinishReason, Request, Status
from tidegate.integrations.vllm.host import Host
from tidegate.integrations.vllm.hosted import HostedRequest
from tidegate.integrations.vllm.pool import Holding, VllmPool
from tidegate.integrations.vllm.scheduler import VllmLifecycle, VllmScheduler
from tidegate.integrations.vllm.seats import VllmSeats

BY_VLLM = ByHost("vLLM")


class ShadowLifecycle(VllmLifecycle):
    """A lifecycle in which nobody gives way by our word; `would_preempt` are those who would, and why."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.would_preempt: dict[Request, str] = {}

    def preempt(self, r: Request, mode: str, reason: str, step: int, now: float) -> None:
        self.would_preempt[r] = reason
        seats = self._running
        assert isinstance(seats, VllmSeats)
        assert isinstance(seats.kv, VllmPool)
        assert isinstance(r.lease, Holding)
        freed = seats.kv.freed_by(r.lease) - r.lease.pledge
        seats.suspend(r)
        seats.kv.take(-freed)


class ShadowScheduler(VllmScheduler):
    """Plans without effect. `would_admit` and `would_preempt` (with the reason) are what the last plan came to."""

    _lifecycle: ShadowLifecycle

    def __init__(self, *parts: Any) -> None:
        self.would_admit: list[str] = []
        self.would_preempt: dict[str, str] = {}
        self.would_end: list[tuple[Request, str]] = []
        super().__init__(*parts)

    def _make_lifecycle(self) -> ShadowLifecycle:
        return ShadowLifecycle(self.waiting, self.running, self.swap, self.ctx)

    def plan(self, now: float) -> StepPlan:
        eviction = self._planner._eviction
        gave_way = eviction._last  # nobody gives way in a plan without effect, so nobody is spared for it in the next
        plan = super().plan(now)
        eviction._last = gave_way
        self.would_admit = [r.id for r in self.offered]
        for r in self.offered:
            self.running.unseat(r)
            self.waiting.add(r)
        self._planner.offered = {}
        suspended, self._lifecycle.would_preempt = self._lifecycle.would_preempt, {}
        self.would_preempt = {r.id: reason for r, reason in suspended.items()}
        for victim in suspended:
            self._adopt(victim)
        return plan

    def admitted(self, request_ids: Iterable[str], tokens: Mapping[str, int], step: int, now: float) -> None:
        """Whom vLLM has admitted by itself."""
        for request_id in request_ids:
            r = self.known(request_id)
            if r is None or r.lease is not None:
                continue
            if r.status is Status.PARKED:
                self.ready(r, now)
            self.waiting.remove(r)
            self._adopt(r)
            self._lifecycle.start(r, step, r.handle.num_computed_tokens - tokens[r.id], now, BY_VLLM)
            self.running.settle(r)
        self.kv.settle()

    def _adopt(self, r: Request) -> None:
        self.running.seat(r, self.kv.reserve(self.kv.nothing, self.kv.blocks_for(r.known_tokens), r))

    def _refusal(self, r: Request, now: float) -> Reject | None:
        refusal = super()._refusal(r, now)
        if refusal is not None:
            self.would_end.append((r, f"refused, {refusal.reason.value}: {refusal.message}"))
            if r.seq < 0:  # it can never run, as far as we know
                r.seq = next(self._arrivals)
                r.target = r.max_tokens or self.limits.pool_tokens
                r.footprint = self.kv.blocks_for(r.prompt_tokens + r.target)
        return None

    def _end(self, r: Request, reason: FinishReason, now: float) -> None:
        if reason in UNSERVED or reason is FinishReason.LENGTH_KV:
            self.would_end.append((r, reason.value))
            self._clipped.discard(r)
        else:
            super()._end(r, reason, now)


class ShadowHost(Host):
    """A host that leaves vLLM's queues, its order and its requests alone. `out` takes what would have been."""

    scheduler: ShadowScheduler
    scheduler_class = ShadowScheduler
    _last: Mapping[str, Any] | None = None

    def _take_over(self) -> None:
        """Nothing is put in place of anything."""

    @property
    def limits_of(self) -> dict[str, int]:
        return {}

    def before_schedule(self, throttled: bool) -> None:
        now = self._clock()
        self._plan = None if throttled or self._engine.pause_state else self.scheduler.plan(now)

    def after_schedule(self, output: Any) -> None:
        now = self._clock()
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        admitted = [*(r.req_id for r in output.scheduled_new_reqs), *resumed]
        if self._plan is not None:
            self._compare(admitted, output.preempted_req_ids or (), self._plan, now)
        step = -1 if self._plan is None else self._plan.step
        self.scheduler.admitted(admitted, output.num_scheduled_tokens, step, now)
        self._note_flight(output, now)
        self._deliver()

    def end(self, r: HostedRequest, reason: FinishReason) -> None:
        self._parked.pop(r, None)
        r.let_go()

    def _refuse(self, handle: Any, why: str, now: float) -> None:
        """A claim that cannot be read is vLLM's request, not ours."""
        self._write({"event": "would refuse", "request_id": handle.request_id, "why": why}, now)

    def _compare(self, admitted: list[str], preempted: Iterable[str], plan: StepPlan, now: float) -> None:
        """A line where ours would have admitted or preempted others than vLLM did, and for every end of ours."""
        scheduler = self.scheduler
        ours, theirs = scheduler.would_admit, sorted(preempted)
        if set(ours) != set(admitted) or sorted(scheduler.would_preempt) != theirs:
            told = {
                "event": "would",
                "step": plan.step,
                "admit": ours,
                "preempt": [{"request_id": i, "reason": why} for i, why in scheduler.would_preempt.items()],
                "vllm_admitted": admitted,
                "vllm_preempted": theirs,
            }
            if {**told, "step": 0} != self._last:  # the same in every step until something changes
                self._last = {**told, "step": 0}
                self._write(told, now)
        for r, why in scheduler.would_end:
            self._write({"event": "would end", "request_id": r.id, "reason": why}, now)
        scheduler.would_end = []
