"""The scheduler: `add`, `abort`, `plan`, `apply`, `quiet_steps`, `explain`. Wiring only; the parts decide.

Pure and single-threaded: time comes in as an argument, results as values, and what happened goes out
as events. The same object runs in an engine, in a simulation and in a test.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from math import inf
from typing import Any, NamedTuple

from tidegate.core.affinity import Affinity
from tidegate.core.door import Door
from tidegate.core.events import Event
from tidegate.core.expected import ExpectedGrowth
from tidegate.core.expiry import Expiry
from tidegate.core.groups import GroupedQueue
from tidegate.core.kv import KvCache
from tidegate.core.lanes import Lanes
from tidegate.core.lifecycle import Lifecycle
from tidegate.core.limits import Limits
from tidegate.core.plan import StepPlan, StepResult
from tidegate.core.planner import Planner
from tidegate.core.policy import Grouping, Key, Policy, PolicyContext, Reject, Triaging
from tidegate.core.predict import HistoryPredictor
from tidegate.core.queue import WaitingQueue
from tidegate.core.quiet import LOUD, Quiet, QuietSteps
from tidegate.core.rekeys import RunningKeys
from tidegate.core.request import FinishReason, Rejection, Request, Status
from tidegate.core.running import Running, hashes_of
from tidegate.core.step_time import LearnedStepTime
from tidegate.core.swap import Swap
from tidegate.core.triage import Triage
from tidegate.errors import ConfigError, RequestRefused

# Keys that are asked for again in one plan; those that are left come in the next ones.
REKEYS = 32


class Snapshot(NamedTuple):
    """The load now. `waiting` counts preempted and parked requests too; waits are seconds."""

    waiting: int
    running: int
    waiting_by_class: dict[str, int]
    running_by_class: dict[str, int]
    oldest_wait_by_class: dict[str, float]
    free_blocks: int
    available_blocks: int
    num_blocks: int
    held_back_by: str | None


class Scheduler:
    """Decides what is computed next. Every time is seconds on one clock that the host chooses."""

    def __init__(self, policy: Policy, limits: Limits, ctx: PolicyContext | None = None) -> None:
        self.policy = policy
        self.limits = limits
        self.ctx = ctx if ctx is not None else PolicyContext(HistoryPredictor(), LearnedStepTime())
        self.kv = self._make_kv()
        self.running = self._make_running(ExpectedGrowth(limits, self.ctx) if limits.headroom == "quantile" else None)
        self.swap = Swap(limits.host_blocks, limits.disk_blocks, limits.block_size, self.ctx.copy_time)
        self._affinity = Affinity(self.kv)
        self.ctx.cached = self._affinity.tokens
        self.waiting = self._queue()
        self._keys = RunningKeys(self.running, policy.order, self.ctx)
        self._looked_at: Request | None = None
        self._looked_after = 0  # evictions until then
        self._lifecycle = self._make_lifecycle()
        self._planner = self._make_planner()
        self._door = Door(policy, limits, self.ctx, self.kv, self.waiting, self.running, self._end)
        self._triage = self._make_triage()
        self._lifecycle.backlog = self._door.backlog
        self._lifecycle.lanes = self.waiting if isinstance(self.waiting, Lanes) else None
        self._quiet = Quiet(self.ctx, self.waiting, self.running, self._planner, self._keys, self._affinity)
        self._expiry = Expiry()
        self._parked: list[tuple[float, int, Request]] = []
        self._num_parked = 0
        self._arrivals = count()
        self._held_back_by: str | None = None

    # What another engine's host puts its own in place of (integrations/vllm/)

    def _make_kv(self) -> KvCache:
        return KvCache(self.limits.num_blocks, self.limits.block_size, self.limits.prefix_caching)

    def _make_running(self, expected: ExpectedGrowth | None) -> Running:
        return Running(self.kv, self.limits, expected)

    def _make_lifecycle(self) -> Lifecycle:
        return Lifecycle(self.waiting, self.running, self.swap, self.ctx)

    def _make_planner(self) -> Planner:
        lifecycle, swap = self._lifecycle, self.swap
        return Planner(self.policy, self.limits, self.ctx, self.kv, self.waiting, self.running, lifecycle, swap)

    @property
    def has_work(self) -> bool:
        """Whether any request that arrived has not ended."""
        return bool(self._lifecycle.requests)

    @property
    def in_flight(self) -> int:
        """Steps that were planned and not applied."""
        return len(self._lifecycle.in_flight)

    def add(self, r: Request, now: float) -> None:
        """A request arrives at the door.

        Raises RequestRefused if it can never run, or if the policy does not let it wait; a refused
        request is told as `Rejected` and never waits. Raises ValueError for an id that is in use.
        """
        if r.id in self._lifecycle.requests:
            raise ValueError(f"request id {r.id!r} is in use")
        self.ctx.now = now
        if self._expiry.heap:
            self.expire(now)
        refusal = self._refusal(r, now)
        if refusal is not None:
            self._affinity.forget(r)  # the door may have asked for its place
            self._lifecycle.reject(r, refusal, now)
            raise RequestRefused(refusal.reason.value, refusal.message, refusal.retry_after)
        if r.not_before > now:
            self._lifecycle.park(r, now)
            heapq.heappush(self._parked, (r.not_before, r.seq, r))
            self._num_parked += 1
        else:
            self._begin_to_wait(r, now)
        if r.queue_ttl is not None:
            self._expiry.watch(r, r.arrival + r.queue_ttl, FinishReason.TIMEOUT)
        last_start = self._door.last_start(r)
        if last_start is not None:
            self._expiry.watch(r, last_start, FinishReason.SHED)

    def abort(self, request_id: str, now: float) -> bool:
        """The client is gone: end the request whatever it is doing. False if it is not known (any more)."""
        r = self._lifecycle.requests.get(request_id)
        if r is None:
            return False
        self._end(r, FinishReason.CANCELLED, now)
        return True

    def _end(self, r: Request, reason: FinishReason, now: float) -> None:
        """`r` ends here, whatever it was doing, parked or not."""
        self._affinity.forget(r)
        if self._triage is not None:
            self._triage.forget(r)
        if r.status is Status.PARKED:
            self._leave_parking(r)
        self._lifecycle.finish(r, reason, now)

    def plan(self, now: float) -> StepPlan:
        """The next step. An empty plan (falsy) is neither executed nor applied."""
        self.ctx.now = now
        if self._parked:
            self._unpark(now)
        if self._expiry.heap:
            self.expire(now)
        self._settle_keys(now)
        settled = None if self._triage is None else self._triage.settle(now)
        plan = self._planner.plan(now, settled)
        if not plan and plan.held_back_by is None:
            plan.held_back_by = "parked" if self._num_parked else "nothing to do"
        self._held_back_by = plan.held_back_by
        return plan

    def expire(self, now: float) -> None:
        """End those who have waited too long. `plan` does that first; a host whose steps last calls it in between."""
        for r, reason in self._expiry.expired(now):
            last_start = self._door.last_start(r) if reason is FinishReason.SHED else None
            if last_start is not None and last_start > now:  # more of its prefix is cached than when it came
                self._expiry.watch(r, last_start, reason)
            else:
                self._end(r, reason, now)

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """A step was computed. Results come in the order of their plans; raises ValueError otherwise."""
        if not self._lifecycle.in_flight or self._lifecycle.in_flight[0].plan is not plan:
            raise ValueError(f"step {plan.step} is not the oldest in flight")
        expected = len(plan.decodes)
        for chunk in plan.chunks:
            expected += chunk.emits
        if len(result.tokens) != expected:
            raise ValueError(f"step {plan.step} emits {expected} tokens, the result has {len(result.tokens)}")
        self.ctx.now = now
        if result.seconds is not None and self.ctx.step_time.learns:
            self._observe(plan, result.seconds)
        self._lifecycle.apply(self._lifecycle.in_flight[0], result, now)

    def quiet_steps(self, now: float) -> QuietSteps:
        """How many steps, and until when, nothing but decoding can happen: no admission, no key that is due, and no end
        but by length with the last of them.

        0 steps where that is not known, where steps are in flight, or where the host keeps token ids or step times are
        learned (both need each step's result). For simulations, which may `pass_steps` then.
        """
        return LOUD if self._lifecycle.in_flight else self._quiet_from(now)

    def quiet_next(self, now: float) -> bool:
        """Whether the next step is one of `quiet_steps` with which nobody ends, whatever is in flight: it may be
        planned later as well.
        """
        quiet = self._quiet_from(now)
        return quiet.steps > quiet.ends

    def _quiet_from(self, now: float) -> QuietSteps:
        """Quiet steps after those that are planned."""
        waiting = len(self.waiting)
        steps = self._quiet.most(waiting)
        if not steps or (self._triage is not None and self._triage.pending(now)):
            return LOUD
        wake = self.next_wake(now) if waiting or self._num_parked else None  # time concerns nobody else
        if wake is not None and wake <= now:
            return LOUD
        head = self.waiting.peek() if waiting else None
        warm = head is not None and self._affinity.warm(head)
        if warm and (head is not self._looked_at or self.kv.evictions != self._looked_after):
            return LOUD
        # Whoever comes first because of a cached prefix is looked at again when anything is evicted.
        return self._quiet.ahead(steps, inf if wake is None else wake, self.kv.free if warm else self.kv.available)

    def pass_steps(self, times: Sequence[float], tokens: Sequence[int] | None) -> None:
        """Take `len(times)` of the `quiet_steps` at once, as `plan` and `apply` would have one by one.

        `times` are when each ends (seconds), `tokens` are those of every step, one a decode; None where nobody is to
        be told (no event then). Each step must be planned, that is the one before it end, before `QuietSteps.until`.
        """
        self._lifecycle.events += self._quiet.take(times, tokens)
        decodes = self.running.decodes
        ending = decodes.ending(decodes.clock)
        if ending:
            self._lifecycle.end_by_length(ending, times[-1])

    def _observe(self, plan: StepPlan, seconds: float) -> None:
        """Tell the step model how long a step took."""
        decodes = len(plan.decodes) * (1 + plan.draft_tokens)
        self.ctx.step_time.observe(plan.num_tokens - decodes, decodes, plan.context, seconds)

    def take_events(self) -> list[Event]:
        """What happened since the last call, in order."""
        events, self._lifecycle.events = self._lifecycle.events, []
        return events

    @property
    def next_expiry(self) -> float | None:
        """When the next of those who wait will have waited too long (seconds); None if nobody will."""
        return self._expiry.next_due()

    def next_wake(self, now: float) -> float | None:
        """When time alone will change what can be planned (seconds); None if only an event will."""
        while self._parked and self._parked[0][2].status is not Status.PARKED:
            heapq.heappop(self._parked)
        due = self.waiting.next_due()
        parked = self._parked[0][0] if self._parked else None
        times = [t for t in (due, parked, self._expiry.next_due()) if t is not None]
        return max(now, min(times)) if times else None

    def snapshot(self, now: float) -> Snapshot:
        """The load at `now`. Costs as much as waits and runs: for metrics, not for every step."""
        queued = [*self.waiting, *(r for _, _, r in self._parked if r.status is Status.PARKED)]
        oldest: dict[str, float] = {}
        for r in queued:
            since = r.arrival if r.preempted_at is None else r.preempted_at
            oldest[r.slo_class] = max(oldest.get(r.slo_class, 0.0), now - since)
        return Snapshot(
            waiting=len(queued),
            running=len(self.running),
            waiting_by_class=dict(Counter(r.slo_class for r in queued)),
            running_by_class=dict(Counter(r.slo_class for r in self.running.members)),
            oldest_wait_by_class=oldest,
            free_blocks=self.kv.free,
            available_blocks=self.kv.available,
            num_blocks=self.kv.num_blocks,
            held_back_by=self._held_back_by,
        )

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """Why a request is where it is, with the decisions so far; None if it is not known (any more).

        Plain data, ready for JSON. Ended requests are remembered for a while.
        """
        r = self._lifecycle.requests.get(request_id)
        told = self._lifecycle.diary.tell(request_id, r)
        if told is None:
            return None
        told["policy"] = self.policy.name
        if r is None:
            return told
        if r in self.waiting:
            told["waiting"] = self._why_waiting(r)
        elif r.status is Status.PARKED:
            told["waiting"] = {"held_back_by": "parked", "until": r.not_before}
            if r.queue_ttl is not None:
                told["waiting"]["expires"] = r.arrival + r.queue_ttl
        elif r in self.running.stalled:
            told["waiting"] = {"held_back_by": "stalled"}
        return told

    def _why_waiting(self, r: Request) -> dict[str, Any]:
        blocked = self._planner.blocked
        why: dict[str, Any] = {"ahead": self.waiting.ahead_of(r), "held_back_by": self._held_back_by}
        if blocked is not None and blocked[0] in self.waiting:
            why["head"], why["head_held_back_by"] = blocked[0].id, blocked[1]
        if r.queue_ttl is not None and not r.preemptions:
            why["expires"] = r.arrival + r.queue_ttl
        return why

    def _make_triage(self) -> Triage | None:
        order, limits = self.policy.order, self.limits
        if not isinstance(order, Triaging) or not order.triages:
            return None
        budget = limits.max_num_batched_tokens
        triage = Triage(self.running, self.policy.budget, self.ctx, budget, self._affinity.known, self._rekey)
        self.ctx.triage = triage
        return triage

    def _rekey(self, r: Request) -> None:
        """Ask again for the place of `r`, wherever it is."""
        if r in self.waiting:
            self.waiting.rekey(r)
        elif r.lease is not None:
            self._keys.rekey(r)

    def _queue(self) -> WaitingQueue:
        order, limits, forget = self.policy.order, self.limits, self._affinity.forget
        if isinstance(order, Grouping):
            if limits.max_resources is not None:
                raise ConfigError(f"max_resources does not work with policy {self.policy.name}, which orders by groups")
            self.running.service = self.ctx.service
            return GroupedQueue(self._key, order, self.ctx)
        if limits.max_resources is not None:
            return Lanes(self._key, limits.max_resources, limits.resource_patience, forget=forget)
        return WaitingQueue(self._key, forget=forget)

    def _key(self, r: Request) -> Key:
        r.tier = self.policy.order.tier(r, self.ctx)
        return self.policy.order.key(r, self.ctx)

    def _refusal(self, r: Request, now: float) -> Reject | None:
        """Why `r` is not taken, if so: it can never run, or the policy does not let it wait."""
        refusal = self._unfit(r)
        if refusal is None:
            r.seq = next(self._arrivals)
            r.tier = self.policy.order.tier(r, self.ctx)
            # Whoever is refused for the load need not be hashed, unless the load is weighed by its hashes.
            refusal = self._unhashable(r) if self._door.backlog is not None else None
        return refusal or self._door.refusal(r, now, self._num_parked) or self._unhashable(r)

    def _settle_keys(self, now: float) -> None:
        """Ask again for keys that time, outputs or the prefix cache have changed, at most `REKEYS` of them."""
        left = REKEYS
        left -= len(self.waiting.rekey_due(now, left))
        self._keys.settle(max(1, left))
        if self._affinity.waits_to_tell:
            for r in self._affinity.grown(max(1, left)):
                if r in self.waiting:  # and not parked
                    self.waiting.rekey(r)
        self._look_at_head()

    def _look_at_head(self) -> None:
        """Whoever comes first because of a prefix that was evicted meanwhile gets its true place."""
        if not self.kv.ranks:
            return
        for _ in range(self.waiting.window):
            head = self.waiting.peek()
            if head is None or (head is self._looked_at and self.kv.evictions == self._looked_after):
                return
            self._looked_at, self._looked_after = head, self.kv.evictions
            if not self._affinity.overrated(head):
                return
            self.waiting.rekey(head)

    def _unfit(self, r: Request) -> Reject | None:
        """Why `r` can never run, if so.

        Otherwise settles how many outputs it may have (`r.target`) and its blocks at its peak (`r.footprint`).
        """
        limits = self.limits
        if r.prompt_tokens < 1:
            return Reject(Rejection.BAD_REQUEST, "the prompt is empty; give at least one token")
        if r.max_tokens is not None and r.max_tokens < 1:
            return Reject(Rejection.BAD_REQUEST, f"max_tokens must be at least 1, not {r.max_tokens}")
        if r.queue_ttl is not None and not r.queue_ttl > 0:
            return Reject(Rejection.BAD_REQUEST, f"queue_ttl must be above 0 seconds, not {r.queue_ttl}")
        room = limits.max_model_len - r.prompt_tokens if limits.max_model_len is not None else None
        if room is not None and (room < 1 or (r.max_tokens is not None and r.max_tokens > room)):
            wanted = r.prompt_tokens + (r.max_tokens or 1)
            told = f"{wanted} tokens wanted (prompt and output), the model takes {limits.max_model_len}"
            return Reject(Rejection.TOO_LONG, told)
        pool = limits.pool_tokens - r.prompt_tokens + 1
        declared = r.max_tokens if r.max_tokens is not None else room
        if pool < 1 or (pool < (r.max_tokens or 0) and limits.oversize == "refuse"):
            wanted = self.kv.blocks_for(r.prompt_tokens + max(0, (r.max_tokens or 1) - 1))
            return Reject(Rejection.KV_CAPACITY, f"{wanted} KV blocks wanted, the pool has {limits.num_blocks}")
        r.clip = declared is None or declared > pool
        r.target = pool if r.clip or declared is None else declared
        r.footprint = self.kv.blocks_for(r.prompt_tokens + r.target - 1)  # its last token is never written
        return None

    def name_blocks(self, r: Request) -> None:
        """Hash the prompt of `r`, in any thread, before `add` does; that spares a step the time.

        Looks at nothing of the scheduler that changes. Token ids that cannot be hashed are told by `add`.
        """
        with suppress(OverflowError, TypeError):
            hashes_of(r, self.kv)

    def _unhashable(self, r: Request) -> Reject | None:
        """The refusal of a prompt whose blocks cannot be named; names them else, so that no plan has to."""
        try:
            hashes_of(r, self.kv)
        except (OverflowError, TypeError):
            return Reject(Rejection.BAD_REQUEST, "token ids must be whole numbers from 0 to 4294967295")
        return None

    def _unpark(self, now: float) -> None:
        while self._parked and self._parked[0][0] <= now:
            r = heapq.heappop(self._parked)[2]
            if r.status is Status.PARKED:
                self._num_parked -= 1
                self._begin_to_wait(r, now)

    def _leave_parking(self, r: Request) -> None:
        """`r` is parked no more, before its time; its entry is met later, or goes with others'."""
        self._num_parked -= 1
        if len(self._parked) > 2 * self._num_parked + 64:
            self._parked = [p for p in self._parked if p[2].status is Status.PARKED and p[2] is not r]
            heapq.heapify(self._parked)

    def _begin_to_wait(self, r: Request, now: float) -> None:
        self._lifecycle.wait(r, now)
        if self._triage is not None:
            self._triage.watch(r)
