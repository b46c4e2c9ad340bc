"""What was preempted, at what cost, and why."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np

from tidegate.errors import InputError
from tidegate.observe.columns import Columns
from tidegate.observe.comparison.run import Loaded
from tidegate.observe.comparison.section import Comparison, Section
from tidegate.observe.comparison.words import count, listed, percent, plural, safe, table
from tidegate.observe.summary import summarise_columns

MAX_REASONS = 12

HEAD = ("class", "run", "requests hit", "preemptions", "most for one", "tokens recomputed", "share", "blocks swapped")

Cause = tuple[str, str, str]
"""Who gave way (class), how it came back, and why: the reason without names and numbers."""


def preemptions(comparison: Comparison) -> Section:
    """Counts by class and run, and reasons where a decision log tells them."""
    rows = [
        _row(name, run, rows)
        for name in comparison.classes
        for run, rows in comparison.of_class(name)
        if np.nansum(rows.numbers("preemptions"))
    ]
    body = table(HEAD, rows, 2, "Preemptions by class and run") if rows else ""
    return Section("preemptions", "What gave way, and why", _headline(comparison), body + _why(comparison))


def _headline(comparison: Comparison) -> str:
    told, unknown = [], []
    for run in comparison.runs:
        known = run.columns.known("preemptions")
        if not known.size:
            unknown.append(run.name)
            continue
        share = summarise_columns(run.columns)["all"].recompute_share
        cost = f" ({percent(share)} of all tokens computed twice)" if known.sum() and share is not None else ""
        told.append(f"{plural(float(known.sum()), 'preemption')} under {run.name}{cost}")
    sentence = f"{listed(told)}. " if told else ""
    return sentence + (f"A client cannot see those of {listed(unknown)}." if unknown else "")


def _row(name: str, run: Loaded, rows: Columns) -> list[str]:
    counts = np.nan_to_num(rows.numbers("preemptions"))
    again = np.nansum(rows.numbers("recomputed_tokens"))
    share = summarise_columns(rows)["all"].recompute_share
    swapped = np.nansum(rows.numbers("swapped_blocks"))
    hit = [count((counts > 0).sum()), count(counts.sum()), count(counts.max())]
    return [name, run.name, *hit, count(again), percent(share), count(swapped)]


def _why(comparison: Comparison) -> str:
    """A table of reasons, most frequent first, a column a run."""
    logged = [run for run in comparison.runs if run.run.decisions is not None]
    if not logged:
        return '<p class="note">Why each gave way is told by a decision log beside the records.</p>'
    found = {run.name: causes(run.run.decisions) for run in logged if run.run.decisions is not None}
    total: Counter[Cause] = Counter()
    for counted in found.values():
        total.update(counted)
    if not total:
        return ""
    shown = [cause for cause, _ in total.most_common(MAX_REASONS)]
    rows = [[*cause, *(count(found[run.name][cause]) for run in logged)] for cause in shown]
    rest = total.total() - sum(total[cause] for cause in shown)
    more = f"<p class='note'>{plural(rest, 'preemption')} for rarer reasons.</p>" if rest else ""
    head = ("who gave way", "comes back by", "because", *(run.name for run in logged))
    return f"<h3>{safe('Reasons, from the decision log')}</h3>{table(head, rows, 3, 'Reasons by run')}{more}"


def causes(path: Path) -> Counter[Cause]:
    """How often somebody gave way for each cause, from a decision log. Raises InputError for what is none."""
    found: Counter[Cause] = Counter()
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if '"preempted"' in line:
                    found.update(_cause(path, number, line))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    return found


def _cause(path: Path, number: int, line: str) -> list[Cause]:
    try:
        told = json.loads(line)
    except ValueError as error:
        raise InputError(f"{path} is no decision log: line {number} is not JSON ({error})") from error
    if not isinstance(told, dict) or told.get("event") != "preempted":
        return []
    return [(str(told.get("class", "")), str(told.get("mode", "")), nameless(str(told.get("reason", ""))))]


def nameless(reason: str) -> str:
    """A reason without the names and numbers that tell one case from another."""
    displaced = re.fullmatch(r"(seat|KV blocks) wanted by .* \(priority -?\d+ < -?\d+\)(; .*)?", reason, re.DOTALL)
    if displaced:
        return f"{displaced[1]} wanted by a more urgent request"
    cause, _, _ = reason.partition("; ")  # what follows is the price of this very case
    return re.sub(r"-?\d+(\.\d+)?", "n", cause)
