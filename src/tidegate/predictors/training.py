"""Grows the trees of a learned predictor from records, and measures them on the newest requests, which they never saw.

Needs scikit-learn (`tidegate[predict]`); what it makes does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from tidegate.core.predict import HistoryPredictor, Predictor
from tidegate.core.request import FinishReason, Request
from tidegate.errors import InputError, MissingExtra
from tidegate.observe.records import Record
from tidegate.predictors.learned import (
    MAX_DEPTH,
    MAX_NAMES,
    MAX_QUANTILES,
    MAX_TREES,
    Ensemble,
    LearnedModel,
    LearnedPredictor,
    Names,
    Tree,
)

if TYPE_CHECKING:
    from sklearn.ensemble import GradientBoostingRegressor

MIN_REQUESTS = 200
MAX_REQUESTS = 200_000
HELD_OUT = 0.2
DEFAULT_QUANTILES = (0.5, 0.9)

LEARNING_RATE = 0.2
BEYOND_QUANTILE = 5
"""Lengths of a leaf that must lie beyond its quantile for it to mean anything."""

PRIOR = 20
"""Requests of no name in particular that are mixed into each name's mean, so that a rare one tells little."""

EXACT = 2**24
"""The trees are grown on 32-bit floats, which hold whole numbers up to this one exactly."""

ENDED_BY_THEMSELVES = frozenset({FinishReason.STOP.value, FinishReason.LENGTH.value})


@dataclass(frozen=True, slots=True)
class Example:
    """A request that ended by itself, and its outputs. `run` counts the files, each of which has its own clock."""

    run: int
    arrival: float
    finish: float
    request: Request
    outputs: int


@dataclass(frozen=True, slots=True)
class Score:
    """How one predictor did at one quantile on the requests held out.

    pinball:  mean loss in tokens: `quantile` for each token by which an output exceeded the prediction,
              `1 - quantile` for each by which it fell short
    median_absolute_error: tokens
    coverage: share of outputs that did not exceed the prediction; the quantile itself would be right
    """

    predictor: str
    quantile: float
    pinball: float
    median_absolute_error: float
    coverage: float


@dataclass(frozen=True, slots=True)
class Training:
    """A model, and how it did. `left_out` requests did not end by themselves, or were too many."""

    model: LearnedModel
    trained: int
    held_out: int
    left_out: int
    declared: int
    scores: list[Score]


def train(
    runs: Sequence[tuple[str, Sequence[Record]]], quantiles: Iterable[float], declared: int | None = None
) -> Training:
    """Learn from (name, records) of runs that followed each other in this order.

    The older requests are learned from, the newest `HELD_OUT` of them are measured on, beside a history that
    learns as it goes and `declared` tokens for everybody, by default the most that the older ones needed.
    Raises InputError for records that are too few or are not what they should be, MissingExtra without
    scikit-learn.
    """
    wanted = _checked_quantiles(quantiles)
    examples = [e for run, (name, records) in enumerate(runs) for e in _examples(run, name, records)]
    if len(examples) < MIN_REQUESTS:
        raise InputError(
            f"{len(examples)} of the recorded requests ended by themselves; training needs at least {MIN_REQUESTS}"
        )
    examples = sorted(examples, key=lambda e: (e.run, e.arrival))[-MAX_REQUESTS:]
    cut = len(examples) - ceil(len(examples) * HELD_OUT)
    old, new = examples[:cut], examples[cut:]
    model = _learn(old, wanted)
    limit = declared if declared is not None else max(e.outputs for e in old)
    predictions = {
        "learned": _learned(model, new, wanted),
        "history": _history(examples, cut, wanted),
        "declared": {q: [float(limit)] * len(new) for q in wanted},
    }
    outputs = np.array([e.outputs for e in new], dtype=float)
    return Training(
        model,
        trained=len(old),
        held_out=len(new),
        left_out=sum(len(records) for _, records in runs) - len(examples),
        declared=limit,
        scores=[_score(name, q, outputs, by[q]) for name, by in predictions.items() for q in wanted],
    )


def _checked_quantiles(quantiles: Iterable[float]) -> list[float]:
    wanted = sorted(set(quantiles))
    if not 1 <= len(wanted) <= MAX_QUANTILES or not all(0.01 <= q <= 0.99 for q in wanted):
        told = ", ".join(f"{q:g}" for q in wanted)
        raise InputError(f"from 1 to {MAX_QUANTILES} quantiles from 0.01 to 0.99 can be learned, not {told}")
    return wanted


def _examples(run: int, name: str, records: Sequence[Record]) -> Iterable[Example]:
    """Those of one file that tell a length; what its columns hold is checked, for JSON does not."""
    for row in records:
        if row.finish_reason not in ENDED_BY_THEMSELVES:
            continue
        for column in ("prompt_tokens", "output_tokens", "priority"):
            value = getattr(row, column)
            if type(value) is not int or not (-EXACT if column == "priority" else 1) <= value <= EXACT:
                raise InputError(f"{name}: request {row.request_id}: {column} cannot be {value!r}")
        for column in ("arrival_s", "finish_s"):
            value = getattr(row, column)
            if type(value) not in (int, float) or not isfinite(value):
                raise InputError(f"{name}: request {row.request_id}: {column} cannot be {value!r}")
        request = Request(
            str(row.request_id),
            prompt_tokens=row.prompt_tokens,
            tenant=str(row.tenant),
            slo_class=str(row.slo_class),
            priority=row.priority,
        )
        yield Example(run, row.arrival_s, row.finish_s, request, row.output_tokens)


def _learn(examples: Sequence[Example], quantiles: Sequence[float]) -> LearnedModel:
    logs = np.log([e.outputs for e in examples])
    tenants = _names([e.request.tenant for e in examples], logs)
    classes = _names([e.request.slo_class for e in examples], logs)
    shown = features_of([e.request for e in examples], tenants, classes)
    ensembles = [export(grow(shown, logs, q), q) for q in quantiles]
    return LearnedModel("tidegate-predictor-1", tenants, classes, ensembles)


def _names(names: Sequence[str], logs: np.ndarray[Any, Any]) -> Names:
    """The most frequent names as the mean log length of their requests, `PRIOR` average ones mixed in.

    Numbers in the order of what they predict let a tree split names as it splits sizes (Breiman et al. 1984),
    and the average is a sensible number for a name it never met.
    """
    lengths: dict[str, list[float]] = {}
    for name, length in zip(names, logs.tolist(), strict=True):
        lengths.setdefault(name, []).append(length)
    mean = float(logs.mean())
    frequent = sorted(lengths, key=lambda name: (-len(lengths[name]), name))[:MAX_NAMES]
    known = {n: _single((sum(lengths[n]) + PRIOR * mean) / (len(lengths[n]) + PRIOR)) for n in frequent}
    return Names(known=known, other=_single(mean))


def _single(value: float) -> float:
    return float(np.float32(value))


def features_of(requests: Sequence[Request], tenants: Names, classes: Names) -> np.ndarray[Any, Any]:
    """What requests show, a row each, in the order of `learned.FEATURES`."""
    return np.array(
        [
            (
                r.prompt_tokens,
                r.priority,
                tenants.known.get(r.tenant, tenants.other),
                classes.known.get(r.slo_class, classes.other),
            )
            for r in requests
        ],
        dtype=np.float32,
    )


def grow(shown: np.ndarray[Any, Any], logs: np.ndarray[Any, Any], quantile: float) -> GradientBoostingRegressor:
    """Gradient-boosted trees for one quantile of the log length. The same data grow the same trees."""
    try:
        from sklearn.ensemble import GradientBoostingRegressor
    except ImportError as e:
        raise MissingExtra("training a predictor needs scikit-learn: pip install 'tidegate[predict]'") from e
    model = GradientBoostingRegressor(
        loss="quantile",
        alpha=quantile,
        n_estimators=MAX_TREES,
        max_depth=MAX_DEPTH,
        learning_rate=LEARNING_RATE,
        min_samples_leaf=max(10, ceil(BEYOND_QUANTILE / min(quantile, 1 - quantile))),
        random_state=0,
    )
    return model.fit(shown, logs)


def export(model: GradientBoostingRegressor, quantile: float) -> Ensemble:
    """The same trees as plain numbers, the learning rate multiplied in."""
    base = float(model.init_.predict(np.zeros((1, model.n_features_in_), dtype=np.float32))[0])
    trees = [_tree(grown.tree_, model.learning_rate) for grown in model.estimators_[:, 0]]
    return Ensemble(quantile=quantile, base=base, trees=trees)


def _tree(grown: Any, rate: float) -> Tree:
    leaf = grown.children_left < 0
    return Tree(
        feature=np.where(leaf, -1, grown.feature).tolist(),
        threshold=np.where(leaf, 0.0, grown.threshold).tolist(),
        left=np.where(leaf, 0, grown.children_left).tolist(),
        right=np.where(leaf, 0, grown.children_right).tolist(),
        value=np.where(leaf, rate * grown.value[:, 0, 0], 0.0).tolist(),
    )


def _learned(
    model: LearnedModel, examples: Sequence[Example], quantiles: Sequence[float]
) -> Mapping[float, list[float]]:
    predictor: Predictor = LearnedPredictor(model, quantiles[0])
    return {q: [predictor.output_quantile(e.request, q) for e in examples] for q in quantiles}


def _history(examples: Sequence[Example], cut: int, quantiles: Sequence[float]) -> Mapping[float, list[float]]:
    """What a history would have said of the examples from `cut` on: at each arrival it knows what had ended."""
    predictor = HistoryPredictor()
    predictions: dict[float, dict[int, float]] = {q: {} for q in quantiles}
    ends = [(e.run, max(e.arrival, e.finish), 0, index) for index, e in enumerate(examples)]
    arrivals = [(e.run, e.arrival, 1, index) for index, e in enumerate(examples)]
    for _, _, arrives, index in sorted(ends + arrivals):
        e = examples[index]
        if not arrives:
            predictor.observe(e.request, e.outputs)
        elif index >= cut:
            for q in quantiles:
                predictions[q][index] = predictor.output_quantile(e.request, q)
    return {q: [by[index] for index in range(cut, len(examples))] for q, by in predictions.items()}


def _score(name: str, quantile: float, outputs: np.ndarray[Any, Any], predicted: Sequence[float]) -> Score:
    over = outputs - np.array(predicted)
    return Score(
        predictor=name,
        quantile=quantile,
        pinball=float(np.maximum(quantile * over, (quantile - 1) * over).mean()),
        median_absolute_error=float(np.median(np.abs(over))),
        coverage=float((over <= 0).mean()),
    )
