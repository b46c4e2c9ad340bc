"""Queue length, seats and KV over time."""

from __future__ import annotations

from typing import Any

import numpy as np

from tidegate.observe.columns import Floats
from tidegate.observe.comparison.run import Loaded
from tidegate.observe.comparison.section import Comparison, Section, figure
from tidegate.observe.comparison.words import count, listed, percent, rounded

SPANS = 240
"""Equal spans of time over which each curve is averaged."""


def timeline(comparison: Comparison) -> Section:
    """Who waits, who runs, and how full the KV pool is."""
    length = max(run.columns.span_s for run in comparison.runs) or 1.0
    edges = np.linspace(0.0, length, SPANS + 1)
    queues = {run.name: _waiting(run, edges) for run in comparison.runs}
    seats = {run.name: _running(run, edges) for run in comparison.runs}
    pools = {run.name: used for run in comparison.runs if (used := _kv_used(run, edges)) is not None}
    charts = {
        "queue": _chart(comparison, edges, queues, "requests waiting", ""),
        "seats": _chart(comparison, edges, seats, "requests running", ""),
    }
    figures = [
        figure(
            "queue", "Queue: requests that wait, preempted ones where a step log knows", "Waiting requests over time"
        ),
        figure("seats", "Seats: requests that run", "Running requests over time"),
    ]
    if pools:
        charts["kv"] = _chart(comparison, edges, pools, "KV in use (%)", "%") | {
            "y": {"label": "KV in use (%)", "unit": "%", "max": 100}
        }
        figures.append(figure("kv", "KV memory that requests hold", "Share of KV blocks in use over time"))
    body = f'<div class="wide">{"".join(figures)}</div>{_note(comparison, pools, length)}'
    return Section("load", "Queue and memory over time", _headline(queues, pools), body, charts)


def _headline(queues: dict[str, Floats], pools: dict[str, Floats]) -> str:
    ordered = sorted(queues, key=lambda name: float(np.nanmax(queues[name])))
    longest = [f"{count(float(np.nanmax(queues[name])))} under {name}" for name in ordered]
    told = f"At its longest the queue holds {listed(longest)}."
    full = [f"{percent(float(np.nanmean(pools[name])) / 100)} under {name}" for name in pools]
    return f"{told} KV in use, on average: {listed(full)}." if full else told


def _note(comparison: Comparison, pools: dict[str, Floats], length: float) -> str:
    told = [f"Time counts from each run's first arrival; each point is the mean over {length / SPANS:.3g} s."]
    if any(_seen_by_a_client(run) for run in comparison.runs):
        told.append("Where a client measured, requests without a first token count as waiting, the others as running.")
    if not pools:
        told.append("KV in use needs a step log beside the records.")
    elif any(run.run.pool_blocks is None for run in comparison.runs):
        told.append("The most blocks that a step log ever saw free count as the whole pool.")
    return f'<p class="note">{" ".join(told)}</p>'


def _chart(comparison: Comparison, edges: Floats, curves: dict[str, Floats], label: str, unit: str) -> dict[str, Any]:
    middle = (edges[1:] + edges[:-1]) / 2
    return {
        "x": {"label": "time (s)", "unit": "s", "log": False, "values": rounded(middle, 6)},
        "y": {"label": label, "unit": unit, "max": None},
        "series": [
            {
                "run": run.name,
                "colour": run.colour,
                "dash": run.run.measured,
                "y": rounded(curves[run.name]),
                "rest": f"peak {float(np.nanmax(curves[run.name])):.3g}\u00a0{unit}".strip(),
            }
            for run in comparison.runs
            if run.name in curves
        ],
        "promise": None,
    }


def mean_level(times: Floats, levels: Floats, edges: Floats) -> Floats:
    """The mean over each span of a level that is `levels[i]` from `times[i]` on (ascending), and 0 before the first."""
    if not times.size:
        return np.zeros(edges.size - 1)
    areas = np.concatenate([[0.0], np.cumsum(levels[:-1] * np.diff(times))])
    at = np.searchsorted(times, edges, side="right") - 1
    until = np.where(at < 0, 0.0, areas[at] + levels[at] * (edges - times[at]))
    return np.diff(until) / np.diff(edges)


def _present(begins: Floats, ends: Floats, edges: Floats) -> Floats:
    """How many are there, on average over each span, of those who come and go at these times (NaN: never came)."""
    there = ~np.isnan(begins)
    times = np.concatenate([begins[there], ends[there]])
    changes = np.concatenate([np.ones(there.sum()), -np.ones(there.sum())])
    order = np.argsort(times, kind="stable")
    return mean_level(times[order], np.cumsum(changes[order]), edges)


def _seen_by_a_client(run: Loaded) -> bool:
    return not run.columns.known("admitted_s").size and bool(run.columns.known("first_token_s").size)


def _served_from(run: Loaded) -> Floats:
    """When each request was admitted, or, where only a client measured, had its first token; NaN: never."""
    return run.columns.numbers("first_token_s" if _seen_by_a_client(run) else "admitted_s") - run.origin


def _waiting(run: Loaded, edges: Floats) -> Floats:
    if run.steps is not None:
        return _from_steps(run, "waiting", edges)
    begun, end = _served_from(run), run.columns.numbers("finish_s") - run.origin
    return _present(run.columns.numbers("arrival_s") - run.origin, np.where(np.isnan(begun), end, begun), edges)


def _running(run: Loaded, edges: Floats) -> Floats:
    if run.steps is not None:
        return _from_steps(run, "running", edges)
    return _present(_served_from(run), run.columns.numbers("finish_s") - run.origin, edges)


def _from_steps(run: Loaded, name: str, edges: Floats) -> Floats:
    """Summed over replicas. After a step that no other follows at once, nobody is known to be there."""
    total = np.zeros(edges.size - 1)
    for steps in (run.steps or {}).values():
        times, levels = _levels(steps, steps[name], 0.0)
        total += mean_level(times - run.origin, levels, edges)
    return total


def _levels(steps: dict[str, Floats], levels: Floats, idle: float) -> tuple[Floats, Floats]:
    """Levels from step to step, and `idle` from the end of a step that is followed by a pause."""
    start, end = steps["start_s"], steps["start_s"] + steps["seconds"]
    pause = np.append(start[1:] > end[:-1] + np.maximum(0.05, steps["seconds"][:-1]), True)
    times = np.concatenate([start, end[pause]])
    order = np.argsort(times, kind="stable")
    return times[order], np.concatenate([levels, np.full(int(pause.sum()), idle)])[order]


def _kv_used(run: Loaded, edges: Floats) -> Floats | None:
    """The percentage of KV blocks that requests hold, over all replicas; None without a step log."""
    if run.steps is None:
        return None
    held, pools = np.zeros(edges.size - 1), 0.0
    for steps in run.steps.values():
        pool = run.run.pool_blocks or float(steps["free_blocks"].max())
        times, levels = _levels(steps, np.maximum(0.0, pool - steps["free_blocks"]), 0.0)
        held += mean_level(times - run.origin, levels, edges)
        pools += pool
    return 100.0 * held / pools if pools else None
