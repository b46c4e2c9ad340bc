"""Pools: classes on engines of their own, and when one pool takes another's overflow."""

from __future__ import annotations

import pytest

from tests.routing.views import TOKEN_S, replica, request, route
from tidegate.core.slo import Slo
from tidegate.routing.pools import Pools
from tidegate.routing.view import ReplicaView

OF_CLASS = {"interactive": "a", "offline": "b", "batch": "b"}
PROMISES = {"interactive": Slo(ttft=0.5, tpot=0.05), "offline": Slo(ttft=2.0), "batch": Slo()}


def pooled() -> list[ReplicaView]:
    return [replica("fast", "a"), replica("slow", "b"), replica("bulk", "b")]


def names(pools: Pools, there: list[ReplicaView], slo_class: str, prompt: int = 1000, cached: int = 0) -> list[str]:
    r = request(prompt, slo_class=slo_class)
    return [c.name for c in pools.allowed(r, there, {c.name: cached for c in there}, 0.0)]


def test_pools_keep_classes_apart() -> None:
    pools, there = Pools({"interactive": "a", "batch": "b"}), pooled()
    there[0].outstanding = 1000
    chooser = route("least-loaded", pools=pools)
    assert chooser.choose(request(), there, 0.0).replica.name == "fast"
    assert {chooser.choose(request(slo_class="batch"), there, 0.0).replica.pool for _ in range(9)} == {"b"}
    assert names(pools, there, "offline") == ["fast", "slow", "bulk"]


def test_a_pool_without_engines_is_served_by_the_others() -> None:
    assert len(names(Pools({"interactive": "gone"}), pooled(), "interactive")) == 3


def test_an_isolated_pool_that_is_down_is_served_by_nobody_else() -> None:
    pools, there = Pools({"interactive": "a"}), pooled()
    r = request()
    assert [c.name for c in pools.allowed(r, there, {}, 0.0, {"a", "b"})] == ["fast"]
    assert pools.allowed(r, there[1:], {}, 0.0, {"a", "b"}) == []
    assert pools.allowed(r, there[1:], {}, 0.0, {"b"}) == there[1:]
    assert [pools.kept_to("interactive", known) for known in ({"a", "b"}, {"b"})] == ["a", None]
    assert pools.kept_to("offline", {"a", "b"}) is None


def test_a_pool_that_is_down_borrows() -> None:
    pools, there = Pools(OF_CLASS, 0.5, PROMISES), pooled()
    there[1].pending_tokens = round(1.0 / TOKEN_S)
    assert pools.allowed(request(), there[1:], {}, 0.0, {"a", "b"}) == there[2:]
    assert pools.kept_to("interactive", {"a", "b"}) is None


def test_a_class_overflows_when_waiting_would_take_its_part_of_the_promise() -> None:
    pools, there = Pools(OF_CLASS, 0.5, PROMISES), pooled()
    spare = round(0.25 / TOKEN_S) - 1000
    there[0].pending_tokens = spare - 1
    assert names(pools, there, "interactive") == ["fast"]
    there[0].pending_tokens = spare + 1
    assert names(pools, there, "interactive") == ["fast", "slow", "bulk"]
    assert names(pools, there, "interactive", cached=100) == ["fast"]  # what is cached there need not be waited for


def test_an_engine_lends_only_what_its_own_promise_spares() -> None:
    pools, there = Pools(OF_CLASS, 0.5, PROMISES), pooled()
    there[0].pending_tokens = 100_000
    there[1].pending_tokens = round(1.0 / TOKEN_S)  # half of offline's two seconds is gone
    assert names(pools, there, "interactive") == ["fast", "bulk"]
    there[2].pending_tokens = round(1.0 / TOKEN_S)
    assert names(pools, there, "interactive") == ["fast"]


def test_a_class_without_a_promise_borrows_idle_engines_only() -> None:
    pools, there = Pools(OF_CLASS, 0.5, PROMISES), pooled()
    assert names(pools, there, "batch") == ["slow", "bulk"]
    there[1].outstanding = there[2].outstanding = 1
    assert names(pools, there, "batch") == ["fast", "slow", "bulk"]
    assert names(pools, there, "batch", prompt=2600) == ["slow", "bulk"]  # would take 0.26 s of interactive's 0.5
    there[0].outstanding = 1
    for _ in range(9):
        there[0].speed.decoded(100, 0, 6.0)  # 60 ms an output, where 50 are promised
    assert names(pools, there, "batch") == ["slow", "bulk"]


def test_a_pool_whose_classes_were_promised_nothing_lends_freely() -> None:
    pools, there = Pools({"interactive": "a", "batch": "b"}, 0.5, PROMISES), pooled()
    for c in there:
        c.pending_tokens = 1_000_000
    assert names(pools, there, "interactive") == ["fast", "slow", "bulk"]


@pytest.mark.parametrize("borrow", [0.0, -1.0, 1.1])
def test_borrow_is_a_part(borrow: float) -> None:
    with pytest.raises(ValueError, match="borrow must be above 0 and at most 1"):
        Pools({}, borrow)
