"""`tidegate calibrate` as a user meets it: simulate, fit the log, simulate on what came out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
SIMULATE = ("simulate", "azure-conv", "--policy", "vllm-v1", "--limit", "80")


def tidegate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidegate", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(SRC)},
    )


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    done = tidegate(*SIMULATE, "--hardware", "a100", "--host-overhead", "1", "--out", folder)
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "vllm-v1.steps.parquet"


def test_a_simulated_log_gives_hardware_that_simulates_the_same(log: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    done = tidegate("calibrate", log, "--model", "llama-3.1-8b", "--out", file, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert list(document) == [
        *("model", "tp", "base", "fitted_steps", "guessed_steps", "constants", "held_out", "hardware"),
    ]
    assert list(document["held_out"]) == ["decode", "mixed", "prefill", "all"]
    assert list(document["held_out"]["all"]) == ["steps", "median", "p90", "bias"]
    assert list(document["constants"]) == ["t0", "e1", "e2", "e3", "e4", "p"]
    assert document["held_out"]["all"]["p90"] < 0.01

    again = tidegate(*SIMULATE, "--hardware", file, "--json")
    assert (again.returncode, again.stderr) == (0, "")
    known = tidegate(*SIMULATE, "--hardware", "a100", "--host-overhead", "1", "--json")
    mine, theirs = json.loads(again.stdout), json.loads(known.stdout)
    assert (mine["hardware"], mine["validated"]) == ("h100-calibrated", True)
    ttft = [d["policies"]["vllm-v1"]["classes"]["all"]["ttft_s"]["p50"] for d in (mine, theirs)]
    assert ttft[0] == pytest.approx(ttft[1], rel=0.01)


def test_the_table_says_what_was_told_and_where_it_went(log: Path, tmp_path: Path) -> None:
    done = tidegate("calibrate", log, "--model", "llama-3.1-8b", "--out", tmp_path / "mine.toml")
    assert all(word in done.stdout for word in ("told by the log", "held out", "median error", "p90", "written to"))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("none.parquet", "--model", "llama-3.1-8b"), "cannot read none.parquet: there is no such file"),
        (("LOG", "--model", "gpt-9"), "no model shape 'gpt-9'"),
        (("LOG", "--model", "llama-3.1-8b", "--hardware-base", "abacus"), "no hardware 'abacus'"),
        (("LOG", "--model", "llama-3.1-8b", "--out", "h.json"), "hardware is written as .toml"),
        (("LOG", "--model", "llama-3.1-8b", "--hold-out", "1"), "the share that is held out must be above 0"),
        (("LOG", "--model", "llama-3.1-8b", "--tp", "3"), "cannot be spread over 3 GPUs"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(log: Path, arguments: tuple[str, ...], complaint: str) -> None:
    done = tidegate("calibrate", *(log if word == "LOG" else word for word in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1
