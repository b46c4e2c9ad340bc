"""Who got how much: service and speed by tenant, and Jain's index of both.

Jain, Chiu, Hawe: A quantitative measure of fairness and discrimination (DEC-TR-301, 1984).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidegate.observe.columns import Columns, Floats
from tidegate.observe.comparison.attainment import bar
from tidegate.observe.comparison.run import Loaded
from tidegate.observe.comparison.section import Comparison, Section
from tidegate.observe.comparison.words import count, listed, percent, plural, safe, table

MAX_TENANTS = 12

HEAD = ("tenant", "run", "requests", "tokens served", "share", "tokens/s seen", "in SLO", "preemptions")


@dataclass(frozen=True, slots=True)
class Tenants:
    """What each tenant of a run got, by name in order.

    served: prompt tokens computed for it and output tokens
    speed:  output tokens over the seconds that its completed requests took from end to end; NaN where none completed
    """

    names: list[str]
    requests: Floats
    served: Floats
    speed: Floats
    attained: Floats
    preemptions: Floats

    def share(self, at: int) -> float:
        """The share of all service that the tenant at this place got."""
        return float(self.served[at] / max(1.0, float(self.served.sum())))


def fairness(comparison: Comparison) -> Section:
    """Bars of speed by tenant, the numbers, and the index per run."""
    found = {run.name: tenants_of(run.columns) for run in comparison.runs}
    names = _largest(found)
    everybody = {name for tenants in found.values() for name in tenants.names}
    if len(everybody) < 2:
        told = "All requests are of one tenant, so there is nobody to be unfair to."
        return Section("fairness", "Fairness between tenants", told, "")
    fastest = max(float(np.nanmax(t.speed)) if not np.isnan(t.speed).all() else 0.0 for t in found.values()) or 1.0
    blocks = "".join(_block(comparison, name, found, fastest) for name in names)
    rows = [row for name in names for run in comparison.runs if (row := _row(name, run, found[run.name]))]
    rest = len(everybody) - len(names)
    more = (
        f" {plural(rest, 'smaller tenant')} beyond the {MAX_TENANTS} largest count only in the index." if rest else ""
    )
    note = (
        '<p class="note">Bars: output tokens per second that a tenant\'s requests saw, end to end, and its share of '
        "all tokens served. Jain's index is 1 where all tenants have the same and 1/n where one of n has everything. "
        "That of the service depends on what tenants asked for; that of the speed should be near 1 where their "
        f"requests are alike.{more}</p>"
    )
    body = (
        f'{_indices(comparison, found)}{note}<div class="bars">{blocks}</div>'
        f"<details><summary>All numbers</summary>{table(HEAD, rows, 2, 'Tenants by run')}</details>"
    )
    return Section("fairness", "Fairness between tenants", _headline(comparison, found), body)


def jain(values: Floats) -> float | None:
    """(sum x)^2 / (n * sum x^2) over what is known; None of nothing, or of only zeros."""
    known = values[~np.isnan(values)]
    squares = float((known**2).sum())
    return float(known.sum()) ** 2 / (known.size * squares) if squares else None


def tenants_of(columns: Columns) -> Tenants:
    """What each tenant got."""
    names, who = columns.names("tenant")
    n = len(names)
    done = columns.completed
    outputs, began = columns.numbers("output_tokens"), ~np.isnan(columns.numbers("first_token_s"))
    prompts = np.where(began, columns.numbers("prompt_tokens") - columns.numbers("cached_tokens"), 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        speed = _sum(who[done], outputs[done], n) / _sum(who[done], columns.numbers("e2e_s")[done], n)
        left = ~columns.cancelled
        attained = _sum(who, columns.numbers("slo_met"), n) / _sum(who[left], np.ones(int(left.sum())), n)
    preemptions = np.nan_to_num(columns.numbers("preemptions"))
    return Tenants(
        names,
        _sum(who, np.ones(len(columns)), n),
        _sum(who, prompts + outputs, n),
        speed,
        attained,
        _sum(who, preemptions, n),
    )


def _sum(who: npt.NDArray[np.int64], weights: Floats, n: int) -> Floats:
    return np.asarray(np.bincount(who, weights=weights, minlength=n), dtype=np.float64)


def _headline(comparison: Comparison, found: dict[str, Tenants]) -> str:
    """How far apart the best and the worst served tenant are."""
    told = []
    for run in comparison.runs:
        speed = found[run.name].speed
        known = speed[~np.isnan(speed)]
        if known.size > 1 and known.min() > 0:
            ratio = float(known.max() / known.min())
            told.append((ratio, f"{ratio:.3g} times that of the slowest under {run.name} (Jain {jain(known):.2f})"))
    if not told:
        return "No two tenants completed requests, so nothing can be compared."
    tenants = max(len(t.names) for t in found.values())
    return f"Of {plural(tenants, 'tenant')} the fastest saw a speed {listed([text for _, text in sorted(told)])}."


def _indices(comparison: Comparison, found: dict[str, Tenants]) -> str:
    rows = [
        (run.name, len(found[run.name].names), _index(found[run.name].speed), _index(found[run.name].served))
        for run in comparison.runs
    ]
    return table(("run", "tenants", "Jain: speed", "Jain: service"), rows, 1, "Jain's index by run")


def _index(values: Floats) -> str:
    index = jain(values)
    return "–" if index is None else f"{index:.3f}"


def _largest(found: dict[str, Tenants]) -> list[str]:
    """The tenants that were served most, over all runs."""
    total: dict[str, float] = {}
    for tenants in found.values():
        for name, served in zip(tenants.names, tenants.served, strict=True):
            total[name] = total.get(name, 0.0) + float(served)
    return sorted(total, key=lambda name: (-total[name], name))[:MAX_TENANTS]


def _block(comparison: Comparison, name: str, found: dict[str, Tenants], fastest: float) -> str:
    bars = []
    for run in comparison.runs:
        tenants = found[run.name]
        if name in tenants.names:
            at = tenants.names.index(name)
            speed = float(tenants.speed[at])
            told = f"{_speed(speed)} · {percent(tenants.share(at))}"
            bars.append(bar(run, 0.0 if speed != speed else speed / fastest, told))
    return f'<div class="block"><h3>{safe(name)}</h3>{"".join(bars)}</div>'


def _speed(speed: float) -> str:
    return "none completed" if speed != speed else f"{speed:.3g} tokens/s"


def _row(name: str, run: Loaded, tenants: Tenants) -> list[str] | None:
    if name not in tenants.names:
        return None
    i = tenants.names.index(name)
    attained, speed = float(tenants.attained[i]), float(tenants.speed[i])
    return [
        name, run.name, count(tenants.requests[i]), count(tenants.served[i]),
        percent(tenants.share(i)), "–" if speed != speed else f"{speed:.3g}",
        percent(None if attained != attained else attained), count(tenants.preemptions[i]),
    ]  # fmt: skip
