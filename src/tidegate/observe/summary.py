"""Records in short: how each class fared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tidegate.observe.columns import Columns, Floats
from tidegate.observe.records import Record, records_table

QUANTILES = (50, 90, 99)
ALL = "all"


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """How the requests of one class fared.

    ttft_s, tpot_s, e2e_s: seconds by quantile ("p50", "p90", "p99"; nearest rank), empty where no
        request has the measure. e2e is over completed requests.
    attainment: share of requests that met their SLO, of all that their client did not cancel
    goodput:    requests per second of the run that met their SLO
    output_tokens_s: output tokens per second of the run
    preemptions: how often running requests gave way
    recompute_share: of all tokens that were computed, the share that was computed a second time
    cache_hit:  of all prompt tokens of admitted requests, the share that the prefix cache spared

    The last three are None where no record knows them, as where a client measured.
    """

    requests: int
    completed: int
    cancelled: int
    attainment: float | None
    goodput: float
    output_tokens_s: float
    ttft_s: dict[str, float]
    tpot_s: dict[str, float]
    e2e_s: dict[str, float]
    preemptions: int | None
    recompute_share: float | None
    cache_hit: float | None


def summarise(records: Sequence[Record]) -> dict[str, ClassSummary]:
    """A summary per class, by name, and one of all of them under "all"; empty for no records.

    The run lasts from the first arrival to the last finish.
    """
    return summarise_columns(Columns(records_table(records)))


def summarise_columns(records: Columns) -> dict[str, ClassSummary]:
    """`summarise` for records that are columns already."""
    if not len(records):
        return {}
    span = records.span_s
    of_classes = {name: _summary(rows, span) for name, rows in records.groups("slo_class")}
    return of_classes | {ALL: _summary(records, span)}


def _summary(rows: Columns, span: float) -> ClassSummary:
    cancelled = int(rows.cancelled.sum())
    counted = len(rows) - cancelled
    met = int(rows.numbers("slo_met").sum())
    preemptions = rows.known("preemptions")
    return ClassSummary(
        requests=len(rows),
        completed=int(rows.completed.sum()),
        cancelled=cancelled,
        attainment=met / counted if counted else None,
        goodput=met / span if span else 0.0,
        output_tokens_s=float(rows.numbers("output_tokens").sum()) / span if span else 0.0,
        ttft_s=quantiles(rows.known("ttft_s")),
        tpot_s=quantiles(rows.known("tpot_s")),
        e2e_s=quantiles(rows.numbers("e2e_s")[rows.completed]),
        preemptions=int(preemptions.sum()) if preemptions.size else None,
        recompute_share=_recompute_share(rows),
        cache_hit=_cache_hit(rows),
    )


def quantiles(values: Floats) -> dict[str, float]:
    """The p50, p90 and p99 of values, by nearest rank; empty of nothing."""
    if not values.size:
        return {}
    cuts = np.percentile(values, QUANTILES, method="inverted_cdf")
    return {f"p{q}": float(cut) for q, cut in zip(QUANTILES, cuts, strict=True)}


def _recompute_share(rows: Columns) -> float | None:
    """Tokens computed a second time, of those computed at all: prompts without what was cached, outputs, and these."""
    again = rows.numbers("recomputed_tokens")
    known = ~np.isnan(again) & ~np.isnan(rows.numbers("admitted_s"))
    if not known.any():
        return None
    once = rows.numbers("prompt_tokens") - rows.numbers("cached_tokens") + rows.numbers("output_tokens")
    total = float((once + again)[known].sum())
    return float(again[known].sum()) / total if total else 0.0


def _cache_hit(rows: Columns) -> float | None:
    """Prompt tokens that were cached, of those of everybody who got a first token or a seat."""
    began = ~np.isnan(rows.numbers("admitted_s")) | ~np.isnan(rows.numbers("first_token_s"))
    prompts = float(rows.numbers("prompt_tokens")[began].sum())
    return float(rows.numbers("cached_tokens")[began].sum()) / prompts if prompts else None
