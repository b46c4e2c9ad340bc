"""The command line as a user meets it: in a process of its own, by exit code and what it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from tidegate import __version__
from tidegate.cli.main import COMMANDS
from tidegate.config import Config, resolve
from tidegate.core.presets import PRESETS
from tidegate.simulate.profile import Profile
from tidegate.simulate.traces import TRACES

SRC = Path(__file__).resolve().parents[2] / "src"


def tidegate(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    return subprocess.run(
        [sys.executable, "-m", "tidegate", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=kept | {"PYTHONPATH": str(SRC)} | environment,
    )


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from tidegate.cli.main import main\n"
        "sys.argv = ['tidegate', '--help']\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert e.code == 0\n"
        "heavy = {'torch', 'transformers', 'numba', 'fastapi', 'pyarrow', 'sklearn'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(SRC)}
    )
    help_text, _, heavy = done.stdout.partition("HEAVY")
    assert heavy.strip() == "[]"
    assert all(f"  {name} " in help_text for name in COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, "config show", "predictor train"])
def test_every_command_has_help(command: str) -> None:
    done = tidegate(*command.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"tidegate {command}" in done.stdout


@pytest.mark.parametrize("command", [(), ("config",), ("predictor",)])
def test_nothing_to_do_prints_the_help_as_it_is(command: tuple[str, ...]) -> None:
    done = tidegate(*command)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip() == tidegate(*command, "--help").stdout.strip()


def test_version() -> None:
    assert tidegate("--version").stdout.strip() == __version__


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("traecs",), "No such command 'traecs'."),
        (("traces", "--jsno"), "No such option"),
        (("replay",), "Missing argument 'workload'."),
        (("replay", "azure", "--limit", "0"), "Invalid value for '--limit'"),
        (("replay", "azure"), "no workload 'azure': name a .jsonl or .csv file, or a shipped trace (azure-conv"),
        (("replay", "azure-conv:thni=0.5"), "azure-conv:thni=0.5: unknown key 'thni'; did you mean 'thin'?"),
        (("replay", "closed:clients=2,count=9,prompt=1,output=1", "--limit", "3"), "a closed loop cannot be cut"),
        (("traces", "show"), "Missing argument 'workload'."),
        (
            ("traces", "show", "azure"),
            "no workload 'azure': name a .jsonl or .csv file, or a shipped trace (azure-conv",
        ),
        (("traces", "show", "poisson:rate=4,count=9"), "poisson:rate=4,count=9: give prompt= and output="),
        (
            ("traces", "show", "closed:clients=2,count=9,prompt=1,output=1"),
            "closed:clients=2,count=9,prompt=1,output=1: a",
        ),
        (("traces", "show", "azure-conv", "--map", "tenant=user"), "a map of columns or a unit needs a file"),
        (("traces", "show", "none.csv", "--map", "user"), "--map user is not of the form FIELD=COLUMN"),
        (("traces", "show", "none.csv"), "cannot read none.csv: No such file or directory"),
        (("replay", "azure-conv", "--out", "x.csv"), "x.csv: records are written as .parquet or .jsonl"),
        (("replay", "azure-conv", "--rate-scale", "0"), "a rate scale must be above 0, not 0"),
        (("replay", "azure-conv", "--token-ids", "9", "9"), "--token-ids 9 9: LOW must be"),
        (("replay", "azure-conv", "--timeout", "0"), "--timeout must be above 0, not 0"),
        (("scenario", "none.yaml", "--policy", ""), "--policy names no policy"),
        (("config", "show", "--config", "none.toml"), "cannot read none.toml: No such file or directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], complaint: str) -> None:
    done = tidegate(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"tidegate: {complaint}")
    assert done.stderr.count("\n") == 1


def test_a_fault_of_ours_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    """Broken package data stands for a fault: nothing a user can say makes one."""
    broken = (
        "import sys\n"
        "from tidegate.simulate import traces\n"
        "traces.TRACES = None\n"
        "from tidegate.cli.main import main\n"
        "sys.argv = ['tidegate', 'traces']\n"
        "main()\n"
    )

    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", broken],
            capture_output=True,
            text=True,
            check=False,
            env={"PYTHONPATH": str(SRC)} | environment,
        )

    quiet, loud = run(), run(TIDEGATE_DEBUG="1")
    assert (quiet.returncode, loud.returncode) == (1, 1)
    assert quiet.stderr.startswith("tidegate: a fault of Tidegate's: AttributeError")
    assert quiet.stderr.count("\n") == 1
    assert "Traceback" in loud.stderr


def test_a_reader_that_leaves_is_no_fault() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tidegate", "config", "show"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PYTHONPATH": str(SRC)},
    )
    assert process.stdout is not None
    process.stdout.close()
    _, complaint = process.communicate()
    assert (process.returncode, complaint) == (0, b"")


def test_policies_are_listed_one_a_line() -> None:
    lines = tidegate("policies").stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(PRESETS)
    assert {row["name"]: row["summary"] for row in json.loads(tidegate("policies", "--json").stdout)} == {
        name: preset.summary for name, preset in PRESETS.items()
    }


@pytest.mark.parametrize("name", ["joint", "sarathi"])
def test_a_policy_shows_its_parameters_and_where_they_are_set(name: str) -> None:
    shown = json.loads(tidegate("policies", name, "--json").stdout)
    rows = {row["parameter"]: row for row in shown["parameters"]}
    assert shown["limits"] == PRESETS[name].limits
    assert rows["max_waiting"] == {"parameter": "max_waiting", "default": 1024, "set_as": "scheduler.max_waiting"}
    assert rows["aging_window"]["set_as"] == "aging.window"
    assert rows["share"]["set_as"] == f"policy.{name}.share"
    settings = {row["set_as"].rpartition(".")[2]: row["default"] for row in rows.values() if "policy." in row["set_as"]}
    companions = {"max_prefill_steps", "restore", "displace"}  # which do nothing beside these defaults
    said = {option: value for option, value in settings.items() if value is not None and option not in companions}
    assert resolve({"policy": {name: said}, "scheduler": {"policy": name}}).build_policy() == (
        resolve({"scheduler": {"policy": name}}).build_policy()
    )
    table = tidegate("policies", name).stdout.splitlines()
    assert table[0] == f"{name}: {PRESETS[name].summary}"
    assert [line.split()[0] for line in table[2 : 2 + len(rows)]] == list(rows)
    assert {"urgent_slack", "aging_rate"} & set(rows) == {"urgent_slack" if name == "joint" else "aging_rate"}
    unknown = tidegate("policies", "jiont")
    assert (unknown.returncode, unknown.stderr) == (2, "tidegate: unknown policy 'jiont'; did you mean joint?\n")


def test_traces_are_listed_with_size_and_licence() -> None:
    rows = json.loads(tidegate("traces", "--json").stdout)
    assert [row["name"] for row in rows] == list(TRACES)
    assert rows[0] == {
        "name": "azure-conv",
        "requests": 19_366,
        "duration_s": 3501.7,
        "rate_s": 5.53,
        "prompt_tokens": 22_361_870,
        "output_tokens": 4_088_665,
        "classes": ["interactive"],
        "licence": "CC-BY-4.0",
        "cite": "Splitwise, ISCA 2024",
    }
    table = tidegate("traces").stdout
    assert all(name in table for name in TRACES)


def test_a_workload_is_shown_in_figures_and_a_picture() -> None:
    parts = ("mooncake-conversation:first=400", "poisson:rate=4,count=300,prompt=64,output=8,tenants=30,batch")
    done = tidegate("traces", "show", *parts)
    assert (done.returncode, done.stderr) == (0, "")
    assert "mooncake-conversation+poisson: 700 requests over" in done.stdout
    for told in ("in the busiest minute", "Poisson 1", "an unbounded cache would hit", "batch", "more)", "█"):
        assert told in done.stdout
    shown = json.loads(tidegate("traces", "show", *parts, "--json").stdout)
    assert list(shown) == ["parts", *(f.name for f in fields(Profile))]
    assert shown["parts"] == list(parts)
    assert {name: g["requests"] for name, g in shown["classes"].items()} == {"interactive": 400, "batch": 300}
    again = tidegate("traces", "show", *parts, "--json", "--seed", "1")
    assert json.loads(again.stdout)["arrivals_per_bin"] != shown["arrivals_per_bin"]


def test_a_terminal_without_block_characters_gets_a_picture_too() -> None:
    done = tidegate("traces", "show", "vtc-real", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "####" in done.stdout


def test_a_mapped_file_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("when,in,out,team\n2024-05-01T08:00:00Z,9,2,red\n2024-05-01T08:00:04Z,8,3,blue\n", encoding="utf-8")
    named = ("arrival_s=when", "prompt_tokens=in", "output_tokens=out", "tenant=team")
    done = tidegate("traces", "show", str(path), *(o for item in named for o in ("--map", item)), "--json")
    shown = json.loads(done.stdout)
    assert (shown["name"], shown["duration_s"], list(shown["tenants"])) == ("own", 4.0, ["blue", "red"])
    path.write_text("when,in,out\nyesterday,9,2\n", encoding="utf-8")
    bad = tidegate("traces", "show", str(path), *(o for item in named[:3] for o in ("--map", item)))
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)
    assert bad.stderr.startswith(f"tidegate: {path}:2: arrival_s: 'yesterday' is not a number or ISO 8601")


def test_config_show_prints_the_resolved_whole(tmp_path: Path) -> None:
    path = tmp_path / "tidegate.toml"
    path.write_text('[scheduler]\npolicy = "sjf"\n[classes.bulk]\npriority = 20\n', encoding="utf-8")
    resolved = resolve(tomllib.loads(path.read_text(encoding="utf-8")))
    assert resolved != Config()
    for done in (
        tidegate("config", "show", "--config", str(path)),
        tidegate("config", "show", TIDEGATE_CONFIG=str(path)),
    ):
        assert resolve(tomllib.loads(done.stdout)) == resolved
    assert resolve(tomllib.loads(tidegate("config", "show").stdout)) == Config()


def test_models_are_listed_and_a_local_one_is_found(tmp_path: Path) -> None:
    rows = json.loads(tidegate("models", "--json", TIDEGATE_CACHE=str(tmp_path)).stdout)
    assert [(row["name"], row["default"], row["cached"]) for row in rows] == [("smollm2-135m", True, False)]
    assert Config().model.name == "smollm2-135m"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}", encoding="utf-8")
    done = tidegate("models", "--fetch", str(tmp_path / "mine"))
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "mine"))
    unknown = tidegate("models", "--fetch", "none")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1)
    assert "smollm2-135m" in unknown.stderr
