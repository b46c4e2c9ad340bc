"""Requests and engines for tests of routes."""

from __future__ import annotations

from itertools import count
from random import Random
from typing import Any

from tidegate.routing.choice import Choice
from tidegate.routing.route import Route, build_route
from tidegate.routing.speed import Speed
from tidegate.routing.view import ReplicaView, RouteView

TOKEN_S = 1e-4
IDS = count()


def route(name: str, seed: int = 0, **given: Any) -> Route:
    return build_route(name, random=Random(seed), **given)


def request(
    prompt: int = 1000, blocks: tuple[int, ...] = (), slo_class: str = "interactive", **given: Any
) -> RouteView:
    return RouteView(str(next(IDS)), slo_class, prompt, blocks, 100, **given)


def replica(name: str, pool: str = "", **given: Any) -> ReplicaView:
    """An engine whose first token takes nothing but its prompt tokens, `TOKEN_S` each, as far as is known."""
    return ReplicaView(name, pool, speed=Speed(token_s=TOKEN_S, base_s=1e-9), **given)


def replicas(n: int, **given: Any) -> list[ReplicaView]:
    return [replica(str(i), **given) for i in range(n)]


def sent_to(c: ReplicaView, cached_tokens: int = 0) -> Choice:
    return Choice(c, cached_tokens)
