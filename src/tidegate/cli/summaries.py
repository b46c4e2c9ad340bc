"""How commands print what became of runs: one line per class and run, within 120 columns, or stable JSON."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from tidegate.observe.summary import ClassSummary

WIDTH = 120
SHORTEST_NAME = 8

_HEADS = (
    "count", "in SLO", "goodput\n/s", "TTFT s\np50/p90/p99", "TPOT ms\np50/p90/p99", "E2E s\np50/p90/p99",
    "pre-\nempted", "recom-\nputed", "cache\nhit",
)  # fmt: skip


def print_summaries(runs: Mapping[str, Mapping[str, ClassSummary]], title: str | None = None) -> None:
    """A table with a line per class and run, runs of one class under each other so that they compare.

    Where the terminal is too narrow names are cut, never numbers. `count` is completed/all where some did not.
    """
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="bold")
    rows = [
        ((name, run), _cells(summaries[name]))
        for name in _classes(runs)
        for run, summaries in runs.items()
        if name in summaries
    ]
    names = 2 if len(runs) > 1 else 1
    room = console.width - sum(1 + _width(i, rows) for i in range(len(_HEADS))) - names
    for head, width in zip(("class", "run"), _name_widths(rows, room, names), strict=False):
        table.add_column(head, width=width, no_wrap=True, overflow="ellipsis")
    for head in _HEADS:
        table.add_column(head, justify="right", no_wrap=True)
    for of, cells in rows:
        table.add_row(*map(Text, of[:names]), *cells)
    console.print(table)


_Row: TypeAlias = tuple[tuple[str, str], list[str]]


def _width(column: int, rows: Sequence[_Row]) -> int:
    """Of the widest text in a column of numbers."""
    return max(map(len, (*_HEADS[column].splitlines(), *(cells[column] for _, cells in rows))))


def _name_widths(rows: Sequence[_Row], room: int, names: int) -> list[int]:
    """How wide the columns of names may be, given the `room` that the numbers leave them together."""
    wanted = [max([5, *(len(of[at]) for of, _ in rows)]) for at in range(names)]
    if sum(wanted) <= room or names == 1:
        return [max(SHORTEST_NAME, min(width, room)) for width in wanted]
    first = max(SHORTEST_NAME, min(wanted[0], room - min(wanted[1], room // 2)))
    return [first, max(SHORTEST_NAME, room - first)]


def summaries_json(runs: Mapping[str, Mapping[str, ClassSummary]]) -> dict[str, Any]:
    """The documented form (docs/records.md): run name to class name to summary."""
    return {run: {name: asdict(summary) for name, summary in classes.items()} for run, classes in runs.items()}


def _classes(runs: Mapping[str, Mapping[str, ClassSummary]]) -> list[str]:
    """Every class that a run has, those of all requests last."""
    found = dict.fromkeys(name for summaries in runs.values() for name in summaries)
    return sorted(found, key=lambda name: (name == "all", name))


def _cells(s: ClassSummary) -> list[str]:
    return [
        brief(s.requests) if s.completed == s.requests else f"{brief(s.completed)}/{brief(s.requests)}",
        _share(s.attainment),
        significant(s.goodput),
        _three(s.ttft_s, 1.0),
        _three(s.tpot_s, 1000.0),
        _three(s.e2e_s, 1.0),
        "-" if s.preemptions is None else brief(s.preemptions),
        _share(s.recompute_share),
        _share(s.cache_hit),
    ]


def _share(share: float | None) -> str:
    """A percentage that is 100 only where nothing is missing."""
    if share is None:
        return "-"
    return f"{share:.1%}" if share == 1 else f"{min(share, 0.999):.1%}"


def _three(cuts: Mapping[str, float], factor: float) -> str:
    return "/".join(significant(value * factor) for value in cuts.values()) or "-"


def brief(count: int) -> str:
    """A count in five characters: 12345, 123k, 1.23M."""
    if count < 100_000:
        return str(count)
    return f"{count // 1000}k" if count < 1_000_000 else f"{count / 1e6:.4g}M"


def significant(value: float) -> str:
    """Three significant digits without an exponent: 0.012, 1.23, 45.6, 789, 12345."""
    if value == 0:
        return "0"
    for bound, digits in ((0.01, 4), (1, 3), (10, 2), (100, 1)):
        if abs(value) < bound:
            return f"{value:.{digits}f}"
    return f"{value:.0f}"
