"""docs/capacity.md as written: its commands are run, and what they print is compared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "capacity.md").read_text(encoding="utf-8")
BLOCKS = [body for kind, body in re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) if not kind]
SHOWN = [body.partition("\n")[::2] for body in BLOCKS if body.startswith("$ ")]
NAMED = [line for body in BLOCKS if not body.startswith("$ ") for line in body.splitlines()]


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command for command, _ in SHOWN])
def test_a_command_prints_what_the_page_shows(tmp_path: Path, command: str, shown: str) -> None:
    if " tune " in command:
        pytest.importorskip("optuna")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", *command.removeprefix("$ ").split()],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=kept | {"PYTHONPATH": path},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.rstrip() for line in done.stdout.splitlines()] == shown.splitlines()


def test_commands_that_are_only_named_exist() -> None:
    assert len(SHOWN) == 3
    assert {line.split()[1] for line in NAMED} == {"simulate", "serve"} <= set(COMMANDS)


@pytest.mark.parametrize("command", ["capacity", "tune"])
def test_every_option_stands_on_the_page(command: str) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "tidegate", command, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"},
    ).stdout
    options = set(re.findall(r"^\s+(--[a-z-]+)", told, re.MULTILINE)) - {"--help"}
    assert len(options) > 15
    assert {option for option in options if f"`{option}" not in PAGE} == set()
