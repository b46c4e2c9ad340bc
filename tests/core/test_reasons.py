"""Why a request took a seat: one sentence with numbers, wherever decisions are told."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.harness import Run, limits, request
from tidegate.core.events import Admitted, Preempted, Restored
from tidegate.core.presets import PRESETS, build_policy
from tidegate.core.reasons import InPlaceOf, score_unit, tier_name
from tidegate.core.request import Request


def reasons(run: Run) -> dict[str, str]:
    """Why each request was admitted first."""
    return {e.request.id: str(e.why) for e in run.events if isinstance(e, Admitted)}


def decisions(run: Run, name: str, kind: str) -> list[dict[str, Any]]:
    """What `explain` tells of one request, of one kind."""
    told = run.scheduler.explain(name)
    assert told is not None
    return [d for d in told["decisions"] if d["event"] == kind]


def test_the_first_in_the_order_is_told_with_its_key() -> None:
    run = Run.of("priority", limits(max_num_seqs=1))
    run.add(request("late", 16, 2, priority=5), request("urgent", 16, 2, priority=1))
    run.until_idle()
    assert reasons(run) == {
        "urgent": "first in turn: tier 1, score 0, arrival 1",
        "late": "first in turn: tier 5, score 0, arrival 0",
    }
    assert decisions(run, "late", "admitted")[0]["reason"] == reasons(run)["late"]


def test_a_score_is_told_in_its_unit_and_as_it_was_at_the_time() -> None:
    """A tenant's counter has risen since: the sentence keeps what decided."""
    run = Run.of("fair", limits(max_num_seqs=1))
    run.add(request("a", 32, 4, tenant="x"), request("b", 32, 4, tenant="x"))
    run.until_idle()
    assert reasons(run) == {
        "a": "first in turn: tier 0, score 0 weighted tokens, arrival 0",
        "b": "first in turn: tier 0, score 40 weighted tokens, arrival 1",
    }


def test_whoever_takes_the_place_of_another_says_whose_and_the_other_how_it_came_back() -> None:
    run = Run.of("priority", limits(max_num_seqs=1))
    run.add(request("low", 16, 20, priority=9))
    run.steps(3)
    run.add(request("high", 16, 2, priority=0))
    run.until_idle()
    assert reasons(run)["high"] == "in the place that low gave"
    (back,) = decisions(run, "low", "restored")
    assert back["reason"] == "back after preemption, first in turn: tier 9, score 0, arrival 0"
    assert [type(e) for e in run.events if isinstance(e, Preempted | Restored)] == [Preempted, Restored]


def test_of_many_who_gave_way_a_few_are_named() -> None:
    assert str(InPlaceOf(tuple("abcdef"))) == "in the place that a, b, c, d gave (and 2 more)"


def test_whoever_passes_a_blocked_head_says_by_which_bound() -> None:
    run = Run.of("fcfs", limits(num_blocks=20, max_num_seqs=4, headroom="none"))
    run.add(request("old", 160, 100), request("head", 240, 16), request("short", 16, 4), request("small", 16, 40))
    run.until_idle()
    told = reasons(run)
    assert told["short"] == "past head, held back by kv: over in 5 steps, head cannot start for 100"
    assert told["small"].startswith("past head, held back by kv: over in 41 steps, head cannot start for ")
    assert told["head"].startswith("first in turn")


def test_whoever_fits_beside_the_head_says_how_many_blocks_it_takes_of_how_many() -> None:
    run = Run.of("fcfs", limits(num_blocks=20, max_num_seqs=4, headroom="none"))
    run.add(request("old", 160, 10), request("head", 208, 16), request("beside", 16, 40))
    run.until_idle()
    assert reasons(run)["beside"] == (
        "past head, held back by kv: its 4 blocks are among the 6 that head leaves free when it starts"
    )


def test_whoever_starts_beside_one_that_waits_for_a_prefix_names_it() -> None:
    run = Run.of("fcfs", limits(max_num_batched_tokens=80))
    first, follower = (Request(name, token_ids=range(64), max_tokens=2) for name in ("first", "follower"))
    run.add(first, follower, request("other", 16, 2))
    run.until_idle()
    assert reasons(run)["other"] == (
        "beside follower, which waits for a prefix that another computes, its seat and blocks left to it"
    )


def test_levels_are_called_levels() -> None:
    run = Run.of("mlfq", limits(max_num_seqs=1), quantum=32)
    run.add(request("long", 16, 60))
    run.steps(24)
    run.add(request("new", 16, 2))
    run.until_idle()
    assert reasons(run)["new"] == "in the place that long gave"
    evicted = decisions(run, "long", "preempted")[0]
    assert evicted["reason"] == "seat wanted by new (level 0 < 1)"


@pytest.mark.parametrize("name", PRESETS)
def test_every_order_with_classes_names_them_and_every_score_has_a_unit(name: str) -> None:
    named = {"joint": "priority", "priority": "priority", "mlfq": "level", "fastserve": "level"}
    order = build_policy(name).order
    assert tier_name(order) == named.get(name, "tier")
    plain = {"fcfs", "priority", "mlfq", "fastserve", "vllm-v0", "vllm-v1", "sarathi"}
    assert (score_unit(order) == "") == (name in plain)
    if getattr(order, "unwrapped", None) is None:
        aged = build_policy(name, {"aging_window": 9.0}).order
        assert (tier_name(aged), score_unit(aged)) == (tier_name(order), "s")
