"""How many requests a second are simulated, beside Dynamo's offline replay of the same requests.

    python bench/sim_speed.py [--json] [--policy joint --policy vllm-v1] [--repeats 3] [--no-dynamo]

azure-conv's first 10,000 requests as they came and four times as fast on one engine, and mooncake-conversation on 16
engines: one H100, Llama-3.1-8B, 26,000 blocks of 16 tokens, 256 seats and 2,048 tokens a step each; records are
collected. Dynamo (PyPI ai-dynamo 1.6.1, compiled Rust) gets the same files in Mooncake's format, its own `vllm`
engine and its round robin; it knows no policies, so its figure is the same in every row of a workload. The script
installs it into an environment of its own under ~/.cache/tidegate, its Python dependencies left out but for those
that the replay imports.

A figure is requests per wall-clock second of the best of `--repeats` runs, which are interleaved: noise only ever
adds. Reading the trace is not counted on our side, and on Dynamo's it is (under 0.1 s).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tidegate.core.limits import Limits
from tidegate.core.presets import build_policy
from tidegate.executors.sim.cost import CostModel
from tidegate.executors.sim.hardware import find_hardware
from tidegate.executors.sim.models import find_model
from tidegate.observe.records import Record
from tidegate.routing.route import Route, build_route
from tidegate.simulate.run import EngineSetup, FleetSetup, simulate
from tidegate.simulate.traces import load_workload
from tidegate.simulate.workload import Workload

DYNAMO = "1.6.1"
NEEDED = (f"ai-dynamo=={DYNAMO}", f"ai-dynamo-runtime=={DYNAMO}")
HOME = Path.home() / ".cache" / "tidegate" / f"ai-dynamo-{DYNAMO}"
BLOCK = 512  # tokens of a block in the trace format
POOL = {"num_blocks": 26_000, "block_size": 16, "max_num_seqs": 256, "max_num_batched_tokens": 2048}


class Case(NamedTuple):
    """A row's workload."""

    name: str
    source: str
    scale: float
    engines: int


CASES = (
    Case("azure-conv 1x", "azure-conv:first=10000", 1.0, 1),
    Case("azure-conv 4x", "azure-conv:first=10000", 4.0, 1),
    Case("mooncake-conversation, 16 engines", "mooncake-conversation", 1.0, 16),
)


def tidegate_seconds(load: Workload, policy: str, engines: int) -> float:
    """Seconds of one simulation, records on."""
    cost = CostModel(find_hardware("h100"), find_model("llama-3.1-8b"))
    setup = EngineSetup(build_policy(policy), Limits(**POOL), cost)
    fleet = FleetSetup([("", engines)], _route) if engines > 1 else FleetSetup()
    records: list[Record] = []
    begin = time.perf_counter()
    simulate(load, setup, records.extend, fleet=fleet)
    seconds = time.perf_counter() - begin
    assert len(records) == len(load)
    return seconds


def _route() -> Route:
    return build_route("round-robin", random=Random(0))


# Runs in Dynamo's environment: trace file and number of workers in, seconds out.
_REPLAY = """
import json, sys, time
from dynamo.replay import run_trace_replay
engine = json.loads(sys.argv[3])
begin = time.perf_counter()
report = run_trace_replay([sys.argv[1]], num_workers=int(sys.argv[2]), router_mode="round_robin", trace_block_size=512,
                          extra_engine_args={"engine": engine})
seconds = time.perf_counter() - begin
print(json.dumps({"seconds": seconds, "completed": report.summary["completed_requests"]}))
"""


def dynamo_python() -> Path | None:
    """The interpreter of Dynamo's environment, made if it is not there; None where that fails."""
    python, ready = HOME / "bin" / "python", HOME / "ready"
    if ready.exists():
        return python
    try:
        venv.create(HOME, with_pip=True, clear=True)
        for options in (["--no-deps", *NEEDED], ["typing-extensions", "msgspec"]):
            own = os.environ | {"PYTHONPATH": ""}  # what lies there it would not install
            subprocess.run([python, "-m", "pip", "install", "-q", *options], check=True, stdout=sys.stderr, env=own)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"without Dynamo, which cannot be installed: {error}", file=sys.stderr)
        return None
    ready.touch()
    return python


def write_mooncake(load: Workload, path: Path) -> None:
    """The workload in Mooncake's format; requests without names get names of their own, so that they share nothing."""
    fresh = 1 + max((name for r in load for name in r.hash_ids), default=0)
    with path.open("w", encoding="utf-8") as out:
        for r in load:
            blocks = -(-r.prompt_tokens // BLOCK)
            names = list(r.hash_ids)
            if not names:
                names, fresh = list(range(fresh, fresh + blocks)), fresh + blocks
            row = {
                "timestamp": round(r.arrival_s * 1000, 3),
                "input_length": r.prompt_tokens,
                "output_length": r.output_tokens,
                "hash_ids": names,
            }
            out.write(json.dumps(row) + "\n")


def dynamo_seconds(python: Path, trace: Path, engines: int, requests: int) -> float:
    """Seconds of one replay by Dynamo."""
    sizes = {{"num_blocks": "num_gpu_blocks"}.get(name, name): size for name, size in POOL.items()}
    engine = json.dumps({"backend": "vllm", **sizes})
    done = subprocess.run(
        [python, "-c", _REPLAY, trace, str(engines), engine], check=True, capture_output=True, text=True
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["completed"] == requests
    return float(told["seconds"])


def measure(case: Case, policies: list[str], repeats: int, python: Path | None) -> list[dict[str, Any]]:
    """The rows of one workload."""
    load = load_workload(case.source).rate_scaled(case.scale)
    best = dict.fromkeys(policies, float("inf"))
    theirs = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        if python is not None:
            write_mooncake(load, trace)
        for _ in range(repeats):
            for policy in policies:
                best[policy] = min(best[policy], tidegate_seconds(load, policy, case.engines))
            if python is not None:
                theirs = min(theirs, dynamo_seconds(python, trace, case.engines, len(load)))
    dynamo = round(len(load) / theirs) if python is not None else None
    return [
        {
            "workload": case.name,
            "policy": policy,
            "tidegate_req_s": round(len(load) / seconds),
            "dynamo_req_s": dynamo,
            "ratio": round(len(load) / seconds / dynamo, 3) if dynamo else None,
        }
        for policy, seconds in best.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--policy", action="append", help="repeat for several; joint and vllm-v1 without")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-dynamo", action="store_true", help="leave Dynamo out")
    options = parser.parse_args()
    python = None if options.no_dynamo else dynamo_python()
    policies = options.policy or ["joint", "vllm-v1"]
    rows = [row for case in CASES for row in measure(case, policies, options.repeats, python)]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        dynamo = "" if row["dynamo_req_s"] is None else f"{row['dynamo_req_s']:>8,} by Dynamo, ratio {row['ratio']}"
        print(f"{row['workload']:36} {row['policy']:10} {row['tidegate_req_s']:>8,} requests/s {dynamo}")


if __name__ == "__main__":
    main()
