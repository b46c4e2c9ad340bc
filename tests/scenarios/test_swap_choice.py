"""S34 of the group "Victim choice, swap or recompute": who goes, and how it comes back, by cost."""

import pytest


def first_victim(run):
    row = next(row for row in run.rows if row.preempted)
    (victim,) = row.preempted
    return row.step, victim["id"], victim["mode"]


@pytest.mark.expects("S34", 0)
@pytest.mark.parametrize("policy", ["fcfs", "priority", "joint"])
def test_s34_the_cheaper_victim_goes_the_cheaper_way(play, policy):
    run = play("S34", policy=policy)
    assert first_victim(run) == (161, "SHORT", "swap")
    assert "swap 2.6 ms < recompute 10.4 ms" in run.rows[161].preempted[0]["reason"]
    assert (run["SHORT"].swapped_blocks, run["SHORT"].recomputed_tokens, run["LONG"].preemptions) == (13, 0, 0)


@pytest.mark.expects("S34", 0)
@pytest.mark.parametrize("changed", [{"cfg.cost.copy_block_us": 1000}, {"cfg.host_blocks": 8}])
def test_s34_recompute_where_copies_are_slow_or_have_no_room(play, changed):
    run = play("S34", set=changed)
    assert first_victim(run) == (161, "SHORT", "recompute")
    assert run["SHORT"].swapped_blocks == 0
    assert run["SHORT"].recomputed_tokens > 0


@pytest.mark.expects("S34", 1)
@pytest.mark.parametrize("changed", [{}, {"cfg.host_blocks": 8}])
def test_s34_whoever_was_evicted_returns_before_new_prompts(play, changed):
    late = [{"id": "NEW", "t": 170, "p": 160, "o": 300}]  # too long to pass by back-fill
    run = play("S34", set={**changed, "cfg.max_seqs": 2}, extra=late)
    back = next(step for step, name in run.restorations() if name == "SHORT")
    assert run["NEW"].admitted_step >= back


@pytest.mark.expects("S34", 1)
def test_s34_a_busy_copy_engine_counts(play):
    """Two equals go in one step: the second is behind the first in the queue of copies, and that tips its choice."""
    extra = [{"id": "W", "t": 0, "p": 48, "o": 300, "prio": 5}, {"id": "V", "t": 0, "p": 48, "o": 300, "prio": 5}]
    urgent = [{"id": "U", "t": 20, "p": 900, "o": 4, "prio": 0}]
    changed = {"cfg.cost.copy_block_us": 300, "cfg.kv": 62, "SHORT.prio": 5, "LONG.p": 16}
    run = play("S34", policy="priority", set={**changed, "cfg.max_seqs": 5}, extra=extra + urgent)
    row = next(row for row in run.rows if len(row.preempted) > 1)
    assert [victim["mode"] for victim in row.preempted][:2] == ["swap", "recompute"]
