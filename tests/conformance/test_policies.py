"""What every policy must hold, on random workloads, at pipeline depth 1 and 2.

The scripted executor holds each plan to the contract; the driver below holds the events to theirs and
asks the KV pool to prove conservation after every step.
"""

import re
from collections import deque
from dataclasses import dataclass
from itertools import count, pairwise
from math import ceil

import pytest
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st

from tidegate.core.events import Admitted, Arrived, Emitted, Finished, Preempted, Rejected, Restored
from tidegate.core.limits import Limits
from tidegate.core.policy import PolicyContext
from tidegate.core.predict import HistoryPredictor, OraclePredictor, StepTime
from tidegate.core.presets import PRESETS, VICTIMS, build_policy
from tidegate.core.request import FinishReason, Request
from tidegate.core.scheduler import Scheduler
from tidegate.core.slo import NO_SLO, Slo
from tidegate.errors import RequestRefused
from tidegate.executors.scripted import Script, ScriptedExecutor

EMPTY_STEPS = 3
"""Empty plans in a row that are forgiven while somebody waits, nothing is in flight and nothing is to come."""


DISPLACED = re.compile(r"wanted by (r\d+) ")
"""In the reason of a preemption: whom an urgent request displaced for itself."""

LONGEST_RUN = 5_000
"""Steps. The longest workload drawn takes a few hundred when nobody is preempted."""


@dataclass(frozen=True)
class Job:
    """One request of a workload. Steps are the driver's, sizes tokens; `cancel` None is never."""

    arrival: int
    prompt: tuple[int, ...]
    outputs: int
    declared: int | None
    priority: int = 0
    cancel: int | None = None
    not_before: int = 0
    keeps_ids: bool = True
    tenant: str = "a"
    slo: Slo = NO_SLO


@dataclass(frozen=True)
class Workload:
    """Jobs and the limits under which they run."""

    limits: Limits
    jobs: tuple[Job, ...]
    oracle: bool = False
    unlucky: frozenset[int] = frozenset()  # which copies to the host or back fail, in the order they are made


@st.composite
def prompts(draw):
    """Prompts with prefixes in common, which caching then shares: a family's, then their own."""
    shared, own = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    family, member = draw(st.integers(0, 1)), draw(st.integers(2, 5))
    return (*(family + 10 * index for index in range(shared)), *(member + 10 * index for index in range(own))) or (9,)


PROMISES = (NO_SLO, NO_SLO, NO_SLO, Slo(tpot=2.5), Slo(tpot=1.6, tbt=9.0), Slo(tbt=1.3), Slo(tbt=0.2))
"""Seconds; a step takes one and a bit more for each decode and prompt token, as `StepsOf` says."""


class StepsOf(StepTime):
    """Steps that decodes lengthen too, so that promises can be kept and broken."""

    def step(self, prefill_tokens, decodes, context_tokens=0.0):
        return 1.0 + 0.2 * decodes + 0.05 * prefill_tokens


@st.composite
def jobs(draw):
    declared = draw(st.one_of(st.integers(1, 30), st.integers(1, 30), st.integers(1, 30), st.none()))
    arrival = draw(st.integers(0, 25))
    return Job(
        arrival=arrival,
        prompt=draw(prompts()),
        outputs=draw(st.integers(1, declared if declared is not None else 30)),
        declared=declared,
        priority=draw(st.integers(-1, 2)),
        cancel=draw(st.one_of(st.none(), st.none(), st.integers(0, 30).map(lambda later: arrival + later))),
        not_before=draw(st.one_of(st.just(0), st.just(0), st.integers(0, 40))),
        keeps_ids=draw(st.booleans()) if draw(st.booleans()) else True,
        tenant=draw(st.sampled_from("aab")),
        slo=draw(st.sampled_from(PROMISES)),
    )


PROMISES = (NO_SLO, NO_SLO, Slo(ttft=4.0), Slo(ttft=12.0, tpot=1.5), Slo(ttft=8.0, tbt=2.0), Slo(e2e=40.0))
"""In the driver's steps: some are kept easily, some cannot be kept under load."""

OWN = {
    "sla": {"patience": st.sampled_from([5.0, 60.0])},
    "joint": {
        "aging_window": st.sampled_from([1.0, 20.0]),
        "urgent_slack": st.sampled_from([0.0, 3.0]),
        "w_cache": st.sampled_from([0.0, 10.0]),
        "first_token_within": st.sampled_from([None, 3.0]),
    },
    "mlfq": {"quantum": st.integers(1, 40), "levels": st.integers(2, 4), "promote": st.sampled_from([5.0, 30.0])},
    "fastserve": {"quantum": st.integers(1, 40), "promote": st.sampled_from([5.0, 30.0])},
    "fair": {"weights": st.just({"b": 3.0}), "w_out": st.sampled_from([1.0, 8.0])},
    "vtc": {"weights": st.just({"b": 3.0})},
    "prefix": {"beta": st.sampled_from([10.0, 100.0]), "age": st.sampled_from([0.0, 10.0])},
    "sglang-lpm": {"age": st.sampled_from([0.0, 10.0])},
}
"""What the parameters of each order are drawn from."""

AGEABLE = ("fcfs", "priority", "sjf", "mlfq", "fastserve", "vllm-v0", "vllm-v1", "sarathi")
"""Policies that `aging_window` works on as a wrapper."""


@st.composite
def workloads(draw):
    seats, draft = draw(st.integers(1, 6)), draw(st.sampled_from([0, 0, 2]))
    limits = Limits(
        num_blocks=draw(st.integers(2, 30)),
        block_size=draw(st.sampled_from([1, 4, 8])),
        max_num_seqs=seats,
        max_num_batched_tokens=draw(st.integers(seats * (1 + draft), 64)),
        max_model_len=draw(st.one_of(st.none(), st.integers(20, 100))),
        headroom=draw(st.sampled_from(["none", "watermark", "quantile", "declared"])),
        watermark=draw(st.sampled_from([0.01, 0.2])),
        oversize=draw(st.sampled_from(["refuse", "clip"])),
        partial_prefills=draw(st.sampled_from([None, 1, 2])),
        prefix_caching=draw(st.booleans()),
        resume_span=draw(st.sampled_from([0, 4, 128])),
        max_preemptions=draw(st.sampled_from([1, 3, 8])),
        draft_tokens=draft,
        stall_steps=draw(st.sampled_from([0, 2])),
        bypass_bound=draw(st.sampled_from([0, 5, 60])),
        host_blocks=draw(st.sampled_from([0, 6, 40])),
        disk_blocks=draw(st.sampled_from([0, 20])),
    )
    unlucky = draw(st.frozensets(st.integers(0, 9), max_size=3))
    return Workload(limits, tuple(draw(st.lists(jobs(), min_size=1, max_size=16))), draw(st.booleans()), unlucky)


@st.composite
def parameters(draw, name):
    """A preset as it is, or with some of its parameters changed."""
    adaptive = {"budget": st.just("adaptive"), "floor": st.just(2), "max_stride": st.integers(1, 4)}
    return draw(
        st.fixed_dictionaries(
            adaptive if draw(st.booleans()) else {},
            optional={
                **({"aging_window": st.sampled_from([1.0, 20.0])} if name in AGEABLE else {}),
                **OWN.get(name, {}),
                "share": st.sampled_from([0.25, 0.5, 1.0]),
                "max_chunk": st.integers(1, 16),
                "victim": st.sampled_from(sorted(VICTIMS)),
                "restore": st.sampled_from(["auto", "swap", "recompute"]),
                "displace": st.booleans(),
                "backfill": st.booleans(),
                "hold_pending": st.booleans(),
                "spare": st.booleans(),
                "mixed_batches": st.booleans(),
                "max_prefill_steps": st.integers(1, 3),
            },
        )
    )


class Driver:
    """Plays a workload to its end and checks every step on the way."""

    def __init__(self, workload, policy, depth):
        self.limits = workload.limits
        self.depth = depth
        predictor = OraclePredictor() if workload.oracle else HistoryPredictor(default=8)
        self.scheduler = Scheduler(policy, self.limits, PolicyContext(predictor, StepsOf(0.1, 1.0)))
        copies = count()
        self.executor = ScriptedExecutor(
            num_blocks=self.limits.num_blocks,
            block_size=self.limits.block_size,
            max_num_seqs=self.limits.max_num_seqs,
            depth=depth,
            host_blocks=self.limits.host_blocks,
            disk_blocks=self.limits.disk_blocks,
            fail_copies=lambda copy, outward: next(copies) in workload.unlucky,
        )
        self.arrivals = {}
        self.cancels = {}
        self.jobs = {}
        self.requests = {}
        for index, job in enumerate(workload.jobs):
            name = f"r{index}"
            self.jobs[name] = job
            self.arrivals.setdefault(job.arrival, []).append(name)
            if job.cancel is not None:
                self.cancels.setdefault(job.cancel, []).append(name)
        self.in_flight = deque()
        self.slots = {}
        self.streams = {name: [] for name in self.jobs}
        self.stamps = {name: [] for name in self.jobs}
        self.seated = {"admitted": [], "restored": [], "preempted": []}
        self.state = dict.fromkeys(self.jobs, "absent")
        self.ends = {}
        self.empty = 0
        self.step = 0

    def play(self):
        while self.arrivals or self.in_flight or self.scheduler.has_work:
            now = float(self.step)
            for name in self.arrivals.pop(self.step, ()):
                self._arrive(name, now)
            self._fold()
            plan = self.scheduler.plan(now)
            note(f"{self.step}: {plan}")
            self._check_told(plan)
            self._check_order(plan)
            self._check_conserving(plan)
            if plan:
                self._submit(plan)
            for name in self.cancels.pop(self.step, ()):
                self.scheduler.abort(name, now + 0.25)
                self._fold()
                assert self.state[name] in ("ended", "refused")
            if self.in_flight and (not plan or len(self.in_flight) == self.depth):
                self._apply(now + 0.5)
            self._fold()
            self.scheduler.kv.check()
            self._check_progress(plan)
            self.step += 1
            assert self.step < LONGEST_RUN, f"a run without end: {self.scheduler.snapshot(now)}"
        self._check_end()
        assert self.scheduler.swap.pool.used == 0, "host blocks are lost"

    def _arrive(self, name, now):
        job = self.jobs[name]
        script = range(1000, 1000 + (job.outputs if job.declared is None else min(job.outputs, job.declared)))
        request = self.requests[name] = Request(
            name,
            token_ids=job.prompt if job.keeps_ids else None,
            prompt_tokens=len(job.prompt),
            max_tokens=job.declared,
            arrival=now,
            priority=job.priority,
            not_before=float(job.not_before),
            oracle_tokens=len(script),
            tenant=job.tenant,
            slo=job.slo,
            handle=Script(script, stops=len(script) != job.declared),
        )
        try:
            self.scheduler.add(request, now)
        except RequestRefused:
            assert self._never_fits(job), f"{name} was refused although it fits"
        else:
            assert not self._never_fits(job), f"{name} can never fit and was taken"

    def _never_fits(self, job):
        declared = job.declared or 1
        longest = self.limits.max_model_len
        if longest is not None and len(job.prompt) + declared > longest:
            return True
        written = len(job.prompt) + (declared - 1 if self.limits.oversize == "refuse" else 0)
        return written > self.limits.pool_tokens

    def _submit(self, plan):
        for slot in plan.left:
            del self.slots[slot]
        for join in plan.joined:
            assert join.slot not in self.slots
            self.slots[join.slot] = join.request_id
        assert len(self.slots) <= self.limits.max_num_seqs
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        assert plan.num_tokens or plan.swapped_out or plan.swapped_in
        self.in_flight.append((plan, list(plan.decodes), self.executor.submit(plan)))

    def _apply(self, now):
        plan, decodes, future = self.in_flight.popleft()
        assert plan.decodes == decodes, "a plan's decodes changed after it was handed out"
        self.scheduler.apply(plan, future.result(), now)

    def _check_told(self, plan):
        """The events of a plan name those whom the plan names."""
        self.seated = {key: [] for key in self.seated}
        self._fold()
        assert self.seated["admitted"] == plan.admitted
        assert self.seated["restored"] == plan.restored
        assert self.seated["preempted"] == [victim.request_id for victim in plan.preempted]
        assert not set(plan.restored) & set(self.seated["preempted"]), "a victim came back in the same plan"
        assert sorted([*plan.admitted, *plan.restored]) == sorted(join.request_id for join in plan.joined)

    def _check_order(self, plan):
        """Equals do not displace equals, and who was preempted is back before the others.

        Two features let others pass on purpose: back-fill, and the wait for a prefix in the making.
        """
        for victim in plan.preempted:
            wanted_by = DISPLACED.search(victim.reason)
            if wanted_by:
                assert self.requests[wanted_by[1]].tier < self.requests[victim.request_id].tier
        features = self.scheduler.policy.features
        if features.backfill or features.hold_pending or not plan.admitted:
            return
        victims = {victim.request_id for victim in plan.preempted}
        for r in self.scheduler.waiting:
            if r.preemptions and r.id not in victims and not r.in_flight:
                assert all(self.requests[name].tier != r.tier for name in plan.admitted)

    def _check_conserving(self, plan):
        """Where budget and seats are left and somebody waits, the plan names what holds him back."""
        spare = plan.num_tokens < self.limits.max_num_batched_tokens and self.scheduler.running.free_seats
        if plan and spare and len(self.scheduler.waiting):
            assert plan.held_back_by

    def _fold(self):
        for told in self.scheduler.take_events():
            if isinstance(told, Emitted):
                for request, token in zip(told.requests, told.tokens, strict=True):
                    assert self.state[request.id] not in ("absent", "ended")
                    self.streams[request.id].append(token)
                    self.stamps[request.id].append(told.now)
                continue
            name = getattr(told, "request").id  # noqa: B009 - every other event tells of one request
            self.state[name] = self._next_state(told, self.state[name])
            if isinstance(told, Admitted | Restored | Preempted):
                self.seated[type(told).__name__.lower()].append(name)
            elif isinstance(told, Finished | Rejected):
                self.ends[name] = told

    @staticmethod
    def _next_state(told, state):
        legal = {
            Arrived: (("absent",), "waiting"),
            Rejected: (("absent",), "refused"),
            Admitted: (("waiting",), "running"),
            Preempted: (("running",), "preempted"),
            Restored: (("preempted",), "running"),
            Finished: (("waiting", "running", "preempted"), "ended"),
        }
        if type(told) not in legal:
            assert state in ("running", "preempted"), f"{told} while {state}"
            return state
        before, after = legal[type(told)]
        assert state in before, f"{told} while {state}"
        return after

    def _check_progress(self, plan):
        """No idle step repeats while somebody who may be scheduled has not ended."""
        parked = any(job.not_before > self.step for job in self.jobs.values())
        idle = not plan and not self.in_flight and self.scheduler.has_work and not parked
        self.empty = self.empty + 1 if idle else 0
        assert self.empty < EMPTY_STEPS, f"nothing is planned any more: {self.scheduler.snapshot(self.step)}"
        if not plan and self.scheduler.has_work:
            assert plan.held_back_by

    def _check_end(self):
        assert self.scheduler.kv.available == self.limits.num_blocks
        assert self.executor.blocks_held() <= self.limits.num_blocks
        assert set(self.ends) == set(self.jobs)
        if self.limits.headroom == "declared" and not self.scheduler.policy.features.displace:
            assert not any(r.preemptions for r in self.requests.values())
        for name, end in self.ends.items():
            if isinstance(end, Finished):
                self._check_outputs(name, end)
        event(f"preemptions: {min(3, max((r.preemptions for r in self.requests.values()), default=0))}")

    def _check_outputs(self, name, end):
        job, stream, request = self.jobs[name], self.streams[name], self.requests[name]
        assert stream == list(range(1000, 1000 + len(stream)))
        assert request.emitted == len(stream)
        assert request.preemptions <= self.limits.max_preemptions
        if job.keeps_ids:
            assert request.token_ids == [*job.prompt, *stream]
        room = self.limits.pool_tokens - len(job.prompt) + 1
        expected = {
            FinishReason.STOP: job.outputs,
            FinishReason.LENGTH: job.declared,
            FinishReason.LENGTH_KV: room,
            FinishReason.CANCELLED: len(stream),
        }
        if end.reason is FinishReason.LENGTH and job.declared is None:
            assert self.limits.max_model_len == len(job.prompt) + len(stream)
        else:
            assert len(stream) == expected[end.reason]
        self._check_timing(name, end)

    def _check_timing(self, name, end):
        """The timing of an end is what somebody saw who wrote down when each token came."""
        stamps, timing = self.stamps[name], end.timing
        gaps = sorted(after - before for before, after in pairwise(stamps))
        assert timing.e2e == end.now - self.requests[name].arrival
        assert timing.ttft == (stamps[0] - self.requests[name].arrival if stamps else None)
        assert timing.max_gap == (gaps[-1] if gaps else None)
        assert timing.p99_gap == (gaps[ceil(0.99 * len(gaps)) - 1] if gaps else None)
        if gaps:
            assert timing.tpot == pytest.approx((stamps[-1] - stamps[0]) / len(gaps))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", PRESETS)
@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_policy_keeps_every_promise(name, depth, data):
    workload = data.draw(workloads())
    policy = build_policy(name, data.draw(parameters(name)))
    Driver(workload, policy, depth).play()
