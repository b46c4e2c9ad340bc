"""Scenarios of the group "KV capacity, deadlock, reservation"."""

from functools import partial
from itertools import pairwise

import pytest

from tidegate.core.room import Room
from tidegate.core.scheduler import Scheduler
from tidegate.executors.scripted import ScriptedExecutor

PLAIN = "vllm-v1"


@pytest.mark.expects("S18", 0)
def test_s18_prompt_waits_for_all_its_room(play):
    run = play("S18")
    start = run["N"].admitted_step
    held = sum(count for name, count in run.blocks_in_use(start).items() if name != "N")
    assert 400 - held >= 100


@pytest.mark.expects("S18", 1)
def test_s18_nobody_is_preempted(play):
    assert play("S18").preemptions() == []


@pytest.mark.expects("S18", 2)
def test_s18_running_ones_do_not_notice(play):
    run, without = play("S18"), play("S18", without=["N"])
    assert all(fate.max_gap_steps == 1 for fate in run.family("R").values())
    assert run.family("R") == without.family("R")


@pytest.mark.parametrize(("pool", "prompt", "count"), [(400, 1600, 4), (200, 900, 2), (310, 2000, 3)])
def test_s18_as_a_kind(play, pool, prompt, count):
    run = play("S18", set={"cfg.kv": pool, "N.p": prompt, "R.x": count})
    start = run["N"].admitted_step
    held = sum(blocks for name, blocks in run.blocks_in_use(start).items() if name != "N")
    assert pool - held >= -(-prompt // 16)
    assert run.preemptions() == []


class Trusting(ScriptedExecutor):
    """Computes whatever it is told, blocks or not."""

    def _write(self, plan, slot, state, tokens):
        state.position += len(tokens)


def test_s18_catches_an_engine_that_checks_the_first_chunk_only(play, monkeypatch):
    monkeypatch.setattr(Room, "wanted", lambda self, r: self._kv.blocks_for(min(256, r.known_tokens)))
    with pytest.raises(AssertionError):
        test_s18_prompt_waits_for_all_its_room(partial(play, executor=Trusting))


BETTER = ("watermark", "declared")
"""The head-room modes there are. Without history `quantile` predicts what was declared."""


@pytest.mark.expects("S19", 0)
def test_s19_headroom_saves_work(play):
    none = play("S19", set={"cfg.headroom": "none"})
    run = min((play("S19", set={"cfg.headroom": mode}) for mode in BETTER), key=lambda run: run.recomputed_tokens())
    assert run.recomputed_tokens() <= 0.05 * run.computed_tokens()
    assert run.recomputed_tokens() < none.recomputed_tokens()


@pytest.mark.expects("S19", 1)
def test_s19_headroom_costs_no_time(play):
    none = play("S19", set={"cfg.headroom": "none"})
    run = min((play("S19", set={"cfg.headroom": mode}) for mode in BETTER), key=lambda run: run.recomputed_tokens())
    assert run.makespan() <= none.makespan()


@pytest.mark.expects("S19", 2)
def test_s19_an_empty_engine_takes_the_first(play):
    run = play("S19", set={"cfg.kv": 24, "cfg.watermark": 0.9, "R.x": 2})
    assert run["R[0]"].admitted_step == 0
    assert run["R[1]"].admitted_step == run["R[0]"].finish_step + 1
    assert run["R[1]"].outputs == 320


@pytest.mark.expects("S20", 0)
def test_s20_never_fit_is_refused_at_the_door(play):
    run = play("S20")
    assert run["X"].finish_reason == "refused"
    (refused,) = run.rows[0].rejected
    assert (refused["id"], refused["reason"]) == ("X", "kv_capacity")


@pytest.mark.expects("S20", 1)
def test_s20_others_do_not_notice(play):
    assert play("S20").family("S") == play("S20", without=["X"]).family("S")


@pytest.mark.parametrize(("prompt", "outputs", "fits"), [(1000, 9, True), (1000, 10, False), (1, 1009, False)])
def test_s20_as_a_kind(play, prompt, outputs, fits):
    """63 blocks hold 1008 tokens; the last output is never written."""
    run = play("S20", set={"X.p": prompt, "X.o": outputs})
    assert run["X"].finish_reason == ("length" if fits else "refused")


@pytest.mark.expects("S21", 0)
def test_s21_refused(play):
    run = play("S21")
    assert run["X"].finish_reason == "refused"
    assert run.rows[0].rejected[0]["reason"] == "kv_capacity"


@pytest.mark.expects("S21", 1)
def test_s21_clipped(play):
    run = play("S21", set={"cfg.oversize": "clip"})
    assert (run["X"].finish_reason, run["X"].outputs) == ("length_kv", 9)


@pytest.mark.expects("S21", 2)
def test_s21_never_its_own_victim(play):
    for mode in ("refuse", "clip"):
        assert play("S21", set={"cfg.oversize": mode}).preemptions() == []


@pytest.mark.parametrize(("pool", "prompt"), [(63, 1), (20, 300), (5, 80), (1, 3)])
def test_s21_as_a_kind(play, pool, prompt):
    """The end comes with the last token that the pool holds, wherever that falls in a block."""
    run = play("S21", set={"cfg.kv": pool, "X.p": prompt, "X.o": 2000, "cfg.oversize": "clip"})
    assert (run["X"].finish_reason, run["X"].outputs) == ("length_kv", pool * 16 - prompt + 1)
    assert run["X"].preemptions == 0


@pytest.mark.expects("S23", 0)
def test_s23_one_prompt_at_a_time_or_one_rollback(play):
    run = play("S23")
    first, second = sorted("AB", key=lambda name: run[name].admitted_step)
    apart = run[second].admitted_step > run[first].finish_step
    assert apart or len(run.preemptions()) == 1


@pytest.mark.expects("S23", 1)
def test_s23_both_finish(play):
    run = play("S23")
    assert run["A"].outputs == run["B"].outputs == 16


@pytest.mark.expects("S23", 2)
def test_s23_little_is_recomputed(play):
    assert play("S23").recomputed_tokens() <= 800


@pytest.mark.expects("S23", 3)
def test_s23_no_idle_step_repeats(play):
    for row, following in pairwise(play("S23").rows):
        assert row.scheduled or following.scheduled


@pytest.mark.parametrize("count", [2, 3, 5])
def test_s23_as_a_kind(play, count):
    """However many half-done prompts are allowed, nobody starts what cannot be finished."""
    run = play("S23", set={"A.x": count, "B.x": count, "cfg.partial_prefills": 2 * count, "cfg.max_seqs": 16})
    assert all(fate.outputs == 16 for fate in run.outcome.requests.values())
    assert run.recomputed_tokens() == 0


NO_TIMEOUT = {"W.queue_ttl": None}  # who is parked for ever stays so until queue timeouts exist


@pytest.mark.expects("S24", 0)
def test_s24_parked_ones_take_no_seat(play):
    run = play("S24", set=NO_TIMEOUT)
    assert all(fate.finish_step <= 40 for fate in run.family("N").values())
    assert all(fate.admitted_step is None for fate in run.family("W").values())


@pytest.mark.expects("S24", 1)
def test_s24_parked_ones_are_dropped_in_time(play):
    run = play("S24")
    for fate in run.family("W").values():
        assert (fate.finish_step, fate.finish_reason) == (500, "dependency_timeout")


def _short_ones_running(run) -> float:
    rows = run.rows[20:301]
    return sum(sum(name.startswith("S[") for name in row.scheduled) for row in rows) / len(rows)


@pytest.mark.expects("S27", 0)
def test_s27_spare_blocks_are_used(play):
    assert _short_ones_running(play("S27")) >= 2


@pytest.mark.expects("S27", 1)
def test_s27_head_is_not_delayed(play):
    run = play("S27")
    assert run["HEAVY"].admitted_step == run["OLD"].finish_step + 1


def test_s27_plain_engine_lets_all_wait(play):
    plain = partial(play, policy=PLAIN)
    run = plain("S27")
    assert all(fate.admitted_step > run["OLD"].finish_step for fate in run.family("S").values())
    with pytest.raises(AssertionError):
        test_s27_spare_blocks_are_used(plain)


@pytest.mark.parametrize("declared", [60, 200, 5000])
def test_s27_with_lengths_that_are_not_known(play, declared):
    """Declared ends that are far from the true ones delay the head by the bypass bound at most."""
    run = play("S27", set={"S.max_o": declared, "S.until": 600, "OLD.max_o": 900}, steps=700)
    assert run["HEAVY"].admitted_step <= run["OLD"].finish_step + 1 + 60


@pytest.mark.expects("S29", 0)
def test_s29_predicted_ends_admit_all(play):
    run = play("S29")
    assert all(fate.admitted_step <= 3 for fate in run.family("B").values())


@pytest.mark.expects("S29", 1)
def test_s29_a_failed_prediction_costs_the_newest(play):
    run = play("S29", set={"A.o": 600, "B.o": 200, "B.max_o": 200})
    assert run["A"].preemptions == 0
    assert run.preemptions()[0][1] == "B[5]"


@pytest.mark.expects("S29", 2)
def test_s29_no_evict_mode_waits(play):
    run = play("S29", set={"cfg.headroom": "declared", "cfg.history": None})
    starts = [fate.admitted_step for fate in run.family("B").values()]
    assert run["A"].finish_step == 29
    assert min(starts) == 30
    assert max(starts) <= 31  # six prompts of 160 tokens take two steps of 512
    assert run.preemptions() == []


@pytest.mark.parametrize(("pool", "declared", "outputs"), [(100, 1400, 30), (60, 700, 80), (40, 400, 1)])
def test_s29_no_evict_mode_as_a_kind(play, pool, declared, outputs):
    """Declared head-room never evicts, whatever is declared, and never waits for more than that."""
    changes = {"cfg.headroom": "declared", "cfg.history": None, "cfg.kv": pool, "A.max_o": declared, "A.o": outputs}
    run = play("S29", set=changes)
    assert run.preemptions() == []
    peak = -(-(160 + declared - 1) // 16)
    fits_beside = (pool - peak) // 14
    first = [fate.admitted_step for fate in run.family("B").values()]
    assert sum(step <= run["A"].finish_step for step in first) >= min(6, fits_beside)


def _useful_tokens_per_step(run) -> float:
    return (run.computed_tokens() - run.recomputed_tokens()) / len(run.rows)


@pytest.mark.expects("S30", 0)
def test_s30_over_subscription_pays(play):
    no_evict = play("S30", set={"cfg.headroom": "declared", "cfg.history": None})
    assert _useful_tokens_per_step(play("S30")) >= 0.95 * _useful_tokens_per_step(no_evict)


@pytest.mark.expects("S30", 1)
def test_s30_little_is_recomputed(play):
    run = play("S30")
    assert run.recomputed_tokens() <= 0.10 * run.computed_tokens()


@pytest.mark.expects("S30", 2)
def test_s30_who_is_out_is_not_put_out_again(play):
    run = play("S30", set={"cfg.headroom": "none"})
    out: set[str] = set()
    for row in run.rows:
        for victim in row.preempted:
            assert victim["id"] not in out
            out.add(victim["id"])
        out -= set(row.restored)
    assert run.preemptions()


@pytest.mark.expects("S31", 0)
def test_s31_everybody_finishes(play):
    assert all(fate.outputs == 300 for fate in play("S31").family("R").values())


@pytest.mark.expects("S31", 1)
def test_s31_no_errors(play):
    assert {fate.finish_reason for fate in play("S31").family("R").values()} == {"length"}


@pytest.mark.expects("S31", 2)
def test_s31_somebody_always_runs(play):
    assert max(len(parked) for parked in play("S31").parked()) <= 3


@pytest.mark.expects("S31", 3)
def test_s31_the_oldest_never_parks(play):
    assert play("S31")["R[0]"].preemptions == 0


@pytest.mark.parametrize(("pool", "count"), [(26, 4), (40, 8), (60, 3)])
def test_s31_as_a_kind(play, pool, count):
    run = play("S31", set={"cfg.kv": pool, "R.x": count, "cfg.max_seqs": 8})
    assert all(fate.finish_reason == "length" for fate in run.family("R").values())
    assert run["R[0]"].preemptions == 0
    assert max(len(parked) for parked in run.parked()) < count


class KillsAll(Scheduler):
    """A broken engine: a shortage of blocks ends everybody."""

    def plan(self, now):
        plan = super().plan(now)
        if plan.preempted:
            for name in [*(r.id for r in self.running.members), *(victim.request_id for victim in plan.preempted)]:
                self.abort(name, now)
        return plan


def test_s31_catches_an_engine_that_kills_all(play):
    for line in (test_s31_everybody_finishes, test_s31_no_errors):
        with pytest.raises(AssertionError):
            line(partial(play, scheduler=KillsAll))
