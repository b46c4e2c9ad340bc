"""A learned predictor: what it learns, that its file is what scikit-learn grew, and that odd files are refused."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.predictors.recorded import TYPICAL, record, records
from tidegate.config import PredictorConfig
from tidegate.core.predict import HistoryPredictor, NoisyPredictor, OraclePredictor
from tidegate.core.request import Request
from tidegate.errors import ConfigError, InputError, MissingExtra
from tidegate.predictors import learned, training
from tidegate.predictors.choice import build_predictor
from tidegate.predictors.learned import LearnedModel, LearnedPredictor, Names, load_model, log_tokens, save_model
from tidegate.predictors.training import train


@pytest.fixture(scope="module")
def trained() -> training.Training:
    return train([("run", records(1500))], (0.5, 0.9))


def asked(tenant: str, prompt: int = 400, **other: Any) -> Request:
    return Request("a", prompt_tokens=prompt, tenant=tenant, **other)


def test_it_learns_whose_answers_are_long(trained: training.Training) -> None:
    predictor = LearnedPredictor(trained.model, 0.5)
    for tenant, typical in TYPICAL.items():
        assert predictor.output_tokens(asked(tenant)) == pytest.approx(typical, rel=0.3)
        assert predictor.output_quantile(asked(tenant), 0.9) == pytest.approx(typical * 1.47, rel=0.35)
    assert TYPICAL["tags"] < predictor.output_tokens(asked("a stranger")) < TYPICAL["report"]
    assert predictor.output_tokens(asked("report", max_tokens=20)) == 20
    predictor.observe(asked("report"), 1)
    assert predictor.output_tokens(asked("report")) > 500


def test_on_requests_held_out_it_beats_what_was_declared(trained: training.Training) -> None:
    assert (trained.trained, trained.held_out, trained.left_out) == (1200, 300, 0)
    scores = {(s.predictor, s.quantile): s for s in trained.scores}
    assert len(scores) == 6
    for quantile in (0.5, 0.9):
        own, declared = scores["learned", quantile], scores["declared", quantile]
        assert own.pinball < declared.pinball / 5
        assert own.median_absolute_error < declared.median_absolute_error / 5
        assert own.coverage == pytest.approx(quantile, abs=0.08)
        assert scores["history", quantile].pinball < declared.pinball / 5, "the history sees tenants as well"
    assert scores["declared", 0.5].coverage > 0.95
    assert trained.declared == max(r.output_tokens for r in records(1500)[:1200])


def test_the_split_is_by_time_file_after_file() -> None:
    """The last file's clock starts anew, and its requests are still the newest."""
    old = [r._replace(arrival_s=r.arrival_s + 1e6, finish_s=r.finish_s + 1e6) for r in records(800)]
    new = [r._replace(tenant="tags", output_tokens=9_000) for r in records(200, seed=1)]
    random.Random(0).shuffle(old)
    done = train([("old", old), ("new", new)], (0.5,), declared=4_000)
    assert (done.trained, done.held_out, done.declared) == (800, 200, 4_000)
    scores = {s.predictor: s for s in done.scores}
    assert scores["learned"].coverage == scores["declared"].coverage == 0.0
    assert scores["declared"].median_absolute_error == 5_000
    assert scores["history"].coverage > 0.1, "it has seen the first of them end"


def test_the_history_knows_at_an_arrival_what_had_ended_by_then() -> None:
    rows = [record(f"r{n}", "mail", float(n), 100, n + 1, finish_s=n + 1.5) for n in range(300)]
    done = train([("run", rows)], (0.9,))
    assert next(s for s in done.scores if s.predictor == "history").median_absolute_error == 8.0
    slow = HistoryPredictor()
    for n in range(299):
        slow.observe(asked("mail", 100), n)
    assert slow.output_quantile(asked("mail"), 0.9) == 292, "of the last 64"


def test_only_requests_that_ended_by_themselves_count() -> None:
    rows = records(400)
    for reason in ("cancelled", "refused", "error", "length_kv"):
        rows += [r._replace(finish_reason=reason, output_tokens=0) for r in records(10)]
    assert train([("run", rows)], (0.5,)).left_out == 40
    with pytest.raises(
        InputError, match="199 of the recorded requests ended by themselves; training needs at least 200"
    ):
        train([("run", records(199))], (0.5,))


@pytest.mark.parametrize(
    "odd",
    [
        {"output_tokens": "many"},
        {"output_tokens": 0},
        {"prompt_tokens": 10**400},
        {"priority": True},
        {"arrival_s": float("nan")},
        {"finish_s": None},
    ],
)
def test_a_record_that_cannot_be_is_named(odd: dict[str, Any]) -> None:
    rows = [*records(300), record("odd", "mail", 1.0, 1, 1, **odd)]
    with pytest.raises(InputError, match=f"run: request odd: {next(iter(odd))} cannot be"):
        train([("run", rows)], (0.5,))


@pytest.mark.parametrize("quantiles", [(), (0.0,), (0.999,), (0.1, 0.2, 0.3, 0.4)])
def test_quantiles_that_cannot_be_learned_are_refused(quantiles: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match=r"from 1 to 3 quantiles from 0\.01 to 0\.99 can be learned"):
        train([("run", records(300))], quantiles)


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    with pytest.raises(MissingExtra, match=r"pip install 'tidegate\[predict\]'"):
        train([("run", records(300))], (0.5,))


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9, 0.99])
def test_the_exported_trees_say_exactly_what_scikit_learn_says(quantile: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    shown = np.column_stack(
        [rng.integers(1, 9_000, 900), rng.integers(-3, 11, 900), rng.normal(5, 2, 900), rng.normal(5, 2, 900)]
    ).astype(np.float32)
    logs = np.sin(shown[:, 0] / 900) + shown[:, 1] * shown[:, 2] / 9 + rng.normal(size=900)
    grown = training.grow(shown, logs, quantile)
    model = LearnedModel("tidegate-predictor-1", Names({}, 0.0), Names({}, 0.0), [training.export(grown, quantile)])
    save_model(model, tmp_path / "p.json")
    assert load_model(tmp_path / "p.json") == model
    (base, trees) = LearnedPredictor(load_model(tmp_path / "p.json"), quantile)._ensembles[0]
    assert trees
    other = rng.normal(0, 4_000, (500, 4)).astype(np.float32)
    for rows in (shown, other):
        assert [log_tokens(base, trees, row) for row in rows.tolist()] == grown.predict(rows).tolist()


def test_what_is_served_is_what_was_measured(trained: training.Training, tmp_path: Path) -> None:
    """The features a request shows while serving are those it showed while learning, to the last bit."""
    m = trained.model
    requests = [Request(r.request_id, prompt_tokens=r.prompt_tokens, tenant=r.tenant) for r in records(50, seed=9)]
    shown = training.features_of(requests, m.tenants, m.slo_classes)
    save_model(m, tmp_path / "p.json")
    predictor = LearnedPredictor(load_model(tmp_path / "p.json"), 0.5)
    base, trees = predictor._ensembles[0]
    for r, row in zip(requests, shown.tolist(), strict=True):
        assert predictor.output_tokens(r) == pytest.approx(np.exp(log_tokens(base, trees, row)), rel=1e-12)


@given(
    tenant=st.sampled_from([*TYPICAL, "stranger"]),
    prompt=st.integers(1, 10**6),
    priority=st.integers(),
    declared=st.none() | st.integers(1, 500),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
)
def test_quantiles_grow_and_stay_within_what_was_declared(
    trained: training.Training, tenant: str, prompt: int, priority: int, declared: int | None, shares: list[float]
) -> None:
    predictor = LearnedPredictor(trained.model, 0.9)
    r = asked(tenant, prompt, priority=priority, max_tokens=declared)
    low, high = (predictor.output_quantile(r, share) for share in shares)
    assert 1 <= low <= high
    assert declared is None or high <= declared
    assert predictor.output_tokens(r) == predictor.output_quantile(r, 0.7) == predictor.output_quantile(r, 1.0)


def test_a_request_is_evaluated_once(trained: training.Training, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for = []
    evaluate = LearnedPredictor._evaluate
    monkeypatch.setattr(LearnedPredictor, "_evaluate", lambda *a: asked_for.append(a) or evaluate(*a))
    predictor = LearnedPredictor(trained.model, 0.5)
    for _ in range(5):
        predictor.output_tokens(asked("mail"))
        predictor.output_quantile(asked("mail"), 0.9)
    assert len(asked_for) == 1
    for prompt in range(1, 3 * learned.REMEMBERED):
        predictor.output_tokens(asked("mail", prompt))
    assert predictor._answers.cache_info().currsize == learned.REMEMBERED


def spoil(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], bytes]:
    def spoiled(document: dict[str, Any]) -> bytes:
        change(document)
        return json.dumps(document).encode()

    return spoiled


def tree_of(document: dict[str, Any]) -> dict[str, Any]:
    return document["ensembles"][0]["trees"][0]


CHAIN = {"feature": [0] * 4 + [-1] * 5, "left": [1, 2, 3, 4, 0, 0, 0, 0, 0], "right": [5, 6, 7, 8, 0, 0, 0, 0, 0],
         "threshold": [0.0] * 9, "value": [0.0] * 9}  # fmt: skip

SPOILED: dict[str, tuple[Callable[[dict[str, Any]], bytes], str]] = {
    "not JSON": (lambda d: b"\x80\x04pickle", "Invalid JSON"),
    "empty": (lambda d: b"", "Invalid JSON"),
    "nested": (lambda d: b"[" * 100_000, "Invalid JSON"),
    "large": (lambda d: b" " * (learned.MAX_BYTES + 1), f"it is larger than {learned.MAX_BYTES} bytes"),
    "other format": (spoil(lambda d: d.update(format="x")), "format must be 'tidegate-predictor-1'"),
    "no format": (spoil(lambda d: d.pop("format")), "format Field required"),
    "more": (spoil(lambda d: d.update(code="x")), "code Unexpected keyword argument"),
    "no ensemble": (spoil(lambda d: d.update(ensembles=[])), "ensembles List should have at least 1 item"),
    "many ensembles": (spoil(lambda d: d.update(ensembles=d["ensembles"] * 2)), "ensembles List should have at most 3"),
    "order": (spoil(lambda d: d["ensembles"].reverse()), "must hold its ensembles by ascending quantile"),
    "quantile": (spoil(lambda d: d["ensembles"][0].update(quantile=1.0)), "ensembles.0.quantile must be less than 1"),
    "base": (spoil(lambda d: d["ensembles"][0].update(base=float("nan"))), "ensembles.0.base must be a finite number"),
    "text": (spoil(lambda d: d["ensembles"][0].update(base="1")), "ensembles.0.base must be a valid number"),
    "trees": (spoil(lambda d: d["ensembles"][0]["trees"].extend([tree_of(d)])), "ensembles.0.trees List should have"),
    "names": (spoil(lambda d: d["tenants"]["known"].update({str(n): 1.0 for n in range(1001)})), "tenants.known Dict"),
    "nodes": (spoil(lambda d: tree_of(d).update(feature=[-1] * 16)), "ensembles.0.trees.0 has 16 nodes; from 1 to 15"),
    "ragged": (spoil(lambda d: tree_of(d).update(value=[0.0])), "ensembles.0.trees.0 has lists of different lengths"),
    "loop": (spoil(lambda d: tree_of(d).update(left=[0] * len(tree_of(d)["left"]))), "has a node 0 whose child is 0"),
    "beyond": (spoil(lambda d: tree_of(d).update(right=[99] * len(tree_of(d)["left"]))), "whose child is 99"),
    "feature": (spoil(lambda d: tree_of(d)["feature"].__setitem__(0, 4)), "trees.0.feature.0 must be less than 4"),
    "deep": (spoil(lambda d: tree_of(d).update(CHAIN)), "ensembles.0.trees.0 is 4 deep; 3 is allowed"),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILED)
def test_an_odd_file_is_refused_in_one_line(what: str, trained: training.Training, tmp_path: Path) -> None:
    path, (make, complaint) = tmp_path / "p.json", SPOILED[what]
    save_model(trained.model, path)
    path.write_bytes(make(json.loads(path.read_bytes())))
    with pytest.raises(InputError) as caught:
        load_model(path)
    assert str(caught.value).startswith(f"{path} is no file of `tidegate predictor train`: ")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_cannot_be(tmp_path: Path, trained: training.Training) -> None:
    with pytest.raises(InputError, match=r"cannot read .*none\.json: No such file"):
        load_model(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot write"):
        save_model(trained.model, tmp_path / "none" / "p.json")


def test_numbers_beyond_sense_still_give_a_length(trained: training.Training) -> None:
    first, second = trained.model.ensembles
    wild = replace(trained.model, ensembles=[replace(first, base=-1e308), replace(second, base=1e308)])
    predictor = LearnedPredictor(wild, 0.5)
    assert predictor.output_tokens(asked("mail")) == 1
    assert predictor.output_quantile(asked("mail"), 0.9) < 1e9


def test_the_configuration_chooses(trained: training.Training, tmp_path: Path) -> None:
    path = str(tmp_path / "p.json")
    save_model(trained.model, Path(path))
    history = build_predictor(PredictorConfig(quantile=0.9))
    assert isinstance(history, HistoryPredictor)
    assert history.quantile == 0.9
    assert isinstance(build_predictor(PredictorConfig(kind="oracle")), OraclePredictor)
    chosen = build_predictor(PredictorConfig(kind="learned", path=path, quantile=0.9))
    assert chosen.output_tokens(asked("mail")) == LearnedPredictor(trained.model, 0.9).output_tokens(asked("mail"))
    noisy = build_predictor(PredictorConfig(kind="learned", path=path, noise=0.5, seed=3))
    assert isinstance(noisy, NoisyPredictor)
    assert (noisy.error, noisy.seed) == (0.5, 3)
    assert isinstance(noisy.inner, LearnedPredictor)
    with pytest.raises(ConfigError, match=r"has not learned quantile 0\.7, but 0\.5, 0\.9"):
        build_predictor(PredictorConfig(kind="learned", path=path, quantile=0.7))
