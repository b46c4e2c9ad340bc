"""Multi-level feedback: short jobs get through without anybody predicting who is short."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from tidegate.core.policy import Key, PolicyContext
from tidegate.core.view import RequestView
from tidegate.errors import ConfigError

IN_FLIGHT = 2
"""Tokens of a request that may come after it was queued: one for each step in flight."""


@dataclass(frozen=True, slots=True)
class FeedbackQueue:
    """`(level, 0)`: a request falls a level when it has had that level's quantum of service.

    Level i has `quantum * ratio**i` tokens (prompt and outputs; what is computed again does not count).
    A request enters the first level whose quantum its prompt fits in (skip-join), and one that has waited
    `promote` seconds stands in the top level until it has had one more top quantum. The level is the
    tier: a running request whose level has fallen gives its seat to a waiting one of a better level.
    Bad at: many jobs of the same length, which all fall together; each displacement costs a recompute.
    Source: Wu et al., "Fast Distributed Inference Serving for Large Language Models" (FastServe), 2023.
    """

    tier_name: ClassVar[str] = "level"

    levels: int = 4
    quantum: int = 512
    ratio: int = 2
    promote: float = 30.0

    def __post_init__(self) -> None:
        for name, least in (("levels", 2), ("quantum", 1), ("ratio", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not self.promote > 0:
            raise ConfigError(f"promote must be above 0, not {self.promote}")

    def tier(self, r: RequestView, ctx: PolicyContext) -> int:
        since = r.waiting_since
        if since is not None and ctx.now >= since + self.promote:
            return 0
        return self.level(r)[0]

    def key(self, r: RequestView, ctx: PolicyContext) -> Key:
        since, (level, *_) = r.waiting_since, self.level(r)
        if since is None or not level:
            return Key(level, 0.0)
        promoted = since + self.promote
        return Key(0, 0.0) if ctx.now >= promoted else Key(level, 0.0, promoted)

    def lapse(self, r: RequestView, ctx: PolicyContext) -> float:
        level, left, used = self.level(r)
        if r.tier >= level:
            return left
        # It was promoted; or it fell by a token that was in flight when it was queued, and is asked again at once.
        return 0.0 if r.tier == level - 1 and used <= IN_FLIGHT else float(self.quantum)

    def level(self, r: RequestView) -> tuple[int, float, int]:
        """(level by the service `r` has had, outputs until it falls from there, tokens it has used of it)."""
        level, quantum, last = 0, self.quantum, self.levels - 1
        while level < last and r.prompt_tokens > quantum:
            level, quantum = level + 1, quantum * self.ratio
        used = r.prompt_tokens + r.emitted
        while level < last and used > quantum:
            used -= quantum
            level, quantum = level + 1, quantum * self.ratio
        return level, (quantum - used + 1 if level < last else inf), used
