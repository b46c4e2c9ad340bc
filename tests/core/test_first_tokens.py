"""`first_token_within` of joint: whoever waits that long for an output takes the place of an equal that runs."""

from __future__ import annotations

import pytest

from tests.core.harness import Run, limits, request
from tidegate.core.slo import Slo
from tidegate.errors import ConfigError


def waits(within: float | None, slo: Slo | None = None, priority: int = 10) -> tuple[list[tuple[int, str]], int]:
    """((step, who) of each who gave way, the step in which "late" starts) where one seat is taken for 40 steps."""
    run = Run.of("joint", limits(max_num_seqs=1), first_token_within=within)
    run.add(request("early", 16, 40, priority=10))
    run.step()
    run.add(request("late", 16, 20, priority=priority, **({} if slo is None else {"slo": slo})))
    run.until_idle()
    assert run.received == {"early": list(range(40)), "late": list(range(20))}
    return [(at, id) for at, id, _ in run.preemptions()], run.first_step_of("late")


def test_an_equal_gives_way_once() -> None:
    assert waits(None) == ([], 40)
    assert waits(8.0) == ([(9, "early")], 9)


def test_nobody_better_gives_way_and_who_is_promised_something_goes_by_that() -> None:
    assert waits(8.0, priority=11) == ([], 40)
    assert waits(8.0, Slo(e2e=1000.0)) == ([], 40)


def test_who_took_a_place_keeps_it_until_its_output() -> None:
    run = Run.of("joint", limits(max_num_seqs=1, max_num_batched_tokens=4), first_token_within=8.0)
    run.add(request("early", 64, 4, priority=10))  # 16 steps of prompt, and so without an output for longer than 8
    run.step()
    run.add(request("late", 12, 4, priority=10))
    run.steps(11)  # of which the last is the first that "late" decodes in
    assert [id for _, id, _ in run.preemptions()] == ["early"]
    run.until_idle()
    assert [id for _, id, _ in run.preemptions()] == ["early", "late"]
    assert run.first_step_of("late") == 9


@pytest.mark.parametrize("within", [0.0, -1.0])
def test_it_must_be_above_0(within: float) -> None:
    with pytest.raises(ConfigError, match="first_token_within must be above 0"):
        Run.of("joint", limits(), first_token_within=within)
