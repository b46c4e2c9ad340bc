"""What a section of the page is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidegate.core.slo import NO_SLO, SloClass
from tidegate.observe.columns import Columns
from tidegate.observe.comparison.run import Loaded

MAX_CLASSES = 8


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page.

    anchor:    its id on the page
    headline:  what it tells, as plain text
    body:      HTML in which everything is escaped already
    charts:    what assets/report.js draws, keyed by the id of the figure that waits for it in the body
    """

    anchor: str
    title: str
    headline: str
    body: str
    charts: dict[str, dict[str, Any]] = field(default_factory=dict)


class Comparison:
    """Runs side by side: their largest classes, in order of urgency."""

    def __init__(self, runs: Sequence[Loaded], promises: Mapping[str, SloClass]) -> None:
        self.runs = runs
        self.promises = promises
        parts = [dict(run.columns.groups("slo_class")) for run in runs]
        self.classes = _classes(parts)
        self._parts = [{name: p[name] for name in self.classes if name in p} for p in parts]

    def of_class(self, name: str) -> list[tuple[Loaded, Columns]]:
        """Each run that has requests of a class, with those."""
        return [(run, part[name]) for run, part in zip(self.runs, self._parts, strict=True) if name in part]

    def promised(self, name: str) -> bool:
        """Whether a class was promised anything, as far as is known."""
        return name not in self.promises or self.promises[name].slo != NO_SLO


def _classes(parts: Sequence[Mapping[str, Columns]]) -> list[str]:
    """The largest classes, the most urgent first."""
    size: dict[str, int] = {}
    urgency: dict[str, float] = {}
    for part in parts:
        for name, rows in part.items():
            size[name] = size.get(name, 0) + len(rows)
            urgency[name] = min(urgency.get(name, float("inf")), float(rows.numbers("priority").min()))
    largest = sorted(size, key=lambda name: -size[name])[:MAX_CLASSES]
    return sorted(largest, key=lambda name: (urgency[name], -size[name], name))


def figure(chart: str, title: str, description: str) -> str:
    """The place on the page for a chart. `title` and `description` are safe already."""
    return (
        f'<figure class="chart"><figcaption>{title}</figcaption>'
        f'<div class="plot" id="{chart}" role="img" aria-label="{description}"></div>'
        f'<p class="readout"></p></figure>'
    )
