"""Decisions where requests share blocks: what counts as free, who waits for whom, and who pays for it."""

from __future__ import annotations

import pytest

from tests.core.harness import Run, limits, request
from tidegate.core.request import Request

SHARED = list(range(320))


def sharing(id: str, own: list[int], outputs: int, **given: object) -> Request:
    """A request whose prompt begins with the 20 blocks that all of these share."""
    return Request(id, token_ids=SHARED + own, max_tokens=outputs, **given)  # type: ignore[arg-type]


def test_blocks_that_the_head_takes_up_itself_are_not_freed_by_its_victim() -> None:
    """Only `victim` holds the head's prefix: evicting it would leave the head as short as before."""
    run = Run.of("priority", limits(num_blocks=26, max_num_seqs=4))
    run.add(request("keep", 64, 8, priority=0))
    run.step()
    run.add(sharing("victim", [1, 2, 3], 8, priority=9))
    run.step()
    run.add(sharing("head", list(range(900, 940)), 1, priority=0))
    run.until_idle()
    assert run.preemptions() == []
    assert run.first_step_of("head") > run.token_times["keep"][-1]


def test_blocks_that_only_victims_share_come_free_with_all_of_them() -> None:
    run = Run.of("priority", limits(num_blocks=30, max_num_seqs=4))
    run.add(sharing("v1", [1] * 8, 100, priority=9))
    run.steps(3)
    run.add(sharing("v2", [2] * 8, 100, priority=9))
    run.steps(2)
    run.add(request("head", 16 * 15, 4, priority=0))
    assert run.step().admitted == ["head"]
    assert sorted(id for _, id, _ in run.preemptions()) == ["v1", "v2"]


def test_an_idle_prefix_counts_once_for_two_urgent_heads() -> None:
    run = Run.of("priority", limits(num_blocks=44, max_num_seqs=6, max_num_batched_tokens=1000))
    run.add(sharing("warm", [1], 1))
    run.until_idle()
    run.add(request("low", 16 * 10 - 8, 60, priority=9))
    run.steps(2)
    run.add(sharing("x", [5] * 30, 4, priority=0), sharing("y", [6] * 30, 4, priority=0))
    plan = run.step()
    assert plan.admitted == ["x", "y"]
    assert plan.preempted == []


def test_a_head_that_waits_for_a_prefix_loses_no_room_to_those_behind_it() -> None:
    def start_of_head(passer: bool) -> int:
        run = Run.of("fcfs", limits(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64))
        run.add(sharing("leader", [], 10))
        run.step()
        run.add(sharing("head", list(range(900, 1220)), 5))
        if passer:
            run.add(request("large", 16 * 30, 500), request("small", 16, 5))
        run.until_idle()
        assert not passer or run.first_step_of("small") < run.first_step_of("large")
        return run.first_step_of("head")

    assert start_of_head(passer=True) == start_of_head(passer=False)


def test_nobody_waits_for_a_prefix_that_one_behind_it_computes() -> None:
    """The holder is of the worst class and a middle class takes all tokens: the urgent one computes for itself."""
    run = Run.of("priority", limits(num_blocks=2000, max_num_seqs=32, max_num_batched_tokens=64))
    run.add(sharing("holder", list(range(500, 820)), 2, priority=10))
    run.step()
    run.add(sharing("urgent", [1] * 20, 2, priority=0))
    for n in range(40):
        run.add(request(f"m{n}", 64, 1, priority=5))
        run.step()
    assert run.first_step_of("urgent") == 1
    run.until_idle()


def test_those_who_share_an_uncomputed_prefix_compute_it_once() -> None:
    run = Run.of("fcfs", limits(num_blocks=400, max_num_batched_tokens=4096))
    run.add(*(sharing(f"r{n}", [n] * 16, 4) for n in range(8)))
    run.until_idle()
    assert sum(c.length for plan in run.plans for c in plan.chunks) == 336 + 7 * 16


def test_a_victim_whose_prefix_others_hold_loses_little() -> None:
    """`sharer` computed as much as `own` but would find most of it again."""
    run = Run.of("fcfs", limits(num_blocks=62, max_num_seqs=4, max_num_batched_tokens=1024, stall_steps=0))
    run.add(sharing("first", [1], 300))
    run.step()
    run.add(request("own", 330, 300), sharing("sharer", list(range(700, 710)), 300))
    while not run.preemptions():
        run.step()
    assert [id for _, id, _ in run.preemptions()] == ["sharer"]


def test_an_urgent_head_is_not_held_up_by_its_victims_own_growth() -> None:
    """With declared head-room the victim's growth is kept free for it: it goes with the victim."""
    run = Run.of("priority", limits(num_blocks=40, max_num_seqs=4, headroom="declared"))
    run.add(request("victim", 80, 400, priority=9))
    run.steps(3)
    run.add(request("head", 320, 10, priority=0))
    assert run.step().admitted == ["head"]


@pytest.mark.parametrize(("prompt", "victim"), [(16, "first"), (120, "second")])
def test_the_first_in_order_gives_way_to_an_equal_only_for_a_bargain(prompt: int, victim: str) -> None:
    """It would lose the least; whoever comes after it goes instead, unless that loses more than twice as much."""
    run = Run.of("fcfs", limits(num_blocks=24, max_num_seqs=2, stall_steps=0), victim="least-work")
    run.add(request("first", prompt, 200))
    run.step()
    run.add(request("second", 200, 100))
    while not run.preemptions():
        run.step()
    assert [id for _, id, _ in run.preemptions()] == [victim]


def test_back_fill_tries_again_when_a_passing_reason_has_passed() -> None:
    def start_of_candidate(partial: int | None) -> int:
        lim = limits(num_blocks=110, max_num_seqs=8, max_num_batched_tokens=64, partial_prefills=partial)
        run = Run.of("priority", lim)
        run.add(request("old", 16 * 60, 600))
        run.steps(20)
        run.add(request("heavy", 1600, 5, priority=5))
        run.steps(3)
        run.add(request("prompt", 64 * 4, 300), request("candidate", 8, 10, priority=5))
        run.until_idle()
        return run.first_step_of("candidate")

    assert start_of_candidate(1) <= start_of_candidate(None) + 1


def test_a_long_one_may_pass_only_within_the_bypass_bound() -> None:
    """It fits beside the head, but `old` ends early: it must not hold the head up for long."""
    run = Run.of("fcfs", limits(num_blocks=110, max_num_seqs=8, max_num_batched_tokens=4096, bypass_bound=30))
    run.stop_after["old"] = 10
    run.add(request("old", 1590, 160))
    run.step()
    run.add(request("heavy", 1600, 40), request("long", 16, 80))
    run.until_idle()
    assert run.first_step_of("heavy") == 10
    assert run.first_step_of("long") >= 10


def test_a_reused_prefix_outlives_an_older_one() -> None:
    run = Run.of("fcfs", limits(num_blocks=44, max_num_seqs=1))
    run.add(sharing("a", [1], 1), request("other", 320, 1), sharing("b", [2], 1))
    run.until_idle()
    run.add(request("large", 16 * 14, 1))
    run.until_idle()
    run.add(sharing("c", [3], 1))
    run.until_idle()
    assert run.ended["c"].request.cached_tokens == 320, "`other` was used least recently"
