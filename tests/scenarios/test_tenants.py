"""Scenarios of the group "LoRA, tenants, classes" that are about tenants."""

from functools import partial

import pytest

NO_WEIGHTS = {"cfg.weights": None}


def widest_gap(run, weights=(1.0, 1.0)):
    """The largest difference of weighted service between A and B while both have requests waiting."""
    prompts = {"A": 2048, "B": 128}
    served, waiting = {"A": 0, "B": 0}, {tenant: len(run.family(tenant)) for tenant in "AB"}
    widest = 0.0
    for row in run.rows:
        for name in row.admitted:
            waiting[name[0]] -= 1
            served[name[0]] += prompts[name[0]]
        for name, tokens in row.emitted.items():
            served[name[0]] += 2 * tokens
        if all(waiting.values()):
            widest = max(widest, abs(served["A"] / weights[0] - served["B"] / weights[1]))
    return widest


BOUND = 2 * max(1 * 2048, 2 * 8000 * 16)


@pytest.mark.expects("S53", 0)
def test_s53_the_published_bound(play):
    assert widest_gap(play("S53", steps=1500)) <= BOUND == 512_000


@pytest.mark.expects("S53", 1)
def test_s53_first_come_first_served_fails_it(play):
    with pytest.raises(AssertionError):
        test_s53_the_published_bound(lambda name, **options: play(name, policy="fcfs", set=NO_WEIGHTS, **options))


@pytest.mark.parametrize("policy", ["fair", "vtc"])
def test_s53_much_tighter_than_the_bound(play, policy):
    """Prompts start one after the other here, so the services differ by hardly more than one request's."""
    assert widest_gap(play("S53", policy=policy, steps=1500)) <= 2 * (2048 + 2 * 64)


@pytest.mark.parametrize("weights", [(3.0, 1.0), (1.0, 2.0)])
def test_s53_by_weight(play, weights):
    run = play("S53", set={"cfg.weights": dict(zip("AB", weights, strict=True))}, steps=1500)
    assert widest_gap(run, weights) <= 2 * (2048 + 2 * 64)


@pytest.mark.expects("S55", 0)
def test_s55_the_quiet_one_is_not_hurt(play):
    waits = sorted(fate.first_token_step - fate.arrival_step for fate in play("S55").family("B").values())
    alone = play("S55", without=["A"])["B[0]"]
    assert waits[-1] <= 5 + alone.first_token_step - alone.arrival_step  # nearest rank: p99 of 40 is the largest


@pytest.mark.expects("S55", 1)
def test_s55_nothing_is_lost(play):
    assert play("S55").makespan() * 0.95 <= play("S55", policy="fcfs").makespan()


def test_s55_plain_engine_hurts_it(play):
    with pytest.raises(AssertionError):
        test_s55_the_quiet_one_is_not_hurt(partial(play, policy="vllm-v1"))


@pytest.mark.parametrize(("prompt", "count"), [(2048, 200), (8192, 40)])
def test_s55_as_a_kind(play, prompt, count):
    """Whatever the noisy one sends, the quiet one waits for at most the prompt that is being computed."""
    run = play("S55", set={"A.p": prompt, "A.x": count, "cfg.headroom": "declared"}, steps=1500)
    waits = [f.first_token_step - f.arrival_step for f in run.family("B").values() if f.first_token_step is not None]
    assert len(waits) >= 28
    assert sorted(waits)[len(waits) // 2] <= prompt // 1024 + 1
