"""What a step allocates and what stays behind: counted, never timed."""

from __future__ import annotations

import gc
import tracemalloc

from tests.core.harness import limits
from tidegate.core.plan import StepResult
from tidegate.core.presets import build_policy
from tidegate.core.request import Request
from tidegate.core.scheduler import Scheduler


def decoding(context: int, running: int) -> Scheduler:
    """`running` requests in steady decode, each behind `context` prompt tokens."""
    blocks = running * (context // 16 + 64)
    scheduler = Scheduler(
        build_policy("fcfs"), limits(num_blocks=blocks, max_num_seqs=running, max_num_batched_tokens=running * context)
    )
    for n in range(running):
        scheduler.add(Request(f"r{n}", prompt_tokens=context, max_tokens=900), 0.0)
    while scheduler.waiting or scheduler.running.prefilling:
        step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> None:
    plan = scheduler.plan(0.0)
    scheduler.apply(plan, StepResult([1] * len(plan.emitting())), 0.0)
    scheduler.take_events()


def peak_of_a_step(scheduler: Scheduler, steps: int = 31) -> int:
    """Bytes a step holds at its height, in the median: a block table's list doubles now and then."""
    peaks = []
    tracemalloc.start()
    for _ in range(steps):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        step(scheduler)
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    return sorted(peaks)[steps // 2]


def test_a_decode_step_allocates_nothing_per_block_of_context() -> None:
    small, large = (peak_of_a_step(decoding(context, 8)) for context in (32, 32_000))
    assert large <= small * 1.1


def test_memory_after_many_requests_is_what_it_was_after_a_thousand() -> None:
    """10,000 requests of 40 tokens with text of their own: the cache, the diary and the history are bounded."""
    scheduler = Scheduler(build_policy("fcfs"), limits(num_blocks=256, max_num_seqs=8, max_num_batched_tokens=512))
    memory = []
    tracemalloc.start()
    for n in range(10_000):
        tokens = range(n * 64, n * 64 + 33)
        scheduler.add(Request(f"r{n}", token_ids=tokens, max_tokens=8, tenant=f"t{n % 3000}"), float(n))
        if n % 8 == 7:
            while scheduler.has_work:
                step(scheduler)
        if n + 1 in (1_000, 10_000):
            gc.collect()
            memory.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    after_few, after_many = memory
    assert after_many < after_few * 1.1
