"""What a step allocates and what stays behind: counted, never timed."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from types import FrameType

import pytest

from tests.core.harness import limits
from tidegate.core.plan import StepResult
from tidegate.core.presets import build_policy
from tidegate.core.request import Request
from tidegate.core.scheduler import REKEYS, Scheduler
from tidegate.core.slo import NO_SLO, Slo


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


def calls_of_a_step(policy: str, waiting: int) -> int:
    """Calls in 8 steps with 64 decoding, `waiting` waiting for a seat, and an arrival and an end in each."""
    scheduler = Scheduler(
        build_policy(policy), limits(num_blocks=20_000, max_num_seqs=64, max_num_batched_tokens=4096, block_size=64)
    )
    for n in range(64):
        scheduler.add(arrival(f"r{n}", n, outputs=4 + n), 0.0)
    while scheduler.running.prefilling or not scheduler.running.members:
        step(scheduler)
    for n in range(waiting):
        scheduler.add(arrival(f"w{n}", n), 0.0)
    step(scheduler)
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for n in range(8):
        now = 1.0 + 0.02 * n
        sys.setprofile(count)
        scheduler.add(arrival(f"n{n}", n), now)
        plan = scheduler.plan(now)
        scheduler.apply(plan, StepResult([1] * len(plan.emitting())), now)
        sys.setprofile(None)
        scheduler.take_events()
    return calls


def arrival(id: str, n: int, outputs: int = 100) -> Request:
    """One of five tenants, three classes and four promises, whose deadlines fall due in every step."""
    slo = (NO_SLO, Slo(ttft=1.2 + n % 997 / 5000), Slo(ttft=30.0, tpot=0.05), Slo(e2e=60.0))[n % 4]
    hashes = [n % 10, 10 + n % 100, 1000 + n]
    return Request(
        id,
        prompt_tokens=200,
        max_tokens=outputs,
        tenant=f"t{n % 5}",
        priority=n % 3 * 5,
        slo=slo,
        block_hashes=hashes,
    )


@pytest.mark.parametrize("policy", ["joint", "sla", "edf", "fair", "lcf", "mlfq", "prefix", "sglang-lpm"])
def test_a_step_costs_what_changes_under_every_order(policy: str) -> None:
    """With 30 times as many waiting. What falls due at once is spread over steps, so there is a most of it."""
    few, many = (calls_of_a_step(policy, waiting) for waiting in (1_000, 30_000))
    keys = REKEYS * 8 * 80 if policy in ("joint", "sla") else 0  # those that time changes: about 60 calls each
    assert many <= 2 * few + keys
