"""Bounded overtaking: an adversary sends whatever its policy prefers, as fast as the machine serves it.

Each policy documents a window (docs/policies.md): nobody who arrives later than that starts before.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.harness import Run, limits, request
from tidegate.core.policies.cache import CacheAware
from tidegate.core.policies.feedback import FeedbackQueue
from tidegate.core.policies.orders import Aged, Priority
from tidegate.core.policy import Order, PolicyContext
from tidegate.core.predict import OraclePredictor, StepTime
from tidegate.core.presets import build_policy
from tidegate.core.request import Request
from tidegate.core.scheduler import Scheduler
from tidegate.core.slo import NO_SLO, Slo

KEPT = st.sampled_from([NO_SLO, Slo(ttft=2.0), Slo(ttft=6.0, tpot=2.0), Slo(e2e=12.0)])
LOST = st.sampled_from([NO_SLO, Slo(ttft=0.01), Slo(ttft=3.0), Slo(e2e=4.0)])


def arrivals_before(
    policy: str,
    params: dict[str, object],
    low: Request,
    draw_next,
    start: int,
    ahead: int,
    depth: int,
    order: Order | None = None,
):
    """Arrival steps of those who started before `low`, which arrives at `start`; `ahead` bounds the run.

    order: in place of the policy's own
    """
    built = build_policy(policy, {**params, "backfill": False})
    built = built if order is None else replace(built, order=order)
    context = PolicyContext(OraclePredictor(), StepTime(0.01, 1.0))
    run = Run(Scheduler(built, limits(num_blocks=400, max_num_seqs=2), context), depth)
    passed: list[int] = []
    for step in range(6 * ahead + 40):
        if step == start:
            run.add(low)
        run.add(draw_next(step))
        for join in run.step().joined:
            if join.request_id == low.id:
                return passed
            passed.append(int(join.request_id[1:]))
    raise AssertionError("it never starts")


@settings(max_examples=40, deadline=None)
@given(data=st.data(), window=st.integers(1, 8), priority=st.integers(0, 2), depth=st.sampled_from([1, 2]))
def test_joint(data: st.DataObject, window: int, priority: int, depth: int) -> None:
    """Nobody later than `(priority + 2) * aging_window + urgent_slack`, whatever was promised to whom."""
    slack = data.draw(st.sampled_from([0.15, 2.0]))
    low = request("low", 16, 2, priority=priority, slo=data.draw(LOST))

    def adversary(step: int) -> Request:
        return request(f"h{step}", 16, 2, priority=data.draw(st.integers(0, 2)), slo=data.draw(KEPT))

    bound = (priority + 2) * window + slack
    within = data.draw(st.sampled_from([None, 0.5 * window, 3.0 * window]))
    params: dict[str, object] = {"aging_window": float(window), "urgent_slack": slack, "first_token_within": within}
    passed = arrivals_before("joint", params, low, adversary, 3, int(bound) + 8, depth)
    assert max(passed, default=0) <= 3 + bound


@settings(max_examples=40, deadline=None)
@given(data=st.data(), patience=st.integers(2, 20), depth=st.sampled_from([1, 2]))
def test_sla(data: st.DataObject, patience: int, depth: int) -> None:
    low = request("low", 16, 2, slo=data.draw(LOST))
    passed = arrivals_before(
        "sla",
        {"patience": float(patience)},
        low,
        lambda step: request(f"h{step}", 16, 2, slo=data.draw(KEPT)),
        3,
        patience + 8,
        depth,
    )
    assert max(passed, default=0) <= 3 + patience


@settings(max_examples=30, deadline=None)
@given(data=st.data(), promote=st.integers(2, 20), prompt=st.integers(17, 120), depth=st.sampled_from([1, 2]))
def test_mlfq(data: st.DataObject, promote: int, prompt: int, depth: int) -> None:
    low = request("low", prompt, 2)
    params: dict[str, object] = {"quantum": 16, "promote": float(promote)}
    passed = arrivals_before(
        "mlfq", params, low, lambda step: request(f"h{step}", data.draw(st.integers(1, 16)), 2), 3, promote + 8, depth
    )
    assert max(passed, default=0) <= 3 + promote


@settings(max_examples=30, deadline=None)
@given(data=st.data(), weighs=st.sampled_from([("prefix", "beta"), ("sglang-lpm", "")]), depth=st.sampled_from([1, 2]))
def test_prefix(data: st.DataObject, weighs: tuple[str, str], depth: int) -> None:
    """At most `advantage / age` later arrivals pass, whoever of them is warm."""
    name, beta = weighs
    params: dict[str, object] = {"age": 8.0} | ({beta: 64.0} if beta else {})

    def adversary(step: int) -> Request:
        warm = data.draw(st.booleans()) or step < 3
        tokens = range(64) if warm else range(10_000 * step, 10_000 * step + 64)
        return Request(f"h{step}", token_ids=[*tokens, 7_000_000 + step], max_tokens=3)

    passed = arrivals_before(name, params, request("low", 64, 2), adversary, 12, 40, depth)
    assert sum(step >= 12 for step in passed) <= 8 + 1  # the one that arrives in the same step comes after it
    assert max(passed, default=0) <= 12 + 8


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(["mlfq", "fastserve"]),
    window=st.integers(1, 12),
    prompt=st.integers(17, 200),
    depth=st.sampled_from([1, 2]),
)
def test_aged_levels(name: str, window: int, prompt: int, depth: int) -> None:
    """A level is worth a window: rivals of the top level pass for as many windows as `low` is levels lower."""
    low = request("low", prompt, 2)
    ahead = FeedbackQueue(quantum=16).level(low)[0] * window
    params: dict[str, object] = {"quantum": 16, "promote": 1e9, "aging_window": float(window)}
    passed = arrivals_before(name, params, low, lambda step: request(f"h{step}", 16, 2), 3, ahead + 8, depth)
    assert max(passed, default=0) <= 3 + ahead


@settings(max_examples=30, deadline=None)
@given(rate=st.integers(1, 3), outputs=st.integers(3, 12), depth=st.sampled_from([1, 2]))
def test_aged_scores(rate: int, outputs: int, depth: int) -> None:
    """A second of service is worth `rate` seconds, of which an output takes one here."""
    params: dict[str, object] = {"aging_window": 60.0, "aging_rate": float(rate)}
    low, ahead = request("low", 16, outputs), rate * (outputs - 2)
    passed = arrivals_before("sjf", params, low, lambda step: request(f"h{step}", 16, 2), 3, ahead + 8, depth)
    assert max(passed, default=0) <= 3 + ahead


@settings(max_examples=30, deadline=None)
@given(window=st.integers(1, 10), beta=st.integers(0, 6), depth=st.sampled_from([1, 2]))
def test_an_aged_cache_bonus(window: int, beta: int, depth: int) -> None:
    """Rivals of a better class, whose prompt is cached, pass for a window and the bonus."""
    order = Aged(CacheAware(Priority(), float(beta)), float(window))
    low, ahead = Request("low", token_ids=range(1000, 1033), max_tokens=2, priority=1), window + beta
    passed = arrivals_before(
        "priority",
        {},
        low,
        lambda step: Request(f"h{step}", token_ids=range(33), max_tokens=2),
        3,
        ahead + 8,
        depth,
        order,
    )
    assert max(passed, default=0) <= 3 + ahead


def test_each_without_its_bound_starves() -> None:
    """The same streams and no window: the tests above bite."""
    cases = {
        "edf": ({}, {}, {"slo": Slo(ttft=1.0)}, 16),
        "sglang-lpm": ({"age": 0.0}, {}, {}, 16),
        "mlfq": ({"quantum": 16, "promote": 1e9}, {}, {}, 30),
        "joint": ({"aging_window": 1e9}, {"priority": 1}, {}, 16),
        "sla": ({"patience": 1e9}, {}, {"slo": Slo(ttft=9.0)}, 16),
    }
    for name, (params, low, high, prompt) in cases.items():
        with pytest.raises(AssertionError, match="never starts"):
            arrivals_before(
                name,
                params,
                request("low", prompt, 2, **low),
                lambda step, high=high, name=name: (
                    Request(f"h{step}", token_ids=[*range(33), step], max_tokens=2, **high)
                    if name == "sglang-lpm"
                    else request(f"h{step}", 16, 2, **high)
                ),
                3,
                30,
                1,
            )


def test_wrappers_compose() -> None:
    """A cache bonus on an aged order adds at most `beta` seconds to what ageing allows."""
    context = PolicyContext(OraclePredictor(), StepTime(), cached=lambda r: r.prompt_tokens)
    r = request("a", 100, 5, arrival=7.0, priority=2)
    order = CacheAware(Aged(Priority(), 10.0), beta=0.5)
    assert order.key(r, context)[:2] == (0, 2 * 10.0 + 7.0 - 0.5)
    assert Aged(CacheAware(Priority(), 0.5), 10.0).key(r, context)[:2] == (0, 2 * 10.0 + 7.0 - 0.5)
    assert order.tier(r, context) == 2
