"""Tidegate's engine against transformers' own continuous batching: same model, dtype, threads and load, in one run.

    python bench/engine_throughput.py [--json] [--rounds 2] [--threads N] [--dtype auto]

The load is 64 prompts of 256 random tokens, 64 outputs each, greedy, 16 at a time. The sides are run in turn, each in
a process of its own as its users run it; figures are medians of the rounds, the ratio that of the rounds' ratios.
transformers gets the faster of its two CPU attentions, tried on one full batch, and the same token budget.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging as transformers_logging

from tidegate.core.limits import Limits
from tidegate.core.plan import StepPlan, StepResult
from tidegate.core.presets import build_policy
from tidegate.core.request import Request
from tidegate.core.scheduler import Scheduler
from tidegate.engine.sampling import SamplingParams
from tidegate.executors.torch.executor import TorchExecutor
from tidegate.executors.torch.hardware import available_cores
from tidegate.executors.torch.model import choose_dtype, load_model
from tidegate.executors.torch.weights import DEFAULT_MODEL, ModelFiles, ensure_model

PROMPT, OUTPUT, SEATS, REQUESTS = 256, 64, 16, 64
BLOCK = 16
STEP_TOKENS = 512
TRIALS = ("sdpa", "paged|eager")


GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass
class Greedy:
    """The handle of a request."""

    params: SamplingParams


def prompts(count: int, length: int = PROMPT) -> list[list[int]]:
    """Random prompts that share nothing."""
    rng = random.Random(1)
    return [[rng.randrange(100, 40000) for _ in range(length)] for _ in range(count)]


def serve(
    executor: TorchExecutor, load: list[list[int]], outputs: int, depth: int = 2, beside: list[float] | None = None
) -> float:
    """Seconds to serve `load` with the real scheduler.

    At depth 1, `beside` gets what each step took beside the model's forward (seconds).
    """
    limits = Limits(
        num_blocks=executor.num_blocks, block_size=BLOCK, max_num_seqs=SEATS, max_num_batched_tokens=STEP_TOKENS
    )
    scheduler = Scheduler(build_policy("vllm-v1"), limits)
    requests = [Request(str(i), token_ids=p, max_tokens=outputs, handle=Greedy(GREEDY)) for i, p in enumerate(load)]
    pipeline: deque[tuple[StepPlan, Future[StepResult]]] = deque()
    start = time.perf_counter()
    for r in requests:
        scheduler.add(r, 0.0)
    while scheduler.has_work or pipeline:
        step, forward = time.perf_counter(), executor.forward_seconds
        plan = scheduler.plan(step - start)
        if plan:
            pipeline.append((plan, executor.submit(plan)))
        while pipeline and (len(pipeline) >= depth or not plan):
            oldest, future = pipeline.popleft()
            scheduler.apply(oldest, future.result(), time.perf_counter() - start)
        scheduler.take_events()
        if beside is not None:
            beside.append(time.perf_counter() - step - (executor.forward_seconds - forward))
    short = [r.id for r in requests if len(r.token_ids or []) != r.prompt_tokens + outputs]
    if short:
        raise SystemExit(f"requests {short[:3]} did not get their {outputs} tokens")
    return time.perf_counter() - start


def transformers_batching(model: PreTrainedModel, load: list[list[int]], outputs: int, attention: str) -> float:
    """Seconds of transformers' continuous batching for `load`."""
    model.set_attn_implementation(attention)
    generation = GenerationConfig(max_new_tokens=outputs, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=640,
        max_batch_tokens=STEP_TOKENS,
        max_requests_per_batch=SEATS,
        allow_block_sharing=False,
    )
    start = time.perf_counter()
    done = model.generate_batch(
        load, generation_config=generation, continuous_batching_config=batching, progress_bar=False, warmup=False
    )
    seconds = time.perf_counter() - start
    short = [len(r.generated_tokens) for r in done.values() if len(r.generated_tokens) != outputs]
    if len(done) != len(load) or short:
        raise SystemExit(f"transformers answered {len(done)} of {len(load)} requests, lengths off: {short[:3]}")
    return seconds


def single_stream(executor: TorchExecutor) -> tuple[float, float]:
    """Batch 1 at pipeline depth 1: tokens a second, and the median ms of a step beside the model's forward."""
    load = prompts(1)
    rates: list[float] = []
    beside: list[float] = []
    for _ in range(3):
        first = serve(executor, load, 1, depth=1)
        rates.append(OUTPUT / (serve(executor, load, 1 + OUTPUT, depth=1, beside=beside) - first))
    return max(rates), statistics.median(beside) * 1e3


def measure_tidegate(files: ModelFiles, dtype: str, threads: int, requests: int) -> dict[str, Any]:
    """One round of ours, and a single stream."""
    executor = TorchExecutor(
        load_model(files.path, name=files.name, dtype=dtype),
        block_size=BLOCK,
        num_blocks=SEATS * (PROMPT + OUTPUT) // BLOCK + 64,
        max_num_seqs=SEATS,
        max_model_len=1024,
        threads=threads,
    )
    load = prompts(requests)
    serve(executor, load[:2], 4)
    batch1, overhead = single_stream(executor)
    inside = executor.forward_seconds + executor.sampling_seconds
    seconds = serve(executor, load, OUTPUT)
    inside = executor.forward_seconds + executor.sampling_seconds - inside
    executor.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "seconds": seconds,
        "batch1": batch1,
        "overhead_ms": overhead,
        "outside": 1 - inside / seconds,
        "peak_mb": peak,
    }


def measure_transformers(files: ModelFiles, dtype: str, threads: int, requests: int) -> dict[str, Any]:
    """One round of theirs."""
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(files.path, dtype=getattr(torch, dtype)).eval()
    load = prompts(requests)
    attention = min(TRIALS, key=lambda a: transformers_batching(model, load[:SEATS], 4, a))
    return {"seconds": transformers_batching(model, load, OUTPUT, attention), "attention": attention}


SIDES = {"tidegate": measure_tidegate, "transformers": measure_transformers}


def in_own_process(side: str, args: argparse.Namespace) -> dict[str, Any]:
    """What one round of `side` says."""
    command = [sys.executable, __file__, "--side", side, "--dtype", args.dtype, "--model", args.model]
    command += ["--threads", str(args.threads), "--requests", str(args.requests), "--cache-dir", str(args.cache_dir)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout))


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """All sides in turn, `args.rounds` times."""
    rounds = [{side: in_own_process(side, args) for side in SIDES} for _ in range(args.rounds)]
    tokens = args.requests * OUTPUT
    seconds = {side: [r[side]["seconds"] for r in rounds] for side in SIDES}
    ours = [r["tidegate"] for r in rounds]
    return {
        "tidegate_tok_s": round(tokens / statistics.median(seconds["tidegate"]), 1),
        "transformers_cb_tok_s": round(tokens / statistics.median(seconds["transformers"]), 1),
        "ratio": round(statistics.median(map(truediv, seconds["transformers"], seconds["tidegate"])), 2),
        "batch1_tok_s": round(statistics.median(r["batch1"] for r in ours), 1),
        "batch1_overhead_ms": round(statistics.median(r["overhead_ms"] for r in ours), 3),
        "outside_model_share": round(statistics.median(r["outside"] for r in ours), 4),
        "peak_mb": round(max(r["peak_mb"] for r in ours)),
        "dtype": args.dtype,
        "threads": args.threads,
        "transformers_attention": rounds[0]["transformers"]["attention"],
        "rounds_s": [{side: round(r[side]["seconds"], 1) for side in SIDES} for r in rounds],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--side", choices=SIDES, help="one round of one side, as JSON")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "tidegate")
    args = parser.parse_args()
    args.dtype = str(choose_dtype(args.dtype, torch.device("cpu"))).removeprefix("torch.")
    if args.side:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        files = ensure_model(args.model, args.cache_dir)
        with contextlib.redirect_stdout(sys.stderr):
            row = SIDES[args.side](files, args.dtype, args.threads, args.requests)
        print(json.dumps(row))
        return
    row = compare(args)
    if args.json:
        print(json.dumps(row))
        return
    for key, value in row.items():
        print(f"{key:28} {value}")


if __name__ == "__main__":
    main()
