"""Records in short: how each class fared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tidegate.core.request import FinishReason
from tidegate.observe.records import COMPLETED, Record

QUANTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """How the requests of one class fared.

    ttft_s, tpot_s, e2e_s: seconds by quantile ("p50", "p90", "p99"; nearest rank), empty where no
        request has the measure. e2e is over completed requests.
    attainment: share of requests that met their SLO, of all that their client did not cancel
    goodput:    requests per second of the run that met their SLO
    output_tokens_s: output tokens per second of the run
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


def summarise(records: Sequence[Record]) -> dict[str, ClassSummary]:
    """A summary per class, by name, and one of all of them under "all"; empty for no records.

    The run lasts from the first arrival to the last finish.
    """
    if not records:
        return {}
    span = max(r.finish_s for r in records) - min(r.arrival_s for r in records)
    names = sorted({r.slo_class for r in records})
    groups = {name: [r for r in records if r.slo_class == name] for name in names}
    return {name: _summary(rows, span) for name, rows in (groups | {"all": list(records)}).items()}


def _summary(rows: Sequence[Record], span: float) -> ClassSummary:
    cancelled = sum(r.finish_reason == FinishReason.CANCELLED.value for r in rows)
    counted = len(rows) - cancelled
    met = sum(r.slo_met for r in rows)
    return ClassSummary(
        requests=len(rows),
        completed=sum(r.finish_reason in COMPLETED for r in rows),
        cancelled=cancelled,
        attainment=met / counted if counted else None,
        goodput=met / span if span else 0.0,
        output_tokens_s=sum(r.output_tokens for r in rows) / span if span else 0.0,
        ttft_s=_quantiles([r.ttft_s for r in rows]),
        tpot_s=_quantiles([r.tpot_s for r in rows]),
        e2e_s=_quantiles([r.e2e_s for r in rows if r.finish_reason in COMPLETED]),
    )


def _quantiles(values: Sequence[float | None]) -> dict[str, float]:
    known = [v for v in values if v is not None]
    if not known:
        return {}
    cuts = np.percentile(known, QUANTILES, method="inverted_cdf")
    return {f"p{q}": float(cut) for q, cut in zip(QUANTILES, cuts, strict=True)}
