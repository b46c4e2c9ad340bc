"""What a route decided, and what every candidate would have cost: for whoever sends, and for whoever asks why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from tidegate.routing.prefix_index import ESTIMATED, EXACT, Held
from tidegate.routing.view import ReplicaView

FIRST_TOKEN = ("base", "queue", "seat", "prefill")
"""Parts of a cost that together are the time to the first token."""


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
    """Who gets a request, and what there was to choose from.

    cached_tokens: those believed to be cached at `replica`
    considered:    who could have got it
    names, parts:  of their costs, for each of `considered`
    held:          what each holds of the prompt
    """

    replica: ReplicaView
    cached_tokens: int
    considered: Sequence[ReplicaView] = ()
    names: Sequence[str] = ()
    parts: Sequence[Sequence[float]] = ()
    held: Held = Held({})

    @property
    def candidates(self) -> list[Candidate]:
        """All who could have got it. Made when somebody asks, which is seldom."""
        tokens, exact = self.held
        return [
            Candidate(
                c.name,
                sum(parts),
                dict(zip(self.names, parts, strict=True)),
                tokens.get(c.name, 0),
                EXACT if c.name in exact else ESTIMATED,
            )
            for c, parts in zip(self.considered, self.parts, strict=True)
        ]

    @property
    def expected_s(self) -> float | None:
        """Predicted seconds to the first token, where the route predicts them."""
        at = _first_token_parts(tuple(self.names))
        if at is None:
            return None
        return sum(map(self.parts[self.considered.index(self.replica)].__getitem__, at))


@cache
def _first_token_parts(names: tuple[str, ...]) -> tuple[int, ...] | None:
    """Where those of FIRST_TOKEN stand; None where one is missing."""
    return tuple(map(names.index, FIRST_TOKEN)) if set(FIRST_TOKEN) <= set(names) else None
