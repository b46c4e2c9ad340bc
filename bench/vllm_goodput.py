"""An interactive stream beside batch work on a real vLLM on the CPU: stock fcfs, stock priority and Tidegate.

    python bench/vllm_goodput.py MODEL [--json] [--rate 1.0 …] [--rounds 1] [--seconds 40]

Each system is started anew, in turns, and gets the same load: 100 batch requests at once (256 tokens in, 96 out), one
offline request every 2 s (128 in, 32 out), and interactive ones at `--rate` a second with exponential gaps (64 in,
24 out), for `--seconds`. 16 seats, 256 tokens a step, 110 KV blocks of 32: batch alone saturates the engine, and stock
preempts for want of memory. All outputs have their full length. Promises: interactive first token in 1 s, offline
whole in 10 s, batch whole in 45 s. The environment of
`scripts/install-vllm` has to run this, alone on the machine.
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
from typing import Any

SYSTEMS = ("stock fcfs", "stock priority", "tidegate")
CLASSES = {  # (tokens in, tokens out, priority, promise, seconds)
    "interactive": (64, 24, 0, "ttft", 1.0),
    "offline": (128, 32, 5, "e2e", 10.0),
    "batch": (256, 96, 10, "e2e", 45.0),
}
TOML = """
[scheduler]
policy = "joint"
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
        came, first, count = time.monotonic(), None, 0
        async for output in engine.generate(prompt, params, name, priority=priority):
            count += len(output.outputs[0].token_ids)
            if count and first is None:
                first = time.monotonic()
        done = time.monotonic()
        assert first is not None
        return {"class": kind, "ttft": first - came, "e2e": done - came, "end": done - start, "tokens": tokens + count}

    warm = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for n in range(3):
        async for _ in engine.generate({"prompt_token_ids": [7 + n] * 200}, warm, f"warm{n}"):
            pass
    start = time.monotonic()
    told = arrivals(rate, seconds)
    seen = await asyncio.gather(*(client(f"r{n}", at, kind, start) for n, (at, kind) in enumerate(told)))
    engine.shutdown()
    return seen


def summary(seen: list[dict[str, Any]]) -> dict[str, Any]:
    """Attainment and P99 TTFT by class, and tokens a second until the last request has ended."""
    row: dict[str, Any] = {"tokens_per_s": round(sum(s["tokens"] for s in seen) / max(s["end"] for s in seen), 1)}
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


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("model")
    args.add_argument("--json", action="store_true")
    args.add_argument("--rate", type=float, action="append")
    args.add_argument("--rounds", type=int, default=1)
    args.add_argument("--seconds", type=float, default=40.0)
    args.add_argument("--system", help=argparse.SUPPRESS)
    options = args.parse_args()
    if options.system:
        seen = asyncio.run(serve(options.model, options.system, options.rate[0], options.seconds))
        print("RESULT" + json.dumps(seen))
        return
    rows = []
    for rate in options.rate or (1.0,):
        for turn in range(options.rounds):
            for system in SYSTEMS:
                command = [sys.executable, __file__, options.model, "--system", system, "--rate", str(rate)]
                env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", **os.environ}
                done = subprocess.run(
                    [*command, "--seconds", str(options.seconds)], capture_output=True, text=True, check=False, env=env
                )
                told = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
                if not told:
                    sys.exit(f"{system} failed:\n{done.stderr[-2000:]}")
                rows.append({"system": system, "rate": rate, "round": turn, **summary(json.loads(told[0][6:]))})
                if not options.json:
                    print(json.dumps(rows[-1]), flush=True)
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
