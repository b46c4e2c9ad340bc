"""`tidegate predictor train`, and how a server and a scenario are told to use what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_cli import tidegate
from tests.predictors.recorded import records
from tidegate.observe.records import write_records
from tidegate.predictors.learned import load_model


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "records.parquet"
    write_records(records(600), path)
    return path


def test_it_trains_tells_how_well_and_writes_a_file(recorded: Path, tmp_path: Path) -> None:
    out, more = tmp_path / "p.json", tmp_path / "more.jsonl"
    write_records(records(100, seed=3), more)
    done = tidegate("predictor", "train", str(recorded), str(more), "--out", str(out), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    scores = told.pop("scores")
    assert told == {
        "out": str(out), "bytes": out.stat().st_size, "trained": 560, "held_out": 140, "left_out": 0,
        "declared": max(r.output_tokens for r in records(600)[:560]),
    }  # fmt: skip
    assert [(s["predictor"], s["quantile"]) for s in scores] == [
        (name, quantile) for name in ("learned", "history", "declared") for quantile in (0.5, 0.9)
    ]
    assert all(set(s) == {"predictor", "quantile", "pinball", "median_absolute_error", "coverage"} for s in scores)
    assert load_model(out).quantiles == (0.5, 0.9)


def test_the_table_and_the_options(recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    done = tidegate(
        "predictor", "train", str(recorded), "--out", str(out), "--quantile", "0.8", "--declared", "4096"
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0].startswith(
        "learned from 480 requests, measured on the 120 after them (0 left out); declared is 4096"
    )
    assert lines[1].split() == ["predictor", "quantile", "pinball", "median_absolute_error", "coverage"]
    assert [line.split()[:2] for line in lines[2:5]] == [[n, "0.8"] for n in ("learned", "history", "declared")]
    assert lines[5] == f"wrote {out} ({out.stat().st_size} bytes)"
    assert load_model(out).quantiles == (0.8,)


def test_too_few_and_other_bad_input(recorded: Path, tmp_path: Path) -> None:
    few, out = tmp_path / "few.jsonl", tmp_path / "p.json"
    write_records(records(20), few)
    for arguments, complaint in (
        ((str(few), "--out", str(out)), "20 of the recorded requests ended by themselves; training needs at least 200"),
        ((str(tmp_path / "none.parquet"), "--out", str(out)), f"cannot read {tmp_path / 'none.parquet'}"),
        (
            (str(recorded), "--out", str(tmp_path / "no" / "p.json")),
            f"cannot write {tmp_path / 'no' / 'p.json'}: there",
        ),
        ((str(recorded), "--out", str(out), "--quantile", "2"), "from 1 to 3 quantiles from 0.01 to 0.99 can be"),
        (
            (str(recorded), "--out", str(out), "--quantile", "0.5", "--quantile", "0.50"),
            "the same --quantile is named twice",
        ),
        ((str(recorded),), "Missing option '--out'"),
    ):
        done = tidegate("predictor", "train", *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"tidegate: {complaint}")
        assert done.stderr.count("\n") == 1
        assert not out.exists()


def test_a_server_has_no_oracle_and_refuses_an_odd_file(tmp_path: Path) -> None:
    config, odd = tmp_path / "tidegate.toml", tmp_path / "p.json"
    odd.write_text("{}", encoding="utf-8")
    for section, complaint in (
        ('kind = "oracle"', 'predictor.kind "oracle" knows lengths only in a simulation; use "history" or "learned"'),
        (f'kind = "learned"\npath = "{odd}"', f"{odd} is no file of `tidegate predictor train`: format Field required"),
    ):
        config.write_text(f"[predictor]\n{section}\n", encoding="utf-8")
        done = tidegate("serve", "--config", str(config))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.strip() == f"tidegate: {complaint}"


SHORT_FIRST = """
id: two
cfg: {kv: 100, budget: 64, max_seqs: 1, policy: sjf}
reqs:
  - {id: first, p: 16, o: 3}
  - {id: long, p: 16, o: 40, t: 1, max_o: 100, tenant: report}
  - {id: short, p: 16, o: 4, t: 1, max_o: 100, tenant: tags}
"""


def order_of_ends(text: str, path: Path, *options: str) -> list[str]:
    path.write_text(text, encoding="utf-8")
    done = tidegate("scenario", str(path), "--json", *options)
    assert done.returncode == 0, done.stderr
    ends = {name: fate["finish_step"] for name, fate in json.loads(done.stdout)["requests"].items()}
    return sorted(ends, key=lambda name: ends[name])


def test_a_scenario_takes_any_predictor(recorded: Path, tmp_path: Path) -> None:
    out, path = tmp_path / "p.json", tmp_path / "s.yaml"
    assert tidegate("predictor", "train", str(recorded), "--out", str(out)).returncode == 0
    assert order_of_ends(SHORT_FIRST, path) == ["first", "long", "short"], "without history both are as declared"
    assert order_of_ends(SHORT_FIRST, path, "--set", "cfg.predictor=oracle") == ["first", "short", "long"]
    learned = f"cfg.predictor={{kind: learned, path: {out}}}"
    assert order_of_ends(SHORT_FIRST, path, "--set", learned) == ["first", "short", "long"]


def test_errors_made_on_purpose_change_what_a_scenario_does(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    truth = order_of_ends(SHORT_FIRST, path, "--set", "cfg.predictor=oracle")
    orders = [
        order_of_ends(SHORT_FIRST, path, "--set", f"cfg.predictor={{kind: oracle, noise: 3.0, seed: {seed}}}")
        for seed in range(6)
    ]
    assert truth in orders
    assert any(order != truth for order in orders)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("orcle", "two: cfg: predictor.kind must be 'history', 'oracle' or 'learned', not 'orcle'"),
        ("{kind: oracle, nois: 1.0}", "two: cfg: unknown option predictor.nois; did you mean noise?"),
        ("3", "two: cfg: predictor must be a table, not 3"),
    ],
)
def test_a_scenario_that_asks_for_an_odd_predictor(value: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SHORT_FIRST, encoding="utf-8")
    done = tidegate("scenario", str(path), "--set", f"cfg.predictor={value}")
    assert (done.returncode, done.stderr.strip()) == (2, f"tidegate: {complaint}")
