"""What holds under `priority`, `sjf` and `fcfs` holds under the default policy where its promises cover it."""

from functools import partial

import pytest

from tests.scenarios import test_other_groups, test_priority


@pytest.fixture
def joint(play):
    return partial(play, policy="joint")


def test_s01_urgent_request_takes_a_seat(joint):
    test_priority.test_s01_urgent_request_takes_a_seat(joint)


def test_s05_preempted_returns_before_one_that_never_ran(joint):
    test_priority.test_s05_victim_is_the_worse_class(joint)
    test_priority.test_s05_preempted_returns_before_one_that_never_ran(joint)


def test_s09_ageing_bounds_the_wait(joint):
    """A class is worth 20 steps, so ten of them 200, and the wait ends there."""
    test_priority.test_s09_ageing_bounds_the_wait(joint)


def test_s10_a_tiny_one_is_not_hidden(joint):
    run = joint("S10")
    assert all(fate.first_token_step - fate.arrival_step <= 3 for fate in run.family("S").values())
    assert run["BIG"].first_token_step <= 66


def test_s11_a_stream_of_short_jobs_does_not_starve_the_long_one(joint):
    run = joint("S11", steps=300)
    assert run["BIG"].admitted_step <= 201
    assert run["BIG"].first_token_step <= 240


def test_s40_shared_prompt_is_computed_once(joint):
    test_other_groups.test_s40_shared_prompt_is_computed_once(joint)
