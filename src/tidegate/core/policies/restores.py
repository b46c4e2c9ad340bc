"""How a victim gets its KV back."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.core.policy import PolicyContext
from tidegate.core.view import Candidate


@dataclass(frozen=True, slots=True)
class Recompute:
    """Drop the KV, keep the token ids, compute what the prefix cache no longer holds as ordinary chunks."""

    def choose(self, victim: Candidate, ctx: PolicyContext) -> str:
        return "recompute"
