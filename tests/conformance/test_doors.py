"""Every policy with every door: limits, promises, time limits, labels and quantile head-room, on random workloads."""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.conformance.test_policies import Driver, parameters, workloads
from tidegate.core.events import Finished, Rejected
from tidegate.core.policies.doors import ClassLimit
from tidegate.core.policy import Grouping
from tidegate.core.presets import PRESETS, build_policy
from tidegate.core.request import UNSERVED, FinishReason, Rejection, Request
from tidegate.core.slo import NO_SLO, Slo
from tidegate.errors import RequestRefused
from tidegate.executors.scripted import Script

CLASSES = ("interactive", "batch")


@dataclass(frozen=True)
class Manner:
    """What one request says at the door, beside what it computes."""

    slo_class: str
    ttl: float | None
    slo: Slo
    resource: str | None


manners = st.builds(
    Manner,
    st.sampled_from(CLASSES),
    st.one_of(st.none(), st.sampled_from([1.0, 5.0, 20.0])),
    st.sampled_from([NO_SLO, NO_SLO, Slo(ttft=8.0), Slo(e2e=25.0), Slo(ttft=3.0, e2e=40.0)]),
    st.sampled_from([None, None, "x", "y", "z"]),
)

doors = st.fixed_dictionaries(
    {"max_waiting": st.sampled_from([1, 3, 50])},
    optional={
        "max_waiting_tokens": st.sampled_from([1, 60, 400]),
        "class_limits": st.sampled_from([{}, {"batch": ClassLimit(2, None)}, {"batch": ClassLimit(None, 50)}]),
        "displace_waiting": st.booleans(),
        "refuse_hopeless": st.booleans(),
        "shed_hopeless": st.booleans(),
    },
)


class DoorDriver(Driver):
    """Plays a workload whose requests have manners, and checks what each door promises."""

    def __init__(self, workload, policy, depth, manners):
        super().__init__(workload, policy, depth)
        self.manners = dict(zip(self.jobs, manners, strict=True))
        self.door = policy.admit
        self.came = {}  # the tier of each on arrival

    def _arrive(self, name, now):
        job, manner = self.jobs[name], self.manners[name]
        script = range(1000, 1000 + (job.outputs if job.declared is None else min(job.outputs, job.declared)))
        request = self.requests[name] = Request(
            name,
            token_ids=job.prompt if job.keeps_ids else None,
            prompt_tokens=len(job.prompt),
            max_tokens=job.declared,
            arrival=now,
            priority=job.priority,
            slo_class=manner.slo_class,
            slo=manner.slo,
            queue_ttl=manner.ttl,
            resource=manner.resource,
            not_before=float(job.not_before),
            oracle_tokens=len(script),
            handle=Script(script, stops=len(script) != job.declared),
        )
        self._fold()
        before = set(self.ends)
        with suppress(RequestRefused):
            self.scheduler.add(request, now)
        self.came[name] = request.tier  # an order may change it later
        self._fold()
        refused = self.ends.get(name)
        if refused is None:
            assert not self._never_fits(job), f"{name} can never fit and was taken"
        else:
            loaded = refused.reason in (Rejection.QUEUE_FULL, Rejection.DEADLINE)
            assert loaded or self._never_fits(job), f"{name} was refused although it fits"
            assert not loaded or refused.retry_after > 0
            others = {self.ends[other].reason for other in set(self.ends) - before - {name}}
            assert FinishReason.DISPLACED not in others, "somebody made room for one that was refused"
        assert self._fresh_waiting() <= self.door.max_waiting

    def _fresh_waiting(self):
        return sum(state == "waiting" for state in self.state.values())

    def _check_told(self, plan):
        super()._check_told(plan)
        running = self.scheduler.running
        if self.limits.max_resources is not None:
            labels = {r.resource for r in running.members if r.resource is not None}
            assert len(labels) <= self.limits.max_resources
        if running.expected is not None:
            assert running.expected.total == sum(map(running.expected.left, running.members)) >= 0
        waiting = [r for r in self.requests.values() if self.state[r.id] in ("waiting", "preempted")]
        queued = [r for r in waiting if r.status.value != "parked"]
        assert len(self.scheduler.waiting) == len(queued)
        assert set(self.scheduler.waiting) == set(queued)
        for r in queued:
            assert r in self.scheduler.waiting
            expired = r.queue_ttl is not None and r.arrival + r.queue_ttl <= plan.now
            assert r.preemptions or not expired, f"{r.id} waits beyond its time"
        self._check_backlog([r for r in waiting if not r.preemptions])

    def _check_backlog(self, fresh):
        backlog = self.scheduler._door.backlog
        if backlog is None:
            return
        works = [backlog.work_of(r) for r in fresh]
        assert backlog.total == (len(fresh), sum(w.prefill for w in works), sum(w.outputs for w in works))
        for name in CLASSES:
            assert backlog.of_class(name).requests == sum(r.slo_class == name for r in fresh)
        tiers = Counter(r.tier for r in fresh)
        for tier in tiers:
            assert backlog.worse_than(tier).requests == sum(n for other, n in tiers.items() if other > tier)

    def _check_order(self, plan):
        """Who lacks a slot for its label is passed, as those are who cannot start."""
        if self.limits.max_resources is None:
            super()._check_order(plan)

    def _check_outputs(self, name, end):
        if end.reason not in UNSERVED:
            super()._check_outputs(name, end)
            return
        request, manner = self.requests[name], self.manners[name]
        assert self.streams[name] == []
        assert request.admitted_at is None
        assert request.planned == 0
        if end.reason in (FinishReason.TIMEOUT, FinishReason.DEPENDENCY_TIMEOUT):
            assert end.now >= request.arrival + manner.ttl
        if end.reason is FinishReason.SHED:
            assert self.door.shed_hopeless
            assert manner.slo is not NO_SLO
        if end.reason is FinishReason.DISPLACED:
            assert any(self.came[r.id] < self.came[name] and r.arrival == end.now for r in self.requests.values())

    def _check_end(self):
        super()._check_end()
        for name, end in self.ends.items():
            event(end.reason.value if isinstance(end, Finished | Rejected) else name)


GROUPED = {name for name in PRESETS if isinstance(build_policy(name).order, Grouping)}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", PRESETS)
@given(data=st.data())
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_policy_keeps_every_promise_behind_every_door(name, depth, data):
    workload = data.draw(workloads())
    limits = replace(
        workload.limits,
        headroom=data.draw(st.sampled_from([workload.limits.headroom, "quantile"])),
        # Slots for labels do not go with orders by groups: the scheduler refuses them together.
        max_resources=None if name in GROUPED else data.draw(st.sampled_from([None, 1, 2])),
        resource_patience=data.draw(st.sampled_from([0.0, 3.0, 100.0])),
    )
    policy = build_policy(name, {**data.draw(parameters(name)), **data.draw(doors)})
    manner = data.draw(st.lists(manners, min_size=len(workload.jobs), max_size=len(workload.jobs)))
    DoorDriver(replace(workload, limits=limits), policy, depth, manner).play()
