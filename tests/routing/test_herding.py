"""Gateways that share nothing, before the same engines: do they herd? And what bounded hashing holds."""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import count
from random import Random
from statistics import fmean

import pytest

from tests.routing.views import TOKEN_S, replicas, request, route, sent_to
from tidegate.routing.ledger import Ledger
from tidegate.routing.route import Route
from tidegate.routing.view import Facts, ReplicaView, RouteView

ENGINES, REQUESTS, RATE, OUTPUTS_S = 8, 4000, 60.0, 1.0
SCRAPE_S = 1.0


class Engines:
    """Each computes prompts one after the other, then decodes for `OUTPUTS_S`."""

    def __init__(self) -> None:
        self.free_at = [0.0] * ENGINES
        self.there = [0] * ENGINES
        self.ends: list[tuple[float, int]] = []
        self.waits: list[float] = []
        self.most_above_mean: list[float] = []

    def run_until(self, now: float) -> None:
        while self.ends and self.ends[0][0] <= now:
            self.there[heapq.heappop(self.ends)[1]] -= 1

    def add(self, engine: int, prompt: int, now: float) -> float:
        """When its first token comes."""
        self.there[engine] += 1
        self.waits.append(max(self.free_at[engine] - now, 0.0))
        self.free_at[engine] = max(self.free_at[engine], now) + prompt * TOKEN_S
        heapq.heappush(self.ends, (self.free_at[engine] + OUTPUTS_S, engine))
        self.most_above_mean.append(max(self.there) * ENGINES / sum(self.there))
        return self.free_at[engine]


class Gateway:
    """One process: its own views, ledger and generator; told of the engines once a second, if at all."""

    def __init__(self, name: str, seed: int, facts: bool) -> None:
        self.route: Route = route(name, seed)
        self.views: list[ReplicaView] = replicas(ENGINES)
        self.ledger = Ledger()
        self.due: list[tuple[float, int, str, bool]] = []
        self.serial = count()
        self.facts, self.told_at = facts, -SCRAPE_S * (seed % 2) / 2

    def send(self, r: RouteView, engines: Engines, now: float) -> None:
        while self.due and self.due[0][0] <= now:
            at, _, name, end = heapq.heappop(self.due)
            self.ledger.ended(name, at) if end else self.ledger.first_token(name, at)
        if self.facts and now - self.told_at >= SCRAPE_S:
            self.told_at = now
            for n, view in enumerate(self.views):
                waiting = engines.free_at[n] > now
                view.told(Facts(now, engines.there[n] - waiting, int(waiting)))
        choice = self.route.choose(r, self.views, now)
        self.ledger.sent(r, choice, now)
        first = engines.add(int(choice.replica.name), r.prompt_tokens, now)
        heapq.heappush(self.due, (first, next(self.serial), r.id, False))
        heapq.heappush(self.due, (first + OUTPUTS_S, next(self.serial), r.id, True))


def spread(name: str, gateways: int, facts: bool = False) -> tuple[float, float]:
    """(mean of the fullest engine's requests over the mean engine's, mean wait in seconds) of one load of prompts."""
    rng, engines, now = Random(5), Engines(), 0.0
    side_by_side = [Gateway(name, seed, facts) for seed in range(1, gateways + 1)]
    for _ in range(REQUESTS):
        now += rng.expovariate(RATE)
        engines.run_until(now)
        r = request(rng.randint(200, 1500), sticky=str(rng.randrange(50)))
        side_by_side[rng.randrange(gateways)].send(r, engines, now)
    return fmean(engines.most_above_mean), fmean(engines.waits)


@pytest.mark.parametrize("facts", [False, True])
@pytest.mark.parametrize("name", ["joint", "least-loaded", "consistent-hash"])
def test_two_gateways_do_not_herd(name: str, facts: bool) -> None:
    """Two that share nothing spread the load nearly as one that knows it all, and far better than by lot."""
    (one, wait), (two, waits), (lot, lots) = spread(name, 1), spread(name, 2, facts), spread("random", 2)
    assert one < two < 1.25 * one
    assert two < lot
    assert wait < lots
    assert waits < lots


def test_many_gateways_before_idle_engines_do_not_choose_the_same() -> None:
    """Nobody has sent anything yet, so all see the same."""
    for name in ("joint", "least-loaded", "round-robin"):
        first = Counter(route(name, seed).choose(request(), replicas(8), 0.0).replica.name for seed in range(400))
        assert len(first) == 8
        assert max(first.values()) < 90  # of an expected 50


def test_bounded_hashing_keeps_keys_together_within_the_bound() -> None:
    chooser, ledger, there, rng = route("consistent-hash"), Ledger(), replicas(4), Random(2)
    homes: dict[str, Counter[str]] = {}
    for _ in range(2000):
        key = str(min(int(rng.paretovariate(1.0)), 60))
        r = request(sticky=key)
        chosen = chooser.choose(r, there, 0.0)
        ledger.sent(r, chosen, 0.0)
        homes.setdefault(key, Counter())[chosen.replica.name] += 1
        total = sum(c.outstanding for c in there)
        assert max(c.outstanding for c in there) <= 1.25 * total / 4 + 1
    rare = [homes[key] for key in homes if sum(homes[key].values()) > 5 and key != "1"]
    assert fmean(max(h.values()) / sum(h.values()) for h in rare) > 0.6


def test_a_key_moves_only_if_its_engine_goes_and_any_two_gateways_agree() -> None:
    there = replicas(5)

    def homes(seed: int, some: list[ReplicaView]) -> dict[str, str]:
        chooser = route("consistent-hash", seed)
        return {
            str(n): chooser.choose(request(sticky=str(n)), some, 0.0).replica.name for n in range(300)
        }  # nobody is full: nothing is outstanding

    before, after = homes(1, there), homes(2, there[:-1])
    assert before == homes(7, there)
    assert {before[key] for key in before if before[key] != after[key]} == {"4"}


def test_without_a_sticky_key_the_first_block_and_then_the_tenant_decide() -> None:
    chooser, there = route("consistent-hash"), replicas(16)

    def home(r: RouteView) -> str:
        return chooser.choose(r, there, 0.0).replica.name

    assert len({home(request(blocks=(7, n))) for n in range(20)}) == 1
    assert len({home(request(blocks=(n, 7))) for n in range(20)}) > 5
    assert len({home(request(tenant="t")) for _ in range(20)}) == 1
    assert len({home(request(tenant=str(n))) for n in range(20)}) > 5
    assert sent_to(there[0]).candidates == []
