"""How much load a fleet carries while every promised class keeps its promises, and how many engines a load needs.

A load is a multiplier of the workload's own rate: 2 is every request in half the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tidegate.core.slo import DEFAULT_CLASSES, NO_SLO, SloClass
from tidegate.errors import InputError
from tidegate.observe.records import Record
from tidegate.simulate.reshape import thinned
from tidegate.simulate.run import EngineSetup, FleetSetup, simulate
from tidegate.simulate.workload import Workload

LEAST, MOST = 0.01, 1000.0
"""Loads between which a capacity is looked for, as multipliers."""

PRECISION = 0.02
"""How close a load that fails is to a capacity, as a share of it."""

MOST_ENGINES = 256
"""Engines at which the search for the smallest fleet ends."""

KEPT = 0.9
"""The share of requests that a drawn sample of a workload keeps."""


def search(
    passes: Callable[[float], bool],
    start: float = 1.0,
    ratio: float = 1.5,
    precision: float = PRECISION,
    least: float = LEAST,
    most: float = MOST,
) -> float:
    """The last pass before the first failure on the grid start * ratio^k, then bisected until a failure is within
    `precision` of it, as a share.

    Where `start` fails, the grid is walked downwards to the first pass. 0 if none passes from `least` on; where
    everything passes up to `most`, the last load that was tried. Takes for granted that what passes at a load
    passes at the smaller ones.
    """
    good, bad = 0.0, start
    while bad <= most and passes(bad):
        good, bad = bad, bad * ratio
    if bad > most:
        return good
    while not good and bad > least:
        lower = max(bad / ratio, least)
        good, bad = (lower, bad) if passes(lower) else (0.0, lower)
    while good and bad / good > 1 + precision:
        middle = math.sqrt(good * bad)
        good, bad = (middle, bad) if passes(middle) else (good, middle)
    return good


def smallest(passes: Callable[[int], bool], most: int = MOST_ENGINES) -> int | None:
    """The smallest number from 1 on that passes, where every larger one does too; None if `most` fails."""
    bad, good = 0, 1
    while not passes(good):
        if good >= most:
            return None
        bad, good = good, min(2 * good, most)
    while good - bad > 1:
        middle = (bad + good) // 2
        bad, good = (bad, middle) if passes(middle) else (middle, good)
    return good


def shares_of(
    workload: Workload, classes: Mapping[str, SloClass], attain: float, own: Mapping[str, float]
) -> dict[str, float]:
    """The share of its requests that each class of `workload` with a promise has to attain: `own`, or `attain`.

    Raises InputError where there is no such class, or `own` names one that is none, and for what is no share.
    """
    there = sorted({r.slo_class for r in workload})
    promised = [name for name in there if name in classes and classes[name].slo != NO_SLO]
    for share in (attain, *own.values()):
        if not 0 < share <= 1:
            raise InputError(f"{share:g} is no share to attain: it must be above 0 and at most 1")
    for name in own:
        if name not in promised:
            why = "was promised nothing" if name in there else "does not occur in the workload"
            raise InputError(f"class {name} {why}; classes with a promise are: {', '.join(promised) or 'none'}")
    if not promised:
        raise InputError(
            f"{workload.name}: no class of it was promised anything, so no load is too much; set [classes.NAME]"
        )
    return {name: own.get(name, attain) for name in promised}


def drawn(workload: Workload, key: tuple[int, ...]) -> Workload:
    """Another sample of what `workload` might have been: a tenth of its requests left out by lot, and the others
    closer together, so that the rate is the same. The same for the same key.

    Raises InputError where nothing is left.
    """
    sample = thinned(workload, KEPT, key).rate_scaled(1 / KEPT)
    if not sample.total:
        raise InputError(f"{workload.name}: too few requests to draw a sample from; use one seed")
    return sample


@dataclass(frozen=True, slots=True)
class Case:
    """Whose capacity is asked for, and what has to be attained there: a share of its requests by class."""

    setup: EngineSetup
    shares: Mapping[str, float]
    fleet: FleetSetup = field(default_factory=FleetSetup)
    classes: Mapping[str, SloClass] = field(default_factory=lambda: DEFAULT_CLASSES)
    declared: int | None = None

    def missed_class(self, workload: Workload) -> str | None:
        """The first class that cannot attain its share any more, None if all attain theirs.

        The simulation ends as soon as there is one. What the door refused has missed.
        """
        left = allowances(workload, self.shares)

        def count(records: Sequence[Record]) -> None:
            for r in records:
                if not r.slo_met and r.slo_class in left:
                    left[r.slo_class] -= 1
                    if left[r.slo_class] < 0:
                        raise _OutOfReach(r.slo_class)

        try:
            simulate(workload, self.setup, count, fleet=self.fleet, classes=self.classes, declared=self.declared)
        except _OutOfReach as e:
            return e.slo_class
        return None

    def with_engines(self, engines: int) -> Case:
        """The same with so many engines behind its route."""
        return replace(self, fleet=FleetSetup() if engines == 1 else replace(self.fleet, pools=(("", engines),)))


class Answer(NamedTuple):
    """The `value` that was found, and the class that misses just beyond it (None where nothing missed)."""

    value: float
    limited_by: str | None


def largest_load(
    case: Case,
    workload: Workload,
    *,
    start: float = 1.0,
    ratio: float = 1.5,
    precision: float = PRECISION,
    on_try: Callable[[float], None] = lambda load: None,
) -> Answer:
    """The largest load at which every class attains its share, as `search` finds it; `on_try` hears of each attempt."""
    missed: dict[float, str] = {}

    def passes(load: float) -> bool:
        on_try(load)
        by = case.missed_class(workload.rate_scaled(load))
        if by is not None:
            missed[load] = by
        return by is None

    return Answer(search(passes, start, ratio, precision), missed[min(missed)] if missed else None)


def smallest_fleet(case: Case, workload: Workload, *, on_try: Callable[[float], None] = lambda engines: None) -> Answer:
    """The fewest engines with which every class attains its share; inf where `MOST_ENGINES` are too few."""
    missed: dict[int, str] = {}

    def passes(engines: int) -> bool:
        on_try(engines)
        by = case.with_engines(engines).missed_class(workload)
        if by is not None:
            missed[engines] = by
        return by is None

    return Answer(smallest(passes) or math.inf, missed[max(missed)] if missed else None)


def allowances(workload: Workload, shares: Mapping[str, float]) -> dict[str, int]:
    """How many requests of each class may miss."""
    counts = dict.fromkeys(shares, 0)
    for r in workload:
        if r.slo_class in counts:
            counts[r.slo_class] += 1
    # A share such as 0.9 of 10 has to leave one, whatever binary fractions make of it.
    return {name: int(count * (1 - shares[name]) + 1e-9) for name, count in counts.items()}


class _OutOfReach(Exception):
    def __init__(self, slo_class: str) -> None:
        super().__init__(slo_class)
        self.slo_class = slo_class
