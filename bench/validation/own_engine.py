"""`tidegate simulate` beside `tidegate serve`: calibrated on one load of this machine, three other loads predicted.

    python bench/validation/own_engine.py measure RUNS [--rounds 5] [--at-most N]
    python bench/validation/own_engine.py compare RUNS [--json]

`measure` serves SmolLM2-135M on one core, sends a load from another with `tidegate replay`, and keeps what client and
engine saw in RUNS/LOAD-ROUND; every run has a server of its own, so that nothing is cached from the one before. The
loads take turns. What is there already is not measured again, so a series may be broken off.

`compare` takes the runs by rounds, because a virtual machine is faster in one hour than in the next: in each round the
cost model is fitted to the step log of the load `calibration`, and the very same requests of the other loads are
simulated. It says how far median and P99 of TTFT and TPOT are from those of the round's real runs (`error`, the median
of the rounds), and how far two real runs are from each other (`spread`). `error_at_pace` is what is left where all
simulated steps are as much slower than in the calibration run as the real run's own step log says the machine was.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from tidegate.cli.engine_options import engine_setup
from tidegate.cli.output import print_json, print_table
from tidegate.config import resolve
from tidegate.executors.sim.cost import CostModel
from tidegate.executors.sim.hardware import Hardware, find_hardware
from tidegate.executors.sim.models import find_model
from tidegate.observe.records import Record, read_records
from tidegate.observe.steplog import iter_steps
from tidegate.observe.summary import summarise
from tidegate.simulate.calibration import Calibration, calibrate, predicted
from tidegate.simulate.instance import StepSink
from tidegate.simulate.run import simulate
from tidegate.simulate.step_costs import step_costs
from tidegate.simulate.traces import load_workload
from tidegate.simulate.workload import WorkloadRequest

ROUNDS = 5
CALIBRATION = "calibration"
MODEL = find_model("smollm2-135m")
CORE = replace(find_hardware("cpu"), name="amx-core", peak_flops=1.2e12, memory_bandwidth=14e9)
"""What a calibration starts from: one core of the machine, as torch's bfloat16 products and copies measure it."""
BLOCK = 16
"""Tokens of a KV block."""
SERVER_CORE, CLIENT_CORE = 0, 1
AIM, TOLERANCE, MOST_TOLERANCE = 0.05, 0.10, 0.20
"""Relative errors: what is aimed at, what is allowed, and the most that is where two real runs differ by more."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent, as `tidegate replay` takes it, and the policy that serves it."""

    parts: tuple[str, ...]
    policy: str

    @property
    def config(self) -> str:
        """Of the server, and of the simulation."""
        return (
            f'[model]\nthreads = 1\n[scheduler]\npolicy = "{self.policy}"\nblock_size = {BLOCK}\nnum_blocks = 2048\n'
            "max_num_seqs = 16\nmax_num_batched_tokens = 256\n"
        )


LOADS = {
    CALIBRATION: Load(("gamma:rate=8,cv=2,count=1000,prompt=lognormal:50:0.9:440,output=8..40",), "fcfs"),
    "short": Load(("poisson:rate=12,count=1000,prompt=lognormal:32:0.6:160,output=exponential:20:80",), "sjf"),
    "long": Load(("poisson:rate=8,count=1000,prompt=50..150,output=8..16",), "vllm-v1"),
    "queue": Load(
        (
            "poisson:rate=5,count=600,prompt=24..72,output=12..36,interactive",
            "onoff:rate=20,on=8s,off=32s,count=400,prompt=20..60,output=16..48,batch",
        ),
        "joint",
    ),
}


def folder(runs: Path, load: str, number: int) -> Path:
    return runs / f"{load}-{number}"


def missing(runs: Path, rounds: int) -> list[tuple[str, int]]:
    """Runs that are still to be made: the loads take turns, so that a slow hour of the machine hits all alike."""
    wanted = [(load, number) for number in range(1, rounds + 1) for load in LOADS]
    return [run for run in wanted if not (folder(runs, *run) / "replay.json").exists()]


def measure(runs: Path, load: str, number: int) -> None:
    """Make one run. `replay.json` is its last file, so whoever has it is whole."""
    into = folder(runs, load, number)
    into.mkdir(parents=True, exist_ok=True)
    for name in ("engine.jsonl", "steps.jsonl"):
        (into / name).unlink(missing_ok=True)
    (into / "config.toml").write_text(
        f'{LOADS[load].config}[server]\nport = 0\n[observe]\nrecords = "{into}/engine.jsonl"\n'
        f'steps = "{into}/steps.jsonl"\n'
    )
    with serving(into / "config.toml") as url:
        replay = ["replay", *LOADS[load].parts, "--url", url, "--out", str(into / "client.parquet"), "--json"]
        seen = subprocess.run(pinned(CLIENT_CORE, *replay), check=True, capture_output=True).stdout
    (into / "replay.json").write_bytes(seen)


@contextmanager
def serving(config: Path) -> Iterator[str]:
    """A server on its own core; the URL at which it is ready."""
    command = pinned(SERVER_CORE, "serve", "--config", str(config))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            for line in server.stdout:
                if " is ready at " in line:
                    yield line.partition(" is ready at ")[2].split()[0]
                    return
            raise SystemExit("the server ended before it was ready")
        finally:
            server.terminate()


def pinned(core: int, *arguments: str) -> list[str]:
    """`tidegate` on one core."""
    return ["taskset", "-c", str(core), sys.executable, "-m", "tidegate", *arguments]


Key = tuple[str, str]
"""A class, or "all", and a metric."""


def metrics(records: Sequence[Record], front_s: float = 0.0) -> dict[Key, float]:
    """Median and P99 of TTFT and TPOT in seconds, of all requests and, where there are several, of each class.

    front_s: what every TTFT is longer by than in the records
    """
    summaries = summarise(records)
    classes = ["all", *sorted(set(summaries) - {"all"})] if len(summaries) > 2 else ["all"]
    return {
        (name, f"{what}_{q}"): getattr(summaries[name], f"{what}_s")[q] + extra
        for name in classes
        for what, extra in (("ttft", front_s), ("tpot", 0.0))
        for q in ("p50", "p99")
    }


def fit(run: Path) -> Calibration:
    """The cost model fitted to the step log of a run."""
    return calibrate(step_costs(iter_steps(run / "steps.jsonl")), MODEL, CORE, source=run.name)


def front_seconds(run: Path) -> float:
    """How much longer a TTFT is for the client than for the engine, in the mean: the way in, and a token's way out."""

    def mean_ttft(name: str) -> float:
        return fmean(r.ttft_s for r in read_records(run / name) if r.ttft_s is not None)

    return mean_ttft("client.parquet") - mean_ttft("engine.jsonl")


def predict(load: Load, hardware: Hardware, on_step: StepSink | None = None) -> list[Record]:
    """Records of the simulated load, as the engine would write them; `on_step` takes its step log."""
    config = resolve(tomllib.loads(load.config))
    records: list[Record] = []
    setup = engine_setup(config, CostModel(hardware, MODEL))
    workload = (named(request, number) for number, request in enumerate(load_workload(load.parts)))
    simulate(workload, setup, records.extend, classes=config.slo_classes, on_step=on_step)
    return records


def named(request: WorkloadRequest, number: int) -> WorkloadRequest:
    """The same with names for its prompt's blocks: whoever was preempted finds them in the engine's cache again."""
    blocks = request.prompt_tokens // BLOCK
    return replace(request, hash_ids=tuple(range(number << 20, (number << 20) + blocks)), hash_block_tokens=BLOCK)


def spread(values: Sequence[float]) -> float:
    """By how much two of them differ, relative to their mean: the median of all pairs."""
    return median(2 * abs(a - b) / (a + b) for a, b in combinations(values, 2))


def at_pace(hardware: Hardware, run: Path) -> Hardware:
    """`hardware` with steps that in sum take as long as those of the run."""
    steps = step_costs(iter_steps(run / "steps.jsonl"))
    return slower(hardware, float(steps.seconds.sum() / predicted(hardware, MODEL, 1, steps).sum()))


def slower(hardware: Hardware, times: float) -> Hardware:
    """The same with every step so many times as long."""
    shares = {name: getattr(hardware, name) / times for name in ("e1", "e2", "e3", "e4")}
    return replace(hardware, t0=hardware.t0 * times, **shares)


class Round(NamedTuple):
    """One round of a load: metrics as predicted, as predicted at the machine's pace in the run, and as measured."""

    predicted: dict[Key, float]
    at_pace: dict[Key, float]
    measured: dict[Key, float]


def play(load: Load, run: Path, hardware: Hardware, front_s: float) -> Round:
    """Predict a run from the hardware and the front of its round."""
    expected, paced = (metrics(predict(load, h), front_s) for h in (hardware, at_pace(hardware, run)))
    return Round(expected, paced, metrics(read_records(run / "client.parquet")))


def rows_of(name: str, rounds: Sequence[Round]) -> Iterator[dict[str, Any]]:
    """A row a class and metric: medians of the rounds."""
    for key in rounds[0].measured:
        real = [r.measured[key] for r in rounds]
        errors = [r.predicted[key] / r.measured[key] - 1 for r in rounds]
        paced = [r.at_pace[key] / r.measured[key] - 1 for r in rounds]
        tolerance = min(MOST_TOLERANCE, max(TOLERANCE, spread(real)))
        yield {
            "load": name,
            "class": key[0],
            "metric": key[1],
            "predicted_ms": round(1e3 * median(r.predicted[key] for r in rounds), 2),
            "measured_ms": round(1e3 * median(real), 2),
            "error": round(median(errors), 4),
            "least_error": round(min(errors), 4),
            "most_error": round(max(errors), 4),
            "error_at_pace": round(median(paced), 4),
            "spread": round(spread(real), 4),
            "tolerance": round(tolerance, 4),
            "within": abs(median(errors)) <= tolerance,
        }


def compare(runs: Path) -> dict[str, Any]:
    """The whole document, of the rounds that are there as a whole."""
    begun = range(1, 1 + len(list(runs.glob(f"{CALIBRATION}-*"))))
    rounds = [n for n in begun if all((folder(runs, load, n) / "replay.json").exists() for load in LOADS)]
    if len(rounds) < 2:
        raise SystemExit(f"{runs} has {len(rounds)} rounds of runs; it takes two to say how far two runs are apart")
    calibrated = [folder(runs, CALIBRATION, n) for n in rounds]
    fits, fronts = [fit(run) for run in calibrated], [front_seconds(run) for run in calibrated]
    rows: list[dict[str, Any]] = []
    for name, load in LOADS.items():
        found = zip(rounds, fits, fronts, strict=True)
        rows += rows_of(name, [play(load, folder(runs, name, n), f.hardware, front) for n, f, front in found])
    return {
        "loads": {name: {"workload": list(load.parts), "policy": load.policy} for name, load in LOADS.items()},
        "calibrations": [calibration(*found) for found in zip(rounds, fits, fronts, strict=True)],
        "rows": rows,
        "checks": checks(rows),
    }


def calibration(number: int, fitted: Calibration, front_s: float) -> dict[str, Any]:
    """What was found in a round's calibration run; null is a constant that the log did not tell."""
    errors = {
        f"{kind}_{name}": getattr(fitted.held_out[kind], name)
        for kind in fitted.held_out
        for name in ("median", "bias")
    }
    return {
        "round": number,
        "steps": fitted.fitted,
        **{c.name: None if c.error is None else float(f"{c.value:.4g}") for c in fitted.constants},
        **{name: None if error is None else round(error, 4) for name, error in errors.items()},
        "front_ms": round(1e3 * front_s, 2),
    }


def checks(rows: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Whether each predicted load is within the tolerance, within the aim, and within the tolerance at its pace."""
    found = {}
    for load in LOADS:
        if load != CALIBRATION:
            own = [row for row in rows if row["load"] == load]
            found[f"{load}_within_tolerance"] = all(row["within"] for row in own)
            found[f"{load}_within_5_percent"] = all(abs(row["error"]) <= AIM for row in own)
            found[f"{load}_within_tolerance_at_pace"] = all(
                abs(row["error_at_pace"]) <= row["tolerance"] for row in own
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="make real runs")
    measuring.add_argument("runs", type=Path)
    measuring.add_argument("--rounds", type=int, default=ROUNDS, help="runs of each load")
    measuring.add_argument("--at-most", type=int, default=None, help="make only so many of those that are missing")
    comparing = commands.add_parser("compare", help="predict, and compare with the runs made so far")
    comparing.add_argument("runs", type=Path)
    comparing.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.command == "measure":
        for load, number in missing(options.runs, options.rounds)[: options.at_most]:
            print(f"{load}, run {number}", flush=True)
            measure(options.runs, load, number)
        return
    document = compare(options.runs)
    if options.json:
        print_json(document)
        return
    print_table(document["calibrations"], "constants and errors of held-out steps; front_ms is from engine to client")
    print_table(document["rows"], "medians of the rounds, and the range of their errors")
    for name, passed in document["checks"].items():
        print(f"{'yes' if passed else 'NO '}  {name.replace('_', ' ')}")


if __name__ == "__main__":
    main()
