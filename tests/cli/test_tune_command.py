"""`tidegate tune` as a user meets it: the file that it writes is one that other commands read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.config import load_config

SRC = Path(__file__).resolve().parents[2] / "src"
BUSY = ("poisson:rate=24,count=240,prompt=1500,output=100", "poisson:rate=6,count=60,prompt=6000,output=100,batch")
BUSY_THEN_QUIET = (*BUSY, "steady:rate=2,count=60,prompt=100,output=5,at=60s")


def tidegate(*arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    path = os.pathsep.join([str(SRC), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "tidegate", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=kept | {"PYTHONPATH": path},
    )


def tune(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("optuna")
    return tidegate("tune", *arguments, "--out", str(out))


def test_the_file_is_a_configuration_with_what_was_found(tmp_path: Path) -> None:
    given, out = tmp_path / "given.toml", tmp_path / "tuned.toml"
    given.write_text(
        '[classes.batch]\npriority = 7\n[policy.joint]\nrestore = "recompute"\n[scheduler]\nblock_size = 32\n'
    )
    done = tune(
        out, *BUSY, "--trials", "6", "--objective", "attainment", "--config", str(given), "--max-num-seqs", "48"
    )
    assert (done.returncode, done.stderr) == (0, "")  # and no progress bar in a pipe
    before = load_config(given, {"scheduler": {"max_num_seqs": 48}})
    after = load_config(out)
    assert after.policy["joint"].items() > before.policy["joint"].items()
    assert after != before
    assert (after.scheduler, after.classes) == (before.scheduler, before.classes)
    again = tidegate("simulate", BUSY[0], "--policy", "joint", "--config", str(out), "--json")
    assert (again.returncode, again.stderr) == (0, "")
    shown = done.stdout.splitlines()
    assert shown[0] == "poisson, 300 requests, llama-3.1-8b on h100"
    assert any(line.startswith("attainment on what was held out: ") for line in shown)
    assert shown[-1] == f"wrote {out}, parameters as found"


def test_the_same_seed_prints_the_same_bytes(tmp_path: Path) -> None:
    out = tmp_path / "tuned.toml"
    arguments = (*BUSY, "--trials", "5", "--seed", "1", "--json")
    done = tune(out, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    written = out.read_bytes()
    assert (tune(out, *arguments).stdout, out.read_bytes()) == (done.stdout, written)
    told = json.loads(done.stdout)
    assert {key: told[key] for key in told if key not in ("parameters", "searched", "held_out", "gain")} == {
        "workload": "poisson",
        "requests": 300,
        "hardware": "h100",
        "validated": True,
        "model": "llama-3.1-8b",
        "tp": 1,
        "cost_model": "formula",
        "host_overhead_s": 0.0,
        "replicas": 1,
        "route": None,
        "policy": "joint",
        "objective": "goodput",
        "trials": 5,
        "hold_out": 0.3,
        "seed": 1,
        "out": str(out),
        "written": "after",
    }
    assert set(told["parameters"]["w_cache"]) == {"before", "after"}
    for part in ("searched", "held_out"):
        assert set(told[part]) == {"before", "after"}
        assert set(told[part]["after"]) == {"goodput", "attainment"}
    assert told["gain"] == pytest.approx(told["held_out"]["after"]["goodput"] - told["held_out"]["before"]["goodput"])


def test_what_is_no_better_on_what_was_held_out_is_not_written(tmp_path: Path) -> None:
    out = tmp_path / "tuned.toml"
    arguments = (*BUSY_THEN_QUIET, "--trials", "6", "--objective", "attainment")
    done = tune(out, *arguments)
    assert "1 before, 1 after (+0.0%): no gain, so nothing is worth changing" in done.stdout
    assert done.stdout.endswith(f"wrote {out}, parameters as they were\n")
    assert load_config(out) == load_config(None)
    told = json.loads(tune(out, *arguments, "--force", "--json").stdout)
    assert (told["gain"], told["written"]) == (0.0, "after")
    assert load_config(out) != load_config(None)


def test_nothing_better_is_told(tmp_path: Path) -> None:
    done = tune(tmp_path / "t.toml", *BUSY, "--trials", "1", "--force")
    assert "1 trials found nothing better than what was there" in done.stdout
    assert load_config(tmp_path / "t.toml") == load_config(None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope",), "nope"),
        ((BUSY[0], "--policy", "fcsf"), "unknown policy 'fcsf'"),
        ((BUSY[0], "--objective", "speed"), "no objective 'speed'; there are: goodput, attainment"),
        ((BUSY[0], "--hold-out", "1"), "1 is no share to hold out"),
        ((BUSY[0], "--trials", "0"), "--trials"),
        ((BUSY[0], "--rate-scale", "0"), "a rate scale must be above 0"),
        ((BUSY[1],), "no class of it was promised anything"),
        (("burst:count=1,prompt=9,output=1",), "1 requests cannot be split at 70%"),
        ((BUSY[0], "--out", "/nowhere/t.toml"), "cannot write /nowhere/t.toml: there is no folder /nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    out = () if "--out" in arguments else ("--out", str(tmp_path / "t.toml"))
    pytest.importorskip("optuna")
    done = tidegate("tune", *arguments, *out)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tidegate: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_without_optuna_it_says_what_to_install(tmp_path: Path) -> None:
    script = (
        "import sys\nsys.modules['optuna'] = None\nfrom tidegate.cli.main import main\n"
        f"sys.argv = ['tidegate', 'tune', {BUSY[0]!r}, '--out', {str(tmp_path / 't.toml')!r}]\nmain()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env={"PYTHONPATH": str(SRC)}
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tidegate: tuning needs Optuna: pip install 'tidegate[tune]'\n"
