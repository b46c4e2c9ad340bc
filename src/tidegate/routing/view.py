"""What a route may know of a request and of the engines it could go to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class RouteView(NamedTuple):
    """A request that is to be routed.

    blocks: names of its prompt's blocks of `block_tokens` tokens, each chained to those before it, so that equal
            names mean equal prefixes: hashes of text in a gateway (then tokens are estimated), of ids in a simulation
    """

    id: str
    slo_class: str
    prompt_tokens: int
    blocks: Sequence[int] = ()
    block_tokens: int = 1

    def tokens(self, blocks: int) -> int:
        """Tokens in the first `blocks` blocks."""
        return min(self.prompt_tokens, blocks * self.block_tokens)


@dataclass(slots=True)
class ReplicaView:
    """One engine, as seen from outside by whoever sends it requests and reads its answers.

    seats:          requests that it runs at once; None where nobody knows
    kv_tokens:      KV tokens that it holds; None where nobody knows
    outstanding:    requests sent to it that have not ended
    sent:           requests sent to it ever
    pending_tokens: prompt tokens, without those believed cached, of requests without a first token. Estimated
    held_tokens:    KV tokens of its outstanding requests: their prompts alone. Estimated, from below
    service_s:      seconds from the first token of a request to its end, a moving mean; 0 before any ended
    """

    name: str
    pool: str = ""
    seats: int | None = None
    kv_tokens: int | None = None
    outstanding: int = 0
    sent: int = 0
    pending_tokens: int = 0
    held_tokens: int = 0
    service_s: float = 0.0
