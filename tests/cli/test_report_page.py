"""docs/report.md as written: its commands run, its Python runs, and its bounds are those of the code."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.observe.runs import as_a_client_sees, made_up, write_run
from tidegate.observe.comparison import fairness, latency, preemptions, section, timeline, worst
from tidegate.observe.records import write_records
from tidegate.observe.report import MAX_RUNS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if not kind for line in text.splitlines()]
CODE = [text for kind, text in BLOCKS if kind == "python"]
ENVIRONMENT = {"PYTHONPATH": str(ROOT / "src")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files that the page speaks of."""
    for name, slow in (("vllm-v1", 3.0), ("joint", 1.0)):
        write_run(tmp_path, name, made_up(60, slow))
    (tmp_path / "results").mkdir()
    write_run(tmp_path / "results", "joint", made_up(60))
    write_records(as_a_client_sees(made_up(60)), tmp_path / "replay.jsonl")
    scenario = next((ROOT / "tests" / "scenarios" / "data").glob("S01-*.yaml"))
    (tmp_path / "scenario.yaml").write_text(scenario.read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs(folder: Path, command: str) -> None:
    words = shlex.split(command)[1:]
    done = subprocess.run(
        [sys.executable, "-m", "tidegate", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    assert (done.returncode, done.stderr) == (0, "")
    if "--out" in words:
        assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    if "--json" in words:
        assert list(json.loads(done.stdout)["runs"]) == ["before", "after"]
    if "--trace" in words:
        assert json.loads((folder / "trace.json").read_text(encoding="utf-8"))


def test_the_python_of_the_page_runs(folder: Path) -> None:
    (code,) = CODE
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, env=ENVIRONMENT)
    assert (folder / "report.html").exists()


def test_the_page_tells_the_bounds_of_the_code() -> None:
    assert len(COMMANDS) == 5
    for told in (
        f"At most {MAX_RUNS} runs",
        f"read at {latency.POINTS} latencies",
        f"{timeline.SPANS} equal spans",
        f"the {section.MAX_CLASSES} largest classes and {fairness.MAX_TENANTS} largest tenants",
        f"{worst.EACH} each, fewer where that would be over {worst.MAX_ROWS} in all",
        f"the {preemptions.MAX_REASONS} most frequent",
    ):
        assert told in PAGE
