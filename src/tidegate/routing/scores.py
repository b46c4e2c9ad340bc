"""Scores: what it would cost to send a request to each of several engines. Lower is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil
from typing import ClassVar, Protocol

from tidegate.routing.view import ReplicaView, RouteView
from tidegate.routing.waits import excess, tokens_ahead


class Score(Protocol):
    """The cost of each candidate, as parts that add up to it.

    names:          of the parts
    wants_prefixes: whether `cached`, the tokens of the prompt that each is believed to hold, is looked at
    """

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def wants_prefixes(self) -> bool: ...

    def parts(
        self, r: RouteView, replicas: Sequence[ReplicaView], cached: Mapping[str, int], now: float
    ) -> Sequence[tuple[float, ...]]: ...


@dataclass(frozen=True, slots=True)
class Equal:
    """Everybody is as good as everybody else: for those that pick blindly."""

    names: ClassVar[tuple[str, ...]] = ()
    wants_prefixes: ClassVar[bool] = False

    def parts(
        self, r: RouteView, replicas: Sequence[ReplicaView], cached: Mapping[str, int], now: float
    ) -> Sequence[tuple[float, ...]]:
        return [()] * len(replicas)


@dataclass(frozen=True, slots=True)
class Outstanding:
    """Requests that have not ended: join the shortest queue. A recent failure counts as one, so that who fails fast
    does not look idle. Blind to the sizes of requests and to what is cached.
    """

    names: ClassVar[tuple[str, ...]] = ("outstanding", "failures")
    wants_prefixes: ClassVar[bool] = False

    def parts(
        self, r: RouteView, replicas: Sequence[ReplicaView], cached: Mapping[str, int], now: float
    ) -> Sequence[tuple[float, ...]]:
        return [(c.outstanding + others(c, now), c.health.recent_failures(now)) for c in replicas]


@dataclass(frozen=True, slots=True)
class Affinity:
    """The share of the prompt that is not cached, between 0 and 1; ties go to the least busy.

    Less than `least` of the prompt counts as nothing, so that a preamble that all requests share does not send them
    all to one engine (SGLang's router has the same rule and the same default). Bad at a popular prefix beyond that:
    its requests go to the engine that had the first, however busy that is.
    """

    least: float = 0.5

    names: ClassVar[tuple[str, ...]] = ("uncached",)
    wants_prefixes: ClassVar[bool] = True

    def parts(
        self, r: RouteView, replicas: Sequence[ReplicaView], cached: Mapping[str, int], now: float
    ) -> Sequence[tuple[float, ...]]:
        shares = [cached.get(c.name, 0) / max(r.prompt_tokens, 1) for c in replicas]
        return [(1.0 - share if share >= self.least else 1.0,) for share in shares]


@dataclass(frozen=True, slots=True)
class BoundedHash:
    """Each key has an order of the engines; the first in it that is not full gets the request.

    Full is who has `bound` times its equal share of what is outstanding, this request included (Mirrokni, Thorup,
    Zadimoghaddam: Consistent Hashing with Bounded Loads, SODA 2018; 1.25 as recommended there). The order is that of
    rendezvous hashing (Thaler and Ravishankar 1998), so an engine that comes or goes moves only its own keys, and any
    two gateways agree. The key is what the client calls sticky, else the first block of the prompt, else the tenant.
    Bad at: sizes of requests, which all count alike, and at keys that are popular beyond the bound.
    """

    bound: float = 1.25

    names: ClassVar[tuple[str, ...]] = ("full", "place")
    wants_prefixes: ClassVar[bool] = False

    def parts(
        self, r: RouteView, replicas: Sequence[ReplicaView], cached: Mapping[str, int], now: float
    ) -> Sequence[tuple[float, ...]]:
        key = r.sticky or (str(r.blocks[0]) if r.blocks else r.tenant)
        most = ceil(self.bound * (sum(c.outstanding for c in replicas) + 1) / len(replicas))
        return [(float(c.outstanding >= most), _place(key, c.name)) for c in replicas]


@dataclass(frozen=True, slots=True)
class Joint:
    """Predicted seconds to the first token, and what the request costs those who are there.

        base + token_s * (tokens waiting there + prompt - cached) + service_s * excess     its own first token
        + stall_s * (prompt - cached) * requests decoding there * `share`                  the delay of their next ones
        + penalty of recent failures

    All coefficients are learned for each engine from what it did (`Speed`). Load and prefix are weighed in one unit,
    time, as by the Conductor of Mooncake (Qin et al., FAST 2025, algorithm 1: queue time and prefill time of each
    instance, the least wins); so affinity yields to load by itself, engine by engine. The wait for a seat or for memory
    (`excess`) and the price of delaying others are ours.

    share: what a second by which somebody's next token is late counts against one of a first token.
    Bad at: orders other than arrival inside the engine, and outputs, which it does not foresee.
    """

    share: float = 0.1

    names: ClassVar[tuple[str, ...]] = ("base", "queue", "seat", "prefill", "interference", "failures")
    wants_prefixes: ClassVar[bool] = True

    def parts(
        self, r: RouteView, replicas: Sequence[ReplicaView], cached: Mapping[str, int], now: float
    ) -> Sequence[tuple[float, ...]]:
        prompt, share, held = r.prompt_tokens, self.share, cached.get
        found = []
        for c in replicas:
            own, first, decoding = prompt - held(c.name, 0), c.speed.first, c.decoding
            ahead: float = c.pending_tokens
            facts = None
            if c.facts is not None and (facts := c.fresh(now)) is not None:
                ahead = tokens_ahead(c, facts)
                decoding += c.others - c.others_waiting
            unbounded = c.seats is None and c.kv_tokens is None
            found.append(
                (
                    first.a,
                    first.b * ahead,
                    0.0 if unbounded else c.service_s * excess(r, c, facts),
                    first.b * own,
                    share * c.speed.decode.b * own * decoding,
                    c.health.penalty_s(now) if c.health.failures else 0.0,
                )
            )
        return found


def others(c: ReplicaView, now: float) -> int:
    """Requests of others than us at `c`, as far as it said so lately."""
    return c.others if c.others and c.fresh(now) is not None else 0


def _place(key: str, name: str) -> float:
    """Between 0 and 1, the same in every process."""
    digest = blake2b(f"{len(key)}:{key}{name}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / (1 << 48)
