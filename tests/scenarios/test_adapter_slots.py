"""Scenario S52: requests that need a named slot beside a seat."""

import pytest

STRICT = {"cfg.limits": {"resource_patience": 0}}
NEVER = {"cfg.limits": {"resource_patience": 1_000_000}}


@pytest.mark.expects("S52", 0)
def test_s52_who_needs_no_adapter_starts_at_once(play):
    for set in (None, STRICT, NEVER):
        assert play("S52", set=set)["N"].admitted_step == 4


@pytest.mark.expects("S52", 1)
def test_s52_the_blocked_adapter_is_not_passed_for_ever(play):
    run = play("S52")
    assert run["B"].admitted_step <= 3 + 100
    passed = [
        fate
        for fate in run.family("A").values()
        if fate.arrival_step > 3 and fate.admitted_step < run["B"].admitted_step
    ]
    assert passed, "nobody was held back before the bound"
    assert all(fate.finish_reason == "length" for fate in run.family("A").values())


def test_s52_without_a_bound_it_would_be(play):
    assert play("S52", set=NEVER)["B"].admitted_step > 1_900


@pytest.mark.expects("S52", 2)
def test_s52_strictly_in_order(play):
    run = play("S52", set=STRICT)
    assert all(
        fate.admitted_step > run["B"].admitted_step for fate in run.family("A").values() if fate.arrival_step > 3
    )
    assert run["B"].admitted_step == run["A[0]"].finish_step + 1


def test_s52_one_adapter_at_a_time(play):
    for set in (None, STRICT, NEVER):
        for row in play("S52", set=set).rows:
            names = {name[0] for name in row.scheduled} - {"N"}
            assert len(names) <= 1
