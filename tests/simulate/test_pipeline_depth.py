"""Steps that are planned while the one before them runs: what a simulation makes up is what an engine would do."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from tests.simulate.test_quiet_steps import COST, load, outcome, setup
from tidegate.core.plan import StepPlan, StepResult
from tidegate.core.presets import PRESETS
from tidegate.core.slo import DEFAULT_CLASSES
from tidegate.observe.records import Record, Recorder
from tidegate.simulate.incoming import Incoming
from tidegate.simulate.run import EngineSetup, simulate
from tidegate.simulate.true_ends import TrueEnds
from tidegate.simulate.workload import WorkloadRequest


def always_two(requests: list[WorkloadRequest], made: EngineSetup, declared: int | None = None) -> list[Record]:
    """Records of an engine that, as soon as there is room, plans until two steps are with its executor."""
    scheduler, executor = made.scheduler()
    incoming, ends = Incoming(requests, DEFAULT_CLASSES, made.limits.block_size, declared), TrueEnds()
    recorder = Recorder("0")
    pipeline: deque[tuple[StepPlan, StepResult, float]] = deque()
    now = idle_from = 0.0
    while True:
        while len(pipeline) < 2 and (plan := scheduler.plan(now)):
            result, seconds = executor.run(plan)
            result.finished = ends.of(plan)
            idle_from = max(idle_from, now) + seconds
            pipeline.append((plan, result, idle_from))
        recorder.observe(scheduler.take_events())
        wake = scheduler.next_wake(now) if len(pipeline) < 2 and scheduler.has_work else None
        computed = pipeline[0][2] if pipeline else inf
        now = min(computed, incoming.next_arrival, inf if wake is None or wake <= now else wake)
        if now == inf:
            return recorder.records
        if pipeline and computed == now:
            plan, result, _ = pipeline.popleft()
            scheduler.apply(plan, result, now)
        elif incoming.next_arrival == now:
            while incoming.next_arrival == now:
                r, _ = incoming.take()
                scheduler.add(r, now)
                ends.watch(r)


def one_by_one(requests: list[WorkloadRequest]) -> list[WorkloadRequest]:
    """The same, no two at the very same time."""
    return [replace(w, arrival_s=w.arrival_s + 1e-7 * i) for i, w in enumerate(requests)]


def planned_ahead(policy: str, **limits: Any) -> EngineSetup:
    return replace(setup(policy, **limits), depth=2)


@pytest.mark.parametrize("rate", [3.0, 40.0], ids=["light", "heavy"])
@pytest.mark.parametrize("policy", sorted(PRESETS))
def test_it_is_what_two_steps_in_flight_make_of_it(policy: str, rate: float) -> None:
    requests = one_by_one(load(7, 150, rate))
    records: list[Record] = []
    simulate(requests, planned_ahead(policy), records.extend)
    assert records == always_two(requests, planned_ahead(policy))


@pytest.mark.parametrize("limits", [{}, {"num_blocks": 120, "headroom": "none"}], ids=str)
def test_ends_that_nobody_knew_of_are_seen_a_step_late(limits: dict[str, Any]) -> None:
    requests, made = one_by_one(load(5, 120, 20.0, outputs=40)), planned_ahead("priority", **limits)
    fast, slow = (outcome(requests, made, stepping, declared=60) for stepping in (False, True))
    assert fast == slow
    assert fast[0] == always_two(requests, made, declared=60)
    assert sum(row.decodes for row in fast[1]) > sum(r.output_tokens - 1 for r in fast[0])


@pytest.mark.parametrize("policy", sorted(PRESETS))
def test_the_outcome_is_that_of_stepping_to_the_last_bit(policy: str) -> None:
    requests = load(7, 150, 10.0)
    fast, slow = (outcome(requests, planned_ahead(policy), stepping) for stepping in (False, True))
    for one, other in zip(fast, slow, strict=True):
        assert one == other
    assert outcome(requests, planned_ahead(policy), False, observed=False)[:2] == slow[:2]
    starts = [row.start_s + row.seconds for row in slow[1]]
    assert all(end <= row.start_s + 1e-9 for end, row in zip(starts, slow[1][1:], strict=False))


def test_whoever_comes_while_a_step_runs_is_in_the_one_after_the_next() -> None:
    first, second = WorkloadRequest(0.0, 500, 4), WorkloadRequest(0.001, 100, 1)
    prompt, decode = COST.step_seconds([(0, 500)]), COST.step_seconds(decodes=1, context=501)
    beside = COST.step_seconds([(0, 100)], decodes=1, context=502)
    for depth, due in (
        (1, prompt + COST.step_seconds([(0, 100)], decodes=1, context=501)),
        (2, prompt + decode + beside),
    ):
        records = outcome([first, second], replace(setup("fcfs"), depth=depth), False)[0]
        assert next(r for r in records if r.request_id == "1").first_token_s == pytest.approx(due)


def test_whoever_finds_nothing_planned_is_in_the_next_step() -> None:
    only, second = WorkloadRequest(0.0, 500, 1), WorkloadRequest(0.001, 100, 1)
    records = outcome([only, second], planned_ahead("fcfs"), False)[0]
    assert records[1].first_token_s == pytest.approx(COST.step_seconds([(0, 500)]) + COST.step_seconds([(0, 100)]))
