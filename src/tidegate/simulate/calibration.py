"""Fits the constants of the cost model to the steps of a log.

Least squares of logarithms of predicted over measured seconds, so that short steps count as much as long ones, and too
long as much as too short, with a loss that grows linearly for large errors, so that a step which waited for something
else does not bend the fit. What the log does not tell is kept from a known hardware: what a log of equal steps can say
is only how long they take. In the end everything is moved a little so that steps are right in the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any, NamedTuple

import numpy as np

from tidegate.errors import InputError, MissingExtra
from tidegate.executors.sim.cost import CostModel
from tidegate.executors.sim.hardware import Hardware
from tidegate.executors.sim.models import ModelShape
from tidegate.simulate.step_costs import KINDS, Floats, StepCosts, held_out

CONSTANTS = ("t0", "e1", "e2", "e3", "e4", "p")
FEWEST = 50
"""Steps to fit on at least."""
MOST = 5_000
"""Steps of one sort (with prompt tokens, or of decodes alone) to fit on at most, evenly chosen; more tell no more."""
FEWEST_DECODES, DECODES_A_PREFILL = 500, 2
"""Steps of decodes alone are the bulk of a log and nearly alike: beyond so many, this many for each of the others."""
OUTLIER = 0.05
"""Relative error from which on it counts linearly."""
WAITED = 2.0
"""A step so many times as long as predicted waited for something else; it has no part in the mean."""
BOUNDS = {"t0": (0.0, 2.0), **dict.fromkeys(("e1", "e2", "e3", "e4"), (1e-4, 1e4)), "p": (1.0, 8.0)}
"""t0 in medians of the steps' seconds; e beyond 1 raises the peak in the end."""
STARTS_P = (1.2, 1.7, 3.0)
CLOSE = 1e-12
"""Relative change at which the search ends."""
NOISE, INDEPENDENT = 0.01, 200
"""At least this relative noise is assumed, and that no more than so many steps tell something of their own."""
RULED_OUT = 9.0
"""Squared standard errors by which a fit with the base's constants may be worse: three of them."""
UNCERTAIN = 0.25
"""Standard error from which on a constant counts as unknown: of t0 in medians of a step, of others relative."""


class Constant(NamedTuple):
    """One constant: what the base has, what was found, and the standard error that the log leaves.

    error: relative; of t0 in medians of a step. None where the log does not tell, and `value` is the base's
    """

    name: str
    base: float
    value: float
    error: float | None


class Errors(NamedTuple):
    """Relative errors of predicted held-out steps; None where there is no such step.

    bias: predicted over measured seconds of all of them together, less 1
    """

    steps: int
    median: float | None
    p90: float | None
    bias: float | None


@dataclass(frozen=True, slots=True)
class Calibration:
    """hardware: the base with the fitted constants; fitted: on so many steps; held_out: errors by kind, and of "all"

    guessed: steps of which the log does not say where prompt chunks begin
    """

    hardware: Hardware
    constants: tuple[Constant, ...]
    fitted: int
    held_out: dict[str, Errors]
    guessed: int


def calibrate(
    steps: StepCosts, model: ModelShape, base: Hardware, tp: int = 1, hold_out: float = 0.3, source: str = "a step log"
) -> Calibration:
    """Fit `steps` of `model` on hardware like `base`; `source` is what `fitted_on` calls the log.

    Time that the host adds to every step is in the log and therefore in t0. Raises InputError for too few steps or a
    share outside of (0, 1), MissingExtra without scipy.
    """
    if not 0 < hold_out < 1:
        raise InputError(f"the share that is held out must be above 0 and under 1, not {hold_out:g}")
    out = held_out(len(steps), hold_out)
    train = steps.of(~out)
    if len(train) < FEWEST:
        raise InputError(f"{len(train)} steps are too few to fit on; it takes {FEWEST} beside those held out")
    fit = _Fit(balanced(train), model, base, tp)
    values, errors = fit.identified()
    hardware = replace(_within_peaks(base, values), name=f"{base.name}-calibrated")
    found = {kind: _errors(hardware, model, tp, steps.of(out).of_kind(kind)) for kind in KINDS}
    found["all"] = _errors(hardware, model, tp, steps.of(out))
    gpus = "one GPU" if tp == 1 else f"{tp} GPUs"
    quality = "" if found["all"].median is None else f"; median error of held-out steps {found['all'].median:.1%}"
    hardware = replace(hardware, fitted_on=f"{model.name}, {gpus}: {len(train):,} steps of {source}{quality}")
    constants = tuple(Constant(n, getattr(base, n), values[n], errors[n]) for n in CONSTANTS)
    return Calibration(hardware, constants, len(train), found, steps.guessed)


def balanced(steps: StepCosts) -> StepCosts:
    """Those to fit on, so that the many steps of decodes alone do not outweigh the few that compute prompts."""
    alone = steps.kind == KINDS.index("decode")
    others = min(MOST, int(np.count_nonzero(~alone)))
    decodes = min(MOST, max(FEWEST_DECODES, DECODES_A_PREFILL * others) if others else MOST)
    chosen = np.zeros(len(steps), np.bool_)
    for where, most in ((np.flatnonzero(alone), decodes), (np.flatnonzero(~alone), others)):
        if len(where):
            chosen[where[np.linspace(0, len(where) - 1, min(most, len(where))).astype(np.int64)]] = True
    return steps.of(chosen)


def predicted(hardware: Hardware, model: ModelShape, tp: int, steps: StepCosts) -> Floats:
    """Seconds that the cost model says of each step."""
    cost = CostModel(hardware, model, tp)
    linear = _norm(steps.tokens * cost.token_s, cost.weights_p ** (1 / cost.p), cost.p)
    return cost.base_s + linear + steps.read * cost.kv_token_s + steps.pairs * cost.pair_s


def _errors(hardware: Hardware, model: ModelShape, tp: int, steps: StepCosts) -> Errors:
    if not len(steps):
        return Errors(0, None, None, None)
    seconds = predicted(hardware, model, tp, steps)
    median, p90 = np.quantile(np.abs(seconds / steps.seconds - 1), (0.5, 0.9)).tolist()
    return Errors(len(steps), median, p90, float(seconds.sum() / steps.seconds.sum() - 1))


def _norm(a: Floats, b: float, p: float) -> Floats:
    """(a^p + b^p)^(1/p), without overflow."""
    larger = np.maximum(a, b)
    return np.asarray(larger * ((a / larger) ** p + (b / larger) ** p) ** (1 / p), np.float64)


def _within_peaks(base: Hardware, values: dict[str, float]) -> Hardware:
    """`base` with these constants. Where more than a peak was reached, the peak was higher: it is raised."""
    compute = max(1.0, values["e1"], values["e3"])
    memory = max(1.0, values["e2"], values["e4"])
    return replace(
        base,
        peak_flops=base.peak_flops * compute,
        memory_bandwidth=base.memory_bandwidth * memory,
        e1=values["e1"] / compute,
        e3=values["e3"] / compute,
        e2=values["e2"] / memory,
        e4=values["e4"] / memory,
        t0=values["t0"],
        p=values["p"],
    )


class _Search(NamedTuple):
    """Fitted constants, and the standard errors of those that were free.

    cost: half the sum of squared residuals, as the loss counts them
    unit: what a constant adds to it that is one standard error off
    """

    values: dict[str, float]
    errors: dict[str, float]
    cost: float
    unit: float

    @property
    def uncertain(self) -> list[str]:
        """The constants of which the log tells too little."""
        return [name for name, error in self.errors.items() if error > UNCERTAIN]


class _Fit:
    """The search. Its variables are t0 in medians of a step, and the logarithms of the other constants."""

    def __init__(self, steps: StepCosts, model: ModelShape, base: Hardware, tp: int) -> None:
        self._seconds = steps.seconds
        self._base = base
        self._step_s = float(np.median(steps.seconds))
        # Seconds of each term at the full peaks.
        full = CostModel(replace(base, t0=0.0, e1=1.0, e2=1.0, e3=1.0, e4=1.0, p=1.0), model, tp)
        self._linear, self._weights = steps.tokens * full.token_s, full.weights_p
        self._read, self._pairs = steps.read * full.kv_token_s, steps.pairs * full.pair_s

    def identified(self) -> tuple[dict[str, float], dict[str, float | None]]:
        """The constants, and the standard errors of those that the log tells.

        While it leaves some too uncertain, that one of them is set to the base's which then fits best, and the others
        are fitted anew; unless the log rules the base's out: time that belongs to another constant would be put there.
        """
        free = best = self._search(CONSTANTS)
        while best.uncertain:
            tried = [self._search([n for n in best.errors if n != kept]) for kept in best.uncertain]
            nearest = min(tried, key=lambda search: search.cost)
            if nearest.cost - free.cost > RULED_OUT * free.unit:
                break
            best = nearest
        values = self._in_the_mean(best)
        return values, {name: best.errors.get(name) for name in CONSTANTS}

    def _in_the_mean(self, found: _Search) -> dict[str, float]:
        """The same constants for the mean step, where the search has the one in the middle: delays are one-sided."""
        ratio = self._seconds / self._predict(found.values)
        self._seconds = self._seconds * float(np.mean(ratio[ratio < WAITED]))
        return self._search(list(found.errors)).values

    def _search(self, free: Sequence[str]) -> _Search:
        """The best constants with all but `free` at the base's."""
        if not free:
            values = self._start(self._base.p, free)
            return _Search(values, {}, self._cost(values), self._unit(values))
        least_squares = _least_squares()
        low, high = ([self._variable(n, BOUNDS[n][side], bound=True) for n in free] for side in (0, 1))
        best: Any = None
        for p in STARTS_P if "p" in free else (self._base.p,):
            start = self._start(p, free)
            x = np.clip([self._variable(n, start[n]) for n in free], np.add(low, 1e-9), np.subtract(high, 1e-9))
            found = least_squares(
                lambda x: self._residuals(self._values(free, x)),
                x,
                bounds=(low, high),
                loss="soft_l1",
                f_scale=OUTLIER,
                xtol=CLOSE,
                ftol=CLOSE,
                gtol=CLOSE,
            )
            if best is None or found.cost < best.cost:
                best = found
        values = self._values(free, best.x)
        unit = self._unit(values)
        errors = dict(zip(free, _standard_errors(best.jac, unit), strict=True))
        return _Search(values, errors, float(best.cost), unit)

    def _start(self, p: float, free: Sequence[str]) -> dict[str, float]:
        """The base's constants, the free ones made slower or faster until the median step is right."""
        values = {name: float(getattr(self._base, name)) for name in CONSTANTS} | ({"p": p} if "p" in free else {})
        slower = float(np.median(self._seconds / self._predict(values)))
        scaled = {n: v * slower if n == "t0" else v / slower for n, v in values.items() if n in free and n != "p"}
        return values | scaled

    def _predict(self, v: dict[str, float]) -> Floats:
        linear = _norm(self._linear / v["e1"], self._weights / v["e2"], v["p"])
        return v["t0"] + linear + self._read / v["e4"] + self._pairs / v["e3"]

    def _residuals(self, values: dict[str, float]) -> Floats:
        return np.asarray(np.log(self._predict(values) / self._seconds), np.float64)

    def _variable(self, name: str, value: float, bound: bool = False) -> float:
        if name == "t0":
            return value if bound else value / self._step_s
        return log(value)

    def _values(self, free: Sequence[str], x: Sequence[float]) -> dict[str, float]:
        values = {name: float(getattr(self._base, name)) for name in CONSTANTS}
        return values | {n: float(v) * self._step_s if n == "t0" else exp(v) for n, v in zip(free, x, strict=True)}

    def _cost(self, values: dict[str, float]) -> float:
        return OUTLIER**2 * float(np.sum(np.hypot(1, self._residuals(values) / OUTLIER) - 1))

    def _unit(self, values: dict[str, float]) -> float:
        residuals = self._residuals(values)
        noise = max(NOISE, 1.4826 * float(np.median(np.abs(residuals))))
        return noise**2 / 2 * max(1.0, len(residuals) / INDEPENDENT)


def _standard_errors(jacobian: Floats, unit: float) -> list[float]:
    """Of each variable, by the curvature of the loss at the minimum, of which `unit` is one standard error."""
    sizes, axes = np.linalg.eigh(jacobian.T @ jacobian)
    variance = 2 * unit * (axes**2 / np.maximum(sizes, 1e-18)).sum(axis=1)
    return [float(v) for v in np.sqrt(variance)]


def _least_squares() -> Any:
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise MissingExtra("calibrating needs scipy: pip install 'tidegate[calibrate]'") from error
    return least_squares
