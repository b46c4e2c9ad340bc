"""Distributions as they are written in a workload: `512`, `100..900`, `lognormal:512:1.2`, `exponential:2s`.

The same four serve lengths (tokens) and times (seconds).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MOST_SIGMA = 10.0  # beyond, a single draw is longer than all the others together
SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h)?")
_RANGE = ".."


@runtime_checkable
class Draw(Protocol):
    """Draws n values of 0 or more."""

    def sample(self, rng: np.random.Generator, n: int) -> Floats: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always `value`."""

    value: float

    def sample(self, rng: np.random.Generator, n: int) -> Floats:
        return np.full(n, self.value)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Evenly between `low` and `high`."""

    low: float
    high: float

    def sample(self, rng: np.random.Generator, n: int) -> Floats:
        return rng.uniform(self.low, self.high, n)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(N(ln median, sigma)), cut off at `most`."""

    median: float
    sigma: float
    most: float = np.inf

    def sample(self, rng: np.random.Generator, n: int) -> Floats:
        return np.minimum(rng.lognormal(np.log(self.median), self.sigma, n), self.most)


@dataclass(frozen=True, slots=True)
class Exponential:
    """Exponential with this mean, cut off at `most`."""

    mean: float
    most: float = np.inf

    def sample(self, rng: np.random.Generator, n: int) -> Floats:
        return np.minimum(rng.exponential(self.mean, n), self.most)


def parse_draw(text: str, number: Callable[[str], float]) -> Draw:
    """The distribution written in `text`, whose values `number` reads. Raises ValueError."""
    name, *values = text.split(":")
    if values:
        return _of_family(name, values, number)
    low, dots, high = text.partition(_RANGE)
    if not dots:
        return Fixed(number(text))
    draw = Uniform(number(low), number(high))
    if draw.high < draw.low:
        raise ValueError(f"the range {text} ends below its start")
    return draw


def _of_family(name: str, values: list[str], number: Callable[[str], float]) -> Draw:
    if name == "lognormal" and len(values) in (2, 3):
        sigma = plain_number(values[1])
        median, *most = (number(v) for v in (values[0], *values[2:]))
        if median > 0 and sigma <= MOST_SIGMA:
            return LogNormal(median, sigma, *most)
    elif name == "exponential" and len(values) in (1, 2):
        return Exponential(*(number(v) for v in values))
    raise ValueError(
        f"{':'.join((name, *values))} is no distribution: write 512, 100..900, lognormal:MEDIAN:SIGMA or "
        "exponential:MEAN, the last two with :MOST if you like"
    )


def parse_seconds(text: str) -> float:
    """Seconds from `90`, `90s`, `250ms`, `20m` or `1.5h`. Raises ValueError."""
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no time: write 90, 90s, 250ms, 20m or 1.5h")
    return float(found[1]) * SECONDS[found[2] or "s"]


def plain_number(text: str) -> float:
    """A finite number of 0 or more. Raises ValueError."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number") from None
    if not 0 <= value < np.inf:
        raise ValueError(f"{text} is not a number of 0 or more")
    return value
