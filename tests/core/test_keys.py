"""Keys that change while their request waits or runs: levels, deadlines, cached prefixes."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.core.harness import Run, limits, request
from tidegate.core.policies.cache import CacheAware
from tidegate.core.policies.deadlines import Deadlines, EarliestDeadline, Joint, latest_start
from tidegate.core.policies.feedback import FeedbackQueue
from tidegate.core.policies.orders import Aged, Priority
from tidegate.core.policy import PolicyContext
from tidegate.core.predict import OraclePredictor, StepTime
from tidegate.core.presets import build_policy
from tidegate.core.rekeys import lapse_of
from tidegate.core.request import FinishReason, Request, Status
from tidegate.core.running import place
from tidegate.core.scheduler import REKEYS, Scheduler
from tidegate.core.slo import NO_SLO, Slo
from tidegate.errors import ConfigError

CTX = PolicyContext(OraclePredictor(), StepTime(prefill_token=0.01, decode=0.1))


def at(now: float) -> PolicyContext:
    return PolicyContext(OraclePredictor(), StepTime(prefill_token=0.01, decode=0.1), now)


# Levels


@pytest.mark.parametrize(
    ("prompt", "emitted", "level", "left"),
    [
        (100, 0, 0, 413), (100, 412, 0, 1), (100, 413, 1, 1024), (512, 0, 0, 1), (513, 0, 1, 512),
        (1024, 1, 2, 2048), (2000, 0, 2, 49), (9000, 0, 3, inf), (100, 9000, 3, inf),
    ],
)  # fmt: skip
def test_level_by_service(prompt: int, emitted: int, level: int, left: float) -> None:
    """Skip-join by the prompt, then a level down for each quantum of 512, 1024, 2048 tokens that is used up."""
    r = request("a", prompt, 10_000)
    r.count(emitted=emitted)
    assert FeedbackQueue().level(r)[:2] == (level, left)


def test_promotion_ends_with_one_top_quantum() -> None:
    order = FeedbackQueue(quantum=16, promote=10.0)
    r = request("a", 100, 50, arrival=5.0)
    assert order.key(r, at(14.9)) == (3, 0.0, 15.0)
    assert order.key(r, at(15.0)) == (0, 0.0, inf)
    assert order.tier(r, at(15.0)) == 0
    r.move(Status.WAITING)
    r.move(Status.RUNNING)
    r.tier = 0
    assert order.lapse(r, at(15.0)) == 16
    assert order.key(r, at(16.0)) == (3, 0.0, inf)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), depth=st.sampled_from([1, 2]), quantum=st.integers(2, 20), blocks=st.integers(20, 80))
def test_running_levels_follow_outputs(data: st.DataObject, depth: int, quantum: int, blocks: int) -> None:
    """At every plan each running request stands at its level, and the counts by tier are right."""
    order = FeedbackQueue(quantum=quantum, promote=1e9)
    policy = build_policy("mlfq", {"quantum": quantum, "promote": 1e9})
    assert policy.order == order
    run = Run.of(policy, limits(num_blocks=blocks, block_size=4, max_num_seqs=3), depth)
    total = data.draw(st.integers(1, 8))
    for step in range(300):
        if step < total:
            run.add(request(f"r{step}", data.draw(st.integers(1, 40)), data.draw(st.integers(1, 60))))
        elif not run.scheduler.has_work:
            break
        run.step()
        running = run.scheduler.running
        counted: dict[int, int] = {}
        for r in running.members:
            counted[r.tier] = counted.get(r.tier, 0) + 1
            if r in running.decodes.members:
                outputs = r.emitted - depth - 1  # looked at when the plan before was made
                r_then = request("then", r.prompt_tokens, 99)
                r_then.count(emitted=max(0, outputs))
                assert order.level(r_then)[0] <= r.tier <= order.level(r)[0]
        assert counted == running._tiers


def test_a_fallen_one_gives_its_seat_to_a_better_one() -> None:
    run = Run.of("mlfq", limits(max_num_seqs=1), quantum=32)
    run.add(request("long", 16, 100))
    run.steps(5)
    run.add(request("short", 16, 4))
    run.steps(10)
    assert not run.preemptions(), "of one level yet"
    run.until_idle()
    (step, id, _), *_ = run.preemptions()
    assert (id, step) == ("long", 18), "it has emitted 17 outputs, one more than its quantum leaves it"
    assert run.token_times["short"][-1] < run.token_times["long"][-1]


# Deadlines


def test_latest_start_is_what_the_promises_leave() -> None:
    r = request("a", 100, 20, arrival=3.0, oracle_tokens=20, slo=Slo(ttft=5.0, tpot=0.3))
    assert latest_start(r, CTX) == pytest.approx(3.0 + 5.0 - 100 * 0.01)
    assert latest_start(r, CTX, cached=40) == pytest.approx(3.0 + 5.0 - 60 * 0.01)
    r.slo = Slo(e2e=9.0)
    assert latest_start(r, CTX) == pytest.approx(3.0 + 9.0 - 100 * 0.01 - 20 * 0.1)
    r.slo = Slo(ttft=5.0, tpot=0.3)
    r.first_token_at = 4.0
    r.count(computed=104, emitted=5)
    r.move(Status.WAITING)
    r.move(Status.RUNNING)
    assert latest_start(r, CTX) == pytest.approx(4.0 + 0.3 * 19 - 1 * 0.01 - 15 * 0.1), "it goes on from 104 tokens"
    r.slo = NO_SLO
    assert latest_start(r, CTX) == inf


@given(
    now=st.floats(0, 500),
    arrival=st.floats(0, 500),
    priority=st.integers(-3, 10),
    slo=st.sampled_from([NO_SLO, Slo(ttft=1.0), Slo(ttft=50.0), Slo(e2e=30.0), Slo(tpot=1.0)]),
    order=st.sampled_from(
        [
            Joint(),
            Joint(urgent_slack=0.0),
            Deadlines(),
            FeedbackQueue(quantum=8),
            Aged(FeedbackQueue(quantum=8)),
        ]
    ),
)
def test_key_and_until_agree(now: float, arrival: float, priority: int, slo: Slo, order: Joint) -> None:
    """A key stands until `until`, which lies ahead, and is another one then."""
    r = request("a", 100, 20, arrival=arrival, priority=priority, slo=slo)
    key = order.key(r, at(now))
    assert key.until > now
    if key.until < inf:
        middle = now + (key.until - now) / 2
        if middle < key.until:
            assert order.key(r, at(middle))[:2] == key[:2]
        assert order.key(r, at(key.until))[:2] != key[:2]


def test_joint_without_promises_is_priority_with_ageing() -> None:
    aged = Aged(Priority(), 60.0)
    for priority, arrival in ((0, 5.0), (10, 0.0), (5, 100.0)):
        r = request("a", 100, 20, arrival=arrival, priority=priority)
        assert Joint().key(r, at(101.0))[:2] == aged.key(r, CTX)[:2]
        assert Joint().tier(r, CTX) == priority


def test_joint_takes_the_longest_prefix_among_the_urgent() -> None:
    cached = {"cold": 0, "warm": 90, "calm": 99, "lost": 99}
    context = at(4.0)
    context.cached = lambda r: cached[r.id]
    starts = {"cold": 4.05, "warm": 4.14, "calm": 6.0, "lost": 3.0}
    requests = {}
    for id, start in starts.items():
        prefill = (100 - cached[id]) * 0.01
        requests[id] = request(id, 100, 5, arrival=0.0, slo=Slo(ttft=start + prefill))
    keys = {id: Joint().key(r, context) for id, r in requests.items()}
    assert sorted(keys, key=lambda id: keys[id]) == ["warm", "cold", "calm", "lost"]


def test_joint_takes_the_urgent_by_when_they_are_due() -> None:
    """Not by when they have to start: in the order by which it was found that all of them can be in time."""
    long = request("long", 100, 5, arrival=0.0, slo=Slo(ttft=5.5))
    short = request("short", 10, 5, arrival=0.0, slo=Slo(ttft=5.0))
    context = at(4.45)
    assert latest_start(long, context) < latest_start(short, context)
    urgent = [Joint().key(r, context) for r in (short, long)]
    assert [key.tier for key in urgent] == [-1, -1]
    assert urgent == sorted(urgent)


def attained(policy: str, load: float, **params: object) -> float:
    """The share of 120 requests that meet TTFT, at `load` times what one seat serves."""
    context = PolicyContext(OraclePredictor(), StepTime(prefill_token=0.001, decode=1.0))
    built = build_policy(policy, {**params, "backfill": False})
    run = Run(Scheduler(built, limits(max_num_seqs=1), context))
    due = [(int(n * 4 / load), request(f"r{n}", 16, 4, slo=Slo(ttft=20.0))) for n in range(120)]
    run.until_idle(due)
    return sum(not end.missed for end in run.ended.values()) / len(due)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("policy", "bound"), [("sla", {"patience": 1000.0}), ("joint", {"aging_window": 500.0})], ids=["sla", "joint"]
)
@pytest.mark.parametrize("hopeless", ["demote", "shed"])
def test_no_collapse_under_overload(policy: str, bound: dict[str, float], hopeless: str) -> None:
    """At one and a half times the load plain EDF serves hardly anybody in time; those who still can must be.

    Those who were demoted come back by age, so that their bound is to be longer than the overload; the
    shed do not.
    """
    params = bound if hopeless == "demote" else {"shed_hopeless": True}
    assert attained(policy, 0.9, **params) == attained("edf", 0.9) == 1.0
    assert attained("edf", 1.5) < 0.25
    assert attained(policy, 1.5, **params) > 0.6


@pytest.mark.parametrize("policy", ["sla", "joint"])
def test_the_hopeless_are_shed_where_that_is_wanted(policy: str) -> None:
    run = Run.of(policy, limits(max_num_seqs=1), shed_hopeless=True, displace=False)
    run.add(request("runs", 16, 40))
    run.step()
    run.add(request("lost", 16, 4, slo=Slo(ttft=5.0)), request("waits", 16, 4))
    run.until_idle()
    assert run.ended["lost"].reason is FinishReason.SHED
    assert run.ended["lost"].now <= 7
    assert run.ended["lost"].missed == ("ttft",)
    assert run.ended["waits"].reason is FinishReason.LENGTH
    demoted = Run.of(policy, limits(max_num_seqs=1), displace=False)
    demoted.add(request("runs", 16, 40))
    demoted.step()
    demoted.add(request("lost", 16, 4, slo=Slo(ttft=5.0)), request("waits", 16, 4))
    demoted.until_idle()
    assert demoted.ended["lost"].reason is FinishReason.LENGTH


def test_a_promise_displaces_what_has_none() -> None:
    run = Run.of("sla", limits(max_num_seqs=1))
    run.add(request("batch", 16, 40))
    run.steps(5)
    run.add(request("chat", 16, 4, slo=Slo(ttft=5.0, tpot=2.0)))
    run.until_idle()
    assert [id for _, id, _ in run.preemptions()] == ["batch"]
    assert run.ended["chat"].missed == ()


def test_a_running_request_loses_its_protection_with_its_promise() -> None:
    """TPOT of half a step a token cannot be kept: when it has shown, the next one may displace it."""
    context = PolicyContext(OraclePredictor(), StepTime(prefill_token=0.001, decode=0.1))
    run = Run(Scheduler(build_policy("sla"), limits(max_num_seqs=1), context))
    run.add(request("late", 16, 60, slo=Slo(ttft=5.0, tpot=0.5)))
    run.steps(3)
    (late,) = run.scheduler.running.members
    assert late.tier == 0
    run.steps(60)
    run2 = [r.tier for r in run.scheduler.running.members]
    assert run2 in ([1], []), "asked again at 1, 16, 32 outputs"
    assert EarliestDeadline().key(late, context).score == 5.0


# Cached prefixes


def warm(tokens: int, id: str, own: int = 8) -> Request:
    start = sum(map(ord, id)) * 1_000_000
    return Request(id, token_ids=[*range(tokens), *range(start, start + own)], max_tokens=4)


# (shared pairs of blocks, of which of two prefixes, own tokens, outputs) of a request a step
SHARERS = st.tuples(st.integers(0, 3), st.integers(1, 2), st.integers(1, 12), st.integers(1, 8))


@settings(max_examples=40, deadline=None)
@given(asked=st.lists(SHARERS, min_size=14, max_size=14), depth=st.sampled_from([1, 2]), blocks=st.integers(12, 60))
@example(  # one is preempted with a token in flight that makes its last full block a part of its prefix
    asked=[(1, 1, 5, 3), (2, 2, 11, 4), (2, 1, 12, 1), (3, 2, 9, 5), (0, 1, 8, 8), (0, 1, 3, 8)], depth=2, blocks=12
)
def test_keys_follow_the_cache(asked: list[tuple[int, int, int, int]], depth: int, blocks: int) -> None:
    """A waiting request is never taken for colder than it is, and the head is not taken for warmer."""
    policy = build_policy("sglang-lpm", {"backfill": False})
    run = Run.of(policy, limits(num_blocks=blocks, block_size=4, max_num_seqs=2, max_num_batched_tokens=16), depth)
    scheduler = run.scheduler
    for step in range(200):
        if step < len(asked):
            shared, prefix, own, outputs = asked[step]
            base, start = 50_000 * prefix, 1000 * step
            tokens = [*range(base, base + 8 * shared), *range(start, start + own)]
            run.add(Request(f"r{step}", token_ids=tokens, max_tokens=outputs))
        elif not scheduler.has_work:
            break
        scheduler._settle_keys(float(run.now))
        for r in scheduler.waiting:
            assert r.key is not None
            assert -r.key.score >= scheduler._affinity._match(r)[0] * 4
        head = scheduler.waiting.peek()
        if head is not None:
            assert head.key is not None
            assert -head.key.score == scheduler._affinity._match(head)[0] * 4
        run.step()
    affinity = scheduler._affinity
    assert not affinity._blocks
    assert not affinity._filed
    assert not affinity._missing
    assert not affinity._names


def test_a_commit_concerns_only_those_who_wait_for_it() -> None:
    """1,000 wait for one prefix, 1,000 for others: so many keys a step at most are asked again, all in the end."""
    policy = build_policy("sglang-lpm", {"backfill": False, "hold_pending": False})
    run = Run.of(policy, limits(num_blocks=4_000, max_num_seqs=1))
    run.add(request("runs", 4, 60))
    run.step()
    for n in range(1_000):
        run.add(warm(64, f"w{n}"), request(f"c{n}", 64, 4))
    asked: list[str] = []
    tokens = run.scheduler.ctx.cached

    def counted(r: Request) -> int:
        asked.append(r.id)
        return tokens(r)

    run.scheduler.ctx.cached = counted
    for _ in range(55):
        run.step()
    assert not asked, "nothing was computed that anybody waits for"
    for _ in range(40):
        before = len(asked)
        run.step()
        assert len(asked) - before <= REKEYS
    assert len(asked) >= 1_000 - 64
    assert all(id.startswith("w") for id in asked)
    assert len(set(asked)) >= 900


def test_those_who_share_a_prefix_in_the_making_wait_for_it() -> None:
    """A follower that arrives half-way finds more cached than the leader did when it began, and is held still."""
    for policy in ("joint", "prefix", "sglang-lpm"):
        run = Run.of(policy, limits(num_blocks=400, max_num_batched_tokens=64))
        run.add(warm(640, "leader"))
        run.steps(4)
        run.add(warm(640, "follower"))
        run.until_idle()
        computed = sum(chunk.length for plan in run.plans for chunk in plan.chunks)
        assert computed <= 648 + 16, policy


def test_places_of_running_requests_move_without_a_scan() -> None:
    run = Run.of("mlfq", limits(max_num_seqs=2), quantum=16)
    run.add(request("a", 8, 60), request("b", 8, 60))
    run.steps(3)
    version = run.scheduler.running.version
    run.steps(2)
    assert run.scheduler.running.version == version, "nobody moved"
    run.steps(10)
    assert run.scheduler.running.version > version
    assert {place(r)[0] for r in run.scheduler.running.members} == {1}


def test_a_head_whose_prefix_was_evicted_loses_its_place() -> None:
    """It waited as the warmest; what made it so is gone, so another is warmer now."""
    run = Run.of(build_policy("sglang-lpm", {"backfill": False}), limits(num_blocks=20, max_num_seqs=2))
    run.add(Request("x", token_ids=range(161), max_tokens=1), Request("y", token_ids=range(9000, 9049), max_tokens=1))
    run.until_idle()
    run.add(request("runs", 16, 12), request("grows", 16, 220))
    run.step()
    run.add(Request("warm", token_ids=[*range(160), 7], max_tokens=1))
    run.add(Request("less", token_ids=[*range(9000, 9048), 7], max_tokens=1))
    scheduler = run.scheduler
    first = scheduler.waiting.peek()
    assert first is not None
    assert first.id == "warm"
    lease = scheduler.kv.reserve(scheduler.kv.nothing, scheduler.kv.available - 3)  # another takes all but "y"'s
    scheduler.kv.release(lease)
    run.step()
    head = scheduler.waiting.peek()
    assert head is not None
    assert head.key is not None
    assert -head.key.score == scheduler._affinity._match(head)[0] * 16


class Souring(Priority):
    """A user's order whose keys change with outputs."""

    def lapse(self, r: Request, ctx: PolicyContext) -> float:
        return 5.0


def test_a_wrapper_lapses_as_the_order_within_does() -> None:
    souring = Souring()
    assert lapse_of(souring) == souring.lapse
    assert lapse_of(Aged(CacheAware(souring))) == souring.lapse
    assert lapse_of(Aged(Priority())) is None


@pytest.mark.parametrize("number", [inf, float("nan"), -1.0])
def test_a_wrapper_takes_only_numbers_that_order(number: float) -> None:
    with pytest.raises(ConfigError, match="window of ageing"):
        Aged(Priority(), number)
    with pytest.raises(ConfigError, match="rate of ageing"):
        Aged(Priority(), 1.0, number)
    with pytest.raises(ConfigError, match="bonus for a cached prompt"):
        CacheAware(Priority(), number)


@pytest.mark.parametrize(
    ("policy", "option"), [("joint", "w_cache"), ("priority", "aging_window"), ("mlfq", "promote")]
)
def test_an_infinite_parameter_is_refused(policy: str, option: str) -> None:
    """0 * inf is no number, and a queue cannot hold a place by it."""
    with pytest.raises(ConfigError, match=f"{option} must be a finite number"):
        build_policy(policy, {option: inf})
