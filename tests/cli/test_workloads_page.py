"""docs/workloads.md as written: its commands are run, what they print is compared, and its examples are loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from tidegate.config import resolve
from tidegate.simulate.expression import STEPS
from tidegate.simulate.profile import Profile
from tidegate.simulate.shipped import ADASERVE_CLASSES, TRACES
from tidegate.simulate.synthetic import Synthetic
from tidegate.simulate.traces import KINDS, load_workload
from tidegate.simulate.workload_files import FIELDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "workloads.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SHOWN = [body.partition("\n")[::2] for _, body in BLOCKS if body.startswith("$ ")]
EXAMPLES = [line for kind, body in BLOCKS if kind == "text" for line in body.splitlines() if line[0].islower()]
FIRST_COLUMNS = [
    cell for row in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE) for cell in re.findall(r"`(.*?)`", row)
]


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command for command, _ in SHOWN])
def test_a_command_prints_what_the_page_shows(tmp_path: Path, command: str, shown: str) -> None:
    (csv,) = (body for kind, body in BLOCKS if kind == "csv")
    (tmp_path / "requests.csv").write_text(csv, encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m {command.removeprefix('$ ')}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=kept | {"PYTHONPATH": str(ROOT / "src")},
    )
    assert [line.rstrip() for line in (done.stdout + done.stderr).splitlines()] == shown.splitlines()
    assert done.returncode == (2 if shown.startswith("tidegate: ") else 0)


def named_workloads(page: str) -> list[list[str]]:
    """The parts of every command line of a page that names a workload, files of the reader's own left out."""
    lines = re.findall(r"^tidegate (?:replay|traces show) ([^#\n]+)", page, re.MULTILINE)
    parts = [re.split(r" --", line)[0].split() for line in lines]
    return [words for words in parts if not any(word.endswith((".jsonl", ".csv")) for word in words)]


@pytest.mark.parametrize("parts", named_workloads(PAGE + (ROOT / "docs" / "replay.md").read_text(encoding="utf-8")))
def test_a_command_that_is_only_named_names_a_workload(parts: list[str]) -> None:
    assert load_workload(parts, closed_loops=True).total > 0


@pytest.mark.parametrize("text", EXAMPLES)
def test_an_example_is_a_workload(text: str) -> None:
    assert len(load_workload(text)) > 0


def test_python_on_the_page_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (position,) = (n for n, (kind, _) in enumerate(BLOCKS) if kind == "python")
    exec(compile(BLOCKS[position][1], "workloads.md", "exec"), {})  # noqa: S102 - our own page
    assert capsys.readouterr().out == BLOCKS[position + 1][1]


def test_the_classes_on_the_page_are_those_of_the_trace() -> None:
    (toml,) = (body for kind, body in BLOCKS if kind == "toml")
    assert set(ADASERVE_CLASSES.values()) <= set(resolve(tomllib.loads(toml)).classes)


def test_the_tables_leave_nothing_out() -> None:
    """Every trace, kind, key, item, field and JSON key there is stands on the page."""
    named = set(FIRST_COLUMNS)
    assert {*TRACES, *KINDS, *FIELDS, *(f.name for f in fields(Profile))} <= named
    assert {*STEPS, "seed"} <= {item.partition("=")[0] for item in named}
    for kind in KINDS.values():
        for key in set(kind.model_fields) - set(Synthetic.model_fields) - {"count", "duration"}:
            assert f"`{key}`" in next(row for row in PAGE.splitlines() if row.startswith(f"| `{kind.kind}`"))
    assert {"prompt", "output", "lengths", "tenants", "count", "duration"} <= set(re.findall(r"`(\w+)[`=]", PAGE))
