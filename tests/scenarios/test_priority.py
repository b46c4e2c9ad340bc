"""Scenarios of the group "Priority and preemption for urgent arrivals"."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from tidegate.core.policy import Key, PolicyContext
from tidegate.core.presets import build_policy
from tidegate.core.queue import WaitingQueue
from tidegate.core.request import Request
from tidegate.core.scheduler import Scheduler

PLAIN = "vllm-v1"


@pytest.mark.expects("S01", 0)
def test_s01_urgent_request_takes_a_seat(play):
    run = play("S01")
    displaced = {name for _, name in run.preemptions()}
    assert run["H"].first_token_step <= 7
    assert len(displaced) == 1
    assert displaced <= set(run.family("L"))
    assert all(fate.max_gap_steps == 1 for name, fate in run.family("L").items() if name not in displaced)


@pytest.mark.expects("S01", 1)
def test_s01_displaced_request_returns_first(play):
    run = play("S01", extra=[{"id": "NEW", "t": 6, "p": 64, "o": 8, "prio": 10}])
    ((_, displaced),) = run.preemptions()
    assert run.restorations() == [(run["H"].finish_step + 1, displaced)]
    assert run["NEW"].admitted_step > run["H"].finish_step + 1


@pytest.mark.expects("S01", 2)
def test_s01_equals_do_not_displace(play):
    run = play("S01", set={"H.prio": 10})
    assert run.preemptions() == []
    assert run["H"].admitted_step == min(fate.finish_step for fate in run.family("L").values()) + 1


def test_s01_plain_engine_lets_it_wait(play):
    plain = partial(play, policy=PLAIN)
    assert plain("S01")["H"].first_token_step >= 400
    with pytest.raises(AssertionError):
        test_s01_urgent_request_takes_a_seat(plain)


@pytest.mark.parametrize(("seats", "urgent"), [(2, 1), (8, 3), (16, 16)])
def test_s01_as_a_kind(play, seats, urgent):
    """Any number of urgent requests displaces exactly as many, and nobody else skips a step."""
    changes = {"cfg.max_seqs": seats, "L.x": seats, "H.x": urgent, "cfg.kv": 1024, "cfg.budget": 2048}
    run = play("S01", set=changes)
    displaced = [name for _, name in run.preemptions()]
    assert len(displaced) == len(set(displaced)) == urgent
    assert all(fate.first_token_step <= 7 for fate in run.family("H").values())
    assert all(fate.max_gap_steps == 1 for name, fate in run.family("L").items() if name not in displaced)
    assert all(fate.outputs == 400 for fate in run.family("L").values())


@pytest.mark.expects("S02", 0)
def test_s02_urgent_request_takes_blocks(play):
    assert play("S02")["H"].admitted_step in (20, 21)


@pytest.mark.expects("S02", 1)
def test_s02_one_victim_before_the_urgent_one_ends(play):
    run = play("S02")
    end = run["H"].finish_step
    victims = [name for step, name in run.preemptions() if step <= end]
    assert end == 35
    assert len(victims) == 1
    assert victims[0] in run.family("L")


@pytest.mark.expects("S02", 2)
def test_s02_emitted_tokens_are_kept(play):
    run = play("S02")
    assert all(run.outcome.streams[name] == list(range(200)) for name in run.family("L"))


def test_s02_plain_engine_lets_it_wait(play):
    with pytest.raises(AssertionError):
        test_s02_urgent_request_takes_blocks(partial(play, policy=PLAIN))


@pytest.mark.parametrize(("pool", "prompt"), [(44, 300), (60, 500), (80, 800)])
def test_s02_as_a_kind(play, pool, prompt):
    """Whatever an urgent prompt needs, it starts at once, and no more is taken than that."""
    run = play("S02", set={"cfg.kv": pool, "H.p": prompt, "cfg.budget": 2048})
    victims = [name for step, name in run.preemptions() if step <= 20]
    freed = 18 * len(victims)
    assert run["H"].admitted_step == 20
    assert pool - 36 + freed >= -(-prompt // 16) > pool - 36 + freed - 18


@pytest.mark.expects("S04", 0)
def test_s04_equals_never_preempt(play):
    assert play("S04").preemptions() == []


@pytest.mark.expects("S04", 1)
def test_s04_third_waits_for_an_end(play):
    run = play("S04")
    assert run["C"].admitted_step == min(run["A"].finish_step, run["B"].finish_step) + 1


@pytest.mark.parametrize(("seats", "equals", "pool"), [(1, 4, 512), (3, 9, 512), (8, 12, 60)])
def test_s04_as_a_kind(play, seats, equals, pool):
    """Any number of equals at any wall: who runs runs on, and ends come in order of arrival."""
    changes = {"cfg.max_seqs": seats, "cfg.kv": pool, "cfg.headroom": "declared", "A.x": equals}
    run = play("S04", set=changes)
    assert run.preemptions() == []
    ends = [fate.finish_step for fate in run.family("A").values()]
    assert ends == sorted(ends)


class NewcomersFirst:
    """A broken order: whoever arrived later is of a better class, and puts others out."""

    def tier(self, r: Request, ctx: PolicyContext) -> int:
        return -r.seq

    def key(self, r: Request, ctx: PolicyContext) -> Key:
        return Key(-r.seq, 0.0)


def test_s04_catches_ping_pong(play):
    broken = replace(build_policy("priority"), order=NewcomersFirst())
    for line in (test_s04_equals_never_preempt, test_s04_third_waits_for_an_end):
        with pytest.raises(AssertionError):
            line(partial(play, policy=broken))


@pytest.mark.expects("S05", 0)
def test_s05_victim_is_the_worse_class(play):
    run = play("S05")
    assert run.preemptions()[0][1] == "A"
    assert run["K"].preemptions == 0


@pytest.mark.expects("S05", 1)
def test_s05_preempted_returns_before_one_that_never_ran(play):
    run = play("S05")
    returned = min(step for step, name in run.restorations() if name == "A")
    assert returned < run["B"].admitted_step
    assert run["B"].outputs == 50


@pytest.mark.expects("S05", 2)
def test_s05_nobody_is_victim_twice_while_an_equal_runs(play):
    run = play("S05")
    victims = run.preemptions()
    for (_, earlier), (step, later) in pairwise(victims):
        assert not (earlier == later == "A" and "B" in run.rows[step].scheduled)


@pytest.mark.parametrize(("pool", "prompt"), [(48, 320), (44, 288), (60, 400)])
def test_s05_as_a_kind(play, pool, prompt):
    """However large the shortage, the victim is back before an older one that never ran."""
    run = play("S05", set={"cfg.kv": pool, "A.p": prompt, "K.p": prompt, "B.p": prompt + 64})
    assert {name for _, name in run.preemptions()} == {"A"}
    assert max(step for step, _ in run.restorations()) < run["B"].admitted_step


class OneHeap(WaitingQueue):
    """A plain engine's queue: whoever was preempted goes back by class and arrival, like everybody."""

    def add(self, r):
        preemptions, r.preemptions = r.preemptions, 0
        super().add(r)
        r.preemptions = preemptions

    def remove(self, r):
        preemptions, r.preemptions = r.preemptions, 0
        super().remove(r)
        r.preemptions = preemptions


def test_s05_plain_engine_starts_the_other(play, monkeypatch):
    monkeypatch.setattr("tidegate.core.scheduler.WaitingQueue", OneHeap)
    with pytest.raises(AssertionError):
        test_s05_preempted_returns_before_one_that_never_ran(partial(play, scheduler=Scheduler))


@pytest.mark.expects("S08", 0)
def test_s08_order_is_not_speed(play):
    run = play("S08", policy="priority")
    assert run["H"].first_token_step - run["H"].arrival_step < 2
    together = [step for step, tokens in run.scheduled("H").items() if tokens == 1]
    for step in together:
        assert run.rows[step + 1].time - run.rows[step].time == pytest.approx(0.0255)
    assert run.rows[49].time - run.rows[48].time == pytest.approx(0.025)
    assert run.outcome.timing["H"]["tpot"] == pytest.approx(0.0255)
    assert run.outcome.timing["H"]["missed"] == ["tpot"]


TURNS = {"cfg.params.budget": "adaptive"}


@pytest.mark.expects("S08", 1)
def test_s08_slo_policy_is(play):
    run = play("S08", set=TURNS)
    together = [step for step, tokens in run.scheduled("H").items() if tokens == 1]
    assert all(len(run.rows[step].scheduled) <= 20 for step in together)
    assert run.outcome.timing["H"]["tpot"] <= 0.020
    assert all(fate.outputs == 512 and fate.recomputed_tokens == 0 for fate in run.family("BG").values())


def test_s08_without_turns_the_promise_is_missed(play):
    run = play("S08", set={**TURNS, "cfg.params.max_stride": 1})
    assert run.outcome.timing["H"]["missed"] == ["tpot"]


@pytest.mark.parametrize(("streams", "pace", "cohorts"), [(20, 20, 2), (40, 20, 3), (30, 17, 3), (50, 18, 4)])
def test_s08_as_a_kind(play, streams, pace, cohorts):
    """As few cohorts as the promise asks for; everybody decodes once in so many steps and ends whole."""
    run = play("S08", set={**TURNS, "BG.x": streams, "H.slo.tpot_ms": pace})
    together = [step for step, tokens in run.scheduled("H").items() if tokens == 1]
    assert run.outcome.timing["H"]["missed"] == []
    for name, fate in run.family("BG").items():
        turns = [step for step in run.scheduled(name) if step in together]
        assert {after - before for before, after in pairwise(turns)} == {cohorts}
        assert (fate.outputs, fate.max_gap_steps) == (512, cohorts)


AGEING = {"cfg.params.aging_window": 20.0}  # a class is worth 20 steps of waiting, so 10 classes are worth 200


@pytest.mark.expects("S09", 0)
def test_s09_ageing_bounds_the_wait(play):
    run = play("S09", set=AGEING)
    waits = [fate.admitted_step - fate.arrival_step for fate in run.family("H").values()]
    assert run["LOW"].finish_step <= 260
    assert max(waits) <= 5


@pytest.mark.parametrize(("window", "priority"), [(5.0, 10), (20.0, 4), (100.0, 2)])
def test_s09_as_a_kind(play, window, priority):
    """The wait is bounded by what the difference in class is worth, and by one more service."""
    run = play("S09", set={"cfg.params.aging_window": window, "LOW.prio": priority}, steps=600)
    assert run["LOW"].admitted_step - 30 <= window * priority + 16


@pytest.mark.expects("S09", 1)
def test_s09_without_ageing_the_bottom_starves_and_it_shows(play):
    run = play("S09", steps=1900)
    starving = run.outcome.waits["10"]
    assert run["LOW"].admitted_step is None
    assert (starving.waiting_now, starving.longest_now, starving.longest_now_id) == (1, 1900 - 30, "LOW")


def test_s09_plain_engines_fail_one_or_the_other(play):
    """Strict classes without ageing let the bottom starve; first come, first served knows no class."""
    with pytest.raises((AssertionError, TypeError)):
        test_s09_ageing_bounds_the_wait(lambda name, **options: play(name, steps=2000))
    with pytest.raises(AssertionError):
        test_s09_without_ageing_the_bottom_starves_and_it_shows(partial(play, policy=PLAIN))
