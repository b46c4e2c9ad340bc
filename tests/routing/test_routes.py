"""Routes: where requests go, given what a gateway can know."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from tests.routing.views import TOKEN_S, replica, replicas, request, route
from tidegate.errors import ConfigError
from tidegate.routing.ledger import Ledger
from tidegate.routing.route import ROUTES
from tidegate.routing.scores import Joint
from tidegate.routing.view import Facts, ReplicaView, RouteView


def cost(r: RouteView, c: ReplicaView, cached: int = 0, now: float = 0.0) -> float:
    (parts,) = Joint().parts(r, [c], {c.name: cached}, now)
    return sum(parts)


def test_every_name_is_a_route_and_an_unknown_one_lists_them() -> None:
    assert all(route(name).name == name for name in ROUTES)
    with pytest.raises(ConfigError, match="unknown route 'jont'; known are random, round-robin"):
        route("jont")


@pytest.mark.parametrize("name", ROUTES)
def test_every_route_chooses_one_of_those_there_are_and_says_what_each_would_have_cost(name: str) -> None:
    chooser, rng, there = route(name), Random(1), replicas(5)
    for now in range(200):
        some = rng.sample(there, rng.randint(1, 5))
        r = request(rng.randint(1, 3000), tuple(rng.sample(range(9), 3)))
        choice = chooser.choose(r, some, float(now))
        assert choice.replica in some
        assert [c.name for c in choice.candidates] == [c.name for c in some]
        assert all(c.cost == pytest.approx(sum(c.parts.values())) for c in choice.candidates)
        of_name = {c.name: c.cached_tokens for c in choice.candidates}
        assert 0 <= choice.cached_tokens == of_name[choice.replica.name]


@pytest.mark.parametrize("name", ROUTES)
def test_a_route_repeats_with_its_seed_and_ties_fall_by_lot(name: str) -> None:
    def drawn(seed: int) -> list[str]:
        chooser = route(name, seed)
        return [chooser.choose(request(sticky=str(i)), replicas(4), 0.0).replica.name for i in range(400)]

    assert drawn(1) == drawn(1)
    assert all(60 < n < 140 for n in Counter(drawn(1)).values())
    if name != "consistent-hash":  # on which any two gateways agree
        assert drawn(1) != drawn(2)


def test_round_robin_takes_turns_also_among_those_allowed() -> None:
    chooser, there = route("round-robin"), replicas(3)
    first = [chooser.choose(request(), there, 0.0).replica.name for _ in range(3)]
    assert sorted(first) == ["0", "1", "2"]
    assert [chooser.choose(request(), there, 0.0).replica.name for _ in range(6)] == first * 2
    rest = [n for n in first if n != "0"]
    assert [chooser.choose(request(), there[1:], 0.0).replica.name for _ in range(3)] == [*rest, rest[0]]


def test_least_loaded_joins_the_shortest_queue() -> None:
    chooser, ledger, there = route("least-loaded"), Ledger(), replicas(3)
    there[0].outstanding = 5
    for _ in range(4):
        r = request()
        ledger.sent(r, chooser.choose(r, there, 0.0), 0.0)
    assert [c.outstanding for c in there] == [5, 2, 2]


def test_least_loaded_counts_what_others_sent_as_long_as_that_is_fresh() -> None:
    chooser, there = route("least-loaded"), replicas(2)
    there[0].outstanding = 1
    there[1].told(Facts(10.0, running=2, waiting=1))
    assert chooser.choose(request(), there, 12.0).replica is there[0]
    assert chooser.choose(request(), there, 16.0).replica is there[1]


def test_prefix_follows_the_longest_prefix_however_busy_that_is() -> None:
    chooser, there = route("prefix"), replicas(3)
    first, cached, *_ = chooser.choose(request(300, (1, 2, 3)), there, 0.0)
    assert cached == 0
    first.outstanding = 100
    again, cached, *_ = chooser.choose(request(300, (1, 2, 9)), there, 0.0)
    assert (again, cached) == (first, 200)
    other, cached, *_ = chooser.choose(request(300, (7, 2, 9)), there, 0.0)  # the same names behind another start
    assert other is not first
    assert cached == 0
    assert chooser.choose(request(300, (1, 8, 9)), there, 0.0).replica is not first  # a third is too little


def test_joint_weighs_the_wait_against_the_prefix() -> None:
    chooser, there = route("joint"), replicas(2)
    r = request(1000, tuple(range(10)))
    holder = chooser.choose(r, there, 0.0).replica
    holder.pending_tokens = 900
    assert chooser.choose(r, there, 0.0).replica is holder  # 900 + 0 < 0 + 1000
    holder.pending_tokens = 1100
    choice = chooser.choose(r, there, 0.0)
    assert choice.replica is not holder
    assert choice.cached_tokens == 0
    assert choice.expected_s == pytest.approx(1000 * TOKEN_S)


def test_joint_foresees_a_wait_for_seats_and_for_memory() -> None:
    full = replica("full", seats=4, outstanding=5, service_s=8.0)
    assert cost(request(1000), full) == pytest.approx(0.1 + 8.0 * 2 / 4)
    short = replica("short", seats=4, kv_tokens=2000, held_tokens=1500, outstanding=1, service_s=8.0)
    assert cost(request(1000), short, 1000) == pytest.approx(8.0 * 0.25)
    short.seats = None  # nobody knows how many it runs at once
    assert cost(request(1000), short, 1000) == pytest.approx(8.0 * 0.25)
    roomy = replica("roomy", seats=4, kv_tokens=20_000, held_tokens=1500, outstanding=1, service_s=8.0)
    assert cost(request(1000), roomy, 200) == pytest.approx(0.08)


def test_joint_counts_the_delay_of_those_who_decode() -> None:
    idle, decoding = replica("idle"), replica("decoding", outstanding=20, decoding=20)
    assert cost(request(1000), idle) == pytest.approx(0.1)
    assert cost(request(1000), decoding) == pytest.approx(0.1 + 0.1 * 20 * 0.1)
    assert cost(request(1000), decoding, 1000) == pytest.approx(0.0, abs=1e-6)  # nothing to compute delays nobody


def test_joint_believes_an_engine_while_that_is_fresh_and_never_stops_without() -> None:
    c = replica("0", seats=10, kv_tokens=10_000, service_s=2.0, prompt_tokens=500.0)
    alone = cost(request(1000), c)
    c.told(Facts(5.0, running=10, waiting=4, kv_usage=0.95))
    assert cost(request(1000), c, now=6.0) == pytest.approx(alone + 4 * 500 * TOKEN_S + 2.0 * 5 / 10 + 0.1 * 0.1 * 10)
    assert cost(request(1000), c, now=5.0 + 5.1) == pytest.approx(alone)
    c.told(Facts(20.0))  # an engine that says nothing
    assert cost(request(1000), c, now=20.0) == pytest.approx(alone)
