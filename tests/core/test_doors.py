"""Who may wait, for how long, and with what head-room: each part alone, against a slow twin where there is one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.harness import Run, limits, request
from tidegate.core.backlog import Backlog, WorkInOrder
from tidegate.core.events import Finished, Rejected
from tidegate.core.expiry import Expiry
from tidegate.core.lanes import Lanes
from tidegate.core.policies.doors import ClassLimit, QueueLimit, predicted_ttft, seconds
from tidegate.core.policy import ACCEPT, Displace, Key, PolicyContext, Reject
from tidegate.core.predict import HistoryPredictor, StepTime
from tidegate.core.presets import build_policy
from tidegate.core.request import FinishReason, Rejection, Request, Status
from tidegate.core.slo import Slo, shortest
from tidegate.core.view import LoadView, Work
from tidegate.errors import ConfigError

CONTEXT = PolicyContext(HistoryPredictor(), StepTime(prefill_token=0.01, decode=0.1))


def asked(**given: Any) -> Request:
    return Request("r", prompt_tokens=100, max_tokens=10, **given)


def load(**given: Any) -> LoadView:
    return LoadView(**{"now": 0.0, "waiting": 0, "running": 0, "free_blocks": 99, "seats": 4, "budget": 100, **given})


# What waits


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans()), max_size=700), st.data())
def test_work_in_order_is_what_a_sum_over_everybody_says(moves: list[tuple[int, int, bool]], data: Any) -> None:
    ordered, twin = WorkInOrder(), {}
    ordered.RUN = 4
    for seq, (tier, score, goes) in enumerate(moves):
        place = (tier, float(score), seq)
        ordered.add(place, Work(1, seq, 2 * seq))
        twin[place] = Work(1, seq, 2 * seq)
        if goes and twin:
            gone = data.draw(st.sampled_from(sorted(twin))) if len(moves) < 30 else min(twin)
            ordered.remove(gone)
            del twin[gone]
    for asked_for in [*list(twin)[:20], (1, 2.0, 3), (9, 0.0, 0)]:
        ahead = [work for place, work in twin.items() if place < asked_for]
        assert ordered.before(asked_for) == (len(ahead), sum(w.prefill for w in ahead), sum(w.outputs for w in ahead))


def test_runs_stay_short_and_few() -> None:
    """What `before` adds up: one sum a run, and the entries of one run."""
    ordered = WorkInOrder()
    for seq in range(20_000):
        ordered.add((seq % 7, float(seq % 11), seq), Work(1, 1, 1))
    assert max(len(run.places) for run in ordered._runs) <= 2 * ordered.RUN
    assert len(ordered._runs) <= 20_000 / ordered.RUN
    assert ordered.before((7, 0.0, 0)) == (20_000, 20_000, 20_000)


def test_taking_out_what_is_not_there_is_an_error() -> None:
    ordered = WorkInOrder()
    ordered.add((0, 0.0, 1), Work(1, 1, 1))
    for place in ((0, 0.0, 0), (0, 0.0, 2)):
        with pytest.raises(KeyError):
            ordered.remove(place)


def test_the_worst_that_waits_is_the_newest_of_the_worst_tier() -> None:
    backlog = Backlog(lambda r: Work(1, 10, 1))
    waiting = []
    for seq, tier in enumerate([5, 9, 9, 0, 5]):
        r = Request(f"r{seq}", prompt_tokens=1)
        r.seq, r.tier, r.key, r.status = seq, tier, Key(tier, 0.0), Status.WAITING
        backlog.enter(r)
        waiting.append(r)
    backlog.leave(waiting[2])
    ends = []
    for r in backlog.worst_first(0):
        backlog.leave(r)
        ends.append(r.seq)
    assert ends == [1, 4, 0]
    assert backlog.total == (1, 10, 1)


# The verdict


def test_a_limit_on_work_and_the_time_in_which_it_is_served() -> None:
    door = QueueLimit(max_waiting_tokens=500)
    full = load(queued=Work(3, 300, 120), own=Work(1, 100, 9))
    verdict = door.decide(asked(), full, CONTEXT)
    assert isinstance(verdict, Reject)
    assert verdict.reason is Rejection.QUEUE_FULL
    assert verdict.retry_after == pytest.approx(300 * 0.01 + 120 / 4 * 0.1)
    assert door.decide(asked(), full._replace(own=Work(1, 70, 9)), CONTEXT) == ACCEPT
    assert door.decide(asked(), load(own=Work(1, 9000, 9)), CONTEXT) == ACCEPT, "nobody waits"


def test_a_limit_on_requests_is_as_long_as_what_waits_takes() -> None:
    verdict = QueueLimit(max_waiting=7).decide(asked(), load(waiting=7), CONTEXT)
    assert isinstance(verdict, Reject)
    assert verdict.retry_after == pytest.approx(7 * 100 * 0.01 + 7 * 10 / 4 * 0.1)
    assert QueueLimit(max_waiting=8).decide(asked(), load(waiting=7), CONTEXT) == ACCEPT


def test_a_class_has_limits_of_its_own() -> None:
    door = QueueLimit(classes={"batch": ClassLimit(2, None), "offline": ClassLimit(None, 300)})
    busy = load(queued=Work(9, 900, 90), of_class=Work(2, 200, 20), own=Work(1, 100, 9))
    for name, refused in (("batch", True), ("offline", True), ("interactive", False)):
        verdict = door.decide(asked(slo_class=name), busy, CONTEXT)
        assert isinstance(verdict, Reject) == refused
        assert not refused or name in verdict.message  # type: ignore[union-attr]


def test_displacement_only_where_it_suffices() -> None:
    door = QueueLimit(max_waiting=3, max_waiting_tokens=500, displace=True)
    full = load(waiting=3, queued=Work(3, 450, 0), own=Work(1, 100, 0))
    assert door.decide(asked(), full._replace(worse=Work(1, 50, 0)), CONTEXT) == Displace(1, 50)
    assert isinstance(door.decide(asked(), full._replace(worse=Work(1, 49, 0)), CONTEXT), Reject)
    assert isinstance(door.decide(asked(), full, CONTEXT), Reject)


def test_a_hopeless_promise_is_refused_with_the_time_by_which_it_would_be_missed() -> None:
    door = QueueLimit(refuse_hopeless=True)
    behind = load(now=1.0, ahead=Work(2, 200, 0), own=Work(1, 100, 9))
    assert predicted_ttft(behind, CONTEXT) == pytest.approx(3.0)
    verdict = door.decide(asked(slo=Slo(ttft=3.5)), behind, CONTEXT)
    assert isinstance(verdict, Reject)
    assert verdict.reason is Rejection.DEADLINE
    assert verdict.retry_after == pytest.approx(0.5)
    assert door.decide(asked(slo=Slo(ttft=4.0)), behind, CONTEXT) == ACCEPT
    assert isinstance(door.decide(asked(slo=Slo(e2e=4.8)), behind, CONTEXT), Reject)
    assert door.decide(asked(slo=Slo(e2e=5.0)), behind, CONTEXT) == ACCEPT
    assert door.decide(asked(slo=Slo(ttft=0.01)), load(now=1.0, own=Work(1, 100, 9)), CONTEXT) == ACCEPT


def test_running_ones_and_seats_are_in_the_way() -> None:
    free = load(running=3, ahead=Work(0, 97, 0), own=Work(1, 97, 9))
    assert predicted_ttft(free, CONTEXT) == pytest.approx(194 * 0.01 + 2 * 0.1)
    full = load(running=4, ahead=Work(1, 0, 30), own=Work(1, 1, 10))
    assert predicted_ttft(full, CONTEXT) == pytest.approx(2 * 20 / 4 * 0.1)
    assert seconds(Work(1, 10, 40), full, CONTEXT) == pytest.approx(10 * 0.01 + 40 / 4 * 0.1)


@pytest.mark.parametrize("params", [{"max_waiting_tokens": 0}, {"displace_waiting": True}])
def test_a_door_that_means_nothing_is_an_error(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        build_policy("fcfs", params)


# In the scheduler


def ends(run: Run) -> dict[str, str]:
    told = {}
    for name, end in run.ended.items():
        told[name] = end.reason.value
        assert isinstance(end, Finished | Rejected)
    return told


def test_an_urgent_one_takes_the_place_of_the_newest_of_the_worst() -> None:
    run = Run.of("priority", limits(max_num_seqs=1), max_waiting=2, displace_waiting=True)
    run.add(request("runs", 16, 50, priority=9))
    run.step()
    run.add(request("old", 16, 2, priority=9), request("new", 16, 2, priority=9))
    run.add(request("equal", 16, 2, priority=9), request("urgent", 16, 2, priority=1))
    assert ends(run) == {"equal": "queue_full", "new": "displaced"}
    run.until_idle()
    assert ends(run) == {
        **dict.fromkeys(("runs", "old", "urgent"), "length"),
        "equal": "queue_full",
        "new": "displaced",
    }


def test_a_parked_one_can_be_displaced() -> None:
    run = Run.of("priority", limits(), max_waiting=1, displace_waiting=True)
    run.add(request("parked", 16, 2, priority=9, not_before=5.0), request("urgent", 16, 2))
    assert ends(run) == {"parked": "displaced"}
    run.until_idle()
    assert run.scheduler.snapshot(9.0).waiting == 0


def test_an_expired_one_makes_room_for_whoever_comes_next() -> None:
    run = Run.of("fcfs", limits(max_num_seqs=1), max_waiting=1)
    run.add(request("runs", 16, 50))
    run.step()
    run.add(request("waits", 16, 2, queue_ttl=3.0))
    run.steps(2)
    run.now = 4
    run.add(request("next", 16, 2))
    assert ends(run) == {"waits": "timeout"}


def test_a_time_limit_wakes_an_idle_engine() -> None:
    run = Run.of("fcfs", limits())
    run.add(request("parked", 16, 2, not_before=float("inf"), queue_ttl=7.0))
    assert run.scheduler.next_wake(0.0) == 7.0
    told = run.scheduler.explain("parked")
    assert told is not None
    assert told["waiting"]["expires"] == 7.0
    run.until_idle()
    assert ends(run) == {"parked": "dependency_timeout"}
    assert run.scheduler.next_wake(9.0) is None


def test_no_time_to_wait_is_a_bad_request() -> None:
    run = Run.of("fcfs", limits())
    run.add(request("r", 16, 2, queue_ttl=0.0))
    assert ends(run) == {"r": "bad_request"}


def test_a_promise_that_nothing_could_keep_any_more_is_given_up() -> None:
    """Alone, 160 prompt tokens take 1.6 s here: after 8.4 s of waiting a TTFT of 10 s is lost."""
    run = Run.of("fcfs", limits(max_num_seqs=1), shed_hopeless=True)
    run.scheduler.ctx.step_time = StepTime(prefill_token=0.01, decode=0.1)
    run.add(request("runs", 16, 12))
    run.step()
    run.add(request("late", 160, 2, slo=Slo(ttft=10.0)), request("free", 16, 2))
    run.until_idle()
    end = run.ended["late"]
    assert isinstance(end, Finished)
    assert (end.reason, end.now) == (FinishReason.SHED, 10.0)
    assert end.missed == ("ttft",)
    assert ends(run) == {"runs": "length", "late": "shed", "free": "length"}
    assert not any(join.request_id == "late" for plan in run.plans for join in plan.joined)


def test_a_prefix_that_others_compute_meanwhile_gives_time() -> None:
    """Cold, 160 prompt tokens take 1.6 s and a TTFT of 10 s is lost after 8.4 s; of which 144 are cached by then."""
    shared = range(160)
    ends_at = {}
    for outputs, ids in ((8, shared), (8, range(1_000, 1_160)), (12, shared)):
        run = Run.of("fcfs", limits(max_num_seqs=1), shed_hopeless=True)
        run.scheduler.ctx.step_time = StepTime(prefill_token=0.01, decode=0.1)
        run.add(Request("first", token_ids=ids, max_tokens=outputs + 1))
        run.add(Request("next", token_ids=shared, max_tokens=1, slo=Slo(ttft=10.0)))
        run.until_idle()
        ends_at[outputs, ids is shared] = (run.ended["next"].reason, run.ended["next"].now)  # type: ignore[union-attr]
    assert ends_at[8, True] == (FinishReason.LENGTH, 9.0), "it starts after 8.4 s, in time"
    assert ends_at[8, False] == (FinishReason.SHED, 9.0)
    assert ends_at[12, True] == (FinishReason.SHED, 10.0), "of 0.16 s nothing is left at the tenth"


def test_watching_many_costs_no_more_than_who_waits() -> None:
    expiry = Expiry()
    for n in range(5_000):
        r = Request(f"r{n}", prompt_tokens=1)
        r.seq, r.status = n, Status.WAITING
        expiry.watch(r, 1e9, FinishReason.TIMEOUT)
        r.status = Status.RUNNING
    assert len(expiry.heap) < 200
    assert expiry.next_due() is None


def test_limits_combine_to_the_shortest() -> None:
    assert shortest(None, 3.0, 5.0) == 3.0
    assert shortest(None, None) is None


# Head-room by quantile


def history(*outputs: int) -> HistoryPredictor:
    predictor = HistoryPredictor()
    for length in outputs:
        predictor.observe(Request("h", prompt_tokens=16, max_tokens=length), length)
    return predictor


def quantile_run(predictor: HistoryPredictor, **given: Any) -> Run:
    run = Run.of("fcfs", limits(headroom="quantile", **given))
    run.scheduler.ctx.predictor = predictor
    return run


def test_what_is_predicted_is_kept_free() -> None:
    """Two of 16 + 48 tokens want 4 blocks each: 7 blocks are enough for one, and 8 for both."""
    for blocks, running in ((7, 1), (8, 2)):
        run = quantile_run(history(*[49] * 9), num_blocks=blocks, max_num_seqs=4)
        run.add(request("a", 16, 60), request("b", 16, 60))
        run.step()
        assert len(run.scheduler.running) == running
        assert run.plans[0].held_back_by == (None if running == 2 else "headroom")


def test_the_share_of_outputs_that_is_covered_is_an_option() -> None:
    lengths = [1, 1, 1, 1, 1, 1, 1, 1, 49, 49]
    for share, running in ((0.5, 2), (0.9, 1)):
        run = quantile_run(history(*lengths), num_blocks=7, headroom_quantile=share)
        run.add(request("a", 16, 60), request("b", 16, 60))
        run.step()
        assert len(run.scheduler.running) == running


def test_a_prediction_that_is_outlived_is_made_anew() -> None:
    run = quantile_run(history(*[10] * 9), num_blocks=64, prefix_caching=False)
    r = request("a", 16, 200)
    run.add(r)
    expected = run.scheduler.running.expected
    assert expected is not None
    seen = []
    for _ in range(199):
        run.step()
        seen.append(expected.total + len(r.lease.table) if r.lease else 0)
    assert seen[0] == 2
    assert seen == sorted(seen), "an expectation never shrinks while it grows"
    assert len(set(seen)) <= 6, "it doubles, rather than follow block by block"
    assert max(seen) <= r.footprint
    run.until_idle()
    assert expected.total == 0


def test_what_was_declared_is_never_exceeded() -> None:
    run = quantile_run(history(*[500] * 9), num_blocks=6)
    run.add(request("a", 16, 33), request("b", 16, 33))
    run.step()
    assert len(run.scheduler.running) == 2, "three blocks each"


# Labels


def labelled(run: Run, *spec: tuple[str, str | None], **given: Any) -> None:
    run.add(*(request(name, 16, 8, resource=label, **given) for name, label in spec))


def test_one_label_does_not_hold_up_another_or_none() -> None:
    run = Run.of("fcfs", limits(max_resources=2, resource_patience=1000.0))
    labelled(run, ("a", "x"), ("b", "y"), ("c", "z"), ("d", "x"), ("e", None))
    run.step()
    assert run.plans[0].admitted == ["a", "b", "d", "e"]
    assert run.scheduler.waiting.fresh == 1
    run.step()
    assert run.plans[1].held_back_by == "resource slots"
    run.until_idle()
    assert run.first_step_of("c") == 8


def test_without_a_limit_a_label_means_nothing() -> None:
    run = Run.of("fcfs", limits())
    labelled(run, ("a", "x"), ("b", "y"), ("c", "z"))
    run.step()
    assert len(run.scheduler.running) == 3


def test_who_is_ahead_in_the_order_passes_also_when_a_label_is_given_up() -> None:
    run = Run.of("priority", limits(max_resources=1, resource_patience=0.0))
    labelled(run, ("x1", "x"))
    run.step()
    labelled(run, ("y", "y"), priority=5)
    run.step()
    labelled(run, ("x-worse", "x"), priority=9)
    labelled(run, ("x-urgent", "x"), priority=0)
    run.until_idle()
    order = sorted(("x1", "y", "x-worse", "x-urgent"), key=run.first_step_of)
    assert order == ["x1", "x-urgent", "y", "x-worse"]
    assert run.first_step_of("x-urgent") == 2, "at once, beside x1"


def test_ten_thousand_behind_a_label_cost_a_step_nothing() -> None:
    """Keys are asked for when somebody is queued or shown, never step by step."""
    calls = 0

    def order(r: Request) -> Key:
        nonlocal calls
        calls += 1
        return Key(0, 0.0)

    lanes = Lanes(order, slots=1, patience=5.0)
    runs = Request("runs", prompt_tokens=1, resource="x")
    lanes.started(runs)
    for n in range(10_000):
        r = Request(f"r{n}", prompt_tokens=1, resource="y" if n % 2 else "x")
        r.seq = n
        lanes.add(r)
    assert calls == 10_001, "each once, and the one that is shown"
    for now in range(100):
        lanes.rekey_due(float(now))
        assert lanes.peek() is not None or now >= 5
    assert calls < 10_005
    assert len(lanes) == 10_000
    assert lanes.fresh == 10_000
    lanes.left(runs)
    assert lanes.peek() is not None
    assert calls < 10_010
