"""Who starts beside a promised end, and who takes another's place before its promise asks for it."""

from __future__ import annotations

import pytest

from tests.core.harness import Run, limits, request
from tidegate.core.policy import PolicyContext
from tidegate.core.predict import HistoryPredictor
from tidegate.core.presets import build_policy
from tidegate.core.scheduler import Scheduler
from tidegate.core.slo import Slo
from tidegate.core.step_time import Coefficients, LearnedStepTime


def beside(e2e: float | None, keep_ends: bool, priority: int = 0) -> int:
    """The step in which a request starts beside one of ten outputs, where each decode adds half a second to a step."""
    ctx = PolicyContext(HistoryPredictor(), LearnedStepTime(Coefficients(0.5, 1e-6, 0.5, 1e-9)))
    run = Run(Scheduler(build_policy("joint", {"keep_ends": keep_ends}), limits(), ctx))
    run.add(request("promised", 16, 10, priority=0, slo=Slo(e2e=e2e)))
    run.step()
    run.add(request("other", 16, 10, priority=priority))
    run.until_idle()
    return run.first_step_of("other")


def test_nobody_starts_where_an_equal_would_miss_its_end() -> None:
    assert beside(12.0, keep_ends=False) == 1
    assert beside(12.0, keep_ends=True) > 4  # by then one more decode no longer makes the end late


@pytest.mark.parametrize("e2e", [None, 5.0, 100.0])
def test_an_end_that_is_kept_or_missed_anyway_holds_nobody_back(e2e: float | None) -> None:
    assert beside(e2e, keep_ends=True) == 1


def test_a_better_class_starts_beside_any_end() -> None:
    assert beside(12.0, keep_ends=True, priority=-1) == 1


def displaced_at(slack: float | None, ttft: float | None) -> list[int]:
    """When somebody of a worse class, in the only seat, gives way to one that comes in the first step."""
    run = Run.of("joint", limits(max_num_seqs=1), displace_slack=slack)
    run.add(request("batch", 16, 40, priority=10))
    run.step()
    run.add(request("urgent", 16, 4, priority=0, slo=Slo(ttft=ttft)))
    run.until_idle()
    return [at for at, id, _ in run.preemptions() if id == "batch"]


def test_whoever_has_slack_leaves_others_their_place_until_its_promise_is_near() -> None:
    assert displaced_at(None, 10.0) == [1]
    assert displaced_at(3.0, 10.0) == [8]


def test_whoever_was_promised_nothing_has_no_slack_to_wait_out() -> None:
    assert displaced_at(3.0, None) == [1]


def test_a_long_prompt_delays_an_equal_as_well() -> None:
    """Each of its tokens takes 50 ms, and the steps are no longer for it."""
    ctx = PolicyContext(HistoryPredictor(), LearnedStepTime(Coefficients(0.5, 0.05, 1e-6, 1e-9)))
    run = Run(Scheduler(build_policy("joint", {"keep_ends": True}), limits(), ctx))
    run.add(request("promised", 16, 10, priority=0, slo=Slo(e2e=12.0)))
    run.step()
    run.add(request("other", 256, 10, priority=0))
    run.until_idle()
    assert run.first_step_of("other") > 1


def test_who_took_a_place_starts_beside_any_end() -> None:
    ctx = PolicyContext(HistoryPredictor(), LearnedStepTime(Coefficients(0.5, 1e-6, 0.5, 1e-9)))
    run = Run(Scheduler(build_policy("joint", {"keep_ends": True}), limits(max_num_seqs=2), ctx))
    run.add(request("promised", 16, 10, priority=0, slo=Slo(e2e=12.0)), request("batch", 16, 60, priority=10))
    run.step()
    run.add(request("other", 16, 10, priority=0))
    run.until_idle()
    given_way = [at for at, id, _ in run.preemptions() if id == "batch"]
    assert given_way == [run.first_step_of("other")]
