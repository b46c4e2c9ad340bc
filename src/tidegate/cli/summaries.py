"""How commands print what became of runs: one line per class and run, within 120 columns, or stable JSON."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from tidegate.observe.summary import ClassSummary

WIDTH = 120
NAME_WIDTH = 16

_HEADS = ("count", "in SLO", "goodput\n/s", "TTFT s\np50/p90/p99", "TPOT ms\np50/p90/p99", "E2E s\np50/p90/p99")
_TAIL_HEADS = ("pre-\nempted", "recom-\nputed", "cache\nhit")


def print_summaries(runs: Mapping[str, Mapping[str, ClassSummary]], title: str | None = None) -> None:
    """A table with a line per class and run, runs of one class under each other so that they compare."""
    wide = sys.stdout.isatty()
    console = Console(width=None if wide else WIDTH)
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("class", max_width=NAME_WIDTH, no_wrap=True, overflow="ellipsis")
    if len(runs) > 1:
        table.add_column("run", max_width=NAME_WIDTH, no_wrap=True, overflow="ellipsis")
    for head in _HEADS + _TAIL_HEADS:
        table.add_column(head, justify="right", no_wrap=True)
    for name in _classes(runs):
        for run, summaries in runs.items():
            if name in summaries:
                names = [name, run] if len(runs) > 1 else [name]
                table.add_row(*map(Text, names), *_cells(summaries[name]))
    console.print(table)


def summaries_json(runs: Mapping[str, Mapping[str, ClassSummary]]) -> dict[str, Any]:
    """The documented form (docs/records.md): run name to class name to summary."""
    return {run: {name: asdict(summary) for name, summary in classes.items()} for run, classes in runs.items()}


def _classes(runs: Mapping[str, Mapping[str, ClassSummary]]) -> list[str]:
    """Every class that a run has, those of all requests last."""
    found = dict.fromkeys(name for summaries in runs.values() for name in summaries)
    return sorted(found, key=lambda name: (name == "all", name))


def _cells(s: ClassSummary) -> list[str]:
    return [
        str(s.requests),
        _share(s.attainment),
        significant(s.goodput),
        _three(s.ttft_s, 1.0),
        _three(s.tpot_s, 1000.0),
        _three(s.e2e_s, 1.0),
        "-" if s.preemptions is None else str(s.preemptions),
        _share(s.recompute_share),
        _share(s.cache_hit),
    ]


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _three(cuts: Mapping[str, float], factor: float) -> str:
    return "/".join(significant(value * factor) for value in cuts.values()) or "-"


def significant(value: float) -> str:
    """Three significant digits without an exponent: 0.012, 1.23, 45.6, 789, 12345."""
    if value == 0:
        return "0"
    for bound, digits in ((0.01, 4), (1, 3), (10, 2), (100, 1)):
        if abs(value) < bound:
            return f"{value:.{digits}f}"
    return f"{value:.0f}"
