"""The group "Priority and preemption for urgent arrivals" with drawn numbers."""

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.scenarios.drawn import block_sizes, blocks, depths, few, peak, play

PRIORITIES = st.sampled_from(["priority", "joint"])


@few
@given(
    size=block_sizes,
    seats=st.integers(1, 6),
    urgent=st.integers(1, 6),
    prompts=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    outputs=st.tuples(st.integers(0, 60), st.integers(1, 20)),
    at=st.integers(3, 12),
    classes=st.tuples(st.integers(-3, 5), st.integers(1, 10)),
    depth=depths,
    policy=PRIORITIES,
)
def test_s01_urgent_ones_take_seats(size, seats, urgent, prompts, outputs, at, classes, depth, policy):
    """All seats are taken by requests that outlast the urgent ones, and memory is never short."""
    urgent = min(urgent, seats)
    (p_low, p_urgent), (more, o_urgent) = prompts, outputs
    o_low = at + o_urgent + 12 + more  # still far from its end when the urgent ones have ended
    cfg = {
        "kv": seats * peak(p_low, o_low, size) + urgent * peak(p_urgent, o_urgent, size),
        "block": size,
        "budget": seats * (p_low + o_low) + urgent * p_urgent,  # everybody's prompt, or return, is one step
        "max_seqs": seats,
        "policy": policy,
    }
    reqs = [
        {"id": "L", "x": seats, "t": 0, "p": p_low, "o": o_low, "prio": classes[0] + classes[1]},
        {"id": "H", "x": urgent, "t": at, "p": p_urgent, "o": o_urgent, "prio": classes[0]},
        {"id": "NEW", "t": at + 1, "p": p_low, "o": 4, "prio": classes[0] + classes[1]},
    ]
    run = play(cfg, reqs, depth=depth)
    displaced = [name for _, name in run.preemptions()]
    assert len(displaced) == len(set(displaced)) == urgent
    assert set(displaced) <= set(run.family("L"))
    assert all(fate.first_token_step == at + depth - 1 for fate in run.family("H").values())
    assert all(fate.max_gap_steps == 1 for name, fate in run.family("L").items() if name not in displaced)
    end = max(fate.finish_step for fate in run.family("H").values())
    assert {step for step, _ in run.restorations()} == {end + 2 - depth}  # a known end frees its seat at the plan
    assert run["NEW"].admitted_step > max(step for step, _ in run.restorations())
    assert all(fate.finish_reason == "length" for fate in run.outcome.requests.values())


@few
@given(
    size=block_sizes,
    prompts=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    at=st.integers(3, 30),
    short=st.integers(1, 100),
    spare=st.integers(0, 10),
    depth=depths,
)
def test_s02_an_urgent_one_takes_as_few_blocks_as_cover_it(size, prompts, at, short, spare, depth):
    """The urgent prompt wants between one and all of what the others hold beyond the free blocks."""
    held = [blocks(p + at, size) for p in prompts]
    wanted = spare + 1 + short * (sum(held) - 1) // 100
    cfg = {"kv": sum(held) + spare, "block": size, "budget": 4096, "max_seqs": 16, "policy": "priority"}
    low = [{"id": f"L{n}", "t": 0, "p": p, "o": at + 20, "prio": 9} for n, p in enumerate(prompts)]
    fits = all(peak(r["p"], r["o"], size) <= cfg["kv"] for r in low)
    if not fits:  # each has to fit alone: shorter lives
        low = [{**r, "o": min(r["o"], cfg["kv"] * size - r["p"] + 1)} for r in low]
    run = play(cfg, [*low, {"id": "H", "t": at, "p": wanted * size, "o": 1, "prio": 0}], depth=depth)
    victims = [int(name[1:]) for step, name in run.preemptions() if step <= at]
    sets = [s for k in range(1, len(held) + 1) for s in combinations(range(len(held)), k)]
    covering = [s for s in sets if spare + sum(held[n] for n in s) >= wanted]
    fewest = min(map(len, covering))
    assert run["H"].admitted_step == at
    assert len(victims) == fewest
    if depth == 1:
        least = min(sum(prompts[n] for n in s) for s in covering if len(s) == fewest)
        assert sum(prompts[n] for n in victims) == least
    assert all(fate.finish_reason == "length" for fate in run.outcome.requests.values())


@few
@given(
    size=block_sizes,
    seats=st.integers(1, 5),
    equals=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 60), st.integers(1, 40)), min_size=2, max_size=9),
    spare=st.integers(0, 20),
    depth=depths,
    policy=PRIORITIES,
    ample=st.booleans(),
)
def test_s04_equals_never_put_each_other_out(size, seats, equals, spare, depth, policy, ample):
    """At either wall: memory suffices for all, or head-room is for whatever was declared."""
    peaks = [peak(p, o, size) for _, p, o in equals]
    cfg = {
        "kv": sum(peaks) if ample else max(peaks) + spare,
        "block": size,
        "budget": 64,
        "max_seqs": seats,
        "policy": policy,
        "headroom": "none" if ample else "declared",
    }
    reqs = [{"id": f"R{n}", "t": t, "p": p, "o": o, "prio": 5} for n, (t, p, o) in enumerate(equals)]
    run = play(cfg, reqs, depth=depth)
    assert run.preemptions() == []
    assert all(fate.finish_reason == "length" for fate in run.outcome.requests.values())
    if ample:
        ends = sorted(fate.finish_step for fate in run.outcome.requests.values())
        starts = [run[name].admitted_step for name in sorted(run.outcome.requests, key=_arrival(run))]
        assert starts == sorted(starts)
        assert all(start > ends[n] + 1 - depth for n, start in enumerate(starts[seats:]))


def _arrival(run):
    order = list(run.outcome.requests)
    return lambda name: order.index(name)


@few
@given(
    size=block_sizes,
    prompt=st.integers(4, 12),
    spare=st.integers(1, 6),
    tails=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    ready=st.integers(3, 80),
    depth=depths,
    policy=PRIORITIES,
)
def test_s05_who_gave_way_comes_before_one_that_never_ran(size, prompt, spare, tails, ready, depth, policy):
    """A and K start with `prompt` blocks each and outgrow what is spare; B fits beside neither of them."""
    grown = (spare // 2 + 2) * size + 10  # both outlive the first shortage
    o_urgent, o_victim = grown + tails[0], grown + tails[1]
    pool = max(2 * prompt + spare, peak(prompt * size, max(o_urgent, o_victim), size))
    late = min((pool - prompt + 1) * size, pool * size - 3)  # beside `prompt` blocks it never fits
    cfg = {"kv": pool, "block": size, "budget": 8192, "max_seqs": 4, "policy": policy}
    reqs = [
        {"id": "B", "t": 0, "p": late, "o": 4, "prio": 5, "blocked_until": ready},
        {"id": "K", "t": 1, "p": prompt * size, "o": o_urgent, "prio": 1},
        {"id": "A", "t": 2, "p": prompt * size, "o": o_victim, "prio": 5},
    ]
    run = play(cfg, reqs, depth=depth)
    assert {name for _, name in run.preemptions()} <= {"A"}
    if peak(prompt * size, grown, size) * 2 > pool:
        assert run.preemptions()
    if run.preemptions():
        assert max(step for step, _ in run.restorations()) < run["B"].admitted_step
    assert all(fate.finish_reason == "length" for fate in run.outcome.requests.values())


@few
@given(
    base=st.integers(2, 20),
    each=st.sampled_from([0.25, 0.5, 1.0]),
    streams=st.integers(5, 24),
    cohorts=st.integers(2, 4),
    size=block_sizes,
)
def test_s08_as_many_decode_beside_a_promise_as_it_bears(base, each, streams, cohorts, size):
    """The promise bears one cohort of `cohorts` beside the urgent one, and not all streams at once."""
    beside = 1 + blocks(streams, cohorts)
    pace = (base + each * beside) / 0.95 + 1e-6  # milliseconds, with the margin of the budget
    cfg = {"kv": 4000, "block": size, "budget": 1024, "max_seqs": 64}
    cfg |= {"step_ms": f"{base} + {each}*decodes + 0.02*prefill_tokens"}
    reqs = [
        {"id": "BG", "x": streams, "t": 0, "p": 16, "o": 120, "prio": 10},
        {"id": "H", "t": 10, "p": 32, "o": 24, "prio": 0, "slo": {"tpot_ms": pace}},
    ]
    run = play(cfg | {"params": {"budget": "adaptive"}}, reqs)
    together = [step for step, tokens in run.scheduled("H").items() if tokens == 1]
    assert all(len(run.rows[step].scheduled) <= beside for step in together)
    assert run.outcome.timing["H"]["missed"] == []
    for name, fate in run.family("BG").items():
        turns = [step for step in run.scheduled(name) if step in together]
        assert all(after - before <= cohorts for before, after in pairwise(turns))
        assert (fate.outputs, fate.recomputed_tokens) == (120, 0)
    plain = play(cfg | {"policy": "priority"}, reqs)
    assert plain["H"].first_token_step == 10
    assert abs(plain.outcome.timing["H"]["tpot"] * 1000 - base - each * (streams + 1)) < 1e-6


@few
@given(
    seats=st.integers(1, 5),
    every=st.integers(1, 6),
    start=st.integers(0, 10),
    difference=st.integers(1, 10),
    window=st.sampled_from([1.0, 3.0, 7.5, 20.0]),
    policy=PRIORITIES,
    size=block_sizes,
)
def test_s09_ageing_bounds_the_wait_of_the_bottom(seats, every, start, difference, window, policy, size):
    """The urgent stream fills the seats exactly: each is served for as many steps as `seats` arrivals take."""
    service, worth = seats * every, window * difference
    at = service + start
    cfg = {"kv": 4000, "block": size, "budget": 128, "max_seqs": seats, "policy": policy}
    reqs = [
        {"id": "LOW", "t": at, "p": 20, "o": service, "prio": difference},
        {"id": "H", "every": every, "from": 0, "until": at + int(worth) + 4 * service, "p": 20, "o": service},
    ]
    run = play({**cfg, "params": {"aging_window": window}}, reqs)
    assert run["LOW"].admitted_step <= at + worth + every + 1
    assert max(f.admitted_step - f.arrival_step for f in run.family("H").values()) <= every + 1
    if policy == "priority":
        strict = play(cfg, reqs, steps=at + int(worth) + 3 * service)
        assert strict["LOW"].admitted_step is None
