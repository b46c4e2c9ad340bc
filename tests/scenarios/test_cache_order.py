"""Scenarios of the group "Prefix cache and order"."""

from functools import partial

import pytest

AGE = {"cfg.params.age": 100.0}  # tokens earned by each admission that passes one over


@pytest.mark.expects("S37", 0)
def test_s37_cold_starts_within_its_bound(play):
    cold = play("S37", set=AGE, steps=300)["COLD"]
    assert cold.admitted_step - cold.arrival_step <= 81


@pytest.mark.expects("S37", 1)
def test_s37_warm_ones_hardly_wait(play):
    hot = play("S37", set=AGE).family("HOT").values()
    assert sum(fate.admitted_step - fate.arrival_step for fate in hot) / len(hot) < 3


@pytest.mark.expects("S37", 2)
def test_s37_without_ageing_cold_starves(play):
    assert play("S37", steps=2901)["COLD"].admitted_step is None


def test_s37_plain_design_fails(play):
    with pytest.raises((AssertionError, TypeError)):
        test_s37_cold_starts_within_its_bound(lambda name, **options: play(name, steps=300))


@pytest.mark.parametrize(("age", "hit"), [(50.0, 7000), (400.0, 8000), (1000.0, 7000)])
def test_s37_as_a_kind(play, age, hit):
    """Whatever a pass is worth, cold requests wait as long as the advantage of the warm ones lasts."""
    run = play("S37", set={"cfg.params.age": age, "HOT.hit": hit}, steps=300)
    assert run["COLD"].admitted_step - 20 <= -(-hit // age) + 8 + 1


def test_s37_no_cliff_in_a_long_queue(play):
    """300 warm ones wait: the cold ones among them are still passed, and the warm order still holds."""
    burst = {"id": "W", "x": 300, "t": 30, "p": 8192, "hit": "HOT=8000", "o": 8}
    run = play("S37", set={"HOT.until": 60, **AGE, "cfg.cached": {"HOT": 500}, "HOT.hit": "HOT=8000"}, extra=[burst])
    before = sum(fate.admitted_step < run["COLD"].admitted_step for fate in run.family("W").values())
    assert 20 <= before <= 80


@pytest.mark.expects("S39", 0)
def test_s39_warm_goes_before_cold(play):
    run = play("S39")
    assert run["WARM"].admitted_step == 0
    assert run["WARM"].cached_tokens == 640
    assert run.prefill_tokens() == 656
    assert run["COLD"].admitted_step <= run["WARM"].finish_step + 1


@pytest.mark.expects("S39", 1)
def test_s39_total_prefill(play):
    assert play("S39").prefill_tokens() == 656


@pytest.mark.expects("S39", 2)
def test_s39_cold_is_not_delayed_for_long(play):
    run = play("S39")
    assert run["COLD"].admitted_step <= run["WARM"].finish_step + 1


@pytest.mark.parametrize("line", [test_s39_warm_goes_before_cold, test_s39_total_prefill])
def test_s39_plain_engine_evicts_it(play, line):
    with pytest.raises(AssertionError):
        line(partial(play, policy="vllm-v1"))


@pytest.mark.parametrize("policy", ["joint", "prefix", "sglang-lpm"])
@pytest.mark.parametrize("colds", [1, 4])
def test_s39_as_a_kind(play, policy, colds):
    run = play("S39", policy=policy, set={"COLD.x": colds})
    assert run["WARM"].cached_tokens == 640
