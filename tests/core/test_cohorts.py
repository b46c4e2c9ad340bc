"""Decodes that take turns: who must decode in every step does, and everybody else within the bound."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.harness import Run, limits, request
from tidegate.core.decode_load import DecodeLoad, Pace, pace_of
from tidegate.core.plan import StepPlan, StepResult
from tidegate.core.policies.adaptive import AdaptiveBudget, largest
from tidegate.core.policy import PolicyContext
from tidegate.core.predict import OraclePredictor, StepTime
from tidegate.core.presets import build_policy
from tidegate.core.request import Request
from tidegate.core.scheduler import Scheduler
from tidegate.core.slo import NO_SLO, Slo
from tidegate.core.view import StepView

BASE, EACH = 1.0, 0.1
"""Seconds: of a step, and of a decode in it."""


class Steps(StepTime):
    """A step takes a second, a tenth more for each decode and a hundredth for each prompt token."""

    def step(self, prefill_tokens: float, decodes: float, context_tokens: float = 0.0) -> float:
        return BASE + EACH * decodes + 0.01 * prefill_tokens


CTX = PolicyContext(OraclePredictor(), Steps())


def paced(seats: float) -> Slo:
    """A promise that holds while at most so many decode."""
    return Slo(tpot=BASE + EACH * seats + 1e-6)


class Watched(Run):
    """A run on the adaptive budget that knows who decoded in which step."""

    decoded: list[list[str]]

    @classmethod
    def start(cls, depth: int = 1, policy: str = "priority", **given: object) -> Watched:
        params = {"budget": "adaptive", "margin": 0.0, **given}
        room = limits(num_blocks=2000, max_num_seqs=40, max_num_batched_tokens=4000)
        context = PolicyContext(OraclePredictor(), Steps())
        run = cls(Scheduler(build_policy(policy, params), room, context), depth)
        run.decoded = []
        return run

    def step(self) -> StepPlan:
        plan = super().step()
        self.decoded.append([self._holder[slot] for slot in plan.decodes])
        return plan

    def turns_of(self, id: str) -> list[int]:
        """The steps in which a request decoded."""
        return [at for at, ids in enumerate(self.decoded) if id in ids]


def gaps(turns: Sequence[int]) -> set[int]:
    return {after - before for before, after in pairwise(turns)}


def background(run: Run, n: int, outputs: int = 60, **given: object) -> None:
    run.add(*(request(f"bg{i}", 4, outputs, **{"priority": 10, **given}) for i in range(n)))


@pytest.mark.parametrize("depth", [1, 2])
def test_the_urgent_decodes_in_every_step_and_the_others_by_turns(depth: int) -> None:
    run = Watched.start(depth)
    background(run, 12)
    run.steps(10)
    assert all(len(ids) == 12 for ids in run.decoded[1:])
    run.add(request("H", 4, 20, slo=paced(5)))
    run.until_idle()
    together = run.turns_of("H")
    assert gaps(together) == {1}
    for at in together:
        assert len(run.decoded[at]) == 5
    for i in range(12):
        turns = run.turns_of(f"bg{i}")
        assert gaps([t for t in turns if t in together]) == {3}
        assert gaps([t for t in turns if t > together[-1] + 1]) == {1}
        assert run.received[f"bg{i}"] == list(range(60))


def test_no_more_cohorts_than_the_promise_needs() -> None:
    for fits, stride in ((13, 1), (12, 2), (7, 2), (6, 3), (5, 3), (4, 4), (2, 4)):
        run = Watched.start()
        background(run, 12)
        run.steps(3)
        run.add(request("H", 4, 30, slo=paced(fits)))
        run.steps(25)
        beside = run.turns_of("H")
        assert gaps([t for t in run.turns_of("bg3") if t in beside]) == {stride}, fits


def test_strides_of_one_are_no_turns() -> None:
    run = Watched.start(max_stride=1)
    background(run, 12)
    run.add(request("H", 4, 20, slo=paced(5)))
    run.until_idle()
    assert gaps(run.turns_of("bg3")) == {1}
    assert run.scheduler.running.cohorts is None


def test_neither_the_promised_nor_a_better_class_yields() -> None:
    run = Watched.start()
    background(run, 6)
    run.add(*(request(f"vip{i}", 4, 40, priority=-1) for i in range(4)))
    run.add(*(request(f"slow{i}", 4, 40, priority=10, slo=Slo(tpot=99.0)) for i in range(4)))
    run.add(request("H", 4, 30, slo=paced(11)))
    run.until_idle()
    for name in ("vip1", "slow1", "H"):
        assert gaps(run.turns_of(name)) == {1}
    assert gaps([t for t in run.turns_of("bg1") if t in run.turns_of("H")]) == {3}


def test_a_hopeless_promise_holds_nobody_back() -> None:
    """Shorter than the shortest step there is: nothing that others do could keep it."""
    run = Watched.start()
    background(run, 12)
    run.add(request("H", 4, 30, slo=Slo(tpot=BASE)))
    run.until_idle()
    assert gaps(run.turns_of("bg1")) == {1}


@pytest.mark.parametrize("whose", [0, 1])
def test_dealing_anew_delays_nobody_beyond_the_bound(whose: int) -> None:
    """Two uneven cohorts become three, the larger one first or last in turn."""
    run = Watched.start(max_stride=3)
    background(run, 16)
    run.add(request("H", 4, 40, slo=paced(9)))
    run.steps(6)
    cohorts = run.scheduler.running.cohorts
    assert cohorts is not None
    assert [len(cohort.decodes) for cohort in cohorts.turns] == [8, 8]
    gone = [r.id for r in cohorts.turns[whose].decodes.members[:7]]
    for id in gone:
        run.abort(id)
    run.add(request("I", 4, 40, slo=paced(5)))
    run.steps(2)
    assert len(cohorts.turns) == 3
    run.steps(20)
    for i in range(16):
        assert max(gaps(run.turns_of(f"bg{i}"))) <= 3


def test_who_has_left_a_cohort_is_planned_no_more() -> None:
    run = Watched.start()
    background(run, 12)
    run.add(request("H", 4, 40, slo=paced(5)))
    run.steps(8)
    run.abort("bg3")
    run.abort("bg7")
    run.steps(6)
    assert all({"bg3", "bg7"}.isdisjoint(ids) for ids in run.decoded[8:])
    run.until_idle()
    assert run.received["bg4"] == list(range(60))


def test_a_plan_hands_out_the_same_list_for_the_same_turn() -> None:
    run = Watched.start()
    background(run, 12)
    run.steps(3)
    run.add(request("H", 4, 30, slo=paced(5)))
    run.steps(8)
    plans = [run.step().decodes for _ in range(9)]
    assert len({id(decodes) for decodes in plans}) == 3
    assert all(plans[i] is plans[i + 3] for i in range(6))


arrivals = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.integers(1, 30),
        st.integers(1, 40),
        st.sampled_from([None, None, None, 2, 4, 7, 30]),
        st.sampled_from([0, 5, 10]),
    ),
    min_size=1,
    max_size=24,
)


@pytest.mark.parametrize("depth", [1, 2])
@given(arrivals, st.integers(1, 4), st.lists(st.tuples(st.integers(1, 60), st.integers(0, 23)), max_size=4))
@settings(max_examples=60, deadline=None)
def test_everybody_decodes_within_the_bound_and_gets_every_token(
    depth: int, jobs: list[tuple[int, int, int, int | None, int]], stride: int, cancels: list[tuple[int, int]]
) -> None:
    run = Watched.start(depth, max_stride=stride)
    requests = {}
    for n, (_, prompt, outputs, pace, priority) in enumerate(jobs):
        slo = NO_SLO if pace is None else paced(pace)
        requests[f"r{n}"] = request(f"r{n}", prompt, outputs, slo=slo, priority=priority)
        if outputs > 3 and n % 5 == 4:
            run.stop_after[f"r{n}"] = outputs - 2
    aborted = {f"r{n}" for _, n in cancels}
    due = sorted(((job[0], requests[f"r{n}"]) for n, job in enumerate(jobs)), key=lambda a: a[0])
    while due or run.scheduler.has_work or run._in_flight:
        while due and due[0][0] <= run.now:
            run.add(due.pop(0)[1])
        run.step()
        check_counters(run)
        for at, n in cancels:
            if at == run.now and n < len(jobs):
                run.abort(f"r{n}")
        assert run.now < 2000
    for id, r in requests.items():
        turns = run.turns_of(id)
        assert max(gaps(turns), default=1) <= (1 if pace_of(r.slo) < 1e9 else stride)
        if id not in aborted:
            wanted = run.stop_after.get(id, r.max_tokens)
            assert wanted is not None
            assert run.received[id] == list(range(wanted))
    assert run.scheduler.running.load.paces == []
    assert run.scheduler.kv.available == 2000


def check_counters(run: Run) -> None:
    """What is derived of clocks is what was received and is in flight."""
    running = run.scheduler.running
    in_flight = Counter(id for _, ids in run._in_flight for id in ids)
    for r in running.members:
        if r.decode_set is not None:
            assert r.emitted == len(run.received.get(r.id, ()))
            assert r.sampled == r.emitted + in_flight[r.id]
            assert r.planned == r.prompt_tokens + r.sampled - 1
    sets = [running.decodes, *(c.decodes for c in running.cohorts.turns)] if running.cohorts else [running.decodes]
    for decodes in sets:
        assert decodes.context == sum(r.planned for r in decodes.members)
    assert sorted(p.seconds for p in running.load.paces) == sorted(
        pace_of(r.slo) for decodes in sets for r in decodes.members if pace_of(r.slo) < 1e9
    )


@given(st.lists(st.sampled_from([None, 3, 5, 9, 14]), min_size=1, max_size=20), st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_a_promise_that_can_be_kept_is_kept(paces: list[int | None], more: int) -> None:
    """No step is longer than the tightest promise of those in it allows, wherever turns can bring that about."""
    run = Watched.start(floor=1)
    background(run, more, outputs=100)
    run.add(*(request(f"r{n}", 4, 100, slo=NO_SLO if p is None else paced(p)) for n, p in enumerate(paces)))
    run.steps(4)
    promised = [p for p in paces if p is not None]
    others = len(paces) - len(promised) + more
    if not promised or len(promised) + ceil(others / 4) > min(promised):
        return
    for _ in range(12):
        assert len(run.step().decodes) <= min(promised)


class Asked(AdaptiveBudget):
    """Remembers of how many decodes it was asked whether they may decode together."""

    @cached_property
    def asked(self) -> list[int]:
        return []

    def decode_tokens(self, step: StepView, ctx: PolicyContext) -> int:
        self.asked.append(step.decodes)
        return super().decode_tokens(step, ctx)


def seated(budget: Asked, slos: Sequence[Slo]) -> Scheduler:
    """Requests with these promises, who decode; nobody waits and nothing is in flight."""
    policy = replace(build_policy("priority"), budget=budget)
    scheduler = Scheduler(policy, limits(num_blocks=2000, max_num_seqs=40), CTX)
    for n, slo in enumerate(slos):
        scheduler.add(Request(f"r{n}", prompt_tokens=4, max_tokens=100 + n, slo=slo), 0.0)
    step(scheduler, 1.0)
    return scheduler


def step(scheduler: Scheduler, now: float) -> None:
    plan = scheduler.plan(now)
    tokens = len(plan.decodes) + sum(chunk.emits for chunk in plan.chunks)
    scheduler.apply(plan, StepResult([0] * tokens), now + 0.5)


def test_a_load_is_not_asked_about_once_a_larger_one_was_found_to_fit() -> None:
    budget = Asked(margin=0.0)
    scheduler = seated(budget, [paced(20)] * 8)
    assert scheduler.quiet_steps(2.0).steps == 99
    asked = len(budget.asked)
    assert asked
    scheduler.abort("r3", 2.0)
    for now in range(2, 60):
        assert scheduler.quiet_steps(now).steps
        step(scheduler, now)
    assert len(budget.asked) == asked


@pytest.mark.parametrize("fits", [20, 3])
def test_a_promise_that_nobody_had_is_asked_about(fits: int) -> None:
    budget = Asked(margin=0.0)
    scheduler = seated(budget, [*[paced(21)] * 6, *[NO_SLO] * 2])
    assert scheduler.quiet_steps(2.0).steps
    scheduler.abort("r0", 2.0)
    scheduler.abort("r1", 2.0)
    asked = len(budget.asked)
    scheduler.add(Request("H", prompt_tokens=4, max_tokens=100, slo=paced(fits)), 2.0)
    step(scheduler, 2.0)
    scheduler.quiet_steps(3.0)
    assert len(budget.asked) > asked
    step(scheduler, 3.0)
    assert bool(scheduler.running.turn) == (fits == 3)


def test_moving_costs_no_step_its_constancy() -> None:
    """While nobody comes or goes, a step with turns costs the same number of calls however many decode."""

    def calls(n: int) -> int:
        room = limits(num_blocks=8 * n, max_num_seqs=n + 1, max_num_batched_tokens=40 * n)
        policy = build_policy("fcfs", {"budget": "adaptive"})
        scheduler = Scheduler(policy, room, PolicyContext(OraclePredictor(), Steps()))
        for i in range(n):
            scheduler.add(Request(f"r{i}", prompt_tokens=8, max_tokens=100), 0.0)
        scheduler.add(Request("H", prompt_tokens=8, max_tokens=100, slo=paced(n / 2)), 0.0)
        count = 0

        def note(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        for at in range(40):
            sys.setprofile(note if at >= 36 else None)  # no block boundary and no routine check in these
            plan = scheduler.plan(0.0)
            scheduler.apply(plan, StepResult([1] * len(plan.emitting())), 0.0)
            sys.setprofile(None)
            scheduler.take_events()
        assert scheduler.running.cohorts is not None
        assert len(scheduler.running.cohorts.turns) > 1
        return count

    assert calls(400) <= calls(40) + 20


@given(
    st.lists(st.tuples(st.sampled_from([None, 0.1, 0.2, 0.5]), st.integers(0, 2)), max_size=30),
    st.data(),
)
def test_the_load_knows_the_tightest_promise(members: list[tuple[float | None, int]], data: st.DataObject) -> None:
    load, there = DecodeLoad(), []
    for n, (tpot, tier) in enumerate(members):
        r = Request(f"r{n}", prompt_tokens=1, slo=NO_SLO if tpot is None else Slo(tpot=tpot, tbt=9.0))
        r.tier = tier
        load.add(r)
        there.append(r)
        if data.draw(st.booleans()):
            load.drop(there.pop(data.draw(st.integers(0, len(there) - 1))))
        promised = sorted(Pace(pace_of(r.slo), r.tier) for r in there if r.slo is not NO_SLO)
        assert load.paces == promised
        at_least = [p for p in promised if p.seconds >= 0.2]
        assert load.tightest(0.2) == (at_least[0] if at_least else None)


@given(st.floats(0, 5), st.floats(0.001, 0.1), st.floats(0, 20), st.integers(0, 9000), st.floats(0, 1))
def test_the_largest_is_the_largest(base: float, slope: float, limit: float, most: int, bend: float) -> None:
    def seconds(n: int) -> float:
        return base + slope * n + bend * max(0, n - most // 2) * slope

    n = largest(seconds, limit, most)
    assert n == next((k for k in reversed(range(most + 1)) if seconds(k) <= limit), 0)


def test_a_straight_line_is_asked_few_times() -> None:
    asked = []

    def seconds(n: int) -> float:
        asked.append(n)
        return 8 + 0.02 * n

    assert largest(seconds, 50.0, 8192) == 2100
    assert len(asked) <= 5


def test_the_budget_is_what_the_promise_leaves() -> None:
    load = DecodeLoad()
    budget = AdaptiveBudget(floor=5, margin=0.1)
    assert budget.tokens(StepView(0.0, 1000, 3, load), CTX) == 997
    promised = Request("r", prompt_tokens=1, slo=Slo(tbt=2.0))
    load.add(promised)
    assert budget.tokens(StepView(0.0, 1000, 3, load), CTX) == 50  # 2.0 * 0.9 - 1.3 seconds, a hundredth a token
    assert budget.tokens(StepView(0.0, 1000, 8, load), CTX) == 5  # nothing left: the floor
    assert budget.tokens(StepView(0.0, 10, 8, load), CTX) == 2  # and never more than the step holds
    load.drop(promised)
    assert budget.tokens(StepView(0.0, 1000, 3, load), CTX) == 997
