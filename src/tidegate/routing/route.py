"""A route: filter, score, pick. It decides; whoever hosts it sends, and tells it what came back.

The three parts are those of llm-d's endpoint picker, where a filter narrows, a scorer compares and a picker chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

from tidegate.errors import ConfigError
from tidegate.routing.picks import Anybody, Cheapest, InTurn, Pick
from tidegate.routing.pools import Pools
from tidegate.routing.prefixes import PrefixMemory
from tidegate.routing.scores import Affinity, Equal, FirstToken, Outstanding, Score
from tidegate.routing.view import ReplicaView, RouteView

REMEMBERED_TOKENS = 1_000_000
"""Tokens whose blocks are remembered of each engine, where nobody knows how many it can hold."""


class Route:
    """Chooses an engine for each request and remembers where prefixes went."""

    def __init__(self, name: str, pools: Pools, score: Score, pick: Pick, prefixes: PrefixMemory) -> None:
        self.name = name
        self._pools = pools
        self._score = score
        self._pick = pick
        self._prefixes = prefixes

    def choose(self, r: RouteView, replicas: Sequence[ReplicaView]) -> tuple[ReplicaView, int]:
        """Who of `replicas` (at least one) serves `r`, and how many of its tokens are believed to be cached there."""
        score, allowed = self._score, self._pools.allowed(r, replicas)
        if not score.wants_prefixes:
            return self._pick.pick([(score.cost(r, c, 0), c) for c in allowed]), 0
        held = self._prefixes.matches(r.blocks) if r.blocks else {}
        cached = {name: r.tokens(depth) for name, depth in held.items()}
        chosen = self._pick.pick([(score.cost(r, c, cached.get(c.name, 0)), c) for c in allowed])
        if r.blocks:
            self._prefixes.sent(chosen.name, r.blocks, r.block_tokens)
        return chosen, cached.get(chosen.name, 0)

    def forget(self, replica: str) -> None:
        """`replica` lost its cache: it was restarted, say."""
        self._prefixes.forget(replica)


def build_route(
    name: str, *, token_s: float, seed: int = 0, pools: Pools | None = None, remembered: int = REMEMBERED_TOKENS
) -> Route:
    """The route called `name`.

    token_s:    seconds that an engine computes for one prompt token; only "joint" asks
    seed:       of "random"
    remembered: tokens whose blocks are remembered of each engine; as many as it can hold, where that is known

    Raises ConfigError for an unknown name.
    """
    kinds: Mapping[str, Callable[[], tuple[Score, Pick]]] = {
        "random": lambda: (Equal(), Anybody(Random(seed))),
        "round-robin": lambda: (Equal(), InTurn()),
        "least-loaded": lambda: (Outstanding(), Cheapest()),
        "prefix": lambda: (Affinity(), Cheapest()),
        "joint": lambda: (FirstToken(token_s), Cheapest()),
    }
    if name not in kinds:
        raise ConfigError(f"unknown route {name!r}; known are {', '.join(kinds)}")
    score, pick = kinds[name]()
    return Route(name, pools or Pools(), score, pick, PrefixMemory(remembered))


ROUTES = ("random", "round-robin", "least-loaded", "prefix", "joint")
"""Names that `build_route` knows."""
