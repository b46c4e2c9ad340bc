"""What the planner guarantees (docs/architecture.md lists them), each by its number."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.harness import AGEABLE, Run, limits, request
from tidegate.core.events import Emitted, Finished, Preempted, Rejected
from tidegate.core.limits import Limits
from tidegate.core.plan import StepPlan
from tidegate.core.policy import PolicyContext
from tidegate.core.presets import PRESETS, build_policy
from tidegate.core.request import FinishReason, Rejection, Request
from tidegate.core.view import Candidate, Need

REASONS = {
    "kv", "headroom", "seats", "shared prefix", "partial prefills", "return after preemption", "prefill budget",
    "chunk size", "token in flight", "preempted in this step", "stalled", "decode turn",
}  # fmt: skip


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Limits, str, dict[str, object], int, list[tuple[int, Request]], dict, list]:
    """Limits, policy, parameters, depth, arrivals, stop tokens, cancellations: small pools, much pressure."""
    seats = draw(st.integers(1, 6))
    lim = limits(
        num_blocks=draw(st.integers(6, 60)),
        block_size=draw(st.sampled_from([1, 4, 16])),
        max_num_seqs=seats,
        max_num_batched_tokens=draw(st.integers(seats, 80)),
        headroom=draw(st.sampled_from(["none", "watermark", "declared"])),
        oversize=draw(st.sampled_from(["refuse", "clip"])),
        partial_prefills=draw(st.sampled_from([None, 1, 2])),
        prefix_caching=draw(st.booleans()),
        resume_span=draw(st.sampled_from([0, 8, 64])),
        max_preemptions=draw(st.sampled_from([0, 1, 3])),
        stall_steps=draw(st.sampled_from([0, 2, 4])),
        watermark=draw(st.sampled_from([0.0, 0.05])),
    )
    params: dict[str, object] = {
        "victim": draw(st.sampled_from(["least-work", "lowest-priority", "newest"])),
        "aging_window": draw(st.sampled_from([None, 1.0, 50.0])),
        "mixed_batches": draw(st.booleans()),
        "share": draw(st.sampled_from([0.25, 1.0])),
        "max_chunk": draw(st.sampled_from([None, None, 3])),
    }
    arrivals, stops = [], {}
    for n in range(draw(st.integers(1, 14))):
        id = f"r{n}"
        prompt = draw(st.integers(1, max(1, lim.pool_tokens // draw(st.sampled_from([1, 2, 4])))))
        shared = draw(st.booleans())
        tokens = range(prompt) if shared else range(n * 10_000, n * 10_000 + prompt)
        r = Request(
            id,
            token_ids=tokens,
            max_tokens=draw(st.one_of(st.none(), st.integers(1, 40))),
            priority=draw(st.sampled_from([0, 0, 5, 10])),
            not_before=draw(st.sampled_from([0.0, 0.0, 0.0, 30.0])),
        )
        arrivals.append((draw(st.integers(0, 40)), r))
        if draw(st.booleans()):
            stops[id] = draw(st.integers(1, 40))
    cancels = draw(st.lists(st.tuples(st.integers(0, 80), st.sampled_from([r.id for _, r in arrivals])), max_size=3))
    policy = draw(st.sampled_from(list(PRESETS)))
    if policy not in AGEABLE:
        params["aging_window"] = None
    return lim, policy, params, draw(st.sampled_from([1, 2])), arrivals, stops, cancels


def invariants(run: Run, lim: Limits, requests: list[Request], max_chunk: int | None) -> None:
    """What holds at the end of every run."""
    assert {r.id for r in requests} == set(run.ended), "every request has exactly one end"
    assert run.scheduler.kv.available == lim.num_blocks, "every block is back"
    assert run.scheduler.running.outstanding == 0
    assert run.scheduler.running.free_seats == lim.max_num_seqs
    for plan in run.plans:
        assert plan.num_tokens <= lim.max_num_batched_tokens
        assert plan.held_back_by is None or plan.held_back_by in REASONS or not plan
        joined = {j.request_id for j in plan.joined}
        assert not joined & {p.request_id for p in plan.preempted}
        for p in plan.preempted:
            wanted = re.search(r"wanted by (r\d+) ", p.reason)
            assert wanted is None or wanted[1] in joined, "nobody gives way in vain"
        if max_chunk is not None:
            assert all(c.length <= max_chunk for c in plan.chunks)
    for r in requests:
        received = run.received.get(r.id, [])
        assert received == list(range(len(received))), "tokens come once and in order"
        end = run.ended[r.id]
        if isinstance(end, Rejected):
            assert not received
            continue
        assert r.preemptions <= lim.max_preemptions
        match end.reason:
            case FinishReason.STOP:
                assert len(received) == run.stop_after[r.id]
            case FinishReason.LENGTH | FinishReason.LENGTH_KV:
                assert len(received) == r.target
        if end.reason is not FinishReason.CANCELLED:
            assert r.token_ids is not None
            assert r.token_ids[r.prompt_tokens :] == received
            times = run.token_times[r.id]
            gaps = [b - a for a, b in itertools.pairwise(times)]
            assert end.timing.max_gap == max(gaps, default=None)
            assert end.timing.ttft == times[0] - r.arrival


@settings(max_examples=200, deadline=None)
@given(workloads())
def test_everything_holds_under_any_load(load: tuple) -> None:
    lim, policy, params, depth, arrivals, stops, cancels = load
    run = Run.of(policy, lim, depth, **params)
    run.stop_after = stops
    due = sorted(arrivals, key=lambda a: a[0])
    while due or run.now < 81:
        run.add(*(r for at, r in due if at == run.now))
        due = [(at, r) for at, r in due if at > run.now]
        for at, id in cancels:
            if at == run.now:
                run.abort(id)
        run.step()
    run.until_idle()
    invariants(run, lim, [r for _, r in arrivals], params["max_chunk"])  # type: ignore[arg-type]


def test_1_who_gives_way_is_settled_before_anything_is_planned() -> None:
    """The urgent head gets its seat in the very plan in which it asks; the victim is not in that plan at all."""
    run = Run.of("priority", limits(max_num_seqs=2))
    run.add(request("a", 32, 50, priority=9), request("b", 32, 50, priority=9))
    run.steps(4)
    run.add(request("h", 32, 4, priority=0))
    plan = run.step()
    assert [p.request_id for p in plan.preempted] == ["b"]
    assert plan.admitted == ["h"]
    assert len(plan.decodes) == 1
    assert "seat wanted by h" in plan.preempted[0].reason


@pytest.mark.parametrize(("share", "displaced_at"), [(0.5, 5), (1.0, 9)])
def test_1_nobody_gives_way_to_a_head_that_cannot_start_yet(share: float, displaced_at: int) -> None:
    """Strictly in order the unfinished prompt takes all tokens until it ends: until then `low` goes on."""
    run = Run.of("priority", limits(max_num_seqs=2, max_num_batched_tokens=32), share=share)
    run.add(request("low", 16, 60, priority=5))
    run.steps(3)
    run.add(request("long", 210, 4, priority=0))
    run.steps(2)
    run.add(request("head", 16, 4, priority=0))
    run.until_idle()
    assert [(at, id) for at, id, _ in run.preemptions()] == [(displaced_at, "low")]
    assert run.first_step_of("head") == displaced_at


@pytest.mark.parametrize("depth", [1, 2])
def test_1_a_long_prompt_in_flight_gives_way_as_well(depth: int) -> None:
    """At depth 2 some chunk of it is always in flight: it is paused for a step, and then evicted."""
    run = Run.of("priority", limits(num_blocks=200, max_num_seqs=1, max_num_batched_tokens=32), depth)
    run.add(request("long", 3000, 4, priority=5))
    run.steps(4)
    run.add(request("head", 16, 4, priority=0))
    run.steps(4)
    assert run.first_step_of("head") <= 4 + depth
    run.until_idle()
    assert run.received["long"] == list(range(4))


def test_2_the_whole_demand_is_covered_or_nobody_is_evicted() -> None:
    """The head wants more than all worse requests hold together: they go on undisturbed."""
    run = Run.of("priority", limits(num_blocks=40, max_num_seqs=4))
    run.add(request("keep", 16 * 20, 60, priority=0), request("low", 16 * 4, 60, priority=9))
    run.steps(3)
    run.add(request("big", 16 * 25, 4, priority=1))
    run.steps(20)
    assert run.preemptions() == []
    assert run.scheduler.explain("big")["waiting"]["held_back_by"] == "kv"


def test_2_victims_are_a_smallest_set_that_loses_the_least() -> None:
    """One block is short; the cheapest single victim goes, not the newest with its long prompt."""
    run = Run.of("fcfs", limits(num_blocks=61, max_num_seqs=4, max_num_batched_tokens=2048, stall_steps=0))
    run.add(request("first", 16 * 20, 100))
    run.step()
    run.add(request("small", 16 * 5, 100))
    run.step()
    run.add(request("large", 16 * 30, 100))
    while not run.preemptions():
        run.step()
    assert [id for _, id, _ in run.preemptions()] == ["small"]


def test_3_a_blocked_head_is_passed_only_by_those_that_do_not_delay_it() -> None:
    """Short ones run beside `old` while `heavy` waits for its end; `heavy` starts as if it had been alone."""
    lim = limits(num_blocks=110, max_num_seqs=8, max_num_batched_tokens=4096)

    def start_of_heavy(passers: bool) -> tuple[int, int]:
        run = Run.of("fcfs", lim)
        run.add(request("old", 1590, 60))
        run.step()
        run.add(request("heavy", 1600, 5))
        for n in range(200):
            if passers and n % 2 == 0:
                run.add(request(f"s{n}", 20, 10))
            run.step()
        passed = sum(run.first_step_of(f"s{n}") < run.first_step_of("heavy") for n in range(0, 40, 2)) if passers else 0
        return run.first_step_of("heavy"), passed

    alone, _ = start_of_heavy(False)
    beside, passed = start_of_heavy(True)
    assert beside == alone
    assert passed >= 10, "the spare blocks were used"


def test_3_where_ends_are_misjudged_the_delay_is_at_most_the_bypass_bound() -> None:
    """`old` declares 400 outputs and stops at 20: those who passed hold `heavy` up no longer than the bound."""
    run = Run.of("fcfs", limits(num_blocks=110, max_num_seqs=8, max_num_batched_tokens=4096, bypass_bound=30))
    run.stop_after["old"] = 20
    run.add(request("old", 1590, 160))
    run.step()
    run.add(request("heavy", 1600, 5))
    for n in range(120):
        run.add(request(f"short{n}", 20, 25), request(f"long{n}", 20, 100))
        run.step()
    assert run.first_step_of("heavy") <= 20 + 30
    started = {j.request_id for plan in run.plans[: run.first_step_of("heavy")] for j in plan.joined}
    assert any(id.startswith("short") for id in started)
    assert not any(id.startswith("long") for id in started), "longer than the bound, and not beside the head"


def test_1_nobody_gives_way_for_one_who_waits_for_a_prefix() -> None:
    """Of two urgent requests with one prefix the first takes a seat; the second would only wait in its own."""
    run = Run.of("priority", limits(num_blocks=64, block_size=4, max_num_seqs=2, max_num_batched_tokens=256))
    run.add(request("a", 8, 30, priority=10), request("b", 8, 30, priority=10))
    run.step()
    shared = list(range(24))
    run.add(*(Request(id, token_ids=[*shared, n, n], max_tokens=4) for n, id in enumerate(("x", "y"))))
    run.step()
    plan = run.plans[-1]
    assert [p.request_id for p in plan.preempted] == ["b"]
    assert [j.request_id for j in plan.joined] == ["x"]
    run.step()
    assert [j.request_id for j in run.plans[-1].joined] == ["y"], "its prefix is there now"
    run.until_idle()


def test_3_holds_behind_a_preempted_head() -> None:
    """A preempted head that waits for its growth to be covered is passed, and not delayed."""
    lim = limits(num_blocks=40, max_num_seqs=4, resume_span=512)
    run = Run.of("fcfs", lim)
    run.add(request("a", 16 * 17, 120), request("b", 16 * 17, 120))
    while not run.preemptions():
        run.step()
    run.add(*(request(f"s{n}", 16, 8) for n in range(4)))
    run.until_idle()
    resumed = next(at for at, plan in enumerate(run.plans) if "b" in plan.restored)
    assert resumed == run.token_times["a"][-1] + 1
    assert any(run.first_step_of(f"s{n}") < resumed for n in range(4))


def test_4_the_span_that_lets_one_return_is_not_given_to_others() -> None:
    """`victim` returns when its growth is covered; a fresh equal that arrived first does not take that cover."""
    run = Run.of("fcfs", limits(num_blocks=48, max_num_seqs=4, max_num_batched_tokens=512, resume_span=128))
    run.add(request("keep", 320, 200), request("victim", 320, 150))
    while not run.preemptions():
        run.step()
    run.add(request("fresh", 300, 50))
    run.until_idle()
    assert [id for _, id, _ in run.preemptions()] == ["victim"], "once, and not again for `fresh`"


def test_4_no_ping_pong_between_equals_and_the_preempted_resume_first() -> None:
    """Pressure among equals: a victim returns before any equal that never ran, and is never evicted in vain."""
    run = Run.of("priority", limits(num_blocks=30, max_num_seqs=4, resume_span=64))
    run.add(request("a", 64, 150, priority=5), request("b", 64, 150, priority=5), request("c", 64, 150, priority=5))
    while not run.preemptions():
        run.step()
    (_, victim, _), *_ = run.preemptions()
    run.add(request("late", 64, 10, priority=5))
    run.until_idle()
    back = next(at for at, plan in enumerate(run.plans) if victim in plan.restored)
    late = run.first_step_of("late")
    assert back < late or run.plans[late].admitted == ["late"], "back-fill aside"
    assert sum(e.request.preemptions for e in run.ended.values()) <= 3


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(20, 40), st.integers(0, 3), st.sampled_from([1, 2]))
def test_4_preemptions_per_request_are_bounded(n: int, blocks: int, bound: int, depth: int) -> None:
    run = Run.of("fcfs", limits(num_blocks=blocks, max_num_seqs=n, resume_span=0, max_preemptions=bound), depth)
    run.add(*(request(f"r{i}", 40, 200) for i in range(n)))
    run.until_idle()
    assert all(end.request.preemptions <= bound for end in run.ended.values())
    assert all(len(tokens) == 200 for tokens in run.received.values())


def test_5_a_prompt_starts_only_if_all_of_it_fits_and_its_blocks_are_reserved_whole() -> None:
    run = Run.of("fcfs", limits(num_blocks=50, max_num_batched_tokens=16, max_num_seqs=4))
    run.add(request("a", 16 * 30, 4), request("b", 16 * 30, 4))
    run.step()
    assert run.scheduler.kv.available == 20
    run.steps(10)
    assert [j.request_id for plan in run.plans for j in plan.joined] == ["a"], "b would not fit whole"


def test_5_idle_cached_hits_are_counted_once() -> None:
    """The hit is taken from the very blocks that count as available: hit and new ones must fit together."""
    run = Run.of("fcfs", limits(num_blocks=20, max_num_seqs=2))
    run.add(Request("warm", token_ids=range(16 * 12), max_tokens=1))
    run.until_idle()
    run.add(request("other", 16 * 6, 50))
    run.step()
    run.add(Request("hit", token_ids=range(16 * 14 + 1), max_tokens=1))
    run.steps(5)
    assert "hit" not in run.received, "12 cached + 3 new blocks do not fit beside 6"
    run.until_idle()
    assert run.ended["hit"].reason is FinishReason.LENGTH


@pytest.mark.parametrize(("headroom", "started"), [("none", 8), ("watermark", 6), ("declared", 4)])
def test_5_headroom_beside_an_admission(headroom: str, started: int) -> None:
    """8 prompts of 2 blocks, peak 4, in 16 blocks: none takes all, a quarter kept free 6, as declared 4."""
    run = Run.of("fcfs", limits(num_blocks=16, headroom=headroom, watermark=0.25))
    run.add(*(request(f"r{n}", 32, 33) for n in range(8)))
    plan = run.step()
    assert len(plan.admitted) == started
    run.until_idle()
    if headroom == "declared":
        assert run.preemptions() == [], "nobody is ever evicted"


@pytest.mark.parametrize("depth", [1, 2])
def test_5_a_better_class_starts_in_the_headroom_that_worse_ones_leave(depth: int) -> None:
    """Nobody gives way for head-room alone: the growth that it is for would be taken from the worse class."""
    run = Run.of("priority", limits(headroom="watermark", watermark=0.25, max_num_batched_tokens=1024), depth)
    run.add(request("low", 16 * 40, 30, priority=10))
    run.step()
    run.add(request("equal", 16 * 10, 4, priority=10))
    assert run.step().admitted == [], "head-room is kept among equals"
    run.add(request("high", 16 * 20, 4, priority=0))
    run.step()
    assert run.first_step_of("high") == 2
    assert run.preemptions() == []


def test_5_whoever_displaced_another_starts_though_no_worse_class_is_left() -> None:
    run = Run.of("priority", limits(headroom="watermark", watermark=0.25, max_num_batched_tokens=1024))
    run.add(request("first", 16 * 30, 30, priority=0), request("low", 16 * 16, 30, priority=10))
    run.step()
    run.add(request("high", 16 * 28, 4, priority=0))
    run.step()
    assert [(at, id) for at, id, _ in run.preemptions()] == [(1, "low")]
    assert run.first_step_of("high") == 1


def test_5_an_empty_engine_takes_the_first_request_that_fits_at_all() -> None:
    run = Run.of("fcfs", limits(num_blocks=10, headroom="watermark", watermark=0.9))
    run.add(request("a", 16 * 9, 4))
    assert run.step().admitted == ["a"]


def test_6_what_can_never_fit_is_refused_with_a_typed_reason() -> None:
    run = Run.of("fcfs", limits(num_blocks=10, max_model_len=1000))
    run.add(request("kv", 161, 1), request("grows", 160, 2), request("long", 900, 101), request("fits", 160, 1))
    run.add(Request("empty", token_ids=[], max_tokens=3), request("nothing", 8, 0))
    reasons = {id: end.reason for id, end in run.ended.items() if isinstance(end, Rejected)}
    assert reasons == {
        "kv": Rejection.KV_CAPACITY,
        "grows": Rejection.KV_CAPACITY,
        "long": Rejection.TOO_LONG,
        "empty": Rejection.BAD_REQUEST,
        "nothing": Rejection.BAD_REQUEST,
    }
    run.until_idle()
    assert run.ended["fits"].reason is FinishReason.LENGTH


@pytest.mark.parametrize("declared", [500, None])
def test_6_clipped_requests_run_until_the_pool_ends(declared: int | None) -> None:
    run = Run.of("fcfs", limits(num_blocks=10, oversize="clip"))
    run.add(request("a", 100, declared))
    run.until_idle()
    assert run.ended["a"].reason is FinishReason.LENGTH_KV
    assert len(run.received["a"]) == 160 - 100 + 1
    assert run.preemptions() == []


def test_6_without_max_tokens_the_model_may_end_it_first() -> None:
    run = Run.of("fcfs", limits(num_blocks=10, max_model_len=120))
    run.add(request("a", 100, None))
    run.until_idle()
    assert run.ended["a"].reason is FinishReason.LENGTH
    assert len(run.received["a"]) == 20


def test_7_a_decode_stalls_only_for_an_end_that_is_known_to_be_near() -> None:
    """`b` lacks a block one step before `a` ends: it waits for it. Without that rule it is evicted."""
    for stall, evicted in ((2, 0), (0, 1)):
        run = Run.of("fcfs", limits(num_blocks=8, max_num_seqs=2, stall_steps=stall))
        run.add(request("a", 60, 5), request("b", 62, 40))
        run.until_idle()
        assert len(run.preemptions()) == evicted
        assert len(run.received["b"]) == 40


def test_7_a_decode_is_not_frozen_behind_a_long_prompt() -> None:
    """Two steps in flight: the prompt that holds the blocks is paused, so that it can give way."""
    run = Run.of("fcfs", limits(num_blocks=21, max_num_seqs=2, max_num_batched_tokens=8, stall_steps=0), depth=2)
    run.add(request("stream", 14, 60))
    run.steps(4)
    run.add(request("prompt", 16 * 19, 2))
    run.until_idle()
    times = run.token_times["stream"]
    assert max(b - a for a, b in itertools.pairwise(times)) <= 4
    assert [id for _, id, _ in run.preemptions()] == ["prompt"]


def test_7_if_nobody_else_can_the_first_gives_way_itself() -> None:
    """All others were evicted as often as they may be: the first does not wait for their ends."""
    run = Run.of("fcfs", limits(num_blocks=30, max_num_seqs=3, resume_span=0, max_preemptions=1, stall_steps=0))
    run.add(*(request(f"r{n}", 100, 250) for n in range(3)))
    run.until_idle()
    held = [at for at, plan in enumerate(run.plans) if plan.held_back_by == "stalled"]
    assert held == []
    assert all(tokens == list(range(250)) for tokens in run.received.values())


@pytest.mark.parametrize("depth", [1, 2])
def test_8_a_cancelled_request_gives_its_blocks_back(depth: int) -> None:
    run = Run.of("fcfs", limits(num_blocks=20, max_num_seqs=1), depth)
    run.add(request("a", 200, 50), request("b", 200, 5))
    run.steps(6)
    before = len(run.received["a"])
    assert run.abort("a")
    assert not run.abort("a")
    assert run.step().admitted == ["b"]
    run.until_idle()
    assert len(run.received["a"]) == before, "no token after the end"
    assert run.ended["a"].reason is FinishReason.CANCELLED
    assert run.received["b"] == list(range(5))


def test_8_cancelled_while_queued_never_computes() -> None:
    run = Run.of("fcfs", limits(max_num_seqs=1))
    run.add(request("a", 16, 20), request("b", 16, 20), request("later", 16, 20, not_before=30.0))
    run.steps(3)
    run.abort("b")
    run.abort("later")
    run.until_idle()
    assert {j.request_id for plan in run.plans for j in plan.joined} == {"a"}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_9_tokens_are_never_lost_repeated_or_reordered(depth: int, caching: bool) -> None:
    run = Run.of("fcfs", limits(num_blocks=26, max_num_seqs=4, prefix_caching=caching, resume_span=16), depth)
    run.add(*(request(f"r{n}", 50, 100) for n in range(6)))
    run.until_idle()
    assert run.preemptions()
    assert all(run.received[f"r{n}"] == list(range(100)) for n in range(6))


@settings(max_examples=80, deadline=None)
@given(workloads())
def test_10_what_stays_idle_carries_the_name_of_its_reason(load: tuple) -> None:
    """Seats, tokens and waiting requests left over: then the plan says who holds them back."""
    lim, policy, params, depth, arrivals, _, _ = load
    run = Run.of(policy, lim, depth, **params)
    run.add(*(replace_arrival(r) for _, r in arrivals))
    for _ in range(60):
        plan = run.step()
        spent = plan.num_tokens >= lim.max_num_batched_tokens
        if len(run.scheduler.waiting) and not spent and plan:
            assert plan.held_back_by in REASONS
        if not plan and run.scheduler.has_work:
            assert plan.held_back_by in REASONS | {"parked"}


def replace_arrival(r: Request) -> Request:
    r.not_before = 0.0
    return r


class Greedy:
    """A broken victim policy: evicts everybody, needed or not."""

    def choose(self, candidates: list[Candidate], need: Need, ctx: PolicyContext) -> list[Candidate]:
        return list(candidates)


def test_a_broken_victim_policy_is_caught_by_these_tests() -> None:
    """Guarantee 2's tests bite: with a policy that evicts everybody, more than the smallest set goes."""
    policy = replace(build_policy("fcfs"), victim=Greedy())
    run = Run.of(policy, limits(num_blocks=61, max_num_seqs=4, max_num_batched_tokens=2048, stall_steps=0))
    run.add(request("first", 16 * 20, 100), request("small", 16 * 5, 100), request("large", 16 * 30, 100))
    while not run.preemptions():
        run.step()
    assert len(run.preemptions()) > 1


def test_the_same_input_gives_the_same_plans() -> None:
    def plans() -> list[StepPlan]:
        run = Run.of("priority", limits(num_blocks=26, max_num_seqs=4))
        run.add(*(request(f"r{n}", 50, 60, priority=n % 2) for n in range(6)))
        return run.until_idle().plans

    assert repr(plans()) == repr(plans())


def test_events_tell_one_story() -> None:
    run = Run.of("priority", limits(num_blocks=26, max_num_seqs=4))
    run.add(*(request(f"r{n}", 50, 60, priority=n % 2) for n in range(6)))
    run.until_idle()
    emitted = sum(len(e.tokens) for e in run.events if isinstance(e, Emitted))
    assert emitted == 6 * 60
    assert sum(len(e.first) for e in run.events if isinstance(e, Emitted)) == 6
    preempted = sum(isinstance(e, Preempted) for e in run.events)
    assert preempted == sum(e.request.preemptions for e in run.events if isinstance(e, Finished))


@pytest.mark.parametrize(
    ("seats", "mixed", "arrivals", "stops"),
    [
        # The key of the one who runs has aged by the time it gives way: it would come before those it made room for.
        (1, False, [(5, "r0", 0), (0, "r1", 0), (0, "r2", 5)], {"r1": 1}),
        # One of two gave way for a block; the other must not give way for it in the same plan, where it cannot return.
        (2, True, [(5, "r0", 0), (0, "r1", 5)], {}),
    ],
)
def test_1_nobody_gives_way_for_one_who_does_not_start(
    seats: int, mixed: bool, arrivals: list[tuple[int, str, int]], stops: dict[str, int]
) -> None:
    room = limits(
        num_blocks=6,
        block_size=4,
        max_num_seqs=seats,
        max_num_batched_tokens=2,
        prefix_caching=False,
        resume_span=0,
        max_preemptions=1,
        stall_steps=0,
    )
    run = Run.of("joint", room, victim="least-work", aging_window=1.0, mixed_batches=mixed, share=0.25)
    run.stop_after = stops
    run.until_idle([(at, Request(id, token_ids=[n], priority=p)) for n, (at, id, p) in enumerate(arrivals)])
    assert run.preemptions()
    for plan in run.plans:
        started = {join.request_id for join in plan.joined}
        wanted = [re.search(r"wanted by (r\d+) ", victim.reason) for victim in plan.preempted]
        assert all(found is None or found[1] in started for found in wanted)
