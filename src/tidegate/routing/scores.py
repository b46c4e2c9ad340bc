"""Scores: what it would cost to send a request to an engine. Lower is better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tidegate.routing.view import ReplicaView, RouteView


class Score(Protocol):
    """The cost of one candidate; `cached_tokens` of the request's prompt are believed to be there."""

    @property
    def wants_prefixes(self) -> bool:
        """Whether `cached_tokens` is looked at."""
        ...

    def cost(self, r: RouteView, replica: ReplicaView, cached_tokens: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Equal:
    """Everybody is as good as everybody else: for those that pick blindly."""

    @property
    def wants_prefixes(self) -> bool:
        return False

    def cost(self, r: RouteView, replica: ReplicaView, cached_tokens: int) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Outstanding:
    """Requests that have not ended: join the shortest queue. Blind to their sizes and to what is cached."""

    @property
    def wants_prefixes(self) -> bool:
        return False

    def cost(self, r: RouteView, replica: ReplicaView, cached_tokens: int) -> float:
        return replica.outstanding


@dataclass(frozen=True, slots=True)
class Affinity:
    """The share of the prompt that is not cached, between 0 and 1; ties go to the least busy.

    Less than `least` of the prompt counts as nothing, so that a preamble that all requests share does not send them
    all to one engine (SGLang's router has the same rule and the same default). Bad at a popular prefix beyond that:
    its requests go to the engine that had the first, however busy that is.
    """

    least: float = 0.5

    @property
    def wants_prefixes(self) -> bool:
        return True

    def cost(self, r: RouteView, replica: ReplicaView, cached_tokens: int) -> float:
        share = cached_tokens / r.prompt_tokens
        return 1.0 - share if share >= self.least else 1.0


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Predicted seconds to the first token: the wait there, and the prefill of what is not cached there.

        (pending tokens + prompt - cached) * token_s + service_s * (outstanding + 1 - seats) / seats
                                        or that with KV tokens in place of seats, whichever is more, if above 0

    The idea of weighing load and prefix in one unit, time, is the Conductor of Mooncake (Qin et al., FAST 2025,
    algorithm 1: queue time + prefill time by instance, the least wins). The wait for a seat or for memory is ours: of
    all that is held, the excess over what an engine holds must end first, which takes `service_s` for a whole turnover.

    token_s: seconds that an engine computes for one prompt token. Bad at: engines of different speed, for which it
    is the same, and outputs, which it does not foresee.
    """

    token_s: float

    @property
    def wants_prefixes(self) -> bool:
        return True

    def cost(self, r: RouteView, replica: ReplicaView, cached_tokens: int) -> float:
        excess = 0.0
        if replica.seats is not None:
            excess = max(excess, (replica.outstanding + 1 - replica.seats) / replica.seats)
        if replica.kv_tokens is not None:
            excess = max(excess, (replica.held_tokens + r.prompt_tokens) / replica.kv_tokens - 1.0)
        to_compute = replica.pending_tokens + r.prompt_tokens - cached_tokens
        return to_compute * self.token_s + replica.service_s * excess
