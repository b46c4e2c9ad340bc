"""An interactive stream beside 200 batch requests, on the real engine, one policy after the other.

    python bench/interactive.py [--json] [--policy joint …] [--rate 0.5 --rate 1.0] [--rounds 2] [--batch 200]

Every run serves the same requests. `batch` ones are there at the start and saturate the engine: questions of 32 tokens
about one of 20 documents of 96 tokens, the documents in turn as clients of a shared service send them, 24 tokens
out; every fifth is `offline` (the same, with a promise on the whole request). Interactive ones (32 in, 12 out)
arrive at `rate` a second, evenly spread with a seeded jitter, until the batch is done. KV memory holds about half
of what the seats could hold, so that requests are preempted and documents are evicted. Every policy has the prefix
cache. Policies run in turn, `rounds` times; medians of the rounds are printed. The promises are scaled to this
machine's steps and printed with the table.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tidegate.core.events import Finished, Preempted
from tidegate.core.limits import Limits
from tidegate.core.plan import StepPlan, StepResult
from tidegate.core.presets import PRESETS, build_policy
from tidegate.core.request import Request
from tidegate.core.scheduler import Scheduler
from tidegate.core.slo import Slo
from tidegate.core.timing import nearest_rank
from tidegate.engine.sampling import SamplingParams
from tidegate.executors.torch.executor import TorchExecutor
from tidegate.executors.torch.hardware import available_cores
from tidegate.executors.torch.model import choose_dtype, load_model
from tidegate.executors.torch.weights import DEFAULT_MODEL, ensure_model

BLOCK, SEATS, STEP_TOKENS = 16, 24, 256
DOCUMENTS, DOCUMENT, QUESTION = 20, 96, 32
BATCH_IN, BATCH_OUT = DOCUMENT + QUESTION, 24
CHAT_IN, CHAT_OUT = 32, 12
POOL = SEATS * (BATCH_IN + BATCH_OUT) // BLOCK // 2
INTERACTIVE = Slo(ttft=2.0, tpot=0.6)
OFFLINE = Slo(e2e=75.0)
POLICIES = ("vllm-v1", "priority", "joint")

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass
class Greedy:
    """The handle of a request."""

    params: SamplingParams


def prompt(seed: int, length: int) -> list[int]:
    """Random tokens, the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(100, 40_000) for _ in range(length)]


def background(count: int) -> list[Request]:
    """What is there at the start: batch requests, every fifth of them an offline one."""
    return [
        Request(
            f"b{i}",
            token_ids=prompt(2_000_000 + i % DOCUMENTS, DOCUMENT) + prompt(i, QUESTION),
            max_tokens=BATCH_OUT,
            slo_class="offline" if i % 5 == 0 else "batch",
            slo=OFFLINE if i % 5 == 0 else Slo(),
            priority=5 if i % 5 == 0 else 10,
            handle=Greedy(GREEDY),
        )
        for i in range(count)
    ]


def chat(number: int, now: float) -> Request:
    """The interactive request number `number`, arriving now."""
    return Request(
        f"c{number}",
        token_ids=prompt(1_000_000 + number, CHAT_IN),
        max_tokens=CHAT_OUT,
        arrival=now,
        slo=INTERACTIVE,
        handle=Greedy(GREEDY),
    )


def serve(executor: TorchExecutor, policy: str, rate: float, batch: int) -> dict[str, Any]:
    """One run; see the module's docstring."""
    own = dict(PRESETS[policy].limits)
    shared = {"num_blocks": POOL, "block_size": BLOCK, "max_num_seqs": SEATS, "max_num_batched_tokens": STEP_TOKENS}
    scheduler = Scheduler(build_policy(policy), Limits(**{**own, **shared}))
    jitter = random.Random(7)
    pipeline: deque[tuple[StepPlan, Future[StepResult]]] = deque()
    ended: list[Finished] = []
    start = time.perf_counter()
    for r in background(batch):
        scheduler.add(r, 0.0)
    left, sent, preemptions = batch, 0, 0
    due, batch_done = 0.5 / rate, 0.0
    while scheduler.has_work or pipeline:
        now = time.perf_counter() - start
        while left and due <= now:
            scheduler.add(chat(sent, due), now)
            sent += 1
            due += (0.5 + jitter.random()) / rate
        plan = scheduler.plan(now)
        if plan:
            pipeline.append((plan, executor.submit(plan)))
        while pipeline and (len(pipeline) >= 2 or not plan):
            oldest, future = pipeline.popleft()
            scheduler.apply(oldest, future.result(), time.perf_counter() - start)
        for event in scheduler.take_events():
            if isinstance(event, Finished):
                ended.append(event)
                if event.request.slo_class != "interactive":
                    left -= 1
                    batch_done = event.now
            elif isinstance(event, Preempted):
                preemptions += 1
    return summary(ended, batch * BATCH_OUT / batch_done, preemptions)


def summary(ended: Sequence[Finished], batch_tok_s: float, preemptions: int) -> dict[str, Any]:
    """What the clients of each class saw."""
    chats = [e for e in ended if e.request.slo_class == "interactive"]
    offline = [e for e in ended if e.request.slo_class == "offline"]
    ttft = sorted(e.timing.ttft or 0.0 for e in chats)
    cached = sum(e.request.cached_tokens for e in ended)
    recomputed = sum(e.request.recomputed_tokens for e in ended)
    return {
        "interactive": len(chats),
        "ttft_p50_s": nearest_rank(ttft, 0.5),
        "ttft_p99_s": nearest_rank(ttft, 0.99),
        "interactive_attained": sum(not e.missed for e in chats) / max(1, len(chats)),
        "offline_attained": sum(not e.missed for e in offline) / max(1, len(offline)),
        "batch_tok_s": batch_tok_s,
        "preemptions": preemptions,
        "recomputed_tokens": recomputed,
        "cached_share": cached / sum(e.request.prompt_tokens for e in ended),
    }


def measure(
    policies: Sequence[str], rates: Sequence[float], rounds: int, batch: int, threads: int
) -> list[dict[str, Any]]:
    """Medians over the rounds, a row a rate and policy."""
    torch.set_num_threads(threads)
    files = ensure_model(DEFAULT_MODEL, Path.home() / ".cache" / "tidegate")
    dtype = str(choose_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
    executor = TorchExecutor(
        load_model(files.path, name=files.name, dtype=dtype),
        block_size=BLOCK,
        num_blocks=POOL,
        max_num_seqs=SEATS,
        max_model_len=1024,
        threads=threads,
    )
    serve(executor, "vllm-v1", 1.0, 4)
    rows = []
    for rate in rates:
        runs: dict[str, list[dict[str, Any]]] = {p: [] for p in policies}
        for _ in range(rounds):
            for policy in policies:
                runs[policy].append(serve(executor, policy, rate, batch))
        for policy in policies:
            medians = {key: round(statistics.median(run[key] for run in runs[policy]), 3) for key in runs[policy][0]}
            rows.append({"rate": rate, "policy": policy, **medians})
    executor.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--policy", action="append")
    parser.add_argument("--rate", type=float, action="append")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--threads", type=int, default=available_cores())
    args = parser.parse_args()
    rows = measure(args.policy or POLICIES, args.rate or (0.25, 0.5, 1.0), args.rounds, args.batch, args.threads)
    if args.json:
        print(json.dumps({"interactive": str(INTERACTIVE), "offline": str(OFFLINE), "rows": rows}))
        return
    print(f"interactive {INTERACTIVE}, offline {OFFLINE}, {POOL} KV blocks, {SEATS} seats")
    print("| " + " | ".join(rows[0]) + " |")
    print("|---" * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")


if __name__ == "__main__":
    main()
