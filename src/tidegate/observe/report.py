"""A comparison of runs on one page: self-contained HTML, for a manager to read and an engineer to dig in.

Nothing is fetched: styles, scripts and data stand in the file, and its content policy lets no other script run and
no address be asked. What the data bring (names of classes, tenants, requests, files) is escaped wherever it stands.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from tidegate.core.slo import SloClass
from tidegate.errors import InputError
from tidegate.observe.comparison.attainment import attainment
from tidegate.observe.comparison.fairness import fairness
from tidegate.observe.comparison.latency import latency
from tidegate.observe.comparison.preemptions import preemptions
from tidegate.observe.comparison.run import Loaded, Run
from tidegate.observe.comparison.section import Comparison, Section
from tidegate.observe.comparison.timeline import timeline
from tidegate.observe.comparison.words import plural, safe, seconds
from tidegate.observe.comparison.worst import worst

__all__ = ["MAX_RUNS", "Run", "load_runs", "write_page", "write_report"]

MAX_RUNS = 8
"""More cannot be told apart by colour."""


def write_report(
    runs: Sequence[Run],
    path: Path,
    *,
    promises: Mapping[str, SloClass] | None = None,
    title: str = "Comparison of runs",
) -> None:
    """Write the page that compares `runs` to `path`; a file that is there is replaced.

    `promises` are the classes as configured, drawn beside what was measured; whether a request met its SLO is
    what its record says. The page's size is bounded, whatever the runs' (docs/report.md says how).
    Raises InputError for no run, more than MAX_RUNS, two of one name, or files that are not what they should be.
    """
    write_page(load_runs(runs), path, promises=promises, title=title)


def write_page(runs: Sequence[Loaded], path: Path, *, promises: Mapping[str, SloClass] | None, title: str) -> None:
    """`write_report` for runs that were read already."""
    comparison = Comparison(runs, promises or {})
    table, rows = worst(comparison)
    parts = (attainment, latency, timeline, fairness, preemptions)
    page = _page(title, runs, [*(part(comparison) for part in parts), table], rows)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def load_runs(runs: Sequence[Run]) -> list[Loaded]:
    """Read every run; those of one name, one measured and one not, share a colour. Raises as `write_report`."""
    if not runs:
        raise InputError("a report needs at least one run")
    if len(runs) > MAX_RUNS:
        raise InputError(f"a report compares at most {MAX_RUNS} runs, not {len(runs)}")
    colours: dict[str, int] = {}
    loaded = [Loaded(run, colours.setdefault(run.name, len(colours))) for run in runs]
    names = [run.name for run in loaded]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two runs are called {name!r}; name them, as in NAME=FILE")
    return loaded


def _page(title: str, runs: Sequence[Loaded], sections: Sequence[Section], rows: list[list[Any]]) -> str:
    charts = {key: chart for section in sections for key, chart in section.charts.items()}
    data = {
        "charts": charts,
        "worst": rows,
        "runs": [{"name": run.name, "colour": run.colour, "dash": run.run.measured} for run in runs],
    }
    scripts = [_asset("uPlot.iife.min.js"), _asset("report.js")]
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src {' '.join(map(_hash, scripts))}; "
        "base-uri 'none'; form-action 'none'"
    )
    nav = "".join(f'<a href="#{section.anchor}">{safe(section.title)}</a>' for section in sections)
    return "".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{safe(title)} · Tidegate</title>",
            f"<style>{_asset('uPlot.min.css')}{_asset('report.css')}</style></head><body>",
            f"<header><p class='brand'>Tidegate</p><h1>{safe(title)}</h1>{_runs(runs)}</header>",
            f'<div class="sticky"><nav aria-label="Sections">{nav}</nav>{_chips(runs)}</div>',
            f"<main>{''.join(map(_section, sections))}</main>",
            "<noscript><p>Charts and the table of requests need JavaScript; all else is here.</p></noscript>",
            f'<script type="application/json" id="data">{embedded(data)}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        )
    )


def _section(section: Section) -> str:
    lines = "".join(f"<p>{escape(line)}</p>" for line in section.headline.split("\n"))
    return (
        f'<section id="{section.anchor}"><h2>{safe(section.title)}</h2>'
        f'<div class="headline">{lines}</div>{section.body}</section>'
    )


def _runs(runs: Sequence[Loaded]) -> str:
    """What is compared."""
    items = []
    for run in runs:
        replicas = len(run.columns.names("replica")[0])
        told = [plural(len(run.columns), "request"), seconds(run.columns.span_s), plural(replicas, "replica")]
        if run.run.measured:
            told.append("measured on a real engine")
        source = f"<small>{escape(run.source)}</small>" if isinstance(run.run.records, Path) else ""
        items.append(f"<li><b>{safe(run.run.name)}</b> <span>{safe(' · '.join(told))}</span>{source}</li>")
    return f'<ul class="runs">{"".join(items)}</ul>'


def _chips(runs: Sequence[Loaded]) -> str:
    """The legend: one button a run, which shows and hides it in every chart."""
    chips = [
        f'<button type="button" class="run c{run.colour}{" measured" if run.run.measured else ""}" data-run="{number}" '
        f'aria-pressed="true" title="Show or hide in the charts"><i></i>{safe(run.name)}</button>'
        for number, run in enumerate(runs)
    ]
    return f'<div class="chips" role="group" aria-label="Runs in the charts">{"".join(chips)}</div>'


def embedded(data: Any) -> str:
    """JSON for a script element: no character in it can end the element or begin a tag."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return (files("tidegate.observe") / "assets" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """How a content policy names a script that may run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
