"""When requests arrive: the point processes behind the synthetic workloads. All times are seconds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tidegate.errors import InputError
from tidegate.simulate.draws import Draw, Floats

MOST_ARRIVALS = 10_000_000
Gaps = Callable[[int], Floats]


def renewal(gaps: Gaps, rate: float, count: int | None, duration_s: float | None) -> Floats:
    """Arrivals whose gaps `gaps` draws: the first `count`, or all before `duration_s`, or whichever is less.

    The first gap stands before the first arrival.
    """
    if duration_s is None:
        assert count is not None  # noqa: S101 - one of both is always given
        return np.cumsum(gaps(count))
    wanted = expected(rate * duration_s) if count is None else min(count, expected(rate * duration_s))
    arrivals = np.cumsum(gaps(wanted))
    while (count is None or len(arrivals) < count) and arrivals[-1] < duration_s:
        arrivals = np.concatenate([arrivals, arrivals[-1] + np.cumsum(gaps(wanted))])
    return arrivals[:count][arrivals[:count] < duration_s]


def expected(arrivals: float) -> int:
    """How many gaps to draw at a time where this many arrivals are expected."""
    refuse_too_many(arrivals)
    return int(arrivals + 4 * arrivals**0.5) + 16


def refuse_too_many(requests: float) -> None:
    """Raise InputError for more requests than a workload may have."""
    if requests > MOST_ARRIVALS:
        raise InputError(f"{requests:.3g} requests are more than the {MOST_ARRIVALS} a workload may have")


def poisson_gaps(rng: np.random.Generator, rate: float) -> Gaps:
    """Exponential gaps."""
    return lambda n: rng.exponential(1 / rate, n)


def gamma_gaps(rng: np.random.Generator, rate: float, cv: float) -> Gaps:
    """Gamma gaps with this coefficient of variation: 0 even, 1 Poisson, above 1 bursts."""
    if cv == 0:
        return lambda n: np.full(n, 1 / rate)
    shape = cv**-2
    return lambda n: rng.gamma(shape, 1 / (rate * shape), n)


def on_off(
    busy: Floats, phases: tuple[Draw, Draw], rng: np.random.Generator, duration_s: float | None = None
) -> Floats:
    """Arrivals of a process that runs only in on-phases, given its arrivals `busy` on a clock that stops in between.

    phases: how long it is on, and off, in turn; it begins on.
    """
    if not len(busy):
        return busy
    on, off = phases
    turns = 16
    ons, offs = on.sample(rng, turns), off.sample(rng, turns)
    while ons.sum() <= busy[-1]:
        if not ons.any():
            raise InputError("on= is always 0, so nothing ever arrives")
        ons, offs = np.append(ons, on.sample(rng, len(ons))), np.append(offs, off.sample(rng, len(offs)))
    passed = np.searchsorted(np.cumsum(ons), busy, side="right")
    arrivals = busy + np.concatenate([[0.0], np.cumsum(offs)])[passed]
    return arrivals if duration_s is None else arrivals[arrivals < duration_s]
