"""Promises kept: by class and run."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.observe.columns import Columns
from tidegate.observe.comparison.run import Loaded
from tidegate.observe.comparison.section import MAX_CLASSES, Comparison, Section
from tidegate.observe.comparison.words import count, listed, percent, plural, ranked, safe, seconds, short, table
from tidegate.observe.summary import ClassSummary, summarise_columns

HEAD = (
    "class", "run", "requests", "completed", "in SLO", "goodput, 1/s", "TTFT p50", "p90", "p99", "TPOT p50", "p90",
    "p99", "E2E p50", "p90", "p99", "preemptions", "recomputed", "cache hit",
)  # fmt: skip


def attainment(comparison: Comparison) -> Section:
    """Bars by class and run, and below them all numbers of the summary."""
    summaries = {run.name: summarise_columns(run.columns) for run in comparison.runs}
    blocks = "".join(_block(comparison, name, summaries) for name in comparison.classes)
    rows = [
        _row(name, run.name, summaries[run.name][name])
        for name in [*comparison.classes, "all"]
        for run in comparison.runs
        if name in summaries[run.name]
    ]
    known = {name for classes in summaries.values() for name in classes} - {"all"}
    rest = len(known) - len(comparison.classes)
    beyond = plural(rest, "smaller class", "smaller classes")
    more = f"<p>{beyond} beyond the {MAX_CLASSES} largest count only under all.</p>"
    body = (
        f'<div class="bars">{blocks}</div>{more if rest else ""}'
        f"<details><summary>All numbers</summary>{table(HEAD, rows, 2, 'Summary by class and run')}</details>"
    )
    return Section("attainment", "Promises kept", _headline(comparison, summaries), body)


def _headline(comparison: Comparison, summaries: dict[str, dict[str, ClassSummary]]) -> str:
    """`interactive: joint keeps 97 % of its promises, vllm-v1 61 %`, the best first."""
    promised = [name for name in comparison.classes if comparison.promised(name)]
    told = [_overall(comparison, promised)] if len(promised) > 1 else []
    for name in promised:
        shares = [(run.name, summaries[run.name][name].attainment) for run, _ in comparison.of_class(name)]
        known = sorted(((run, share) for run, share in shares if share is not None), key=lambda pair: -pair[1])
        if known:
            (first, best), *others = known
            parts = [f"{first} keeps {percent(best)} of the promises", *(f"{r} {percent(s)}" for r, s in others)]
            told.append(f"{short(name)}: {ranked(parts)}.")
    return "\n".join(told) or "No class was promised anything."


def _overall(comparison: Comparison, promised: Sequence[str]) -> str:
    """All promises together, and how many requests a second that is."""
    shares = []
    for run in comparison.runs:
        parts = [rows for name in promised for of, rows in comparison.of_class(name) if of is run]
        counted = sum(len(rows) - int(rows.cancelled.sum()) for rows in parts)
        met = sum(float(rows.numbers("slo_met").sum()) for rows in parts)
        if counted:
            shares.append((met / counted, met / (run.columns.span_s or 1.0), run.name))
    (share, rate, first), *others = sorted(shares, reverse=True)
    best = f"In all, {first} keeps {percent(share)} of the promises ({rate:.3g} requests a second)"
    return f"{ranked([best, *(f'{run} {percent(s)} ({r:.3g})' for s, r, run in others)])}."


def _block(comparison: Comparison, name: str, summaries: dict[str, dict[str, ClassSummary]]) -> str:
    promised = comparison.promised(name)
    bars = []
    for run, rows in comparison.of_class(name):
        summary = summaries[run.name][name]
        counted = len(rows) - summary.cancelled
        share = summary.attainment if promised else (summary.completed / counted if counted else None)
        bars.append(bar(run, share, f"{percent(share)} of {count(counted)}"))
    note = _promise(comparison, name) if promised else "nothing promised: completed"
    small = f" <small>{safe(note)}</small>" if note else ""
    return f'<div class="block"><h3>{safe(name)}{small}</h3>{"".join(bars)}</div>'


def bar(run: Loaded, share: float | None, told: str) -> str:
    """A run's name, a bar as long as `share`, and the number in words."""
    width = 100 * min(1.0, max(0.0, share or 0.0))
    kind = " measured" if run.run.measured else ""
    return (
        f'<div class="bar c{run.colour}{kind}"><span class="who">{safe(run.name)}</span>'
        f'<span class="track" aria-hidden="true"><i style="width:{width:.2f}%"></i></span>'
        f'<span class="value">{safe(told)}</span></div>'
    )


def _promise(comparison: Comparison, name: str) -> str:
    """The promise in words, where it is known."""
    known = comparison.promises.get(name)
    if known is None:
        return ""
    slo = known.slo
    parts = (("TTFT", slo.ttft), ("TPOT", slo.tpot), ("P99 gap", slo.tbt), ("E2E", slo.e2e))
    said = [f"{what} ≤ {seconds(bound)}" for what, bound in parts if bound is not None]
    return listed(said) if said else ""


def _row(name: str, run: str, s: ClassSummary) -> list[str]:
    cuts = [seconds(of.get(q)) for of in (s.ttft_s, s.tpot_s, s.e2e_s) for q in ("p50", "p90", "p99")]
    return [
        name, run, count(s.requests), count(s.completed), percent(s.attainment), f"{s.goodput:.3g}", *cuts,
        count(s.preemptions), percent(s.recompute_share), percent(s.cache_hit),
    ]  # fmt: skip


def attained(rows: Columns) -> float | None:
    """The share of requests that met their SLO, of all that their client did not cancel."""
    counted = len(rows) - int(rows.cancelled.sum())
    return float(rows.numbers("slo_met").sum()) / counted if counted else None
