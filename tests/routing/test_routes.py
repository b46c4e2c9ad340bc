"""Routes: where requests go, given what a gateway can know."""

from __future__ import annotations

from collections import Counter
from itertools import count
from random import Random

import pytest

from tidegate.errors import ConfigError
from tidegate.routing.ledger import Ledger
from tidegate.routing.pools import Pools
from tidegate.routing.prefixes import PrefixMemory
from tidegate.routing.route import ROUTES, Route, build_route
from tidegate.routing.scores import FirstToken
from tidegate.routing.view import ReplicaView, RouteView

TOKEN_S = 1e-4
IDS = count()


def route(name: str, **given: object) -> Route:
    return build_route(name, token_s=TOKEN_S, **given)  # type: ignore[arg-type]


def request(prompt: int = 1000, blocks: tuple[int, ...] = (), slo_class: str = "interactive") -> RouteView:
    return RouteView(str(next(IDS)), slo_class, prompt, blocks, 100)


def replicas(n: int, **given: object) -> list[ReplicaView]:
    return [ReplicaView(str(i), **given) for i in range(n)]  # type: ignore[arg-type]


def test_every_name_is_a_route_and_an_unknown_one_lists_them() -> None:
    assert all(route(name).name == name for name in ROUTES)
    with pytest.raises(ConfigError, match="unknown route 'jont'; known are random, round-robin"):
        route("jont")


@pytest.mark.parametrize("name", ROUTES)
def test_every_route_chooses_one_of_those_there_are(name: str) -> None:
    chooser, rng, there = route(name), Random(1), replicas(5)
    for _ in range(200):
        some = rng.sample(there, rng.randint(1, 5))
        chosen, cached = chooser.choose(request(rng.randint(1, 3000), tuple(rng.sample(range(9), 3))), some)
        assert chosen in some
        assert cached >= 0


def test_random_is_even_and_repeats_with_its_seed() -> None:
    def drawn(seed: int) -> list[str]:
        chooser, there = route("random", seed=seed), replicas(4)
        return [chooser.choose(request(), there)[0].name for _ in range(400)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert all(70 < n < 130 for n in Counter(drawn(1)).values())


def test_round_robin_takes_turns_also_among_those_allowed() -> None:
    chooser, there = route("round-robin"), replicas(3)
    assert [chooser.choose(request(), there)[0].name for _ in range(6)] == list("012012")
    assert [chooser.choose(request(), there[1:])[0].name for _ in range(3)] == list("121")


def test_least_loaded_joins_the_shortest_queue_and_spreads_ties() -> None:
    chooser, ledger, there = route("least-loaded"), Ledger(), replicas(3)
    there[0].outstanding = 5
    for _ in range(4):
        r = request()
        chosen, cached = chooser.choose(r, there)
        ledger.sent(r, chosen, cached)
    assert [c.outstanding for c in there] == [5, 2, 2]
    idle = replicas(2)
    idle[0].sent = 1
    assert chooser.choose(request(), idle)[0].name == "1"


def test_prefix_follows_the_longest_prefix_however_busy_that_is() -> None:
    chooser, there = route("prefix"), replicas(3)
    first, cached = chooser.choose(request(300, (1, 2, 3)), there)
    assert cached == 0
    first.outstanding = 100
    again, cached = chooser.choose(request(300, (1, 2, 9)), there)
    assert (again, cached) == (first, 200)
    other, cached = chooser.choose(request(300, (7, 2, 9)), there)  # the same names behind another start
    assert other is not first
    assert cached == 0
    assert chooser.choose(request(300, (1, 8, 9)), there)[0] is not first  # a third of the prompt is too little


def test_joint_weighs_the_wait_against_the_prefix() -> None:
    chooser, there = route("joint"), replicas(2)
    r = request(1000, tuple(range(10)))
    holder, _ = chooser.choose(r, there)
    holder.pending_tokens = 900
    assert chooser.choose(r, there)[0] is holder  # 900 + 0 < 0 + 1000
    holder.pending_tokens = 1100
    chosen, cached = chooser.choose(r, there)
    assert chosen is not holder
    assert cached == 0


def test_joint_foresees_a_wait_for_seats_and_for_memory() -> None:
    score = FirstToken(TOKEN_S)
    full = ReplicaView("full", seats=4, outstanding=5, service_s=8.0)
    assert score.cost(request(1000), full, 0) == pytest.approx(0.1 + 8.0 * 2 / 4)
    short = ReplicaView("short", seats=4, kv_tokens=2000, held_tokens=1500, outstanding=1, service_s=8.0)
    assert score.cost(request(1000), short, 1000) == pytest.approx(8.0 * 0.25)
    roomy = ReplicaView("roomy", seats=4, kv_tokens=20_000, held_tokens=1500, outstanding=1, service_s=8.0)
    assert score.cost(request(1000), roomy, 200) == pytest.approx(0.08)


def pooled() -> list[ReplicaView]:
    return [ReplicaView("fast", "a"), ReplicaView("slow", "b"), ReplicaView("bulk", "b")]


def test_pools_keep_classes_apart() -> None:
    pools, there = Pools({"interactive": "a", "batch": "b"}), pooled()
    there[0].outstanding = 1000
    chooser = route("least-loaded", pools=pools)
    assert chooser.choose(request(), there)[0].name == "fast"
    assert {chooser.choose(request(slo_class="batch"), there)[0].pool for _ in range(4)} == {"b"}
    assert {c.name for c in pools.allowed(request(slo_class="offline"), there)} == {"fast", "slow", "bulk"}


def test_a_class_borrows_only_beyond_the_margin() -> None:
    pools, there = Pools({"interactive": "a", "batch": "b"}, borrow=3), pooled()
    there[0].outstanding, there[1].outstanding, there[2].outstanding = 4, 2, 1
    assert [c.name for c in pools.allowed(request(), there)] == ["fast", "bulk"]
    there[2].outstanding = 2
    assert [c.name for c in pools.allowed(request(), there)] == ["fast"]
    assert [c.name for c in pools.allowed(request(slo_class="batch"), there)] == ["slow", "bulk"]


def test_a_pool_without_engines_is_served_by_the_others() -> None:
    assert len(Pools({"interactive": "gone"}).allowed(request(), pooled())) == 3


def test_prefix_memory_is_bounded_and_forgets_tails_first() -> None:
    memory = PrefixMemory(tokens=4)
    memory.sent("x", (1, 2, 3))
    memory.sent("x", (1, 8, 9))
    assert len(memory) == 4
    assert memory.matches((1, 2, 3)) == {"x": 2}  # 3, the tail longest unused, went
    assert memory.matches((1, 8, 9)) == {"x": 3}
    for i in range(100):
        memory.sent("y", (1000 + i, 2000 + i))
    assert len(memory) == 8
    assert len(memory._holders) == 8


def test_blocks_count_for_what_they_hold() -> None:
    memory = PrefixMemory(tokens=1000)
    memory.sent("x", range(20), block_tokens=100)
    assert memory.matches(range(20)) == {"x": 10}


def test_prefix_memory_tells_the_depth_of_each_and_forgets_a_replica() -> None:
    memory = PrefixMemory(tokens=100)
    memory.sent("x", (1, 2, 3))
    memory.sent("y", (1, 5))
    assert memory.matches((1, 2, 3, 4)) == {"x": 3, "y": 1}
    assert memory.matches((2, 3)) == {"x": 2}
    assert memory.matches((6,)) == {}
    memory.forget("x")
    assert memory.matches((1, 2, 3)) == {"y": 1}
    assert len(memory._holders) == 2


def test_the_ledger_counts_what_a_gateway_sees() -> None:
    ledger, c = Ledger(), ReplicaView("0")
    a, b = request(1000), request(500)
    ledger.sent(a, c, 300)
    ledger.sent(b, c, 0)
    assert (c.outstanding, c.sent, c.pending_tokens, c.held_tokens) == (2, 2, 1200, 1500)
    ledger.first_token(a.id, 2.0)
    ledger.first_token(a.id, 3.0)
    assert c.pending_tokens == 500
    ledger.ended(a.id, 6.0)
    assert (c.outstanding, c.held_tokens, c.service_s) == (1, 500, 4.0)
    ledger.ended(b.id, 9.0)  # refused, or cancelled before its first token
    ledger.ended(b.id, 9.5)
    assert (c.outstanding, c.pending_tokens, c.held_tokens, c.service_s) == (0, 0, 0, 4.0)
