"""Which promised first tokens are kept: the most that can be, by a slow twin; and what a lost one may not do."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from tests.core.harness import request
from tidegate.core.events import Finished
from tidegate.core.limits import Limits
from tidegate.core.plan import StepResult
from tidegate.core.policies.adaptive import AdaptiveBudget
from tidegate.core.policies.budgets import FixedBudget
from tidegate.core.policy import PolicyContext
from tidegate.core.predict import HistoryPredictor, StepTime
from tidegate.core.presets import build_policy
from tidegate.core.request import Request
from tidegate.core.scheduler import Scheduler
from tidegate.core.slo import Slo
from tidegate.core.triage import HORIZON, all_in_time, in_time, moore
from tidegate.core.view import StepView

JOBS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), max_size=7)


def queued(jobs: list[tuple[int, int]]) -> list[tuple[float, Request, int]]:
    """(deadline, request, tokens) by deadline, of (deadline, tokens)."""
    made = [(float(deadline), request(f"r{i}", tokens, 1), tokens) for i, (deadline, tokens) in enumerate(jobs)]
    for seq, (_, r, _) in enumerate(made):
        r.seq = seq
    return sorted(made, key=lambda job: (job[0], job[1].seq))


def in_time_together(jobs: tuple[tuple[float, Request, int], ...]) -> bool:
    """Whether jobs sorted by deadline all end in time, at a token a second from 0."""
    end = 0
    for deadline, _, tokens in jobs:
        end += tokens
        if end > deadline:
            return False
    return True


@given(JOBS)
def test_as_many_are_kept_as_any_choice_could_keep(jobs: list[tuple[int, int]]) -> None:
    first = queued(jobs)
    given_up = moore(first, 0.0, 1.0, 0.0, lambda r: 1.0)
    kept = tuple(job for job in first if job[1] not in given_up)
    most = max(n for n in range(len(first) + 1) if any(map(in_time_together, combinations(first, n))))
    assert len(kept) == most
    assert in_time_together(kept)


@given(JOBS, st.floats(0, 20), st.floats(0.001, 3), st.floats(0, 20))
def test_nobody_is_given_up_exactly_where_all_are_in_time(
    jobs: list[tuple[int, int]], now: float, token: float, least: float
) -> None:
    first = queued(jobs)
    assert all_in_time(first, now, token, least) == (not moore(first, now, token, least, lambda r: 1.0))


def test_a_class_that_keeps_more_gives_up_first() -> None:
    first = queued([(10, 6), (10, 7)])
    small, large = first[0][1], first[1][1]
    assert moore(first, 0.0, 1.0, 0.0, lambda r: 1.0) == {large}
    assert moore(first, 0.0, 1.0, 0.0, lambda r: 2.0 if r is small else 1.0) == {small}


def test_who_would_be_late_alone_takes_nobody_along() -> None:
    first = queued([(5, 9), (6, 4)])
    assert moore(first, 0.0, 1.0, 0.0, lambda r: 1.0) == {first[0][1]}


def test_no_step_is_shorter_than_the_decodes_beside() -> None:
    first = queued([(1, 1), (4, 1)])
    assert moore(first, 0.0, 1.0, 2.0, lambda r: 1.0) == {first[0][1]}


@given(JOBS, st.integers(1, 20))
def test_a_step_ends_in_time_for_those_it_ends_for(jobs: list[tuple[int, int]], most: int) -> None:
    kept = [(float(deadline), tokens) for deadline, tokens in sorted(jobs)]
    due = in_time(kept, 0.0, most, float(most), float)
    ends, tokens = [], 0
    for deadline, own in kept:
        tokens += own
        ends.append((tokens, deadline))
    whole = [(tokens, deadline) for tokens, deadline in ends if tokens <= most]
    if due is None:  # a full step is in time for the first of them, or no step is
        assert not whole or most <= whole[0][1] or whole[0][0] > whole[0][1] or whole[0][0] == most
    else:
        assert due < most
        assert all(due <= deadline for tokens, deadline in ends if tokens <= due)
        assert any(most > deadline for tokens, deadline in ends if tokens <= due), "a full step would have been late"


def late_share(policy: str, outputs: int = 1, **given_params: object) -> tuple[int, int]:
    """(promises kept, requests) of a burst: one long prompt that cannot be in time beside 20 short ones that can."""
    limits = Limits(num_blocks=4096, max_num_seqs=32, max_num_batched_tokens=256, prefix_caching=False)
    ctx = PolicyContext(HistoryPredictor(), StepTime(prefill_token=0.001, decode=0.01))
    scheduler = Scheduler(build_policy(policy, given_params), limits, ctx)
    long = request("long", 2000, outputs, slo=Slo(ttft=2.01))
    scheduler.add(long, 0.0)
    now, kept, ended = 0.0, 0, 0
    for i in range(20):
        r = request(f"s{i}", 90, outputs, arrival=0.0, slo=Slo(ttft=2.1))
        scheduler.add(r, 0.0)
    while scheduler.has_work:
        plan = scheduler.plan(now)
        now += sum(c.length for c in plan.chunks) * 0.001 + (0.01 if plan.decodes else 0.0)
        scheduler.apply(plan, StepResult([1] * len(plan.emitting())), now)
        for event in scheduler.take_events():
            if isinstance(event, Finished):
                ended += 1
                kept += not event.missed
    return kept, ended


def test_one_large_prompt_is_given_up_for_many_small_ones() -> None:
    assert late_share("joint") == (20, 21)
    assert late_share("edf")[0] <= 2, "the collapse that this is about"


def test_of_a_prompt_that_is_half_computed_counts_what_is_left() -> None:
    limits = Limits(num_blocks=4096, max_num_seqs=32, max_num_batched_tokens=200, prefix_caching=False)
    ctx = PolicyContext(HistoryPredictor(), StepTime(prefill_token=0.001, decode=0.01))
    scheduler = Scheduler(build_policy("joint", {"share": 1.0}), limits, ctx)
    long = request("long", 2000, 1, slo=Slo(ttft=2.1))
    scheduler.add(long, 0.0)
    now = 0.0
    while long.computed < 1800:
        plan = scheduler.plan(now)
        now += sum(c.length for c in plan.chunks) * 0.001
        scheduler.apply(plan, StepResult([]), now)
    scheduler.add(request("short", 90, 1, arrival=now, slo=Slo(ttft=0.5)), now)
    seat = long.slot
    assert [c.slot for c in scheduler.plan(now).chunks] == [seat], "its last 200 tokens are in time"


def step_of(due: int | None = None) -> StepView:
    return StepView(0.0, 1000, 0, due=due)


def test_a_step_ends_where_the_adaptive_budget_is_told() -> None:
    ctx = PolicyContext(HistoryPredictor(), StepTime())
    assert AdaptiveBudget().tokens(step_of(due=100), ctx) == 100
    assert AdaptiveBudget().tokens(step_of(), ctx) == 1000
    assert FixedBudget().tokens(step_of(due=100), ctx) == 1000, "a fixed budget is fixed"


def test_a_promised_prompt_is_not_halved_for_others() -> None:
    ctx, budget = PolicyContext(HistoryPredictor(), StepTime()), AdaptiveBudget(share=0.5)
    promised, plain = request("a", 5000, 1, slo=Slo(ttft=1.0)), request("b", 5000, 1)
    assert budget.chunk(promised, 5000, 1000, step_of(), True, ctx) == 1000
    assert budget.chunk(plain, 5000, 1000, step_of(), True, ctx) == 500


def test_a_step_ends_early_for_a_first_token_and_nobody_gives_way_for_the_next() -> None:
    """`due` has 100 tokens and 0.15 s: a full step of 256 would be late for it, so `next` gets no token and no seat."""
    limits = Limits(num_blocks=512, max_num_seqs=2, max_num_batched_tokens=256, prefix_caching=False)
    ctx = PolicyContext(HistoryPredictor(), StepTime(prefill_token=0.001, decode=0.01))
    scheduler = Scheduler(build_policy("joint"), limits, ctx)
    for id in ("c", "d"):
        scheduler.add(request(id, 8, 50, priority=10), 0.0)
    for now in (0.0, 0.1):
        plan = scheduler.plan(now)
        scheduler.apply(plan, StepResult([1] * len(plan.emitting())), now)
    scheduler.add(request("due", 100, 4, slo=Slo(ttft=0.15), arrival=1.0), 1.0)
    scheduler.add(request("next", 300, 4, arrival=1.0), 1.0)
    plan = scheduler.plan(1.0)
    assert [chunk.length for chunk in plan.chunks] == [100]
    assert [join.request_id for join in plan.joined] == ["due"]
    assert len(plan.preempted) == 1


def test_a_class_is_judged_by_what_it_was_served() -> None:
    """A first token that came is kept, one that is late is lost, and a client's own leaving is neither."""
    scheduler = Scheduler(build_policy("joint"), Limits(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=64))
    triage = scheduler._triage
    assert triage is not None
    for id in ("served", "left", "late"):
        scheduler.add(request(id, 4, 1, slo_class=id, slo=Slo(ttft=1.0), arrival=0.0), 0.0)
        if id == "served":
            scheduler.apply(scheduler.plan(0.0), StepResult([1]), 0.1)
    scheduler.abort("left", 0.2)
    scheduler.plan(5.0)
    assert triage._kept["served"] == 1.0
    assert triage._kept["late"] < 1.0
    assert "left" not in triage._kept


def test_who_was_given_up_is_forgotten_with_its_promise() -> None:
    scheduler = Scheduler(build_policy("joint"), Limits(num_blocks=4096, max_num_seqs=4, max_num_batched_tokens=64))
    triage = scheduler._triage
    assert triage is not None
    far = request("far", 4, 1, slo=Slo(ttft=1e6))
    triage.watch(far)
    triage._given_up.add(far)
    far.count(sampled=1)  # its token came all the same
    for i in range(2 * HORIZON):
        triage.watch(request(f"r{i}", 4, 1, slo=Slo(ttft=1.0 + i)))
    assert far not in triage._given_up


def test_ended_promises_are_forgotten() -> None:
    limits = Limits(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=64)
    scheduler = Scheduler(build_policy("joint"), limits)
    triage = scheduler._triage
    assert triage is not None
    for i in range(10 * HORIZON):
        scheduler.add(request(f"r{i}", 4, 1, slo=Slo(ttft=1e6)), float(i))
        scheduler.abort(f"r{i}", float(i))
    assert len(triage._promises) <= 2 * HORIZON
    assert not triage._given_up
