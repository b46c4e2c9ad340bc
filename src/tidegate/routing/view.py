"""What a route may know of a request and of the engines it could go to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tidegate.routing.health import Breaker
from tidegate.routing.speed import Speed

FACTS_LAST_S = 5.0
"""Seconds after which facts read from an engine are no longer believed."""


class RouteView(NamedTuple):
    """A request that is to be routed.

    blocks:       names of its prompt's blocks of `block_tokens` tokens, each chained to those before it and to the
                  tenant's and client's salt, so that equal names mean equal prefixes: hashes of text in a gateway
                  (then tokens are estimated), of ids in a simulation
    tenant:       who asks
    sticky:       what requests that belong together have in common (a session, a user); "" where nobody said
    streams:      whether its first token can be seen from outside
    """

    id: str
    slo_class: str
    prompt_tokens: int
    blocks: Sequence[int] = ()
    block_tokens: float = 1
    tenant: str = "default"
    sticky: str = ""
    streams: bool = True

    def tokens(self, blocks: int) -> int:
        """Tokens in the first `blocks` blocks."""
        return min(self.prompt_tokens, int(blocks * self.block_tokens))


class Facts(NamedTuple):
    """What an engine says of itself, read at `at` (seconds, on the clock that routes are told). None: it does not say.

    running, waiting: its requests, whoever sent them
    kv_usage:         share of its KV memory that requests hold, between 0 and 1
    hit_rate:         share of prompt tokens that its cache held, between 0 and 1. Shown, not reckoned with
    """

    at: float
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    hit_rate: float | None = None


@dataclass(slots=True, eq=False)
class ReplicaView:
    """One engine, as seen from outside by whoever sends it requests and reads its answers.

    seats:          requests that it runs at once; None where nobody knows
    kv_tokens:      KV tokens that it holds; None where nobody knows
    speed, health:  what was learned of it
    outstanding:    requests sent to it that have not ended
    decoding:       those of them whose first token came
    sent:           requests sent to it ever
    pending_tokens: prompt tokens, without those believed cached, of requests without a first token. Estimated
    held_tokens:    KV tokens of its outstanding requests: prompts, and outputs seen. Estimated, from below
    computed_tokens: prompt tokens that it computed ever, as far as first tokens show. Estimated
    service_s:      seconds from the first token of a request to its end, a moving mean; 0 before any ended
    prompt_tokens:  of a request sent to it, a moving mean
    facts:          what it said of itself last; `told` sets it
    others:         requests of others than us that were there then
    others_waiting: those of them that did not run yet
    """

    name: str
    pool: str = ""
    seats: int | None = None
    kv_tokens: int | None = None
    speed: Speed = field(default_factory=Speed)
    health: Breaker = field(default_factory=Breaker)
    outstanding: int = 0
    decoding: int = 0
    sent: int = 0
    pending_tokens: int = 0
    held_tokens: int = 0
    computed_tokens: int = 0
    service_s: float = 0.0
    prompt_tokens: float = 0.0
    facts: Facts | None = None
    others: int = 0
    others_waiting: int = 0

    def told(self, facts: Facts) -> None:
        """The engine said this of itself. What it counts beyond our own requests is taken to be of others."""
        running, waiting = facts.running or 0, facts.waiting or 0
        self.facts = facts
        self.others = max(0, running + waiting - self.outstanding)
        self.others_waiting = min(self.others, max(0, waiting - (self.outstanding - self.decoding)))

    def fresh(self, now: float) -> Facts | None:
        """What it said of itself, unless that is too long ago: then its own counts are all there is."""
        facts = self.facts
        return facts if facts is not None and now - facts.at <= FACTS_LAST_S else None
