"""What a route decided, and what every candidate would have cost: for whoever sends, and for whoever asks why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tidegate.routing.view import ReplicaView


class Candidate(NamedTuple):
    """What one engine would have cost.

    cost:          the sum of its parts, in the route's own unit; seconds where the route is `joint`
    parts:         by name
    cached_tokens: tokens of the prompt that are believed to be cached there; 0 where the route does not ask
    known:         how: "exact" from the engine's events, "estimated" from what was sent there
    """

    name: str
    cost: float
    parts: Mapping[str, float]
    cached_tokens: int
    known: str


class Choice(NamedTuple):
    """Who gets a request, and all who could have. `cached_tokens` are those believed to be cached at `replica`."""

    replica: ReplicaView
    cached_tokens: int
    candidates: Sequence[Candidate]

    @property
    def expected_s(self) -> float | None:
        """Predicted seconds to the first token, where the route predicts them."""
        parts = next(c.parts for c in self.candidates if c.name == self.replica.name)
        waits = [parts[name] for name in FIRST_TOKEN if name in parts]
        return sum(waits) if len(waits) == len(FIRST_TOKEN) else None


FIRST_TOKEN = ("base", "queue", "seat", "prefill")
"""Parts of a cost that together are the time to the first token."""
