"""docs/write-a-policy.md as written: its files are written down, its commands run, and what they print is compared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.core.harness import Run, limits, request
from tests.server.scripted_model import ScriptedModel, goes_on
from tests.server.serving import serving
from tidegate.config import load_config
from tidegate.core.policies.adaptive import AdaptiveBudget
from tidegate.core.policies.orders import Aged, Priority
from tidegate.core.policies.victims import LeastWorkLost
from tidegate.core.policy import Policy
from tidegate.custom import find_policy

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "write-a-policy.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`([\w.]+)`:\n```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
SESSIONS = re.findall(r"^```\n(\$ .*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [part.partition("\n")[::2] for session in SESSIONS for part in session.split("$ ")[1:]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's files in the working directory, and a `tidegate` as it is installed."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    command = tmp_path / "bin" / "tidegate"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nfrom tidegate.cli.main import main\nmain()\n", encoding="utf-8")
    command.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("shortprompts", "whole"):
        sys.modules.pop(name, None)


def test_the_page_has_files_and_commands() -> None:
    assert {"tidegate.toml", "shortprompts.py", "queue.yaml", "serve.toml", "whole.py"} <= set(FILES)
    assert len(COMMANDS) >= 7
    assert PAGE.count("```") == 2 * (len(FILES) + len(SESSIONS)), "every block of the page is run"


@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_command_prints_what_the_page_shows(folder: Path, command: str, shown: str) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    path = f"{folder / 'bin'}:{kept['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=kept | {"PATH": path, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.stdout + done.stderr == shown
    assert (done.returncode == 2) == shown.startswith("tidegate: ")


def test_what_is_composed_in_toml_is_what_it_says(folder: Path) -> None:
    policy = load_config(folder / "tidegate.toml").build_policy()
    assert policy.order == Aged(Priority(), 30.0)
    assert policy.budget == AdaptiveBudget(margin=0.1)
    assert policy.admit.sheds


def test_the_configuration_composes_with_an_order_of_ones_own(folder: Path) -> None:
    policy = load_config(folder / "serve.toml").build_policy()
    from shortprompts import ShortPrompts

    assert policy.order == Aged(ShortPrompts(unit=500), 60.0, 20.0)
    assert policy.budget == AdaptiveBudget()
    assert policy.victim == LeastWorkLost()
    assert policy.admit.weighs


def test_the_engine_serves_by_it(folder: Path) -> None:
    """One seat, which is taken: of a long prompt and a short one after it the short one comes first."""
    raw = tomllib.loads((folder / "serve.toml").read_text(encoding="utf-8"))
    model = ScriptedModel(goes_on, max_num_seqs=1)
    with serving(model, {**raw, "scheduler": {**raw["scheduler"], "max_num_seqs": 1}}) as served:
        model.gate.clear()
        with ThreadPoolExecutor(3) as clients:

            def post(prompt: int, waiting: int) -> Future[httpx.Response]:
                body = {"prompt": [7 + waiting] * prompt, "max_tokens": 4}
                answer = clients.submit(served.http.post, "/v1/completions", json=body)
                while len(served.scheduler.running) != 1 or len(served.scheduler.waiting) != waiting:
                    pass
                return answer

            answers = [post(16, 0), post(200, 1), post(16, 2)]
            head = served.scheduler.waiting.peek()
            model.gate.set()
            assert head is not None
            assert head.prompt_tokens == 16
            assert [a.result(20).status_code for a in answers] == [200, 200, 200]


def test_the_victim_of_the_page_gives_way(folder: Path) -> None:
    whole = find_policy("whole:WHOLE")
    assert isinstance(whole, Policy)
    run = Run.of(whole, limits(num_blocks=20, max_num_seqs=2, resume_span=8))
    run.add(request("first", 16, 200))
    run.steps(20)
    run.add(request("later", 16, 200))
    run.until_idle()
    assert {id for _, id, _ in run.preemptions()} == {"later"}


def test_the_order_is_about_thirty_lines() -> None:
    lines = FILES["shortprompts.py"].splitlines()
    assert len([line for line in lines if line.strip()]) <= 30
