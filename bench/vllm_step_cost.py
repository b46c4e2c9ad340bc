"""What Tidegate adds to a step of vLLM's scheduler: stock against ours, on its real classes, nothing computed.

    python bench/vllm_step_cost.py [--json] [--policy joint …] [--steps 1000]

Steady decode: `running` requests decode, `waiting` more lack seats; schedule plus update_from_output is timed, 20
steps of each system in turn on the same load, by the thread's CPU time. `over stock` is the median of the rounds' own
ratios, each of the medians of neighbouring turns, so that a machine whose pace changes counts little. Figures are
microseconds. The environment of `scripts/install-vllm` has to run this.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from operator import truediv
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from tidegate.integrations.vllm import TidegateScheduler
from tidegate.integrations.vllm.scripted import Engine, make_config, make_scheduler

PROMPT = 64
TURN = 20
STOCK = "stock"


def load(policy: str, running: int, waiting: int) -> Engine:
    """An engine with so many decoding and so many waiting, of two classes."""
    additional: dict[str, Any] = {}
    if policy != STOCK:
        file = Path(tempfile.mkdtemp()) / "tidegate.toml"
        file.write_text(f'[scheduler]\npolicy = "{policy}"\nmax_waiting = 1000000\n')
        additional = {"tidegate": str(file)}
    config = make_config(
        num_blocks=running * 200 + 2000, max_num_seqs=running, max_num_batched_tokens=8192, additional=additional
    )
    engine = Engine(make_scheduler(Scheduler if policy == STOCK else TidegateScheduler, config))
    for n in range(running + waiting):
        prompt = [2 + (n * 31 + i) % 900 for i in range(PROMPT)]
        late = n >= running
        engine.add(engine.request(f"r{n}", prompt, 3000, priority=n % 3 * 5 if late else 0))
        if n == running - 1:
            while sum(r.num_output_tokens > 0 for r in engine.scheduler.running) < running:
                engine.step()
    for _ in range(5):
        engine.step()
    return engine


def cpu_time(engine: Engine) -> int:
    """Nanoseconds of CPU that vLLM's two calls in a step take."""
    start = time.thread_time_ns()
    output = engine.schedule()
    planned = time.thread_time_ns()
    result = engine.compute()
    computed = time.thread_time_ns()
    engine.apply(output, result)
    return planned - start + time.thread_time_ns() - computed


def rounds(loads: dict[str, Engine], steps: int) -> dict[str, list[float]]:
    """Microseconds of a step of each, the median of each round of `TURN` steps."""
    gc.collect()
    gc.freeze()
    times: dict[str, list[float]] = {name: [] for name in loads}
    for _ in range(steps // TURN):
        for name, engine in loads.items():
            times[name].append(statistics.median(cpu_time(engine) for _ in range(TURN)) / 1e3)
    return times


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--json", action="store_true")
    args.add_argument("--policy", action="append")
    args.add_argument("--running", type=int, action="append")
    args.add_argument("--waiting", type=int, action="append")
    args.add_argument("--steps", type=int, default=1000)
    options = args.parse_args()
    rows = []
    for running in options.running or (64, 256):
        for waiting in options.waiting or (1_000, 10_000):
            loads = {name: load(name, running, waiting) for name in (STOCK, *(options.policy or ("fcfs", "joint")))}
            told = rounds(loads, options.steps)
            rows += [
                {
                    "policy": name,
                    "running": running,
                    "waiting": waiting,
                    "step_us_p50": round(statistics.median(told[name]), 1),
                    "over_stock": round(statistics.median(map(truediv, told[name], told[STOCK])) - 1, 4),
                }
                for name in loads
            ]
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    print("policy    running  waiting   us/step   over stock")
    for row in rows:
        name, over = row["policy"], row["over_stock"]
        print(f"{name:<9} {row['running']:>7} {row['waiting']:>8} {row['step_us_p50']:>9} {over:>11.1%}")


if __name__ == "__main__":
    main()
