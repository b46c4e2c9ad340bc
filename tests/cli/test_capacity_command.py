"""`tidegate capacity` as a user meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
CHAT = "poisson:rate=20,count=120,prompt=1000,output=40"
LONG = "poisson:rate=5,count=30,prompt=5000,output=40,batch"


def capacity(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    return subprocess.run(
        [sys.executable, "-m", "tidegate", "capacity", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=kept | {"PYTHONPATH": str(SRC)} | environment,
    )


def test_policies_are_compared_in_a_table() -> None:
    done = capacity(CHAT, LONG, "--policy", "vllm-v1", "--policy", "joint", "--precision", "0.1", "--seeds", "2")
    assert (done.returncode, done.stderr) == (0, "")  # and no progress bar in a pipe
    title, heads, *lines = done.stdout.splitlines()
    assert title.startswith("poisson, 150 requests at ")
    assert title.endswith("/s, llama-3.1-8b on h100")
    assert heads.split() == ["policy", "load", "from", "to", "requests/s", "first", "to", "miss", "KV", "blocks"]
    loads = {words[0]: float(words[1]) for words in map(str.split, lines)}
    assert list(loads) == ["vllm-v1", "joint"]
    assert loads["joint"] > loads["vllm-v1"] > 0
    assert all(float(low) <= float(load) <= float(high) for _, load, low, high, *_ in map(str.split, lines))


def test_json_is_stable_and_the_same_bytes_in_every_process() -> None:
    arguments = (
        CHAT,
        "--seeds",
        "3",
        "--seed",
        "5",
        "--precision",
        "0.2",
        "--class-attain",
        "interactive=0.9",
        "--json",
    )
    done, again = capacity(*arguments, PYTHONHASHSEED="1"), capacity(*arguments, PYTHONHASHSEED="2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == again.stdout
    told = json.loads(done.stdout)
    assert {key: told[key] for key in told if key != "policies"} == {
        "workload": "poisson",
        "requests": 120,
        "hardware": "h100",
        "validated": True,
        "model": "llama-3.1-8b",
        "tp": 1,
        "cost_model": "formula",
        "host_overhead_s": 0.0,
        "replicas": 1,
        "route": None,
        "attain": {"interactive": 0.9},
        "seeds": 3,
        "seed": 5,
        "precision": 0.2,
        "at": None,
    }
    found = told["policies"]["joint"]
    assert set(found) == {"num_blocks", "load", "requests_s", "samples"}
    loads = [sample["load"] for sample in found["samples"]]
    assert len(set(loads)) > 1  # samples differ
    assert found["load"] == {"min": min(loads), "median": sorted(loads)[1], "max": max(loads)}
    assert {sample["limited_by"] for sample in found["samples"]} == {"interactive"}
    assert found["requests_s"]["min"] > 20 * found["load"]["min"] * 0.7


def test_engines_that_a_load_needs() -> None:
    arguments = (CHAT, "--at", "8", "--seeds", "2", "--attain", "0.9")
    done = capacity(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert (told["at"], told["replicas"], told["route"], told["precision"]) == (8.0, None, "joint", None)
    found = told["policies"]["joint"]
    assert set(found) == {"num_blocks", "engines", "samples"}
    needed = [sample["engines"] for sample in found["samples"]]
    assert found["engines"] == {"min": min(needed), "median": max(needed), "max": max(needed)}
    assert 1 < max(needed) < 20
    shown = capacity(*arguments).stdout.splitlines()
    assert shown[0].endswith("/s (8 times), engines of llama-3.1-8b on h100, route joint")
    assert shown[2].split()[:2] == ["joint", str(max(needed))]


def test_a_promise_that_no_fleet_keeps_and_a_load_without_end(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[classes.interactive]\nttft = 0.0001\n")
    one = "burst:count=2,prompt=10,output=1"
    hopeless = (CHAT, "--seeds", "1", "--config", str(config))
    told = json.loads(capacity(*hopeless, "--at", "1", "--json").stdout)["policies"]["joint"]
    assert told["engines"] == {"min": None, "median": None, "max": None}
    assert told["samples"] == [{"engines": None, "limited_by": "interactive"}]
    assert capacity(*hopeless, "--at", "1").stdout.splitlines()[2].split()[1] == ">256"
    assert json.loads(capacity(*hopeless, "--json").stdout)["policies"]["joint"]["load"]["max"] == 0
    assert capacity(one, "--seeds", "1").stdout.splitlines()[2].split()[1].startswith(">")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope",), "nope"),
        ((CHAT, "--attain", "1.5"), "1.5 is no share to attain"),
        ((CHAT, "--class-attain", "batch=0.9"), "class batch does not occur in the workload"),
        ((CHAT, LONG, "--class-attain", "batch=0.9"), "class batch was promised nothing"),
        ((CHAT, "--class-attain", "interactive"), "must be a class and a share, such as completion=0.9"),
        ((CHAT, *("--class-attain", "interactive=0.9") * 2), "class interactive has a share already"),
        ((LONG,), "no class of it was promised anything"),
        ((CHAT, "--policy", "fcfs", "--policy", "fcfs"), "the same --policy is named twice"),
        ((CHAT, "--at", "2", "--replicas", "2"), "leave --replicas out"),
        ((CHAT, "--at", "2", "--precision", "0.1"), "--precision does nothing with --at"),
        ((CHAT, "--at", "0"), "a rate scale must be above 0"),
        ((CHAT, "--route", "joint"), "--route does nothing with one engine"),
        ((CHAT, "--at", "2", "--route", "x"), "unknown route 'x'"),
        ((CHAT, "--seeds", "0"), "--seeds"),
        (("closed:clients=2,count=10,prompt=10,output=5",), "a closed loop has no arrivals of its own"),
        (("burst:count=1,prompt=9,output=1", "--seeds", "99"), "too few requests to draw a sample from"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    done = capacity(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tidegate: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
