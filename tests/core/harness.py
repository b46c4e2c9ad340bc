"""Drives the real scheduler step by step, as an engine would, and checks what every run must hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from zlib import crc32

from tidegate.core.events import Emitted, Event, Finished, Rejected
from tidegate.core.limits import Limits
from tidegate.core.plan import Copy, StepPlan, StepResult
from tidegate.core.policy import Policy
from tidegate.core.presets import build_policy
from tidegate.core.request import FinishReason, Request, Status
from tidegate.core.scheduler import Scheduler
from tidegate.errors import RequestRefused


def limits(**given: object) -> Limits:
    """Limits without admission head-room unless a test asks for it: small numbers stay readable."""
    return Limits(**{"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 256, "headroom": "none", **given})  # type: ignore[arg-type]


def request(id: str, prompt: int, outputs: int | None, **given: object) -> Request:
    """A request whose prompt shares no token with that of another id."""
    start = (crc32(id.encode()) & 0xFFFF) * 10_000
    return Request(id, token_ids=range(start, start + prompt), max_tokens=outputs, **given)  # type: ignore[arg-type]


@dataclass
class Run:
    """One scheduler on a step clock (a step is a second) at a pipeline depth.

    `stop_after` ends a request after that many outputs, as a stop token would. Output `g` of a request
    is the token `g`, so that what a client received tells order, loss and repetition. `fails` says which copies to
    the host or back fail.
    """

    scheduler: Scheduler
    depth: int = 1
    stop_after: dict[str, int] = field(default_factory=dict)
    fails: Callable[[Copy], bool] = lambda copy: False
    now: int = 0
    plans: list[StepPlan] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    received: dict[str, list[int]] = field(default_factory=dict)
    token_times: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, Finished | Rejected] = field(default_factory=dict)
    _in_flight: deque[tuple[StepPlan, list[str]]] = field(default_factory=deque)
    _produced: dict[str, int] = field(default_factory=dict)
    _holder: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, policy: str | Policy, limits: Limits, depth: int = 1, **params: object) -> Run:
        built = policy if isinstance(policy, Policy) else build_policy(policy, params)
        return cls(Scheduler(built, limits), depth)

    def add(self, *requests: Request) -> None:
        """They arrive now; refusals are recorded as the end they are."""
        for r in requests:
            r.arrival = float(self.now)
            try:
                self.scheduler.add(r, float(self.now))
            except RequestRefused:
                pass
        self._collect()

    def abort(self, request_id: str) -> bool:
        known = self.scheduler.abort(request_id, float(self.now))
        self._collect()
        return known

    def step(self) -> StepPlan:
        """Plan one step and apply the oldest one once `depth` are in flight (or there is nothing to plan)."""
        plan = self.scheduler.plan(float(self.now))
        self.check()
        self.plans.append(plan)
        if plan:
            for slot in plan.left:
                self._holder.pop(slot, None)
            for join in plan.joined:
                self._holder[join.slot] = join.request_id
            self._in_flight.append((plan, [self._holder[slot] for slot in plan.emitting()]))
        if self._in_flight and (len(self._in_flight) >= self.depth or not plan):
            self._apply()
        self._collect()
        self.now += 1
        return plan

    def steps(self, n: int) -> None:
        for _ in range(n):
            self.step()

    def until_idle(self, arrivals: Iterable[tuple[int, Request]] = (), bound: int = 20_000) -> Run:
        """Step until everything ended; `arrivals` are (step, request)."""
        due = deque(sorted(arrivals, key=lambda a: a[0]))
        idle = 0
        while due or self.scheduler.has_work or self._in_flight:
            while due and due[0][0] <= self.now:
                self.add(due.popleft()[1])
            busy = bool(self._in_flight)
            plan = self.step()
            parked = self.scheduler.next_wake(float(self.now)) is not None
            idle = 0 if plan or busy or parked or due or not self.scheduler.has_work else idle + 1
            assert idle < 3, f"livelock at step {self.now}: {plan.held_back_by}"
            assert self.now < bound, "the run does not end"
        return self

    def first_step_of(self, request_id: str) -> int:
        """The step in which the request first computed a token."""
        for at, plan in enumerate(self.plans):
            if any(j.request_id == request_id for j in plan.joined):
                return at
        raise AssertionError(f"{request_id} never started")

    def preemptions(self) -> list[tuple[int, str, str]]:
        """(step, request, reason) of every preemption."""
        return [(at, p.request_id, p.reason) for at, plan in enumerate(self.plans) for p in plan.preempted]

    def _apply(self) -> None:
        plan, ids = self._in_flight.popleft()
        tokens, finished = [], []
        for index, id in enumerate(ids):
            g = self._produced.get(id, 0)
            tokens.append(g)
            self._produced[id] = g + 1
            if g + 1 == self.stop_after.get(id):
                finished.append((index, FinishReason.STOP))
        failed = [copy.request_id for copy in (*plan.swapped_out, *plan.swapped_in) if self.fails(copy)]
        self.scheduler.apply(plan, StepResult(tokens, finished, failed_copies=failed), float(self.now))
        self.check()

    def check(self) -> None:
        """No block is lost or held twice, on the device and on the host."""
        self.scheduler.kv.check()
        steps = self.scheduler._lifecycle.in_flight
        under_way = [t for step in steps for t in step.transfers]
        ended = [t.copy.host for t in under_way if not t.inward and t.request.status is Status.FINISHED]
        live = [r.host for r in self.scheduler._lifecycle.requests.values()]
        held = sorted(block for blocks in (*live, *ended, *(t.host for t in under_way)) for block in blocks)
        assert len(set(held)) == len(held)
        assert self.scheduler.swap.pool.used == len(held)

    def _collect(self) -> None:
        for event in self.scheduler.take_events():
            self.events.append(event)
            if isinstance(event, Emitted):
                for r, token in zip(event.requests, event.tokens, strict=True):
                    assert r.id not in self.ended, f"{r.id} emits after its end"
                    self.received.setdefault(r.id, []).append(token)
                    self.token_times.setdefault(r.id, []).append(self.now)
            elif isinstance(event, Finished | Rejected):
                assert event.request.id not in self.ended, f"{event.request.id} ends twice"
                self.ended[event.request.id] = event


AGEABLE = ("joint", "fcfs", "priority", "sjf", "mlfq", "fastserve", "vllm-v0", "vllm-v1", "sarathi")
"""Policies that take an `aging_window`."""

Checker = Callable[[Run], None]
