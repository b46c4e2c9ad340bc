"""`tidegate simulate` as a user meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.observe.records import read_records
from tidegate.observe.steplog import read_steps

SRC = Path(__file__).resolve().parents[2] / "src"
SMALL = ("azure-conv:first=60", "azure-code:first=40")


def simulate(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    return subprocess.run(
        [sys.executable, "-m", "tidegate", "simulate", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=kept | {"PYTHONPATH": str(SRC)} | environment,
    )


def test_policies_are_compared_in_a_table_and_in_files(tmp_path: Path) -> None:
    out = tmp_path / "new" / "report"
    done = simulate(*SMALL, "--policy", "vllm-v1", "--policy", "joint", "--out", str(out))
    assert (done.returncode, done.stderr) == (0, "")  # and no progress bar in a pipe
    lines = done.stdout.splitlines()
    assert lines[0].strip() == "azure-conv+azure-code, 100 requests, llama-3.1-8b on h100"
    assert [line.split()[:3] for line in lines if line.startswith("interactive")] == [
        ["interactive", "vllm-v1", "60"],
        ["interactive", "joint", "60"],
    ]
    for policy in ("vllm-v1", "joint"):
        records, steps = out / f"{policy}.records.parquet", out / f"{policy}.steps.parquet"
        assert len(read_records(records)) == 100
        assert sum(row.prefill_tokens for row in read_steps(steps)) == sum(
            r.prompt_tokens for r in read_records(records)
        )
    assert "<html" in (out / "report.html").read_text(encoding="utf-8")


def test_a_trace_and_the_decisions_of_every_engine_change_nothing(tmp_path: Path) -> None:
    """Each request is there from arrival to end, each step is a slice, and each admission has its reasons."""
    workload = ("azure-conv:first=80", "--num-blocks", "400", "--replicas", "2", "--route", "round-robin", "--json")
    plain = simulate(*workload)
    done = simulate(*workload, "--out", str(tmp_path), "--trace", "--decisions")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == plain.stdout
    events = json.loads((tmp_path / "joint.trace.json").read_text())
    steps = [e for e in events if e["ph"] == "X"]
    assert len(steps) == len(list(read_steps(tmp_path / "joint.steps.parquet")))
    ids = {r.request_id for r in read_records(tmp_path / "joint.records.parquet")}
    assert {e["name"] for e in events if e["ph"] == "e"} & ids == ids
    decisions = [json.loads(line) for line in (tmp_path / "joint.decisions.jsonl").read_text().splitlines()]
    assert {d["request_id"] for d in decisions if d["event"] == "admitted"} == ids
    assert {d["replica"] for d in decisions} == {"0", "1"}
    assert [d["time"] for d in decisions if d["replica"] == "1"] == sorted(
        d["time"] for d in decisions if d["replica"] == "1"
    )


@pytest.mark.parametrize("option", ["--trace", "--decisions"])
def test_what_is_written_needs_a_folder(option: str) -> None:
    done = simulate("azure-conv:first=5", option)
    assert (done.returncode, done.stderr) == (2, f"tidegate: {option} writes into a folder: add --out\n")


def test_json_is_stable_and_the_same_bytes_in_every_process() -> None:
    arguments = ("mooncake-conversation:first=40", "--replicas", "2", "--route", "random", "--seed", "3", "--json")
    done, again = simulate(*arguments, PYTHONHASHSEED="1"), simulate(*arguments, PYTHONHASHSEED="2")
    assert done.returncode == 0
    assert done.stdout == again.stdout
    told = json.loads(done.stdout)
    assert {key: told[key] for key in told if key != "policies"} == {
        "workload": "mooncake-conversation",
        "requests": 40,
        "hardware": "h100",
        "validated": True,
        "model": "llama-3.1-8b",
        "tp": 1,
        "cost_model": "formula",
        "host_overhead_s": 0.0,
        "replicas": 2,
        "route": "random",
    }
    assert set(told["policies"]["joint"]) == {"num_blocks", "steps", "simulated_s", "classes"}
    assert told["policies"]["joint"]["classes"]["all"]["requests"] == 40


def test_the_configuration_sets_policies_classes_and_limits(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[scheduler]\nnum_blocks = 3000\nmax_num_seqs = 2\n[classes.interactive]\nttft = 0.001\n")
    told = json.loads(simulate("azure-conv:first=20", "--config", str(config), "--json").stdout)["policies"]["joint"]
    assert told["num_blocks"] == 3000
    assert told["classes"]["interactive"]["attainment"] == 0.0


def test_the_host_overhead_and_the_hardware_are_told() -> None:
    told = json.loads(
        simulate("azure-conv:first=5", "--host-overhead", "1.5", "--hardware", "l40s", "--tp", "2", "--json").stdout
    )
    assert (told["host_overhead_s"], told["hardware"], told["validated"], told["tp"]) == (0.0015, "l40s", False, 2)
    assert "on 2 x l40s (unvalidated)" in simulate("azure-conv:first=5", "--hardware", "l40s", "--tp", "2").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope",), "nope"),
        (("azure-conv", "--policy", "fcsf"), "scheduler.policy: unknown policy 'fcsf'; did you mean fcfs?"),
        (("azure-conv", "--policy", "fcfs", "--policy", "fcfs"), "the same --policy is named twice"),
        (("azure-conv", "--hardware", "h101"), "no hardware 'h101'"),
        (("azure-conv", "--model", "llama-3.1-70b"), "no KV block fits in 90% of h100"),
        (("azure-conv", "--tp", "3"), "cannot be spread over 3 GPUs"),
        (("azure-conv", "--replicas", "2", "--route", "x"), "unknown route 'x'; known are random"),
        (("azure-conv", "--route", "joint"), "--route does nothing with one engine"),
        (("azure-conv", "--borrow", "0.5"), "--borrow does nothing without a second --pool"),
        (("azure-conv", "--pool", "two:batch"), "must be a number of engines and classes"),
        (("azure-conv", "--pool", "1:batc"), "no class 'batc'; there are: batch"),
        (("azure-conv", "--pool", "1:batch", "--pool", "1:batch"), "class batch has a pool already"),
        (("azure-conv", "--pool", "1:batch", "--replicas", "2"), "leave --replicas out"),
        (("azure-conv", "--rate-scale", "0"), "above 0"),
        (("adaserve-multislo",), "is of class 'c"),
        (("azure-conv", "--out", "/proc/nowhere"), "cannot write to /proc/nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    done = simulate(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tidegate: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_file_to_swap_to_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[scheduler]\ndisk_kv_memory = "1GiB"\n')
    done = simulate("azure-conv:first=5", "--config", str(config))
    assert done.returncode == 2
    assert "a simulation has no file to swap to" in done.stderr


def test_torch_is_not_needed() -> None:
    script = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'numba', 'fastapi', 'sklearn'):\n    sys.modules[name] = None\n"
        "from tidegate.cli.main import main\n"
        "sys.argv = ['tidegate', 'simulate', 'azure-conv:first=5']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env={"PYTHONPATH": str(SRC)}
    )
    assert (done.returncode, done.stderr) == (0, "")
