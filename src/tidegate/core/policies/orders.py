"""Who comes first. Lower first by (tier, score, arrival); a base order leaves arrival to the tie."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from tidegate.core.policy import Key, Order, PolicyContext
from tidegate.core.view import RequestView
from tidegate.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Fcfs:
    """First come, first served: `(0, 0)`.

    No starvation; bad at head-of-line blocking, a long request delays every short one behind it.
    """

    def tier(self, r: RequestView, ctx: PolicyContext) -> int:
        return 0

    def key(self, r: RequestView, ctx: PolicyContext) -> Key:
        return Key(0, 0.0)


@dataclass(frozen=True, slots=True)
class Priority:
    """Static classes, FCFS within a class: `(priority, 0)`; a lower number is more urgent, as in vLLM.

    Starves the lower classes under load unless it is wrapped in `Aged`.
    """

    tier_name: ClassVar[str] = "priority"

    def tier(self, r: RequestView, ctx: PolicyContext) -> int:
        return r.priority

    def key(self, r: RequestView, ctx: PolicyContext) -> Key:
        return Key(r.priority, 0.0)


@dataclass(frozen=True, slots=True)
class ShortestJob:
    """Shortest (remaining) job first: `(0, seconds of service left)`.

    The seconds are those of the prompt tokens not computed and the outputs predicted to come, alone on
    the machine, as predicted when it is queued. Best mean latency where predictions are right; starves long
    requests unless `Aged`.
    """

    score_unit: ClassVar[str] = "s"

    def tier(self, r: RequestView, ctx: PolicyContext) -> int:
        return 0

    def key(self, r: RequestView, ctx: PolicyContext) -> Key:
        outputs = max(1.0, ctx.predictor.output_tokens(r) - r.emitted)
        prompt = max(0, r.prompt_tokens + r.emitted - r.computed) if not r.preemptions else r.prompt_tokens + r.emitted
        return Key(0, ctx.step_time.service(prompt, outputs))


@dataclass(frozen=True, slots=True)
class Aged:
    """`order` with ageing: one tier is worth `window` seconds of waiting, one unit of score `rate` seconds.

    The key `(0, tier * window + score * rate + arrival)` is static: waiting moves everybody alike.
    Bounded overtaking: nobody whose tier is better by D and whose score is better by S comes first if
    it arrives more than `D * window + S * rate` seconds later. Displacement of running requests goes
    by the unaged tier as well, so an aged request is not displaced by those it has outwaited.
    Raises ConfigError for an order that ages by itself, or that ageing cannot move.
    """

    score_unit: ClassVar[str] = "s"

    order: Order
    window: float = 60.0
    rate: float = 1.0

    def __post_init__(self) -> None:
        refuse_wrapping(self.order, "ageing")
        if not 0 < self.window < inf:
            raise ConfigError(f"the window of ageing must be above 0 and finite, not {self.window}")
        if not 0 <= self.rate < inf:
            raise ConfigError(f"the rate of ageing must be at least 0 and finite, not {self.rate}")

    def tier(self, r: RequestView, ctx: PolicyContext) -> int:
        return self.order.tier(r, ctx)

    def key(self, r: RequestView, ctx: PolicyContext) -> Key:
        key = self.order.key(r, ctx)
        return Key(0, key.tier * self.window + key.score * self.rate + r.arrival, key.until)


def refuse_wrapping(order: object, wrapper: str) -> None:
    """Raise ConfigError where `wrapper` (a word such as "ageing") does not work on `order`.

    An order says why in a class variable `unwrapped`, in words that follow "it".
    """
    why: str | None = getattr(order, "unwrapped", None)
    if why is not None:
        raise ConfigError(f"{wrapper} does not work on this order: it {why}")
