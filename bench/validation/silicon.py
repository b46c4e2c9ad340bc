"""Measured GPUs: mean TTFT and TPOT of real engines beside the simulator's, by both cost models.

    python bench/validation/silicon.py [--json] [--every N] [--spread]

The measurements are those of `silicon_sample.csv` in `aiconfigurator-core` (extra `aiconfigurator`): an engine, a
model, how many requests were out at a time, prompts of one length and outputs of one. Used are all that our presets
describe: H100 or H200, a model with a preset, in its own bfloat16, one engine for prompts and outputs. Nothing is
fitted to any of them.

Each is simulated as a closed loop: so many clients, each of whom asks again when its answer has ended, ROUNDS requests
for each of them, all of which count. The clients begin together, as load generators let them; `--spread` lets them
begin evenly over the time of one request instead, because the file does not say and first tokens depend on it. The
host's time is 0. E2E is not in the file, but follows: outputs are of one length.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import Any

import numpy as np

from tidegate.cli.output import print_json, print_table
from tidegate.core.limits import Limits
from tidegate.core.presets import PRESETS, build_policy
from tidegate.executors.sim.cost import CostModel
from tidegate.executors.sim.hardware import find_hardware
from tidegate.executors.sim.kernel_tables import KernelTables
from tidegate.executors.sim.models import find_model
from tidegate.executors.sim.step_cost import StepCost
from tidegate.observe.records import Record
from tidegate.simulate.closed_loop import ClosedLoop
from tidegate.simulate.run import EngineSetup, simulate
from tidegate.simulate.sizing import pool_blocks
from tidegate.simulate.workload import Workload, WorkloadRequest

ROUNDS = 10
BLOCK, SEATS, BUDGET = 16, 256, 8192
COST_MODELS = ("formula", "kernel tables")
SYSTEMS = {"h100_sxm": "h100", "h200_sxm": "h200"}
MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "Qwen/Qwen3-32B": "qwen3-32b",
}
ENGINES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "vllm": ("vllm-v1", {}),
    "sglang": ("sglang-lpm", {"mixed_batches": False}),
    "trtllm": ("vllm-v1", {}),
}
"""The preset nearest to an engine's defaults. SGLang computes prompts in steps of their own."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row of the file in our names."""

    engine: str
    model: str
    hardware: str
    tp: int
    clients: int
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float


CONDITIONS = {
    "H100 or H200": lambda row: row["system"] in SYSTEMS,
    "a model with a preset": lambda row: row["model_path"] in MODELS,
    "bfloat16": lambda row: not row["precision"] and not row["gemm_quant_mode"],  # the model's own format
    "one engine for prompts and outputs": lambda row: row["mode"] == "agg" and row["pp_size"] == "1",
}


def read_measurements() -> tuple[list[Measurement], dict[str, int]]:
    """What is used of the file, and how many rows are left after each condition."""
    file = files("aiconfigurator_core").joinpath("systems/silicon_sample.csv")
    left = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    counts = {"all": len(left)}
    for name, holds in CONDITIONS.items():
        left = [row for row in left if holds(row)]
        counts[name] = len(left)
    return [_measurement(row) for row in left], counts


def _measurement(row: Mapping[str, str]) -> Measurement:
    return Measurement(
        engine=row["backend"],
        model=MODELS[row["model_path"]],
        hardware=SYSTEMS[row["system"]],
        tp=int(row["tp_size"]),
        clients=int(row["batch_size"]),
        prompt_tokens=int(row["isl"]),
        output_tokens=int(row["osl"]),
        ttft_s=float(row["silicon_ttft_ms"]) / 1e3,
        tpot_s=float(row["silicon_tpot_ms"]) / 1e3,
    )


@cache
def cost_of(name: str, hardware: str, model: str, tp: int, engine: str) -> StepCost:
    """One of COST_MODELS; the kernel tables are those of the engine that was measured."""
    if name == "formula":
        return CostModel(find_hardware(hardware), find_model(model), tp)
    return KernelTables(find_hardware(hardware), find_model(model), tp, backend=engine)


def run(m: Measurement, cost_model: str, spread: bool) -> tuple[float, float]:
    """Mean TTFT and TPOT of the simulated measurement, seconds."""
    cost = cost_of(cost_model, m.hardware, m.model, m.tp, m.engine)
    preset, changed = ENGINES[m.engine]
    known = {**PRESETS[preset].limits, "max_num_seqs": SEATS, "max_num_batched_tokens": BUDGET}
    limits = Limits(num_blocks=pool_blocks(cost, BLOCK), block_size=BLOCK, **known)
    records: list[Record] = []
    simulate(
        Workload(m.engine, (), (clients(m, cost, spread),)),
        EngineSetup(build_policy(preset, {**changed, "max_waiting": None}), limits, cost),
        records.extend,
    )
    ttfts, tpots = [r.ttft_s for r in records], [r.tpot_s for r in records]
    return fmean(s for s in ttfts if s is not None), fmean(s for s in tpots if s is not None)


def clients(m: Measurement, cost: StepCost, spread: bool) -> ClosedLoop:
    """The measurement's clients, who begin together, or spread over about the time of one request."""
    asked = m.clients * ROUNDS
    context = m.prompt_tokens + m.output_tokens // 2
    decode = cost.step_seconds(decodes=m.clients, context=m.clients * context)
    over = cost.prefill_seconds(m.prompt_tokens) + m.output_tokens * decode if spread else 0.0
    begin = [over * client / m.clients for client in range(m.clients)]
    request = WorkloadRequest(0.0, m.prompt_tokens, m.output_tokens)
    return ClosedLoop(m.clients, (request,) * asked, (*begin, *[0.0] * (asked - m.clients)))


def compared(measurements: Sequence[Measurement], spread: bool) -> Iterator[dict[str, Any]]:
    """A row for each measurement and cost model."""
    for m in measurements:
        for cost_model in COST_MODELS:
            ttft, tpot = run(m, cost_model, spread)
            found = {"simulated_ttft_s": round(ttft, 4), "simulated_tpot_s": round(tpot, 5)}
            yield {**asdict(m), "cost_model": cost_model, **found}


def groups(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Errors over all measurements, by GPUs, and by engine, model and GPUs; for each cost model."""
    named: dict[tuple[str, str, int | str], list[Mapping[str, Any]]] = {}
    for row in rows:
        engine, model, tp = row["engine"], row["model"], row["tp"]
        for group in (("all", "all", "all"), ("all", "all", tp), (engine, model, tp)):
            named.setdefault(group, []).append(row)
    return [
        {"engine": engine, "model": model, "tp": tp, "cost_model": cost_model}
        | errors([row for row in named[engine, model, tp] if row["cost_model"] == cost_model])
        for engine, model, tp in sorted(named, key=lambda group: (group[0] != "all", *map(str, group)))
        for cost_model in COST_MODELS
    ]


def errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of each latency: median and p90 of the absolute relative error, and the median of simulated over measured."""
    found: dict[str, float] = {"rows": len(rows)}
    for name, latency in LATENCIES.items():
        ratio = np.array([latency(row, "simulated_") / latency(row, "") for row in rows])
        error = np.abs(ratio - 1)
        of = {"median": np.median(error), "p90": np.quantile(error, 0.9), "ratio": np.median(ratio)}
        found |= {f"{name}_{statistic}": round(float(value), 3) for statistic, value in of.items()}
    return found


LATENCIES: Mapping[str, Callable[[Mapping[str, Any], str], float]] = {
    "ttft": lambda row, whose: row[f"{whose}ttft_s"],
    "tpot": lambda row, whose: row[f"{whose}tpot_s"],
    "e2e": lambda row, whose: row[f"{whose}ttft_s"] + (row["output_tokens"] - 1) * row[f"{whose}tpot_s"],
}


def measure(every: int = 1, spread: bool = False) -> dict[str, Any]:
    """The whole document; `every` takes only each so-manyth measurement."""
    measurements, counts = read_measurements()
    rows = list(compared(measurements[::every], spread))
    return {"rounds": ROUNDS, "spread": spread, "counts": counts, "groups": groups(rows), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--every", type=int, default=1, help="only every N-th measurement")
    parser.add_argument("--spread", action="store_true", help="clients begin over the time of one request")
    options = parser.parse_args()
    document = measure(options.every, options.spread)
    if options.json:
        print_json(document)
        return
    left = ", ".join(f"{name}: {count:,}" for name, count in document["counts"].items())
    print_table(document["groups"], f"rows of the file that are left: {left}")


if __name__ == "__main__":
    main()
