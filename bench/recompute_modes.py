"""What others see of a resumed request: recomputed in one piece, in chunks, in chunks with the prefix cache.

    python bench/recompute_modes.py [--json] [--rounds 3]

Six streams decode beside a request with a prompt of 1,024 tokens. An urgent one takes its seat for 8 tokens; then
it comes back and its KV has to be there again. For each way of bringing it back: the largest gap between two tokens
that a stream saw from the return on, the time from the return to its next token, and the tokens computed again.
Real engine, default model, ways in turn, medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tidegate.core.events import Emitted, Restored
from tidegate.core.limits import Limits
from tidegate.core.presets import build_policy
from tidegate.core.request import Request
from tidegate.core.scheduler import Scheduler
from tidegate.engine.sampling import SamplingParams
from tidegate.executors.torch.executor import TorchExecutor
from tidegate.executors.torch.hardware import available_cores
from tidegate.executors.torch.model import choose_dtype, load_model
from tidegate.executors.torch.weights import DEFAULT_MODEL, ensure_model

STREAMS, LONG = 6, 1024
WAYS = {
    "monolithic": {"max_num_batched_tokens": 2048, "prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 128, "prefix_caching": False},
    "chunked, prefix cache": {"max_num_batched_tokens": 128, "prefix_caching": True},
}
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass
class Greedy:
    """The handle of a request."""

    params: SamplingParams


def request(id: str, prompt: int, outputs: int, priority: int) -> Request:
    """A request of random tokens that no other shares."""
    rng = random.Random(id)
    tokens = [rng.randrange(100, 40_000) for _ in range(prompt)]
    return Request(id, token_ids=tokens, max_tokens=outputs, priority=priority, handle=Greedy(GREEDY))


def run(executor: TorchExecutor, way: str) -> dict[str, float]:
    """One run; seconds of the largest gap and of the return, tokens computed again."""
    limits = Limits(num_blocks=executor.num_blocks, max_num_seqs=STREAMS + 1, **WAYS[way])  # type: ignore[arg-type]
    scheduler = Scheduler(build_policy("priority", {"restore": "recompute"}), limits)
    for i in range(STREAMS):
        scheduler.add(request(f"stream{i}", 32, 400, 0), 0.0)
    scheduler.add(request("long", LONG, 64, 10), 0.0)
    last: dict[str, float] = {}
    widest, returned, back, step = 0.0, None, 0.0, 0
    long_tokens = 0
    start = time.perf_counter()
    while not back:
        now = time.perf_counter() - start
        plan = scheduler.plan(now)
        scheduler.apply(plan, executor.submit(plan).result(), time.perf_counter() - start)
        for event in scheduler.take_events():
            if isinstance(event, Restored):
                returned = event.now
                again = event.recompute
            elif isinstance(event, Emitted):
                for r in event.requests:
                    if returned is not None and r.id.startswith("stream"):
                        widest = max(widest, event.now - last[r.id])
                    last[r.id] = event.now
                    if r.id == "long":
                        long_tokens += 1
                        back = event.now - returned if returned is not None else 0.0
        step += 1
        if long_tokens == 8 and returned is None and "urgent" not in last:
            scheduler.add(request("urgent", 32, 8, -1), now)
            last["urgent"] = now
    for i in range(STREAMS):
        scheduler.abort(f"stream{i}", now)
    scheduler.abort("long", now)
    return {"largest_gap_s": widest, "back_s": back, "recomputed_tokens": float(again)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=available_cores())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    files = ensure_model(DEFAULT_MODEL, Path.home() / ".cache" / "tidegate")
    dtype = str(choose_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
    executors = {
        way: TorchExecutor(
            load_model(files.path, name=files.name, dtype=dtype),
            num_blocks=256,
            max_num_seqs=STREAMS + 1,
            max_model_len=2048,
            threads=args.threads,
        )
        for way in WAYS
    }
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way, executor in executors.items():
            runs[way].append(run(executor, way))
    rows: list[dict[str, Any]] = [
        {"way": way, **{k: round(statistics.median(r[k] for r in done), 3) for k in done[0]}}
        for way, done in runs.items()
    ]
    if args.json:
        print(json.dumps({"rows": rows}))
        return
    print("| " + " | ".join(rows[0]) + " |")
    print("|---" * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")


if __name__ == "__main__":
    main()
