"""Orders: their formulas, and what ageing guarantees."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.harness import Run, limits, request
from tidegate.core.plan import StepPlan, StepResult
from tidegate.core.policies.orders import Aged, Fcfs, Priority, ShortestJob
from tidegate.core.policy import PolicyContext
from tidegate.core.predict import OraclePredictor, StepTime
from tidegate.core.presets import PRESETS, build_policy
from tidegate.core.request import Request
from tidegate.core.scheduler import Scheduler
from tidegate.errors import ConfigError, RequestRefused

CTX = PolicyContext(OraclePredictor(), StepTime(prefill_token=0.001, decode=0.1))


def test_base_orders_leave_arrival_to_the_tie() -> None:
    early, late = request("a", 10, 5, arrival=1.0, priority=3), request("b", 10, 5, arrival=9.0, priority=3)
    for order in (Fcfs(), Priority(), ShortestJob()):
        assert order.key(early, CTX) == order.key(late, CTX)
    assert Fcfs().key(early, CTX) == (0, 0.0, float("inf"))
    assert Priority().key(early, CTX)[:2] == (3, 0.0)


def test_shortest_job_is_what_is_left_in_seconds() -> None:
    fresh = request("a", 100, 50, oracle_tokens=20)
    assert ShortestJob().key(fresh, CTX).score == pytest.approx(100 * 0.001 + 20 * 0.1)
    fresh.preemptions = 1
    fresh.count(planned=110, sampled=11, computed=110, emitted=11)
    assert ShortestJob().key(fresh, CTX).score == pytest.approx(111 * 0.001 + 9 * 0.1), (
        "its KV is gone, its outputs stay"
    )


def test_ageing_folds_the_class_and_keeps_it_for_displacement() -> None:
    r = request("a", 10, 5, arrival=7.0, priority=4)
    aged = Aged(Priority(), window=20.0)
    assert aged.key(r, CTX)[:2] == (0, 4 * 20.0 + 7.0)
    assert aged.tier(r, CTX) == 4


@settings(max_examples=40, deadline=None)
@given(
    window=st.integers(1, 15),
    tier=st.integers(1, 3),
    start=st.integers(0, 10),
    outputs=st.integers(1, 4),
    depth=st.sampled_from([1, 2]),
)
def test_bounded_overtaking(window: int, tier: int, start: int, outputs: int, depth: int) -> None:
    """An adversary sends the urgent class as fast as the machine serves it. Nobody who arrives more than
    `tier * window` seconds after the low one starts before it."""
    policy = build_policy("priority", {"aging_window": float(window), "backfill": False})
    run = Run.of(policy, limits(num_blocks=64, max_num_seqs=2), depth)
    ahead = start + tier * window + 1
    for step in range(ahead * (1 + outputs) // 2 + ahead + 20):
        if step == start:
            run.add(request("low", 16, outputs, priority=tier))
        run.add(request(f"h{step}", 16, outputs, priority=0))
        run.step()
    assert "low" in run.received, "it starts while the adversary goes on"
    began = run.first_step_of("low")
    for plan in run.plans[: began + 1]:
        for join in plan.joined:
            if join.request_id.startswith("h"):
                assert int(join.request_id[1:]) <= start + tier * window


def test_without_ageing_the_same_adversary_starves_it() -> None:
    run = Run.of("priority", limits(num_blocks=64, max_num_seqs=2))
    for step in range(400):
        if step == 3:
            run.add(request("low", 16, 4, priority=2, slo_class="batch"))
        run.add(request(f"h{step}", 16, 4, priority=0))
        run.step()
    assert "low" not in run.received
    assert run.scheduler.snapshot(400.0).oldest_wait_by_class["batch"] == 397.0
    told = run.scheduler.explain("low")
    assert told is not None
    assert told["waiting"]["held_back_by"] == "seats"
    assert told["waiting"]["ahead"] > 100


def test_explain_tells_the_whole_story_and_forgets_in_the_end() -> None:
    run = Run.of("priority", limits(max_num_seqs=1))
    run.add(request("low", 20, 10, priority=5))
    run.steps(3)
    run.add(request("high", 20, 3, priority=0))
    run.until_idle()
    told = run.scheduler.explain("low")
    assert told is not None
    assert [line["event"] for line in told["decisions"]] == ["arrived", "admitted", "preempted", "restored", "finished"]
    assert told["decisions"][2]["reason"] == "seat wanted by high (priority 0 < 5)"
    assert told["decisions"][3]["recomputed_tokens"] + told["decisions"][3]["kept_tokens"] == 22
    assert told["status"] == "finished"
    assert run.scheduler.explain("never seen") is None
    for n in range(600):
        run.add(request(f"r{n}", 1, 1))
        run.until_idle()
    assert run.scheduler.explain("low") is None


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_and_runs(name: str) -> None:
    run = Run.of(name, limits(**PRESETS[name].limits))
    run.add(*(request(f"r{n}", 50, 20) for n in range(12)))
    run.until_idle()
    assert all(len(tokens) == 20 for tokens in run.received.values())


@pytest.mark.parametrize(
    ("name", "params", "told"),
    [
        ("fifo", {}, "unknown policy 'fifo'; known are joint"),
        ("fcfs", {"shares": 1}, "no parameter 'shares'; did you mean 'share'"),
        ("fcfs", {"patience": 1.0}, "no parameter 'patience'; it has aging_window"),
        ("sla", {"pationce": 1.0}, "did you mean 'patience'"),
        ("fair", {"aging_window": 5.0}, "ageing does not work on this order: it moves tenants"),
        ("sla", {"aging_window": 5.0}, "ageing does not work on this order"),
        ("prefix", {"aging_window": 5.0}, "ageing does not work on this order"),
        ("joint", {"aging_rate": 2.0}, "aging_rate does nothing here"),
        ("fair", {"weights": {"a": 0.0}}, "weights.a must be above 0"),
        ("fair", {"w_out": 0.0}, "w_out must be above 0"),
        ("mlfq", {"levels": 1}, "levels must be at least 2"),
        ("sla", {"patience": 0.0}, "patience must be above 0"),
        ("sglang-lpm", {"age": -1.0}, "age must be at least 0"),
        ("fcfs", {"victim": "oldest"}, "unknown victim 'oldest'; known are"),
        ("fcfs", {"share": 0.0}, "share must be above 0"),
    ],
)
def test_a_wrong_policy_is_told_in_one_sentence(name: str, params: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build_policy(name, params)


def test_vllm_v1_evicts_its_newest_and_never_displaces() -> None:
    """The known design: what it lacks stays off, so that baselines are honest."""
    run = Run.of("vllm-v1", limits(num_blocks=20, max_num_seqs=2, **PRESETS["vllm-v1"].limits))
    run.add(request("a", 100, 120, priority=9), request("b", 100, 120, priority=9))
    run.steps(3)
    run.add(request("h", 16, 4, priority=0))
    run.until_idle()
    assert {id for _, id, _ in run.preemptions()} == {"b"}
    assert run.first_step_of("h") > run.token_times["a"][-1]


@pytest.mark.parametrize(("host", "swaps"), [(64, True), (0, False)])
def test_vllm_v0_swaps_where_there_is_a_host_pool(host: int, swaps: bool) -> None:
    room = limits(num_blocks=20, max_num_seqs=2, host_blocks=host, **PRESETS["vllm-v0"].limits)
    run = Run.of("vllm-v0", room)
    run.add(request("a", 100, 120), request("b", 100, 120))
    run.until_idle()
    modes = {p.mode for plan in run.plans for p in plan.preempted}
    assert modes == ({"swap"} if swaps else {"recompute"})
    assert (run.ended["b"].request.recomputed_tokens == 0) is swaps


def test_an_id_in_use_is_refused_and_a_free_one_is_not() -> None:
    scheduler = Scheduler(build_policy("fcfs"), limits())
    scheduler.add(request("a", 4, 4), 0.0)
    with pytest.raises(ValueError, match="'a' is in use"):
        scheduler.add(request("a", 4, 4), 0.0)
    scheduler.abort("a", 0.0)
    scheduler.add(Request("a", token_ids=[1], max_tokens=1), 0.0)


def test_what_would_break_a_plan_is_refused_at_the_door() -> None:
    scheduler = Scheduler(build_policy("fcfs"), limits())
    for n, tokens in enumerate(([2**32], [-1], [3] * 15 + [2**40])):
        with pytest.raises(RequestRefused, match="token ids must be"):
            scheduler.add(Request(f"r{n}", token_ids=tokens * 16, max_tokens=1), 0.0)
    with pytest.raises(RequestRefused, match="token ids must be"):
        scheduler.add(Request("both", token_ids=range(64), block_hashes=[1, 2], max_tokens=1), 0.0)
    assert not scheduler.has_work


def test_a_result_that_is_too_short_is_not_applied() -> None:
    scheduler = Scheduler(build_policy("fcfs"), limits())
    scheduler.add(request("a", 4, 4), 0.0)
    scheduler.add(request("b", 4, 4), 0.0)
    plan = scheduler.plan(0.0)
    with pytest.raises(ValueError, match="step 0 emits 2 tokens, the result has 1"):
        scheduler.apply(plan, StepResult([1]), 0.0)
    with pytest.raises(ValueError, match="not the oldest in flight"):
        scheduler.apply(StepPlan(7, 0.0), StepResult([]), 0.0)
    scheduler.apply(plan, StepResult([1, 1]), 0.0)


def test_cancelled_ones_leave_nothing_behind() -> None:
    """Neither the parked nor the waiting: what a step looks at follows who is there."""
    scheduler = Scheduler(build_policy("fcfs"), limits(max_num_seqs=1))
    scheduler.add(request("runs", 4, 100), 0.0)
    scheduler.plan(0.0)
    for n in range(3_000):
        scheduler.add(Request(f"p{n}", prompt_tokens=4, max_tokens=4, not_before=1e9), 0.0)
        scheduler.add(Request(f"w{n}", prompt_tokens=4, max_tokens=4), 0.0)
    for n in range(3_000):
        scheduler.abort(f"p{n}", 0.0)
        scheduler.abort(f"w{n}", 0.0)
    assert len(scheduler._parked) < 100
    assert len(scheduler.waiting._rest) < 100
    assert scheduler.next_wake(0.0) is None


def test_the_queue_limit_counts_those_never_admitted() -> None:
    policy = build_policy("fcfs", {"max_waiting": 2})
    run = Run.of(policy, limits(num_blocks=20, max_num_seqs=2))
    run.add(request("a", 100, 120), request("b", 100, 120))
    while not run.preemptions():
        run.step()
    run.add(request("c", 300, 4), request("d", 300, 4), request("e", 300, 4))
    assert list(run.ended) == ["e"], "the preempted one does not count"
    assert run.ended["e"].retry_after == pytest.approx(2 * 300 * 1e-4 + 2 * 4 / 2 * 0.02), "two like it, on two seats"
