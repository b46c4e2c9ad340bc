"""The groups "Victim choice, swap or recompute" and "Prefix cache and order" with drawn numbers."""

from math import ceil

from hypothesis import example, given
from hypothesis import strategies as st

from tests.scenarios.drawn import block_sizes, blocks, depths, few, peak, play

VICTIMS = st.sampled_from(["joint", "fcfs", "priority"])


def shortage(requests, size, last):
    """(step, blocks wanted then) of the last growth before `last`: a pool of one less is short there, and never before.

    `requests` are (arrival, prompt, outputs), each prompt one step; nobody ends before `last`.
    """

    def wanted(step):
        return sum(blocks(prompt + step - arrival, size) for arrival, prompt, _ in requests)

    step = max(s for s in range(last - size, last) if wanted(s) > wanted(s - 1))
    return step, wanted(step)


@few
@given(
    size=block_sizes,
    long=st.tuples(st.integers(100, 150), st.integers(100, 150)),
    short=st.integers(7, 10),
    offsets=st.tuples(st.integers(0, 31), st.integers(0, 31), st.integers(0, 31)),
    outputs=st.integers(0, 31),
    order=st.permutations([0, 1, 2]),
    policy=VICTIMS,
    caching=st.booleans(),
)
def test_s32_the_least_work_is_thrown_away(size, long, short, offsets, outputs, order, policy, caching):
    """Two long ones that fit together, and a short one of a tenth of their size that outgrows what they leave."""
    end = size + 12 + outputs % size  # everybody grows by two blocks or so before the long ones end
    sizes = [blocks_ * size + offset % size for blocks_, offset in zip((*long, short), offsets, strict=True)]
    lives = [(at, sizes[n], end + (60 if n == 2 else 0)) for at, n in enumerate(order)]
    step, wanted = shortage(lives, size, end - 8)
    cfg = {"kv": wanted - 1, "block": size, "budget": 16384, "max_seqs": 8, "policy": policy, "prefix_caching": caching}
    reqs = [{"id": "ABC"[n], "t": at, "p": prompt, "o": o} for n, (at, prompt, o) in zip(order, lives, strict=True)]
    run = play(cfg, reqs)
    assert run.preemptions()[0] == (step, "C")
    assert run["A"].preemptions == run["B"].preemptions == 0
    assert run.recomputed_tokens() <= run["C"].preemptions * (sizes[2] + end + 60)
    assert run["C"].outputs == end + 60


@few
@given(
    size=block_sizes,
    short=st.integers(2, 20),
    factor=st.integers(3, 6),
    old=st.integers(2, 20),
    wait=st.integers(0, 31),
    compute=st.integers(10, 200),
    percent=st.sampled_from([10, 60, 95, 105, 180, 900]),
    room=st.integers(-2, 3),
    policy=VICTIMS,
    caching=st.booleans(),
)
@example(size=16, short=3, factor=4, old=2, wait=5, compute=50, percent=95, room=0, policy="joint", caching=False)
@example(size=16, short=3, factor=4, old=2, wait=5, compute=50, percent=105, room=0, policy="joint", caching=False)
@example(size=16, short=3, factor=4, old=2, wait=5, compute=50, percent=95, room=-1, policy="joint", caching=False)
def test_s34_the_cheaper_way_for_the_cheaper_victim(
    size, short, factor, old, wait, compute, percent, room, policy, caching
):
    """The long one costs more than twice the short one either way, and so does the old one, who is first.

    Copying the short one takes `percent` of computing it again; the host has `room` blocks more than it holds.
    """
    last = 8 + size + wait % size
    held = short * size
    prompts = {"OLD": (short + old + factor) * size + 3 * last, "SHORT": held, "LONG": factor * held + 3 * last}
    lives = [(0, prompt, last + 40) for prompt in prompts.values()]
    step, wanted = shortage(lives, size, last + 20)
    tokens = held + step - 1  # the token of this step is not computed yet
    out = blocks(tokens, size)
    copy, host = max(1, tokens * compute * percent // (200 * out)), max(1, out + room)
    cost, pool = {"prefill_tok_us": compute, "copy_block_us": copy}, {"host_blocks": host}
    cfg = {"kv": wanted - 1, "block": size, "budget": 16384, "max_seqs": 4, "policy": policy, "cost": cost, **pool}
    cfg["prefix_caching"] = caching
    reqs = [{"id": name, "t": 0, "p": prompt, "o": last + 40} for name, prompt in prompts.items()]
    late = {"id": "NEW", "t": step + 1, "p": prompts["LONG"] + 80 * size, "o": 1}
    reqs += [late] if peak(late["p"], 1, size) < wanted else []
    run = play(cfg, reqs)
    (victim,) = next(row.preempted for row in run.rows if row.preempted)
    swaps = out <= host and 2 * out * copy < tokens * compute
    assert (run.preemptions()[0], victim["mode"]) == ((step, "SHORT"), "swap" if swaps else "recompute")
    if run["SHORT"].preemptions == 1:
        assert run["SHORT"].swapped_blocks == (out if swaps else 0)
        if swaps:
            assert run["SHORT"].recomputed_tokens == 0
    if late in reqs:
        assert next(at for at, name in run.restorations() if name == "SHORT") <= run["NEW"].admitted_step
    assert all(fate.finish_reason == "length" for fate in run.outcome.requests.values())


@few
@given(
    size=block_sizes,
    seats=st.integers(1, 8),
    hot=st.tuples(st.integers(10, 40), st.integers(1, 20)),
    age=st.integers(5, 200),
    cold=st.integers(1, 60),
    start=st.integers(0, 10),
)
def test_s37_a_cold_one_starts_within_its_bound(size, seats, hot, age, cold, start):
    """The warm stream fills the seats exactly: each is served for as many steps as there are seats."""
    hit, at = hot[0] * size, seats + start
    bound = ceil(hit / age) + 1
    cfg = {"kv": 20000, "block": size, "budget": 512, "max_seqs": seats, "policy": "sglang-lpm"}
    last = at + bound + 3 * seats + 5
    reqs = [
        {"id": "COLD", "t": at, "p": cold, "o": seats, "hit": 0},
        {"id": "HOT", "every": 1, "from": 0, "until": last, "p": hit + hot[1], "hit": hit, "o": seats},
    ]
    aged = play({**cfg, "params": {"age": float(age)}}, reqs)
    assert aged["COLD"].admitted_step - at <= bound
    assert max(fate.admitted_step - fate.arrival_step for fate in aged.family("HOT").values()) < 3
    assert play(cfg, reqs, steps=last)["COLD"].admitted_step is None


@few
@given(
    size=block_sizes,
    cached=st.integers(2, 60),
    free=st.integers(2, 40),
    wanted=st.integers(0, 100),
    own=st.integers(2, 16),
    outputs=st.integers(1, 6),
    colds=st.integers(1, 4),
    policy=st.sampled_from(["joint", "prefix", "sglang-lpm"]),
    depth=depths,
)
def test_s39_a_cold_one_does_not_evict_a_warm_one(size, cached, free, wanted, own, outputs, colds, policy, depth):
    """The cold ones arrive first; each wants more than is free, and the warm one's own part fits in what is."""
    own = min(own, size)
    cold = (free + 1 + (cached - 1) * wanted // 100) * size
    cfg = {"kv": cached + free, "block": size, "budget": 8192, "max_seqs": 8, "policy": policy}
    cfg["cached"] = {"X": cached}
    outputs = min(outputs, free * size - own + 1)
    reqs = [
        {"id": "COLD", "x": colds, "t": 0, "p": cold, "o": 1},
        {"id": "WARM", "t": 0, "p": cached * size + own, "hit": f"X={cached * size}", "o": outputs},
    ]
    run = play(cfg, reqs, depth=depth)
    assert (run["WARM"].admitted_step, run["WARM"].cached_tokens) == (0, cached * size)
    assert run.scheduled("WARM")[0] == own
    starts = [fate.admitted_step for fate in run.family("COLD").values()]
    assert min(starts) <= run["WARM"].finish_step + 1


@few
@given(
    size=block_sizes,
    count=st.integers(2, 12),
    shared=st.integers(0, 400),
    own=st.integers(1, 40),
    budget=st.sampled_from([32, 100, 600]),
    outputs=st.integers(1, 20),
    policy=VICTIMS,
    depth=depths,
)
def test_s40_a_shared_prompt_is_computed_once(size, count, shared, own, budget, outputs, policy, depth):
    """Seats and memory are for all; only whole blocks can be shared, and never a prompt's last token."""
    prompt = shared + own
    rest = prompt - shared // size * size
    cfg = {"kv": count * peak(prompt, outputs, size), "block": size, "budget": budget, "max_seqs": count}
    reqs = [{"id": "R", "x": count, "t": 0, "p": prompt, "share": shared, "o": outputs}]
    run = play({**cfg, "policy": policy}, reqs, depth=depth)
    assert run.computed_tokens() == prompt + (count - 1) * rest + count * (outputs - 1)
    first = [fate.first_token_step for fate in run.family("R").values()]
    steps = blocks((count - 1) * (rest + 1), budget - count)
    assert max(first) - first[0] <= 1 + steps
