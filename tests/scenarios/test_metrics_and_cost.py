"""Scenarios of the group "Metrics, cost of deciding, two levels" that are told in words: tests in code."""

import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scenarios.drawn import few
from tidegate.core.events import Emitted, Finished, Restored
from tidegate.core.limits import Limits
from tidegate.core.policy import Key
from tidegate.core.presets import build_policy
from tidegate.core.request import Request
from tidegate.core.scheduler import Scheduler
from tidegate.executors.scripted import Script, ScriptedExecutor


class Engine:
    """A scheduler on a scripted executor, stepped at times that the test chooses."""

    def __init__(self, policy="priority", **limits):
        self.limits = Limits(**limits)
        self.scheduler = Scheduler(build_policy(policy) if isinstance(policy, str) else policy, self.limits)
        self.executor = ScriptedExecutor(
            num_blocks=self.limits.num_blocks,
            block_size=self.limits.block_size,
            max_num_seqs=self.limits.max_num_seqs,
        )

    def add(self, name, now, prompt, outputs, priority=0):
        self.scheduler.add(
            Request(
                name,
                prompt_tokens=prompt,
                max_tokens=outputs,
                arrival=now,
                priority=priority,
                handle=Script(range(outputs)),
            ),
            now,
        )

    def step(self, planned, applied):
        """Plan at one time, apply at another; the events of both."""
        plan = self.scheduler.plan(planned)
        if plan:
            self.scheduler.apply(plan, self.executor.submit(plan).result(), applied)
        return self.scheduler.take_events()


@pytest.fixture(scope="module")
def trace():
    """{arrive: 0, sched: 2, token1: 5, preempt: 20, resume: 55, next_token: 60, finish: 100, outputs: 56}."""
    engine = Engine(num_blocks=64, max_num_seqs=1, prefix_caching=False)
    engine.add("V", 0, prompt=64, outputs=56, priority=5)
    events = engine.step(2, 5)
    for time in range(6, 20):
        events += engine.step(time - 1, time)
    engine.add("U", 20, prompt=64, outputs=35, priority=0)
    for time in range(20, 55):
        events += engine.step(time, time + 1)
    events += engine.step(55, 60)
    for time in range(61, 101):
        events += engine.step(time - 1, time)
    assert not engine.scheduler.has_work
    return events


@pytest.fixture(scope="module")
def ended(trace):
    return next(event for event in trace if isinstance(event, Finished) and event.request.id == "V")


@pytest.mark.expects("S57", 0)
def test_s57_ttft(ended):
    assert ended.timing.ttft == 5


@pytest.mark.expects("S57", 1)
def test_s57_max_gap_spans_the_preemption(ended):
    assert ended.timing.max_gap == 60 - 19
    assert ended.timing.p99_gap == 41  # nearest rank of 55 gaps: the largest
    assert ended.timing.tpot == pytest.approx((100 - 5) / 55)


@pytest.mark.expects("S57", 2)
def test_s57_e2e(ended):
    assert ended.timing.e2e == 100


@pytest.mark.expects("S57", 3)
def test_s57_queued(ended):
    assert ended.timing.queued == 2


@pytest.mark.expects("S57", 4)
def test_s57_preempted_wait_is_told_apart(ended):
    assert ended.timing.preempted == 55 - 20


@pytest.mark.expects("S57", 5)
def test_s57_preemptions_are_counted(ended):
    assert ended.request.preemptions == 1


@pytest.mark.expects("S57", 6)
def test_s57_recomputed_tokens_are_reported(trace, ended):
    assert ended.request.recomputed_tokens == 64 + 14  # the prompt and 14 of 15 outputs were in the cache
    (restored,) = (event for event in trace if isinstance(event, Restored))
    assert restored.recompute == 78


@settings(max_examples=40, deadline=None)
@given(starts=st.lists(st.integers(1, 60), min_size=1, max_size=5, unique=True), length=st.integers(1, 6))
def test_s57_as_a_kind(starts, length):
    """Each time away adds to the preempted wait, and nothing of it to the queue time; gaps are what the client saw."""
    engine = Engine(num_blocks=64, max_num_seqs=1, prefix_caching=False)
    engine.add("V", 0, prompt=10, outputs=70, priority=5)
    events, seen = [], []
    for time in range(200):
        if time in starts:
            engine.add(f"U{time}", time, prompt=10, outputs=length, priority=0)
        told = engine.step(time, time + 1)
        seen += [time + 1 for e in told if isinstance(e, Emitted) and any(r.id == "V" for r in e.requests)]
        events += told
    (ended,) = (event for event in events if isinstance(event, Finished) and event.request.id == "V")
    gaps = [later - earlier for earlier, later in pairwise(seen)]
    assert len(seen) == 70
    assert ended.timing.max_gap == max(gaps)
    assert ended.timing.preempted == sum(gap - 1 for gap in gaps)
    assert ended.timing.queued == 0
    assert ended.request.preemptions == sum(gap > 1 for gap in gaps)


class Compared(float):
    """A score that counts how often it is compared."""

    comparisons = 0

    def __lt__(self, other):
        Compared.comparisons += 1
        return float(self) < float(other)

    def __eq__(self, other):
        Compared.comparisons += 1
        return float(self) == float(other)

    __hash__ = float.__hash__


class CountingOrder:
    """An order whose keys count how often they are asked for and compared; urgency differs, classes do not."""

    def __init__(self):
        self.asked = 0

    def tier(self, r, ctx):
        return 0

    def key(self, r, ctx):
        self.asked += 1
        return Key(0, Compared(hash(r.id) % 1000))


def _cost_of_deciding(waiting, short_of, running=512, prompt=640):
    """Operations of 8 steps with `running` running, `waiting` waiting, nothing admissible, and one arrival a step."""
    order = CountingOrder()
    engine = Engine(
        replace(build_policy("priority"), order=order),
        num_blocks=100_000 if short_of == "seats" else running,
        block_size=128,
        max_num_seqs=running if short_of == "seats" else running + 88,
        max_num_batched_tokens=8192,
        headroom="none",
    )
    for index in range(running):
        engine.add(f"R{index}", 0.0, prompt=64, outputs=64)
    for step in range(8):
        engine.step(step, step + 1)
    for index in range(waiting):
        engine.add(f"W{index}", 8.0, prompt=prompt, outputs=64)
    engine.step(8.0, 9.0)
    operations: Counter[str] = Counter()
    Compared.comparisons = order.asked = 0

    def count(frame, event, argument):
        operations[event] += 1

    for step in range(8):
        plan_at = 9.0 + step
        arrival = f"N{step}"
        sys.setprofile(count)
        engine.add(arrival, plan_at, prompt=prompt, outputs=64)
        plan = engine.scheduler.plan(plan_at)
        sys.setprofile(None)
        assert len(plan.decodes) == running
        assert not plan.admitted
        result = engine.executor.submit(plan).result()
        sys.setprofile(count)
        engine.scheduler.apply(plan, result, plan_at + 1)
        engine.scheduler.take_events()
        sys.setprofile(None)
    return {
        "calls": operations["call"] + operations["c_call"],
        "comparisons": Compared.comparisons,
        "keys": order.asked,
    }


@pytest.fixture(scope="module", params=["seats", "blocks"])
def costs(request):
    return {waiting: _cost_of_deciding(waiting, request.param) for waiting in (1_000, 10_000, 100_000)}


@pytest.mark.expects("S59", 0)
def test_s59_deciding_costs_what_changes(costs):
    for measure, least in costs[1_000].items():
        for waiting in (10_000, 100_000):
            assert costs[waiting][measure] <= 2 * least, (measure, costs)


@pytest.mark.expects("S59", 1)
def test_s59_bounded_window(costs):
    """Keys are asked for once per arrival, and only the arrivals and the front of the queue are compared."""
    for cost in costs.values():
        assert cost["keys"] <= 2 * 8
        assert cost["comparisons"] <= 8 * 200


@pytest.mark.expects("S59", 2)
def test_s59_no_full_sort(costs):
    """A sort of the queue compares every entry at least once, every step."""
    assert costs[100_000]["comparisons"] < 100_000


@given(
    short_of=st.sampled_from(["seats", "blocks"]),
    running=st.integers(1, 128),
    prompt=st.integers(65, 900),
    waiting=st.integers(100, 800),
)
@settings(few, max_examples=10)
def test_s59_as_a_kind(short_of, running, prompt, waiting):
    """With whatever runs and waits: ten times as many who wait cost at most twice as much."""
    least, more = (_cost_of_deciding(n, short_of, running, prompt) for n in (waiting, 10 * waiting))
    assert all(more[measure] <= 2 * least[measure] for measure in least), (least, more)
    assert more["keys"] <= 2 * 8
