"""The groups "Overload, timeouts, deadlines" and "LoRA, tenants, classes" with drawn numbers."""

from math import ceil

from hypothesis import example, given
from hypothesis import strategies as st

from tests.scenarios.drawn import block_sizes, blocks, depths, few, peak, play

ORDERS = st.sampled_from(["joint", "fcfs", "priority"])


@few
@given(
    size=block_sizes,
    limit=st.integers(1, 12),
    seats=st.integers(1, 4),
    service=st.integers(2, 8),
    at_once=st.integers(0, 12),
    policy=ORDERS,
    depth=depths,
)
def test_s43_the_queue_has_an_end(size, limit, seats, service, at_once, policy, depth):
    """A stream brings one request a step, and `seats` of them are served in `service` steps: more than can be."""
    seats = min(seats, service - 1)
    cfg = {"kv": 400, "block": size, "budget": 64, "max_seqs": seats, "policy": policy, "max_waiting": limit}
    reqs = [{"id": "R", "every": 1, "from": 0, "until": 60, "p": 5, "o": service}]
    reqs += [{"id": "X", "x": at_once, "t": 20, "p": 5, "o": service}] if at_once else []
    run = play(cfg, reqs, depth=depth)
    assert max(row.waiting for row in run.rows) <= limit
    served = [fate for fate in run.outcome.requests.values() if fate.finish_reason == "length"]
    refused = [fate for fate in run.outcome.requests.values() if fate.finish_reason == "refused"]
    assert len(served) + len(refused) == 60 + at_once
    assert all(fate.finish_step == fate.arrival_step for fate in refused)
    assert {entry["reason"] for row in run.rows for entry in row.rejected} == {"queue_full"}
    # Whoever is accepted waits for those who wait already, `seats` at a time, and for a service under way.
    assert max(f.admitted_step - f.arrival_step for f in served) <= ceil(limit / seats) * service


@few
@given(
    size=block_sizes,
    prompts=st.lists(st.integers(1, 300), min_size=2, max_size=15),
    limit=st.integers(50, 1500),
    rate=st.sampled_from([100, 1000, 12345]),
    by=st.sampled_from(["work", "promise", "both"]),
    policy=ORDERS,
)
def test_s44_work_is_limited_in_order_of_arrival(size, prompts, limit, rate, by, policy):
    """All arrive at once; a promise of the time in which the limit's work is served says the same as the limit.

    (Under `joint` a promise about to be broken comes before those who arrived earlier, and only the former are ahead.)
    """
    policy = policy if by == "work" else "fcfs"
    accepted: list[int] = []
    for p in prompts:  # the first is taken however large
        if not accepted or sum(accepted) + p <= limit:
            accepted.append(p)
    cfg = {"kv": 4000, "block": size, "budget": 256, "max_seqs": 64, "policy": policy, "prefill_rate": f"{rate} tok/s"}
    cfg |= {"max_queued_tokens": None if by == "promise" else limit}
    cfg |= {"ttft_target_s": None if by == "work" else limit / rate}
    run = play(cfg, [{"id": f"R{n}", "t": 0, "p": p, "o": 1} for n, p in enumerate(prompts)])
    assert [p for n, p in enumerate(prompts) if run[f"R{n}"].finish_reason != "refused"] == accepted
    told = {entry["reason"] for row in run.rows for entry in row.rejected}
    assert told <= {"work": {"queue_full"}, "promise": {"deadline"}, "both": {"queue_full", "deadline"}}[by]


@few
@given(
    size=block_sizes,
    of_all=st.one_of(st.none(), st.integers(1, 80)),
    own=st.lists(st.one_of(st.none(), st.integers(1, 80)), min_size=1, max_size=6),
    at=st.integers(1, 20),
    seats=st.integers(1, 3),
    policy=ORDERS,
    depth=depths,
)
def test_s46_who_waits_too_long_never_computes(size, of_all, own, at, seats, policy, depth):
    """Those who run outlast everybody's patience, so that nobody else gets a seat before its time is up."""
    cfg = {"kv": 400, "block": size, "budget": 64, "max_seqs": seats, "policy": policy, "queue_ttl": of_all}
    first = {"id": "A", "x": seats, "t": 0, "p": 20, "o": 110}
    reqs = [first, *({"id": f"B{n}", "t": at, "p": 20, "o": 2, "ttl": ttl} for n, ttl in enumerate(own))]
    run, alone = play(cfg, reqs, depth=depth), play(cfg, [first], depth=depth)
    assert run.family("A") == alone.family("A")
    for n, ttl in enumerate(own):
        shortest = min((limit for limit in (ttl, of_all) if limit is not None), default=None)
        fate = run[f"B{n}"]
        if shortest is None:
            assert fate.finish_reason == "length"
        else:
            assert (fate.finish_reason, fate.finish_step) == ("timeout", at + shortest)
            assert not run.scheduled(f"B{n}")


@few
@given(
    size=block_sizes,
    seats=st.integers(1, 8),
    limit=st.integers(1, 10),
    burst=st.integers(1, 40),
    cancelled=st.integers(0, 40),
    outputs=st.integers(1, 10),
    policy=ORDERS,
    depth=depths,
)
def test_s48_everybody_gets_one_answer(size, seats, limit, burst, cancelled, outputs, policy, depth):
    """A burst in one step, then some who are cancelled in the step of their arrival; 200 steps later the same again."""
    cfg = {"kv": 400, "block": size, "budget": 64, "max_seqs": seats, "policy": policy, "max_waiting": limit}
    waves = (0, 200)
    reqs = [{"id": f"W{t}", "x": burst, "t": t, "p": 6, "o": outputs} for t in waves]
    if cancelled:
        reqs += [{"id": f"C{t}", "x": cancelled, "t": t + 1, "cancel": t + 1, "p": 6, "o": 30} for t in waves]
    run = play(cfg, reqs, depth=depth)
    ends = [fate.finish_reason for fate in run.outcome.requests.values()]
    assert len(ends) == 2 * (burst + cancelled)
    assert set(ends) <= {"length", "refused", "cancelled"}
    for name in ("W", "C")[: 1 + bool(cancelled)]:
        early, late = ([f.finish_reason for f in run.family(f"{name}{t}").values()] for t in waves)
        assert early == late
    served = [fate.finish_reason for fate in run.family("W0").values()].count("length")
    assert served == min(burst, limit)
    assert run.rows[-1].free_blocks + sum(blocks(6 + outputs, size) for _ in run.rows[-1].scheduled) >= 400


@few
@given(
    size=block_sizes,
    slots=st.integers(1, 3),
    every=st.integers(1, 6),
    service=st.integers(2, 20),
    patience=st.integers(0, 40),
    at=st.integers(1, 10),
    policy=ORDERS,
    depth=depths,
)
def test_s52_a_blocked_adapter_is_not_passed_for_ever(size, slots, every, service, patience, at, policy, depth):
    """Each of `slots` adapters has a stream in which the next comes before the last has ended; seats are for all."""
    every = min(every, service - 1)
    until = at + patience + 4 * service + 10
    cfg = {"kv": 4000, "block": size, "budget": 512, "max_seqs": 100, "policy": policy, "max_loras": slots}
    cfg["limits"] = {"resource_patience": patience}
    reqs = [
        {"id": f"A{n}", "every": every, "from": 0, "until": until, "p": 6, "o": service, "lora": n}
        for n in range(slots)
    ]
    other = {"id": "B", "t": at, "p": 6, "o": 3, "lora": "other"}
    run = play(cfg, [*reqs, other, {"id": "N", "t": at, "p": 6, "o": 3}], depth=depth)
    assert run["N"].admitted_step == at
    assert run["B"].admitted_step <= at + patience + service + 1
    assert all(fate.finish_reason == "length" for fate in run.outcome.requests.values())
    labels = {name: name.partition("[")[0] for name in run.outcome.requests if name != "N"}
    assert depth > 1 or all(len({labels[n] for n in row.scheduled if n in labels}) <= slots for row in run.rows)
    if slots == 1 and patience == 0:
        later = [fate for fate in run.family("A0").values() if fate.arrival_step > at]
        assert all(fate.admitted_step > run["B"].admitted_step for fate in later)


@few
@given(
    size=block_sizes,
    prompts=st.tuples(st.integers(1, 200), st.integers(1, 40)),
    outputs=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    weights=st.tuples(st.sampled_from([1.0, 2.0, 3.0]), st.sampled_from([1.0, 2.0])),
    seats=st.integers(1, 6),
    spare=st.integers(0, 60),
    policy=st.sampled_from(["fair", "vtc"]),
)
def test_s53_shares_are_in_tokens(size, prompts, outputs, weights, seats, spare, policy):
    """Both tenants have requests waiting in the steps that are looked at, and the pool holds a batch whole."""
    need = max(peak(p, o, size) for p, o in zip(prompts, outputs, strict=True))
    cfg = {"kv": need + spare, "block": size, "budget": 64, "max_seqs": seats, "policy": policy}
    cfg["headroom"] = "declared"  # who gave way returns before other tenants, and is charged no second time
    cfg["params"] = {"backfill": False}  # blocks that the first cannot use are nobody's share
    reqs = [
        {"id": t, "x": 80, "t": 0, "p": p, "o": o, "tenant": t} for t, p, o in zip("AB", prompts, outputs, strict=True)
    ]
    run = play({**cfg, "weights": dict(zip("AB", weights, strict=True))}, reqs, steps=150)
    size_of, weight = dict(zip("AB", prompts, strict=True)), dict(zip("AB", weights, strict=True))
    batch = min((need + spare) * size, seats * max(p + o for p, o in zip(prompts, outputs, strict=True)))
    bound = 2 * max(max(prompts), 2 * batch) / min(weights)
    served, waiting = {"A": 0.0, "B": 0.0}, {"A": 80, "B": 80}
    for row in run.rows:
        for name in row.admitted:
            waiting[name[0]] -= 1
            served[name[0]] += size_of[name[0]] / weight[name[0]]
        for name, tokens in row.emitted.items():
            served[name[0]] += 2 * tokens / weight[name[0]]
        if not all(waiting.values()):
            break
        assert abs(served["A"] - served["B"]) <= bound


@few
@given(
    size=block_sizes,
    noisy=st.tuples(st.integers(10, 40), st.integers(30, 80)),
    fit=st.integers(1, 4),
    quiet=st.tuples(st.integers(1, 60), st.integers(1, 12)),
    budget=st.sampled_from([64, 128, 512]),
)
@example(size=4, noisy=(27, 30), fit=1, quiet=(16, 1), budget=64)  # who waits behind many of another tenant's
def test_s55_a_noisy_tenant_does_not_hurt_a_quiet_one(size, noisy, fit, quiet, budget):
    """Beside as many noisy requests as fit there is always room for a quiet one, and not for one more noisy one.
    The quiet tenant asks for less than half of what the noisy one is served meanwhile, one request at a time."""
    p_noisy, (p_quiet, o_quiet) = (noisy[0] * size, noisy[1]), quiet
    p_quiet = min(p_quiet, (noisy[0] - 1) * size - o_quiet, budget // 4)
    spare = peak(p_quiet, o_quiet, size)
    cfg = {"kv": fit * peak(*p_noisy, size) + spare, "block": size, "budget": budget, "max_seqs": fit + 3}
    cfg |= {"headroom": "declared", "policy": "fair"}
    prompt_steps = ceil(p_noisy[0] / (budget - fit - 1))
    rate = (p_noisy[0] + 2 * p_noisy[1]) / (prompt_steps + p_noisy[1])
    every = max(o_quiet + 6, ceil(2 * (p_quiet + 2 * o_quiet) / rate))
    noise = {"id": "A", "x": 4 * fit + 6, "t": 0, "p": p_noisy[0], "o": p_noisy[1], "tenant": "A"}
    hush = {"id": "B", "every": every, "from": 3, "until": 150, "p": p_quiet, "o": o_quiet, "tenant": "B"}
    run, alone = play(cfg, [noise, hush]), play(cfg, [hush])["B[0]"]
    # Prompts are computed one after another: one is under way, and one more may come first if the counters are level.
    bound = 1 + 2 * prompt_steps + alone.first_token_step - alone.arrival_step
    assert max(f.first_token_step - f.arrival_step for f in run.family("B").values()) <= bound
