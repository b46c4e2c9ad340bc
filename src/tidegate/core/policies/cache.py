"""Whoever finds more of its prompt in the prefix cache comes earlier.

`ctx.cached` answers how much, and has the key asked for again when that grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from tidegate.core.policies.orders import refuse_wrapping
from tidegate.core.policy import Key, Order, PolicyContext
from tidegate.core.view import RequestView
from tidegate.errors import ConfigError

_PASSES = "ages by arrivals"


@dataclass(frozen=True, slots=True)
class PrefixShare:
    """`(0, age * seq - beta * cached_tokens / prompt_tokens)`, in tokens: the largest cached share first.

    `seq` numbers the arrivals, so each later one that gets on first earns a request `age` tokens: nobody who
    arrives more than `beta / age` arrivals later passes, and so many do at most. A wholly cached prompt is
    worth `beta` tokens. Bad at deadlines and at fairness: it serves the cache.
    """

    unwrapped: ClassVar[str] = _PASSES
    score_unit: ClassVar[str] = "tokens"

    beta: float = 4096.0
    age: float = 64.0

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ConfigError(f"beta must be above 0, not {self.beta}")
        _check_age(self.age)

    def tier(self, r: RequestView, ctx: PolicyContext) -> int:
        return 0

    def key(self, r: RequestView, ctx: PolicyContext) -> Key:
        return Key(0, self.age * r.seq - self.beta * cached_share(r, ctx))


@dataclass(frozen=True, slots=True)
class LongestPrefix:
    """`(0, age * seq - cached_tokens)`, in tokens: the longest cached prefix first (SGLang's LPM).

    With `age` above 0 nobody who arrives more than `longest prompt / age` arrivals later passes; with 0,
    the known design, requests that find nothing starve while warm ones keep coming.
    """

    unwrapped: ClassVar[str] = _PASSES
    score_unit: ClassVar[str] = "tokens"

    age: float = 0.0

    def __post_init__(self) -> None:
        _check_age(self.age)

    def tier(self, r: RequestView, ctx: PolicyContext) -> int:
        return 0

    def key(self, r: RequestView, ctx: PolicyContext) -> Key:
        return Key(0, self.age * r.seq - ctx.cached(r))


@dataclass(frozen=True, slots=True)
class CacheAware:
    """`order`, whose score is seconds, with `beta` seconds of bonus for a wholly cached prompt.

    The key `(tier, score - beta * cached_tokens / prompt_tokens)`. It adds at most `beta` to the seconds by
    which others may pass, so wrap it in `Aged` where the order itself does not bound them.
    Raises ConfigError for an order whose score is not seconds of a request.
    """

    score_unit: ClassVar[str] = "s"

    order: Order
    beta: float = 0.5

    def __post_init__(self) -> None:
        refuse_wrapping(self.order, "a cache bonus in seconds")
        if not 0 <= self.beta < inf:
            raise ConfigError(f"the bonus for a cached prompt must be at least 0 and finite, not {self.beta}")

    def tier(self, r: RequestView, ctx: PolicyContext) -> int:
        return self.order.tier(r, ctx)

    def key(self, r: RequestView, ctx: PolicyContext) -> Key:
        key = self.order.key(r, ctx)
        return key._replace(score=key.score - self.beta * cached_share(r, ctx))


def cached_share(r: RequestView, ctx: PolicyContext) -> float:
    """The part of `r`'s prompt that is cached, 0 to 1."""
    return min(1.0, ctx.cached(r) / r.prompt_tokens)


def _check_age(age: float) -> None:
    if not age >= 0:
        raise ConfigError(f"age must be at least 0, not {age}")
