"""The requests that fared worst, for whoever wants to know which."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tidegate.observe.columns import Columns
from tidegate.observe.comparison.section import Comparison, Section
from tidegate.observe.comparison.words import NAME_LENGTH, plural, rounded, short

EACH = 20
"""Requests of a run that are taken by each measure; all four together are told of a class and run."""

MAX_ROWS = 600

MEASURES = ("ttft_s", "tpot_s", "e2e_s", "max_gap_s")
TEXTS = ("request_id", "tenant", "finish_reason")
SECONDS = ("ttft_s", "tpot_s", "max_gap_s", "e2e_s")
SIZES = (
    "prompt_tokens", "output_tokens", "cached_tokens", "preemptions", "recomputed_tokens", "arrival_s", "priority",
)  # fmt: skip

BODY = """
<form class="filters">
<label>Run <select id="worst-run"><option value="">all</option></select></label>
<label>Class <select id="worst-class"><option value="">all</option></select></label>
<label>Search <input id="worst-text" type="search" placeholder="id, tenant, end"></label>
<label><input id="worst-missed" type="checkbox"> only broken promises</label>
<output id="worst-count"></output>
</form>
<div class="scroll tall" role="region" tabindex="0" aria-label="Worst requests"><table id="worst-table"></table></div>
"""


def worst(comparison: Comparison) -> tuple[Section, list[list[Any]]]:
    """The section, and the rows of its table in the order of `columns` of assets/report.js."""
    parts = [(name, pair) for name in comparison.classes for pair in comparison.of_class(name)]
    each = max(2, min(EACH, MAX_ROWS // (len(MEASURES) * max(1, len(parts)))))
    rows: list[list[Any]] = []
    for name, (run, columns) in parts:
        rows += _rows(run.name, short(name), columns, _chosen(columns, each), run.origin)
    told = (
        f"{plural(len(rows), 'request')} that waited longest, decoded slowest or stalled most in their run and class."
    )
    return Section("worst", "The worst requests", told, BODY), rows


def _chosen(columns: Columns, each: int) -> npt.NDArray[np.int64]:
    """Rows that are among the `each` largest of some measure."""
    found: set[int] = set()
    for measure in MEASURES:
        values = np.nan_to_num(columns.numbers(measure), nan=-1.0)
        top = np.argpartition(-values, min(each, values.size - 1))[:each]
        found.update(int(i) for i in top if values[i] >= 0)
    return np.array(sorted(found), dtype=np.int64)


def _rows(run: str, name: str, columns: Columns, chosen: npt.NDArray[np.int64], origin: float) -> list[list[Any]]:
    texts = {text: [v[:NAME_LENGTH] for v in columns.texts(text, chosen.tolist())] for text in TEXTS}
    numbers = {number: columns.numbers(number)[chosen] for number in SECONDS + SIZES}
    numbers["arrival_s"] = numbers["arrival_s"] - origin
    told = {number: rounded(values, 5) for number, values in numbers.items()}
    met = columns.numbers("slo_met")[chosen]
    return [
        [
            run, name, texts["request_id"][i], texts["tenant"][i], *(told[number][i] for number in SECONDS),
            bool(met[i]), texts["finish_reason"][i], *(told[number][i] for number in SIZES),
        ]
        for i in range(len(chosen))
    ]  # fmt: skip
