"""The shape of what `bench/validation/*.py --json` print, on a handful of requests."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from bench.validation import mooncake, own_engine, sarathi, silicon, vtc
from tidegate.observe.records import Record, write_records
from tidegate.observe.steplog import StepRow, write_steps
from tidegate.simulate.traces import load_workload


def test_vtc_has_the_documented_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vtc, "fit_pace", lambda workload, target_s: 1.0)
    document = json.loads(json.dumps(vtc.measure(40)))
    assert list(document) == ["fit", "real", "overload", "checks"]
    assert list(document["fit"]) == ["pace", "on", "measured_s"]
    assert [row["policy"] for row in document["real"]] == ["FCFS", "LCF", "VTC"]
    assert list(document["real"][0]) == [
        *("policy", "mean_ttft_s", "measured_mean_ttft_s", "light_p50_s", "measured_light_p50_s"),
        *("heavy_p50_s", "measured_heavy_p50_s"),
        *("requests_s", "tpot_p50_s", "measured_requests_s", "measured_tpot_p50_s"),
    ]
    assert [row["policy"] for row in document["overload"]] == ["FCFS", "VTC"]
    assert list(document["overload"][0]) == [
        *("policy", "largest_gap", "measured_gap", "requests_s", "tpot_p50_s"),
    ]
    assert all(isinstance(passed, bool) for passed in document["checks"].values())


def test_the_pace_is_found_and_tenants_are_told_apart() -> None:
    few = load_workload("vtc-real").limited(60)
    target = vtc.mean_ttft(vtc.run(few, "FCFS", 2.0))
    assert vtc.fit_pace(few, target) == pytest.approx(2.0, rel=0.02)
    light, heavy = vtc.tenants_by_load(load_workload("vtc-real"))
    assert (len(light), len(heavy), len(light & heavy)) == (13, 2, 0)


def test_service_is_spread_evenly_from_the_first_token_to_the_end() -> None:
    records: list[Record] = vtc.run(load_workload("vtc-overload").limited(1), "FCFS", 1.0)
    r, tenant = records[0], records[0].tenant
    assert r.first_token_s is not None
    middle = (r.first_token_s + r.finish_s) / 2
    whole = r.prompt_tokens + 2 * r.output_tokens
    served = [vtc.service(records, tenant, t) for t in (r.first_token_s, middle, r.finish_s + 1)]
    assert served == pytest.approx([0, whole / 2, whole])


def test_mooncake_has_the_documented_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "INSTANCES", 2)
    document = json.loads(json.dumps(mooncake.measure([2.0], 30)))
    assert list(document) == ["instances", "hardware", "tp", "model", "ideal_hit_rate", "rows", "checks"]
    assert [row["route"] for row in document["rows"]] == ["random", "least-loaded", "prefix", "joint"]
    assert list(document["rows"][0]) == [
        *("scale", "route", "mean_ttft_s", "p50_ttft_s", "hit_rate", "refused", "published_s"),
        *("to_least_loaded", "published_to_least_loaded"),
    ]
    assert [row["published_to_least_loaded"] for row in document["rows"]] == [3.73, 1.0, 0.68, 0.68]
    assert all(row["refused"] == 0 for row in document["rows"])


def test_sarathi_has_the_documented_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sarathi, "RATES", 8)
    document = json.loads(json.dumps(sarathi.measure(12, [256, 512])))
    assert list(document) == ["requests", "promises_s", "shape_rate_s", "published_gain", "rows", "checks"]
    assert [row["engine"] for row in document["rows"]] == ["prefill first", "chunked, 256", "chunked, 512"]
    assert list(document["rows"][0]) == [
        *("engine", "budget", "strict_rate_s", "strict_gain", "relaxed_rate_s", "relaxed_gain"),
        *("p99_tbt_s", "median_wait_s"),
    ]
    assert all(isinstance(passed, bool) for passed in document["checks"].values())


def test_silicon_has_the_documented_fields() -> None:
    document = json.loads(json.dumps(silicon.measure(120)))
    assert list(document) == ["rounds", "spread", "counts", "groups", "rows"]
    assert list(document["counts"].values()) == [5221, 1884, 783, 351, 351]
    assert len(document["rows"]) == 3 * 2  # measurements and cost models
    assert list(document["rows"][0]) == [
        *("engine", "model", "hardware", "tp", "clients", "prompt_tokens", "output_tokens", "ttft_s", "tpot_s"),
        *("cost_model", "simulated_ttft_s", "simulated_tpot_s"),
    ]
    assert list(document["groups"][0]) == [
        *("engine", "model", "tp", "cost_model", "rows", "ttft_median", "ttft_p90", "ttft_ratio"),
        *("tpot_median", "tpot_p90", "tpot_ratio", "e2e_median", "e2e_p90", "e2e_ratio"),
    ]
    total = [(g["cost_model"], g["rows"]) for g in document["groups"] if g["tp"] == "all"]
    assert total == [(cost, 3) for cost in silicon.COST_MODELS]


def test_silicon_counts_errors_on_either_side() -> None:
    measured = {"ttft_s": 1.0, "tpot_s": 0.1, "output_tokens": 11}
    simulated = [(1.2, 0.05), (0.6, 0.15), (1.0, 0.1)]
    found = silicon.errors([measured | {"simulated_ttft_s": a, "simulated_tpot_s": b} for a, b in simulated])
    assert (found["rows"], found["ttft_median"], found["ttft_p90"], found["ttft_ratio"]) == (3, 0.2, 0.36, 1.0)
    assert (found["tpot_median"], found["tpot_ratio"]) == (0.5, 1.0)
    assert (found["e2e_median"], found["e2e_ratio"]) == (0.05, 1.0)  # 1.7, 2.1 and 2.0 s, measured 2.0


def test_clients_of_silicon_begin_together_or_spread_over_one_request() -> None:
    m = silicon.Measurement("vllm", "llama-3.1-8b", "h100", 1, 4, 512, 64, 0.1, 0.01)
    cost = silicon.cost_of("formula", m.hardware, m.model, m.tp, m.engine)
    together, spread = (silicon.clients(m, cost, spread) for spread in (False, True))
    assert len(together) == len(spread) == m.clients * silicon.ROUNDS
    assert set(together.think_s) == {0.0}
    gaps = [b - a for a, b in pairwise(spread.think_s[:4])]
    assert gaps == pytest.approx([gaps[0]] * 3)
    assert 4 * gaps[0] > cost.prefill_seconds(512) + 64 * cost.step_seconds(decodes=4, context=4 * 512)


FRONT_S = 0.005
SLOWER = {1: (1.0, 1.0), 2: (1.06, 1.0)}
"""By how much the steps of each round's runs are longer, and those of its calibration run."""


@pytest.fixture
def made_up_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs of short loads as a real server and its client would have left them, by the cost model itself."""
    short = {
        name: replace(load, parts=tuple(re.sub(r"count=(\d+)0,", r"count=\1,", part) for part in load.parts))
        for name, load in own_engine.LOADS.items()
    }
    monkeypatch.setattr(own_engine, "LOADS", short)
    for name, load in short.items():
        for number in SLOWER:
            folder = own_engine.folder(tmp_path, name, number)
            folder.mkdir()
            hardware = own_engine.slower(own_engine.CORE, SLOWER[number][name == own_engine.CALIBRATION])
            rows: list[StepRow] = []
            records = own_engine.predict(load, hardware, rows.append)
            write_records(records, folder / "engine.jsonl")
            write_records((r._replace(ttft_s=r.ttft_s + FRONT_S) for r in records), folder / "client.parquet")
            write_steps(rows, folder / "steps.jsonl")
            (folder / "replay.json").write_text("{}")
    return tmp_path


def test_own_engine_has_the_documented_fields_and_finds_what_made_the_runs(made_up_runs: Path) -> None:
    document = json.loads(json.dumps(own_engine.compare(made_up_runs)))
    assert list(document) == ["loads", "calibrations", "rows", "checks"]
    assert [found["round"] for found in document["calibrations"]] == [1, 2]
    assert list(document["calibrations"][0]) == [
        *("round", "steps", "t0", "e1", "e2", "e3", "e4", "p"),
        *(f"{kind}_{what}" for kind in ("decode", "mixed", "prefill", "all") for what in ("median", "bias")),
        "front_ms",
    ]
    assert [found["front_ms"] for found in document["calibrations"]] == pytest.approx([1e3 * FRONT_S] * 2)
    rows = document["rows"]
    assert list(rows[0]) == [
        *("load", "class", "metric", "predicted_ms", "measured_ms", "error", "least_error", "most_error"),
        *("error_at_pace", "spread", "tolerance", "within"),
    ]
    assert {(row["load"], row["class"]) for row in rows} == {
        *((load, "all") for load in own_engine.LOADS),
        *(("queue", name) for name in ("batch", "interactive")),
    }
    assert list(document["checks"]) == [
        f"{load}_within_{what}"
        for load in ("short", "long", "queue")
        for what in ("tolerance", "5_percent", "tolerance_at_pace")
    ]
    for row in rows:
        assert abs(row["error_at_pace"]) < 0.03
        if row["load"] != own_engine.CALIBRATION and (row["class"], row["metric"]) == ("all", "tpot_p50"):
            assert row["least_error"] < -0.04  # the machine was slower in the second round


def test_own_engine_tolerates_what_two_runs_differ_by_up_to_a_fifth() -> None:
    key = ("all", "ttft_p99")
    for real, tolerance in (((1.0, 1.01), 0.1), ((1.0, 1.15), 0.1395), ((1.0, 1.6), 0.2)):
        (row,) = own_engine.rows_of("load", [own_engine.Round({key: 2.0}, {key: 1.0}, {key: value}) for value in real])
        assert row["tolerance"] == tolerance
        assert not row["within"]


def test_own_engine_measures_what_is_missing_load_after_load(tmp_path: Path) -> None:
    assert own_engine.missing(tmp_path, 2) == [(load, number) for number in (1, 2) for load in own_engine.LOADS]
    done = own_engine.folder(tmp_path, "short", 1)
    done.mkdir()
    assert ("short", 1) in own_engine.missing(tmp_path, 2)  # broken off
    (done / "replay.json").touch()
    assert ("short", 1) not in own_engine.missing(tmp_path, 2)
    with pytest.raises(SystemExit, match="0 rounds of runs; it takes two"):
        own_engine.compare(tmp_path)
