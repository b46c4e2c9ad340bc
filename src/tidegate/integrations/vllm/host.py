"""What stands between vLLM's scheduler and ours: vLLM's calls become ours, our decisions become vLLM's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from math import inf
from typing import Any, NamedTuple

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine import FinishReason as VllmReason
from vllm.v1.request import RequestStatus

from tidegate.config import Config
from tidegate.core.limits import Limits
from tidegate.core.plan import StepPlan
from tidegate.core.policy import Policy, PolicyContext
from tidegate.core.request import UNSERVED, FinishReason, Rejection
from tidegate.errors import RequestRefused
from tidegate.integrations.vllm.hosted import HostedRequest
from tidegate.integrations.vllm.identity import BadClaim, Claim, Claims
from tidegate.integrations.vllm.observers import Observer
from tidegate.integrations.vllm.queue import OfferedQueue
from tidegate.integrations.vllm.scheduler import VllmScheduler
from tidegate.observe.jsonlines import Lines

PARKED = 64
"""Requests that wait for their grammar and are asked about in one step; the others follow in the next ones."""

LEARN_EVERY = 4
"""Of steps with as many decodes as the one before and no prompt, one in so many is learned from: they are all alike."""

REASONS = {
    VllmReason.STOP: FinishReason.STOP,
    VllmReason.LENGTH: FinishReason.LENGTH,
    VllmReason.ABORT: FinishReason.CANCELLED,
    VllmReason.ERROR: FinishReason.ERROR,
    VllmReason.REPETITION: FinishReason.STOP,
}


OURS = UNSERVED | {FinishReason.LENGTH_KV}
"""Ends that only we decide."""


class InFlight(NamedTuple):
    """A step that vLLM computes: what was planned, when it was scheduled (seconds), and its sizes (tokens)."""

    plan: StepPlan | None
    scheduled_at: float
    prefill: int
    decodes: int


class Host:
    """Tidegate's scheduler for one of vLLM's. Times are seconds of `clock`; `wall` is that of vLLM's arrival times."""

    scheduler_class: type[VllmScheduler] = VllmScheduler

    def __init__(
        self,
        engine: Any,
        config: Config,
        policy: Policy,
        limits: Limits,
        context: PolicyContext,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.observers: Sequence[Observer] = ()
        self.out: Lines | None = None
        self._engine = engine
        self._clock = clock
        self._wall = wall
        self._claims = Claims(config)
        self.scheduler = self.scheduler_class(policy, limits, context, engine, self)
        self._parked: dict[HostedRequest, None] = {}
        self._flight: deque[InFlight] = deque()
        self._farewells: list[tuple[int, Any]] = []
        self._plan: StepPlan | None = None
        self._last_done = -inf
        self._decodes = 0
        self._alike = 0
        self._queue = OfferedQueue(self._waiting, self._count_waiting)
        self._take_over()

    def _take_over(self) -> None:
        """Put our queue in place of vLLM's. Its second one stays: who holds blocks is drained first in any order."""
        self._engine.waiting = self._queue
        self._engine.policy = SchedulingPolicy.FCFS  # whoever is last in `running` gives way, and that order is ours

    # Requests come and go

    def arrived(self, handle: Any) -> None:
        """vLLM has taken `handle` in: it waits, or is turned away at the door."""
        now = self._clock()
        try:
            r = self._hosted(handle, self._claim(handle), now)
            self.scheduler.add(r, now)
        except BadClaim as bad:
            self._refuse(handle, str(bad), now)
        except RequestRefused as refusal:
            self._turn_away(handle, f"{refusal.reason}: {refusal}")
        else:
            if r.not_before > now:
                self._parked[r] = None
        self._deliver()

    def _refuse(self, handle: Any, why: str, now: float) -> None:
        """`handle` claims what there is not: it never becomes a request of ours, and is told here alone."""
        line = {"event": "rejected", "reason": Rejection.BAD_REQUEST.value, "message": why}
        self._write({**line, "request_id": handle.request_id}, now)
        self._turn_away(handle, why)

    def finished(self, handles: Iterable[Any], status: Any) -> None:
        """vLLM has ended these before their time."""
        reason = REASONS.get(RequestStatus.get_finished_reason(status), FinishReason.CANCELLED)
        for handle in handles:
            self.scheduler.ended(handle.request_id, reason, self._clock())
        self._deliver()

    def end(self, r: HostedRequest, reason: FinishReason) -> None:
        """`r` has ended; where that is our word, vLLM frees it and its client is told.

        A session's turn ends as well, by vLLM's word; what it does with its next input is vLLM's.
        """
        handle = r.handle
        self._parked.pop(r, None)
        r.let_go()
        if reason in OURS:
            clipped = reason is FinishReason.LENGTH_KV
            self._turn_away(handle, reason.value, VllmReason.LENGTH if clipped else VllmReason.ABORT)

    def _turn_away(self, handle: Any, why: str, reason: VllmReason = VllmReason.ABORT) -> None:
        """vLLM forgets `handle`; its client gets an end, with the reason beside it."""
        self._engine.finish_requests(handle.request_id, RequestStatus.FINISHED_ABORTED)
        farewell = EngineCoreOutput(
            request_id=handle.request_id,
            new_token_ids=[],
            finish_reason=reason,
            stop_reason=f"tidegate: {why}",
            events=handle.take_events(),
            trace_headers=handle.trace_headers,
        )
        self._farewells.append((handle.client_index, farewell))

    def _claim(self, handle: Any) -> Claim:
        xargs = handle.sampling_params.extra_args or {}
        return self._claims.of(xargs, handle.priority, handle.cache_salt)

    def _hosted(self, handle: Any, claim: Claim, now: float) -> HostedRequest:
        engine = self._engine
        # vLLM fills in what is left of the model's length where nothing was said: that is no declaration.
        declared = handle.max_tokens < engine.max_model_len - handle.num_prompt_tokens
        return HostedRequest(
            handle,
            max_tokens=handle.max_tokens if declared else None,
            arrival=now - max(0.0, self._wall() - handle.arrival_time),
            tenant=claim.tenant,
            slo_class=claim.slo_class,
            priority=claim.priority,
            slo=claim.slo,
            cache_salt=handle.cache_salt or "",
            queue_ttl=claim.queue_ttl,
            not_before=inf if engine._is_blocked_waiting_status(handle.status) else 0.0,
            resource=None if handle.lora_request is None else handle.lora_request.lora_name,
        )

    # A step

    @property
    def limits_of(self) -> dict[str, int]:
        """Tokens of single requests that vLLM may schedule at most in this step."""
        return self.scheduler.limits_of if self._plan is not None else {}

    def before_schedule(self, throttled: bool) -> None:
        """Plan the step, make room for it, and put those who may be admitted where vLLM looks for them.

        While vLLM is paused, or holds prompts back for other ranks, nobody is admitted and nothing is planned.
        """
        now, engine, scheduler = self._clock(), self._engine, self.scheduler
        self._ask_parked(now)
        if throttled or engine.pause_state:
            self._plan = None
            scheduler.expire(now)
            return
        engine.running = scheduler.by_place(engine.running)
        self._plan = scheduler.plan(now)
        limits = scheduler.limits_of
        self._queue.offer([r.handle for r in scheduler.offered if limits[r.id]])

    def after_schedule(self, output: Any) -> None:
        """vLLM has scheduled a step."""
        now = self._clock()
        self._queue.close()
        if self._plan is not None:
            self.scheduler.scheduled(output.num_scheduled_tokens, self._plan.step, now)
        self._note_flight(output, now)
        self._deliver()

    def _note_flight(self, output: Any, now: float) -> None:
        decodes = 0 if self._plan is None else len(self._plan.decodes)
        self._flight.append(InFlight(self._plan, now, output.total_num_scheduled_tokens - decodes, decodes))

    def step_done(self) -> None:
        """The oldest step in flight was computed; vLLM is about to apply it."""
        now, step = self._clock(), self._flight.popleft()
        self._step = step
        busy = now - max(step.scheduled_at, self._last_done)
        self._last_done = now
        if step.plan is not None and step.prefill + step.decodes > 0:
            if self._is_news(step):
                self.scheduler.ctx.step_time.observe(step.prefill, step.decodes, step.plan.context, busy)
            for observer in self.observers:
                observer.step(step.plan, busy)

    def _is_news(self, step: InFlight) -> bool:
        """Whether the step model learns from it."""
        alike = not step.prefill and step.decodes == self._decodes
        self._alike = self._alike + 1 if alike else 0
        self._decodes = step.decodes
        return not self._alike % LEARN_EVERY

    def after_update(self, outputs: dict[int, Any]) -> None:
        """vLLM has applied the step: what it tells its clients is what our books take in."""
        now, step = self._clock(), -1 if self._step.plan is None else self._step.plan.step
        told = chain.from_iterable(client.outputs for client in outputs.values())
        for end in self.scheduler.computed(told, step, now):
            self.scheduler.ended(end.request_id, REASONS[end.finish_reason], now)
        for client, farewell in self._farewells:
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(farewell)
        self._farewells = []
        self._deliver()

    def preempt(self, r: HostedRequest) -> None:
        """`r` gives way in vLLM at once, as it does there when blocks run out."""
        engine = self._engine
        engine.running.remove(r.handle)
        engine._preempt_request(r.handle, self._clock())
        # It is not in this step, so what was in the last one is no longer what the worker goes on with.
        engine.prev_step_scheduled_req_ids.discard(r.id)

    def preempted(self, handle: Any) -> None:
        """vLLM preempts `handle`: by our word, or by itself."""
        self.scheduler.gave_way(handle.request_id, "vLLM was out of KV blocks", self._clock())

    def close(self) -> None:
        """Write what waits."""
        for observer in self.observers:
            observer.close()

    def _ask_parked(self, now: float) -> None:
        """Whoever waited for a grammar that is there by now waits as all others do."""
        for r in list(islice(self._parked, PARKED)):
            del self._parked[r]
            if self._engine._handle_blocked_waiting_request(r.handle):
                self.scheduler.ready(r, now)
            else:
                self._parked[r] = None  # behind the others

    def _deliver(self) -> None:
        events = self.scheduler.take_events()
        if events:
            for observer in self.observers:
                observer.events(events)

    def _write(self, line: Mapping[str, Any], now: float) -> None:
        """A line of the decision log that no event of ours is."""
        if self.out is not None:
            self.out.write({"time": now, **line})

    def _waiting(self) -> Iterator[Any]:
        yield from (r.handle for r in (*self.scheduler.waiting, *self._parked))

    def _count_waiting(self) -> int:
        return len(self.scheduler.waiting) + len(self._parked)
