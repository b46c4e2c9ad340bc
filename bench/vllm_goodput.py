"""An interactive stream beside batch work on a real vLLM on the CPU: stock fcfs, stock priority and Tidegate.

    python bench/vllm_goodput.py MODEL [--rate 0.75 …] [--rounds 2] [--seconds 40] [--out FOLDER] [--json]

Each system is started anew, in turns (every other round the other way round), and gets the same load: 100 batch
requests at once (256 tokens in, 96 out), one offline request every 2 s (128 in, 32 out), and interactive ones at
`--rate` a second with exponential gaps (64 in, 24 out), for `--seconds`. 16 seats, 256 tokens a step, 110 KV blocks of
32: batch alone saturates the engine, and stock preempts for want of memory. All outputs have their full length.
Promises: interactive first token in 1 s, offline whole in 10 s, batch whole in 45 s. Ours is told that outputs are
short (who was preempted returns when 64 more are covered), to keep 5 % of the blocks free for whoever comes, to take
nobody's place while a promise has more than 0.7 s of slack, and to start nobody who makes an equal miss its end.

Tokens a second are prompts and outputs until the last request has ended. The last batch requests leave seats empty for
want of others, so the rate while there is no want of work is told beside it: until `--seconds`, prompts counted with
their first token. Figures are means of the rounds; `least` is of the ratios to stock fcfs in the same round.

Every run is kept in FOLDER, and one that lies there is not made again. Three rates of two rounds take some 35 minutes
on two cores. The environment of `scripts/install-vllm` has to run this, alone on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

SYSTEMS = ("stock fcfs", "stock priority", "tidegate")
CLASSES = {  # (tokens in, tokens out, priority, promise, seconds)
    "interactive": (64, 24, 0, "ttft", 1.0),
    "offline": (128, 32, 5, "e2e", 10.0),
    "batch": (256, 96, 10, "e2e", 45.0),
}
RATES = (0.75, 1.5, 2.25)
TOML = """
[scheduler]
policy = "joint"
watermark = 0.05
resume_span = 64
[policy.joint]
victim = "lowest-priority"
displace_slack = 0.7
keep_ends = true
[classes.interactive]
ttft = 1.0
tpot = "none"
[classes.offline]
e2e = 10.0
[classes.batch]
e2e = 45.0
"""


def arrivals(rate: float, seconds: float) -> list[tuple[float, str]]:
    """(seconds, class) of every request, in order; the same for every system."""
    rng, found, at = random.Random(1), [(0.0, "batch")] * 100, 2.0
    while (at := at + rng.expovariate(rate)) < seconds:
        found.append((at, "interactive"))
    found += [(float(t), "offline") for t in range(3, int(seconds), 2)]
    return sorted(found)


async def serve(model: str, system: str, rate: float, seconds: float) -> list[dict[str, Any]]:
    """What every client of one system saw."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    ours = system == "tidegate"
    config = Path(tempfile.mkdtemp()) / "tidegate.toml"
    config.write_text(TOML)
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype="bfloat16",
            max_model_len=512,
            max_num_seqs=16,
            max_num_batched_tokens=256,
            block_size=32,
            num_gpu_blocks_override=110,
            enforce_eager=True,
            scheduling_policy="priority" if system == "stock priority" else "fcfs",
            scheduler_cls="tidegate.integrations.vllm.TidegateAsyncScheduler" if ours else None,
            additional_config={"tidegate": str(config)} if ours else {},
            disable_log_stats=True,
        )
    )
    rng = random.Random(2)

    async def client(name: str, at: float, kind: str, start: float) -> dict[str, Any]:
        tokens, outputs, priority, *_ = CLASSES[kind]
        prompt = {"prompt_token_ids": [rng.randrange(1000, 40000) for _ in range(tokens)]}
        await asyncio.sleep(max(0.0, start + at - time.monotonic()))
        params = SamplingParams(
            temperature=0.0,
            max_tokens=outputs,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"slo_class": kind},
        )
        came, times = time.monotonic(), []
        async for output in engine.generate(prompt, params, name, priority=priority):
            times += [time.monotonic()] * len(output.outputs[0].token_ids)
        ended = time.monotonic()
        return {
            "class": kind,
            "ttft": times[0] - came,
            "e2e": ended - came,
            "end": ended - start,
            "tokens": tokens + len(times),
            "in_time": sum(t <= start + seconds for t in times) + tokens * (times[0] <= start + seconds),
        }

    warm = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for n in range(3):
        async for _ in engine.generate({"prompt_token_ids": [7 + n] * 200}, warm, f"warm{n}"):
            pass
    start = time.monotonic()
    told = arrivals(rate, seconds)
    seen = await asyncio.gather(*(client(f"r{n}", at, kind, start) for n, (at, kind) in enumerate(told)))
    engine.shutdown()
    return seen


def summary(seen: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Attainment and P99 TTFT by class, tokens a second until the last request has ended, and until `seconds`."""
    row: dict[str, Any] = {
        "tokens_per_s": round(sum(s["tokens"] for s in seen) / max(s["end"] for s in seen), 1),
        "tokens_per_s_loaded": round(sum(s["in_time"] for s in seen) / seconds, 1),
    }
    for kind, (*_, promise, limit) in CLASSES.items():
        own = [s for s in seen if s["class"] == kind]
        ranked = sorted(s["ttft"] for s in own)
        row[kind] = {
            "requests": len(own),
            "attained": round(sum(s[promise] <= limit for s in own) / len(own), 3),
            "ttft_p50_s": round(ranked[len(ranked) // 2], 3),
            "ttft_p99_s": round(ranked[ceil(0.99 * len(ranked)) - 1], 3),
            "e2e_mean_s": round(sum(s["e2e"] for s in own) / len(own), 2),
        }
    return row


def run(model: str, system: str, rate: float, seconds: float) -> list[dict[str, Any]]:
    """One run in a process of its own."""
    command = [sys.executable, __file__, model, "--system", system, "--rate", str(rate), "--seconds", str(seconds)]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    told = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not told:
        sys.exit(f"{system} failed:\n{done.stderr[-2000:]}")
    seen: list[dict[str, Any]] = json.loads(told[0][6:])
    return seen


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each rate and system the means of its rounds, and its ratios to stock fcfs of the same rounds."""
    told = []
    for rate in sorted({row["rate"] for row in rows}):
        stock = {row["round"]: row for row in rows if (row["rate"], row["system"]) == (rate, SYSTEMS[0])}
        for system in SYSTEMS:
            own = [row for row in rows if (row["rate"], row["system"]) == (rate, system)]
            ratios = [row["tokens_per_s"] / stock[row["round"]]["tokens_per_s"] for row in own]
            loaded = [row["tokens_per_s_loaded"] / stock[row["round"]]["tokens_per_s_loaded"] for row in own]
            told.append(
                {
                    "rate": rate,
                    "system": system,
                    "rounds": len(own),
                    "ttft_p99_s": round(fmean(row["interactive"]["ttft_p99_s"] for row in own), 3),
                    "attained": {k: round(fmean(row[k]["attained"] for row in own), 3) for k in CLASSES},
                    "tokens_per_s": round(fmean(row["tokens_per_s"] for row in own), 1),
                    "of_fcfs": round(fmean(ratios), 3),
                    "of_fcfs_least": round(min(ratios), 3),
                    "of_fcfs_loaded": round(fmean(loaded), 3),
                }
            )
    return told


def table(told: list[dict[str, Any]]) -> str:
    """The comparison as text."""
    head = "rate  system          interactive   attained: interactive offline batch   tokens/s of fcfs (least) loaded"
    lines = [head, "/s                    P99 TTFT s"]
    for row in told:
        attained = " ".join(f"{row['attained'][k]:>8.1%}" for k in CLASSES)
        lines.append(
            f"{row['rate']:<5} {row['system']:<15} {row['ttft_p99_s']:>10.3f}   {'':>9}{attained}   "
            f"{row['tokens_per_s']:>10.1f} {row['of_fcfs']:>7.3f} ({row['of_fcfs_least']:.3f})"
            f" {row['of_fcfs_loaded']:>6.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("model")
    args.add_argument("--json", action="store_true")
    args.add_argument("--rate", type=float, action="append")
    args.add_argument("--rounds", type=int, default=2)
    args.add_argument("--seconds", type=float, default=40.0)
    args.add_argument("--out", type=Path, help="folder of the runs; made where it is not there")
    args.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = args.parse_args()
    if options.system:
        seen = asyncio.run(serve(options.model, options.system, options.rate[0], options.seconds))
        print("RESULT" + json.dumps(seen))
        return
    out = options.out or Path(tempfile.mkdtemp(prefix="vllm-goodput-"))
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for rate in options.rate or RATES:
        for turn in range(options.rounds):
            for system in SYSTEMS if turn % 2 == 0 else SYSTEMS[::-1]:  # so that a drift of the machine cancels
                file = out / f"{system.replace(' ', '-')}-rate{rate:g}-{options.seconds:g}s-{turn}.json"
                if not file.exists():
                    made = run(options.model, system, rate, options.seconds)
                    file.write_text(json.dumps(made))
                row = summary(json.loads(file.read_text()), options.seconds)
                rows.append({"system": system, "rate": rate, "round": turn, **row})
                if not options.json:
                    print(json.dumps(rows[-1]), flush=True)
    if options.json:
        print(json.dumps({"rows": rows, "compared": compared(rows)}))
        return
    print(f"\n{table(compared(rows))}\nruns in {out}")


if __name__ == "__main__":
    main()
