"""A route: filter, score, pick. It decides; whoever hosts it sends, and tells it what came back.

The three parts are those of llm-d's endpoint picker, where a filter narrows, a scorer compares and a picker chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

from tidegate.errors import ConfigError
from tidegate.routing.choice import Choice
from tidegate.routing.picks import Anybody, Cheapest, InTurn, Pick
from tidegate.routing.pools import Pools
from tidegate.routing.prefix_index import Held, PrefixIndex
from tidegate.routing.scores import Affinity, BoundedHash, Equal, Joint, Outstanding, Score
from tidegate.routing.view import ReplicaView, RouteView

REMEMBERED_TOKENS = 1_000_000
"""Tokens whose blocks are remembered of each engine, where nobody knows how many it can hold."""
NOTHING = Held({})
NEAR = 0.05
"""Costs of "joint" that differ by less than this share are as good as equal: predictions are no better than that."""


class Route:
    """Chooses an engine for each request and remembers where prefixes went: `prefixes` is for those who know more."""

    def __init__(self, name: str, pools: Pools, score: Score, pick: Pick, prefixes: PrefixIndex) -> None:
        self.name = name
        self.prefixes = prefixes
        self._pools = pools
        self._score = score
        self._pick = pick
        self._asks = score.wants_prefixes or pools.borrow is not None

    def choose(self, r: RouteView, replicas: Sequence[ReplicaView], now: float) -> Choice:
        """Who of `replicas` (at least one, all fit to be sent requests) serves `r`: it is taken to go there."""
        held = self.prefixes.held(r) if self._asks else NOTHING
        cached = held.tokens
        allowed = self._pools.allowed(r, replicas, cached, now)
        parts = self._score.parts(r, allowed, cached, now)
        chosen = self._pick.pick(allowed, [sum(p) for p in parts])
        if self._asks:
            self.prefixes.sent(r, chosen.name, chosen.kv_tokens)
        return Choice(chosen, cached.get(chosen.name, 0), allowed, self._score.names, parts, held)

    def forget(self, replica: str) -> None:
        """`replica` lost its cache, hangs, or is gone."""
        self.prefixes.forget(replica)


def build_route(name: str, *, random: Random, pools: Pools | None = None, remembered: int = REMEMBERED_TOKENS) -> Route:
    """The route called `name`.

    random:     decides between equals. Gateways side by side need generators of different seeds
    remembered: tokens whose blocks are remembered of each engine that does not say how many it holds

    Raises ConfigError for an unknown name.
    """
    kinds: Mapping[str, Callable[[], tuple[Score, Pick]]] = {
        "random": lambda: (Equal(), Anybody(random)),
        "round-robin": lambda: (Equal(), InTurn(random)),
        "least-loaded": lambda: (Outstanding(), Cheapest(random)),
        "prefix": lambda: (Affinity(), Cheapest(random)),
        "consistent-hash": lambda: (BoundedHash(), Cheapest(random)),
        "joint": lambda: (Joint(), Cheapest(random, NEAR)),
    }
    if name not in kinds:
        raise ConfigError(f"unknown route {name!r}; known are {', '.join(kinds)}")
    score, pick = kinds[name]()
    return Route(name, pools or Pools(), score, pick, PrefixIndex(remembered))


ROUTES = ("random", "round-robin", "least-loaded", "prefix", "consistent-hash", "joint")
"""Names that `build_route` knows."""
