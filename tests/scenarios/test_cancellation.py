"""Scenarios of the group "Cancellation"."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.mark.expects("S49", 0)
def test_s49_blocks_and_seat_come_back_at_once(play):
    run = play("S49")
    row = run.rows[11]
    assert row.admitted == ["B"]
    assert list(row.scheduled) == ["B"]
    assert row.free_blocks == 32 - 16  # B's prompt and nothing of A


@pytest.mark.expects("S49", 1)
def test_s49_no_token_after_the_cancel(play):
    run = play("S49")
    assert run["A"].finish_reason == "cancelled"
    assert max(row.step for row in run.rows if "A" in row.emitted) == 10
    assert run["A"].outputs == len(run.outcome.streams["A"]) == 10  # tokens at steps 1 to 10
    assert run["B"].outputs == 20


URGENT = {"id": "U", "t": 3, "p": 64, "o": 30, "prio": -1}


@pytest.mark.expects("S49", 2)
@pytest.mark.parametrize(
    ("cancel", "extra", "state"),
    [(0, (), "in prefill"), (1, (), "at the first token"), (8, (URGENT,), "preempted")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_s49_in_every_state(play, cancel, extra, state):
    run = play("S49", set={"A.cancel": cancel}, extra=extra)
    assert run["A"].finish_reason == "cancelled"
    assert run["A"].preemptions == (state == "preempted")
    assert max(run.scheduled("A")) <= cancel
    held = {name: count for name, count in run.blocks_in_use(cancel + 1).items() if name != "A"}
    assert run.rows[cancel + 1].free_blocks == 32 - max(16 * ("B" in held), sum(held.values()))
    assert run["B"].outputs == 20


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cancel=st.integers(0, 190))
def test_s49_as_a_kind(play, cancel):
    """Whenever the client goes, its blocks and seat are another's in the next step."""
    run = play("S49", set={"A.cancel": cancel, "A.x": 3, "cfg.max_seqs": 3, "cfg.kv": 96, "cfg.budget": 1024})
    assert all(fate.finish_reason == "cancelled" for fate in run.family("A").values())
    assert run["B"].admitted_step == max(1, cancel + 1)
    assert run.rows[-1].free_blocks == 96


@pytest.mark.expects("S50", 0)
def test_s50_the_running_one_is_undisturbed(play):
    run = play("S50")
    assert (run["A"].outputs, run["A"].finish_step, run["A"].max_gap_steps) == (60, 59, 1)


@pytest.mark.expects("S50", 1)
def test_s50_the_cancelled_one_computes_nothing(play):
    run = play("S50")
    assert run.scheduled("B") == {}
    assert (run["B"].finish_step, run["B"].finish_reason) == (20, "cancelled")


@pytest.mark.expects("S50", 2)
def test_s50_the_next_one_starts(play):
    assert play("S50")["C"].admitted_step in (60, 61)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cancelled=st.integers(1, 40), outputs=st.integers(30, 90), size=st.sampled_from([8, 16, 32]))
def test_s50_as_a_kind(play, cancelled, outputs, size):
    """Any number of queued requests may go; nobody else notices."""
    run = play("S50", set={"B.x": cancelled, "A.o": outputs, "cfg.block": size})
    assert all(fate.outputs == 0 for fate in run.family("B").values())
    assert run["A"].finish_step == outputs - 1
    assert run["C"].outputs == 10
