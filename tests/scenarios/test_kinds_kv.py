"""The group "KV capacity, deadlock, reservation" with drawn numbers."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.scenarios.drawn import block_sizes, blocks, depths, few, peak, play

HEADROOMS = st.sampled_from(["none", "watermark", "quantile", "declared"])


@few
@given(
    size=block_sizes,
    prompts=st.lists(st.integers(18, 30), min_size=1, max_size=4),
    lengths=st.lists(st.integers(4, 8), min_size=4, max_size=4, unique=True),
    extra=st.integers(0, 4),
    more=st.integers(0, 3),
    at=st.integers(1, 3),
    depth=depths,
)
def test_s18_a_prompt_waits_for_all_its_room(size, prompts, lengths, extra, more, at, depth):
    """`extra` blocks are free beside the peaks, and those still to grow into are at most 12: too few for N, which
    fits in what the first that ends leaves."""
    lengths = [at + depth + n for n in lengths[: len(prompts)]]
    peaks = [peak(p * size, o, size) for p, o in zip(prompts, lengths, strict=True)]
    growth = sum(full - p for full, p in zip(peaks, prompts, strict=True))
    wanted = min(extra + growth + 1 + more, min(prompts) + extra)
    cfg = {"kv": sum(peaks) + extra, "block": size, "budget": 8192, "max_seqs": 16}
    reqs = [
        {"id": f"R{n}", "t": 0, "p": p * size, "o": o} for n, (p, o) in enumerate(zip(prompts, lengths, strict=True))
    ]
    run = play(cfg, [*reqs, {"id": "N", "t": at, "p": wanted * size, "o": 1}], depth=depth)
    alone = play(cfg, reqs, depth=depth)
    if depth == 1:  # at 2 a known end frees its blocks before its last token is told
        assert sum(run.blocks_in_use(run["N"].admitted_step, size).values()) <= cfg["kv"]
    assert run.preemptions() == []
    assert all(run[name] == fate for name, fate in alone.outcome.requests.items())
    if wanted > extra + growth:
        assert run["N"].admitted_step == min(fate.finish_step for fate in alone.outcome.requests.values()) + 2 - depth


@few
@given(
    size=block_sizes,
    count=st.integers(2, 10),
    prompt=st.integers(1, 60),
    outputs=st.integers(10, 90),
    spare=st.integers(0, 30),
    watermark=st.sampled_from([0.0, 0.05, 0.3, 0.9]),
    headroom=HEADROOMS,
    depth=depths,
)
def test_s19_headroom_never_locks_and_declared_never_evicts(
    size, count, prompt, outputs, spare, watermark, headroom, depth
):
    """The pool holds at least one whole, whatever share of it must stay free beside others."""
    cfg = {"kv": peak(prompt, outputs, size) + spare, "block": size, "budget": 128, "max_seqs": 16}
    cfg |= {"headroom": headroom} | ({"watermark": watermark} if headroom == "watermark" else {})
    run = play(cfg, [{"id": "R", "x": count, "t": 0, "p": prompt, "o": outputs}], depth=depth)
    assert run["R[0]"].admitted_step == 0
    assert all(fate.outputs == outputs for fate in run.family("R").values())
    if headroom in ("declared", "quantile"):  # without a history, what was declared is what is predicted
        assert run.preemptions() == []


@few
@given(
    size=block_sizes,
    pool=st.integers(1, 40),
    prompt=st.integers(1, 900),
    outputs=st.integers(1, 400),
    others=st.integers(0, 5),
    at=st.integers(0, 3),
    depth=depths,
)
def test_s20_s21_what_cannot_fit_is_refused_or_clipped(size, pool, prompt, outputs, others, at, depth):
    small = {"id": "S", "x": others, "t": at, "p": 1, "o": min(16, pool * size)} if others else None
    cfg = {"kv": pool, "block": size, "budget": 64, "max_seqs": 8, "headroom": "declared"}
    reqs = [{"id": "X", "t": at, "p": prompt, "o": outputs}, *([small] if small else [])]
    fits = prompt + outputs - 1 <= pool * size
    run = play(cfg, reqs, depth=depth)
    clipped = play({**cfg, "oversize": "clip"}, reqs, depth=depth)
    assert run["X"].finish_reason == ("length" if fits else "refused")
    if not fits:
        assert run.rows[at].rejected[0]["reason"] == "kv_capacity"
    if small and not fits:
        assert run.family("S") == play(cfg, [small], depth=depth).family("S")
    room = pool * size - prompt + 1
    if fits:
        assert clipped["X"].finish_reason == "length"
    elif room >= 1:
        assert (clipped["X"].finish_reason, clipped["X"].outputs) == ("length_kv", room)
    else:
        assert clipped["X"].finish_reason == "refused"
    assert run.preemptions() == clipped.preemptions() == []


@few
@given(
    size=block_sizes,
    pool=st.integers(6, 60),
    prompts=st.lists(st.integers(1, 100), min_size=2, max_size=6),
    outputs=st.integers(1, 12),
    partial=st.sampled_from([None, 1, 2, 6]),
    budget=st.sampled_from([16, 100, 512]),
    depth=depths,
)
def test_s23_half_done_prompts_never_hold_everything(size, pool, prompts, outputs, partial, budget, depth):
    """Each prompt takes more than half of the pool, so that two can never be computed side by side."""
    least, most = (pool // 2 + 1) * size, pool * size - outputs + 1
    sizes = [least + (most - least) * share // 100 for share in prompts] if most >= least else [least]
    outputs = min(outputs, pool * size - max(sizes) + 1)
    cfg = {"kv": pool, "block": size, "budget": budget, "max_seqs": 8, "partial_prefills": partial}
    run = play(cfg, [{"id": f"A{n}", "t": 0, "p": p, "o": outputs} for n, p in enumerate(sizes)], depth=depth)
    assert all(fate.outputs == outputs for fate in run.outcome.requests.values())
    assert run.recomputed_tokens() == 0
    assert run.preemptions() == []
    assert all(row.scheduled or following.scheduled for row, following in pairwise(run.rows[: 1 - depth or None]))


@few
@given(
    size=block_sizes,
    seats=st.integers(1, 4),
    parked=st.integers(1, 8),
    served=st.integers(1, 8),
    ttl=st.integers(1, 60),
    at=st.integers(0, 8),
    outputs=st.integers(1, 10),
    depth=depths,
)
def test_s24_parked_ones_take_no_seat(size, seats, parked, served, ttl, at, outputs, depth):
    cfg = {"kv": 200, "block": size, "budget": 128, "max_seqs": seats}
    never = {"id": "W", "x": parked, "t": 1, "p": 20, "o": 8, "blocked_until": "never", "queue_ttl": ttl}
    plain = {"id": "N", "x": served, "t": at, "p": 20, "o": outputs}
    run = play(cfg, [never, plain], depth=depth)
    assert run.family("N") == play(cfg, [plain], depth=depth).family("N")
    for fate in run.family("W").values():
        assert (fate.finish_step, fate.finish_reason) == (1 + ttl, "dependency_timeout")
        assert fate.admitted_step is None


@few
@given(
    size=block_sizes,
    short=st.tuples(st.integers(1, 60), st.integers(4, 40)),
    beside=st.integers(2, 5),
    old=st.tuples(st.integers(10, 60), st.integers(60, 150)),
    heavy=st.integers(1, 100),
    bound=st.integers(41, 80),
    known=st.booleans(),
    every=st.integers(1, 2),
)
def test_s27_backfill_behind_a_blocked_head(size, short, beside, old, heavy, bound, known, every):
    """Beside OLD there is room for `beside` short ones and not for HEAVY, which fits once OLD has ended."""
    (p_short, o_short), (p_old, o_old) = short, (old[0] * size, old[1])
    spare = beside * peak(p_short, o_short, size)
    peak_old = peak(p_old, o_old, size)
    pool = peak_old + spare
    growth = peak_old - old[0] + 1
    least, most = spare + growth + 1, pool - 1
    if least > most:
        p_old = (old[0] + growth + 3) * size
        peak_old = peak(p_old, o_old, size)
        pool, most = peak_old + spare, peak_old + spare - 1
    wanted = least + (most - least) * heavy // 100
    cfg = {"kv": pool, "block": size, "budget": 8192, "max_seqs": 64, "limits": {"bypass_bound": bound}}
    reqs = [
        {"id": "OLD", "t": 0, "p": p_old, "o": o_old},
        {"id": "HEAVY", "t": 2, "p": wanted * size, "o": 2},
        {"id": "S", "every": every, "from": 3, "until": o_old + 30, "p": p_short, "o": o_short},
    ]
    if not known:
        reqs[0]["max_o"] = min(2 * o_old, (pool - 1) * size - p_old)
        reqs[2]["max_o"] = 2 * o_short
    run = play(cfg, reqs)
    freed = run["OLD"].finish_step + 1
    if known:
        assert run["HEAVY"].admitted_step == freed
        assert all(step > freed and name.startswith("S[") for step, name in run.preemptions())  # head-room is none
        rows = run.rows[3 + 2 * every : freed - o_short - 2]
        assert all(sum(name.startswith("S[") for name in row.scheduled) >= 2 for row in rows)
    else:
        assert run["HEAVY"].admitted_step <= freed + bound


@few
@given(
    size=block_sizes,
    prompt=st.integers(4, 100),
    length=st.integers(4, 40),
    count=st.integers(1, 6),
    spare=st.integers(0, 3),
)
def test_s29_predicted_ends_do_not_strangle_the_batch(size, prompt, length, count, spare):
    """What A declared leaves no room beside it; all ends as they were seen before leave room for everybody."""
    each = peak(prompt, length, size)
    pool = (count + 1) * (each + 1) + spare
    cfg = {"kv": pool, "block": size, "budget": (count + 2) * (prompt + 1) + 16, "max_seqs": 16}
    seen = [{"p": prompt, "o": length, "x": 50}]
    reqs = [
        {"id": "A", "t": 0, "p": prompt, "max_o": pool * size - prompt, "o": length},
        {"id": "B", "x": count, "t": 1, "p": prompt, "max_o": 2 * length, "o": length},
    ]
    run = play({**cfg, "headroom": "quantile", "history": seen}, reqs)
    assert all(fate.admitted_step == 1 for fate in run.family("B").values())
    assert run.preemptions() == []
    safe = play({**cfg, "headroom": "declared"}, reqs)
    assert min(fate.admitted_step for fate in safe.family("B").values()) == safe["A"].finish_step + 1
    assert safe.preemptions() == []
    wrong = [{**r, "o": 3 * length, "max_o": 3 * length} for r in reqs]
    failed = play({**cfg, "headroom": "quantile", "history": seen}, wrong)
    assert failed["A"].preemptions == 0
    if failed.preemptions():
        assert failed.preemptions()[0][1] == f"B[{count - 1}]"


@few
@given(
    size=block_sizes,
    prompt=st.integers(8, 100),
    length=st.integers(10, 100),
    whole=st.integers(1, 4),
    count=st.integers(2, 8),
    spread=st.lists(st.integers(0, 20), min_size=8, max_size=8),
)
def test_s30_a_good_prediction_costs_little(size, prompt, length, whole, count, spread):
    """The pool holds `whole` of them at their peak; outputs lie up to a fifth under the lengths seen before."""
    cfg = {"kv": whole * peak(prompt, length, size), "block": size, "budget": 512, "max_seqs": 16}
    lengths = [max(1, length * (100 - less) // 100) for less in spread[:count]]
    reqs = [{"id": f"R{n}", "t": 0, "p": prompt, "o": o, "max_o": length} for n, o in enumerate(lengths)]
    seen = [{"p": prompt, "o": o, "x": 6} for o in lengths]
    run = play({**cfg, "headroom": "quantile", "history": seen}, reqs)
    safe = play({**cfg, "headroom": "declared"}, reqs)
    assert run.recomputed_tokens() <= 0.10 * run.computed_tokens()
    useful = [(r.computed_tokens() - r.recomputed_tokens()) / len(r.rows) for r in (run, safe)]
    assert useful[0] >= 0.95 * useful[1]


@few
@given(
    size=block_sizes,
    count=st.integers(2, 8),
    prompt=st.integers(1, 60),
    outputs=st.integers(20, 90),
    share=st.integers(0, 99),
    headroom=st.sampled_from(["none", "watermark"]),
    caching=st.booleans(),
    depth=depths,
)
def test_s31_a_full_pool_kills_nobody(size, count, prompt, outputs, share, headroom, caching, depth):
    """Their peaks together are more than the pool, which holds any one of them."""
    each = peak(prompt, outputs, size)
    pool = each + (count - 1) * each * share // 100
    cfg = {"kv": pool, "block": size, "budget": 128, "max_seqs": 8, "headroom": headroom, "prefix_caching": caching}
    run = play(cfg, [{"id": "R", "x": count, "t": 0, "p": prompt, "o": outputs}], depth=depth)
    assert all((fate.outputs, fate.finish_reason) == (outputs, "length") for fate in run.family("R").values())
    assert run["R[0]"].preemptions == 0
    out: set[str] = set()
    for row in run.rows:
        for victim in row.preempted:
            assert victim["id"] not in out
            out.add(victim["id"])
        assert len(out) < count
        out -= set(row.restored)
    assert blocks(prompt, size) <= pool
