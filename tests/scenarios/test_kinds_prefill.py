"""The group "Long prefill, chunking, decode starvation" with drawn numbers."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scenarios.drawn import block_sizes, blocks, depths, few, play
from tidegate.errors import InputError

FAIR_TURN = st.sampled_from(["joint", "fcfs", "priority"])


@few
@given(
    size=block_sizes,
    budget=st.sampled_from([64, 150, 256, 1000]),
    count=st.integers(1, 8),
    share=st.integers(1, 100),
    at=st.integers(1, 8),
    outputs=st.integers(1, 30),
    policy=FAIR_TURN,
    depth=depths,
)
def test_s10_a_huge_prompt_hides_no_tiny_one(size, budget, count, share, at, outputs, policy, depth):
    """Half of a step is theirs: the tiny ones together take as many halves, and the huge one lasts longer than that."""
    half = (budget - count) // 2
    tiny = max(1, share * half // 100)
    steps = blocks(count * tiny, half)
    huge = budget * (at + 2 * steps + 6)
    cfg = {"kv": 20000, "block": size, "budget": budget, "max_seqs": count + 1, "policy": policy}
    reqs = [{"id": "BIG", "t": 0, "p": huge, "o": 4}, {"id": "S", "x": count, "t": at, "p": tiny, "o": outputs}]
    run = play(cfg, reqs, depth=depth)
    assert all(fate.first_token_step - at < steps + depth for fate in run.family("S").values())
    # Nothing is wasted: it ends as if the others' tokens had been its own.
    assert run["BIG"].first_token_step <= blocks(huge + count * (tiny + outputs), budget) + depth - 2


@few
@given(
    size=block_sizes,
    budget=st.sampled_from([64, 150, 512]),
    seats=st.integers(2, 6),
    short=st.integers(1, 40),
    outputs=st.integers(1, 30),
    steps=st.integers(3, 12),
    depth=depths,
)
def test_s15_a_batch_is_not_filled_by_one(size, budget, seats, short, outputs, steps, depth):
    """A long prompt and as many short ones as there are seats beside it arrive at once."""
    others = seats - 1
    halves = blocks(others * short, (budget - others) // 2)
    long = budget * (steps + 2 * halves)
    cfg = {"kv": 10000, "block": size, "budget": budget, "max_seqs": seats}
    run = play(
        cfg,
        [{"id": "A", "t": 0, "p": long, "o": 4}, {"id": "B", "x": others, "t": 0, "p": short, "o": outputs}],
        depth=depth,
    )
    assert all(fate.first_token_step <= halves + depth - 1 for fate in run.family("B").values())
    assert run["A"].first_token_step <= blocks(long + others * (short + outputs), budget) + depth - 2


@few
@given(
    budget=st.sampled_from([32, 64, 100]),
    chunks=st.integers(3, 10),
    outputs=st.integers(1, 6),
    rate=st.sampled_from([1.0, 3.0, 9.0]),
    size=block_sizes,
)
def test_s11_a_stream_of_short_jobs_does_not_starve_the_long_one(budget, chunks, outputs, rate, size):
    """Every step brings a job that fills it: the long one is never the shortest, and waiting makes it the first."""
    advantage = (chunks + outputs - 2) * rate  # seconds by which its service is longer, at what a second is worth
    bound = int(advantage) + 2
    cfg = {"kv": 4000, "block": size, "budget": budget, "max_seqs": 32, "policy": "sjf"}
    last = bound + 2 * chunks + 4
    reqs = [
        {"id": "BIG", "t": 0, "p": chunks * budget, "o": outputs},
        {"id": "S", "every": 1, "from": 0, "until": last, "p": budget, "o": 1},
    ]
    aged = play({**cfg, "params": {"aging_window": 10.0, "aging_rate": rate}}, reqs)
    assert aged["BIG"].admitted_step <= bound
    assert aged["BIG"].first_token_step <= bound + 2 * chunks
    assert play(cfg, reqs, steps=last)["BIG"].admitted_step is None


@few
@given(
    turns=st.integers(1, 6),
    streams=st.integers(1, 8),
    prompt=st.integers(2, 300),
    outputs=st.integers(1, 8),
    arrivals=st.integers(1, 25),
    every=st.integers(1, 2),
    size=block_sizes,
)
def test_s12_prefills_and_decodes_take_turns(turns, streams, prompt, outputs, arrivals, every, size):
    """Seats and memory are for all, so that a prompt which waits could be computed."""
    cfg = {"kv": 8000, "block": size, "budget": 128, "max_seqs": streams + arrivals, "mixed_batches": False}
    reqs = [
        {"id": "D", "x": streams, "t": 0, "p": 8, "o": 100},
        {"id": "P", "every": every, "from": 5, "until": 5 + arrivals * every, "p": prompt, "o": outputs},
    ]
    run = play({**cfg, "params": {"max_prefill_steps": turns}}, reqs)
    assert all((fate.max_gap_steps or 0) <= turns + 1 for fate in run.outcome.requests.values())
    dry, first = 0, {name: fate.first_token_step for name, fate in run.outcome.requests.items()}
    for row in run.rows:
        assert len({tokens > 1 or row.step <= first[name] for name, tokens in row.scheduled.items()}) <= 1
        waits = any(fate.arrival_step <= row.step < first[name] for name, fate in run.outcome.requests.items())
        dry = dry + 1 if waits and not any(row.step <= first[name] for name in row.scheduled) else 0
        assert dry < 3


@few
@given(
    base=st.integers(2, 20),
    each=st.sampled_from([0.01, 0.02, 0.1]),
    streams=st.integers(1, 20),
    room=st.integers(64, 400),
    chunks=st.integers(2, 12),
    margin=st.sampled_from([0.0, 0.05, 0.2]),
    size=block_sizes,
)
def test_s13_a_chunk_is_what_the_promise_leaves(base, each, streams, room, chunks, margin, size):
    """The promise leaves `room` prefill tokens beside all who decode, and the budget more than that."""
    limit = base + each * (streams + room + 0.5)
    cfg = {"kv": 20000, "block": size, "budget": 1024, "max_seqs": 64, "step_ms": f"{base} + {each}*tokens"}
    cfg["params"] = {"budget": "adaptive", "margin": margin}
    long = chunks * room + 1
    promised = {"id": "D", "x": streams, "t": 0, "p": 4, "o": 40, "slo": {"tpot_ms": limit / (1 - margin)}}
    run = play(cfg, [promised, {"id": "P", "t": 5, "p": long, "o": 4}])
    lengths = [after.time - row.time for row, after in pairwise(run.rows) if row.step and "D[0]" in row.scheduled]
    assert max(lengths) <= limit / 1000 + 1e-9
    parts = [tokens for step, tokens in run.scheduled("P").items() if step <= run["P"].first_token_step]
    assert parts == [room] * chunks + [1]
    alone = play(cfg, [{"id": "P", "t": 5, "p": 3000, "o": 4}])
    assert max(alone.scheduled("P").values()) == 1024


@few
@given(
    draft=st.integers(1, 7),
    streams=st.integers(1, 24),
    left=st.integers(1, 200),
    chunks=st.integers(1, 10),
    size=block_sizes,
    depth=depths,
)
def test_s16_draft_tokens_are_part_of_the_budget(draft, streams, left, chunks, size, depth):
    """All streams decode while the prompt is computed, and leave it `left` tokens of a step."""
    left = max(left, 2 * (1 + draft))  # two more seats than streams
    budget = streams * (1 + draft) + left
    cfg = {"kv": 8000, "block": size, "budget": budget, "max_seqs": streams + 2, "draft": draft, "accept": 0}
    reqs = [
        {"id": "D", "x": streams, "t": 0, "p": 4, "o": chunks + 2 * streams + 20},
        {"id": "P", "t": streams + 5, "p": chunks * left + 1, "o": 4},
    ]
    run = play(cfg, reqs, depth=depth)
    parts = [tokens for step, tokens in run.scheduled("P").items() if step <= run["P"].first_token_step]
    assert parts[:chunks] == [left] * chunks
    assert max(sum(row.scheduled.values()) for row in run.rows) <= budget
    with pytest.raises(InputError, match="draft_tokens"):
        play({**cfg, "max_seqs": budget // (1 + draft) + 1}, reqs)
