"""How long requests waited: distributions of TTFT, TPOT and E2E by class, one curve a run."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tidegate.observe.columns import Columns, Floats
from tidegate.observe.comparison.run import Loaded
from tidegate.observe.comparison.section import Comparison, Section, figure
from tidegate.observe.comparison.words import ranked, rounded, safe, seconds, short

POINTS = 160
"""Latencies, evenly spaced on the logarithm, at which each distribution is read."""


class Measure(NamedTuple):
    """One latency: its column, name, unit on the axis, units in a second, and the promise that bounds it."""

    column: str
    name: str
    unit: str
    factor: float
    promise: str
    meaning: str


MEASURES = (
    Measure("ttft_s", "TTFT", "s", 1.0, "ttft", "time to first token"),
    Measure("tpot_s", "TPOT", "ms", 1000.0, "tpot", "mean time per output token after the first"),
    Measure("e2e_s", "E2E", "s", 1.0, "e2e", "arrival to last token"),
)


def latency(comparison: Comparison) -> Section:
    """A chart per class and measure."""
    charts: dict[str, dict[str, Any]] = {}
    blocks = []
    for number, name in enumerate(comparison.classes):
        figures = []
        for measure in MEASURES:
            chart = _chart(comparison, name, measure)
            if chart is not None:
                key = f"cdf-{number}-{measure.promise}"
                charts[key] = chart
                what = f"{measure.name}, {measure.meaning}"
                figures.append(figure(key, what, f"Share of {safe(name)} requests by {measure.meaning}"))
        if figures:
            blocks.append(f'<h3>{safe(name)}</h3><div class="grid">{"".join(figures)}</div>')
    note = (
        f"<p class='note'>Each curve tells which share of the requests was served within the time below it: the higher "
        f"and the further left, the better. TTFT and E2E are of all requests that were not cancelled, so a curve that "
        f"ends under 100 % left somebody unserved; TPOT is of those with two output tokens or more. A dashed upright "
        f"line is the promise. Curves are read at {POINTS} times, exactly; drag to zoom, double-click to zoom out.</p>"
    )
    return Section("latency", "How long requests take", _headline(comparison), note + "".join(blocks), charts)


def _headline(comparison: Comparison) -> str:
    """For the most urgent class, what nine of ten requests wait for the first token."""
    for name in comparison.classes:
        told = []
        for run, rows in comparison.of_class(name):
            waits, total = _values(rows, MEASURES[0])
            if total and waits.size:
                at = int(np.ceil(0.9 * total)) - 1
                told.append((waits[at] if at < waits.size else float("inf"), run.name))
        if told:
            (best, first), *others = sorted(told)
            lead = f"Nine of ten {short(name)} requests have their first token {_within(best)} under {first}"
            return f"{ranked([lead, *(f'{_within(wait)} under {run}' for wait, run in others)])}."
    return "No request ever got a first token."


def _within(wait: float) -> str:
    return "never" if wait == float("inf") else f"within {seconds(wait)}"


def _values(rows: Columns, measure: Measure) -> tuple[Floats, int]:
    """The ascending latencies that there are (seconds), and of how many requests they are."""
    if measure.column == "tpot_s":
        known = np.sort(rows.known(measure.column))
        return known, known.size
    left = ~rows.cancelled
    served = left & rows.completed if measure.column == "e2e_s" else left
    values = rows.numbers(measure.column)[served]
    return np.sort(values[~np.isnan(values)]), int(left.sum())


def _chart(comparison: Comparison, name: str, measure: Measure) -> dict[str, Any] | None:
    curves: list[tuple[Loaded, Floats, int]] = []
    for run, rows in comparison.of_class(name):
        values, total = _values(rows, measure)
        if values.size:
            curves.append((run, values * measure.factor, total))
    if not curves:
        return None
    known = comparison.promises.get(name)
    bound = getattr(known.slo, measure.promise) if known is not None else None
    grid = _grid([values for _, values, _ in curves], None if bound is None else bound * measure.factor)
    series = [
        {
            "run": run.name,
            "colour": run.colour,
            "dash": run.run.measured,
            "y": rounded(cdf(values, grid, total)),
            "rest": _at_rest(values, total, measure),
        }
        for run, values, total in curves
    ]
    return {
        "x": {
            "label": f"{measure.name} ({measure.unit})",
            "unit": measure.unit,
            "log": True,
            "values": rounded(grid, 5),
        },
        "y": {"label": "share of requests (%)", "unit": "%", "max": 100},
        "series": series,
        "promise": None if bound is None else bound * measure.factor,
    }


def _at_rest(ascending: Floats, total: int, measure: Measure) -> str:
    """What half and what 99 % of all take, for those who point at nothing."""
    told = []
    for name, share in (("half", 0.5), ("99\u00a0%", 0.99)):
        at = int(np.ceil(share * total)) - 1
        value = ascending[at] / measure.factor if at < ascending.size else float("inf")
        told.append(f"{name} never" if value == float("inf") else f"{name} ≤ {seconds(value)}")
    return ", ".join(told)


def cdf(ascending: Floats, grid: Floats, total: int) -> Floats:
    """The percentage of `total` that does not exceed each point of `grid`."""
    return np.asarray(100.0 * np.searchsorted(ascending, grid, side="right") / total, dtype=np.float64)


def _grid(curves: list[Floats], promise: float | None) -> Floats:
    """Times from under the smallest to over the largest value, and the promise among them."""
    positive = [values[values > 0] for values in curves]
    smallest = min((float(values[int(0.002 * values.size)]) for values in positive if values.size), default=1e-3)
    largest = max(float(values[-1]) for values in curves)
    low = min(smallest, promise or smallest) / 1.15
    high = max(largest, promise or largest, low * 1.5) * 1.05
    return np.geomspace(low, high, POINTS)
