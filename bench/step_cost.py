"""What one step of the scheduler costs: plan + apply + delivery to every stream, nothing computed.

    python bench/step_cost.py [--json] [--policy fcfs --policy priority] [--steps 400] [--repeats 5]

Steady decode with `running` requests and `waiting` more, which lack seats or (`short_of`) KV blocks; with
churn, one request arrives and one ends in every step; a third of those who wait are of the class that runs, and so
is whoever arrives. Token ids are kept, tokens are delivered to one
queue a request; with `POLICY+ttft` every request was promised a first token, and time changes the keys of five of
them in every step. The repeats of all rows are interleaved; a row's figure is the least of its repeats'
medians, because noise only ever adds. The reference loop (append 256 ints to a list and sum it) is timed
in the same run, so that the figure travels.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections import deque
from itertools import count
from operator import attrgetter

from tidegate.core.events import Emitted, Finished
from tidegate.core.limits import Limits
from tidegate.core.plan import StepResult
from tidegate.core.presets import build_policy
from tidegate.core.request import Request
from tidegate.core.scheduler import Scheduler
from tidegate.core.slo import NO_SLO, Slo

PROMPT_TOKENS = 64
OUTPUTS = 256
RUNNING = (64, 256, 1024)
WAITING = (1_000, 10_000, 100_000)
REKEY_EVERY = 0.004
"""Seconds between two promises that become urgent, where requests have one (`POLICY+ttft`): five in every step."""


stream_of = attrgetter("handle")
deliver = deque(maxlen=0).extend  # runs an iterator for its effects


class Load:
    """A scheduler held at `running` decodes and `waiting` others, one step a call."""

    def __init__(self, policy: str, running: int, waiting: int, churn: bool, short_of: str = "seats") -> None:
        self.promises = policy.endswith("+ttft")
        policy = policy.removesuffix("+ttft")
        params = {"aging_window": 60.0} if policy == "priority" else {}
        peak = -(-(PROMPT_TOKENS + OUTPUTS) // 16)
        limits = Limits(
            num_blocks=running * 64 + 1024 if short_of == "seats" else running * peak,
            max_num_seqs=running if short_of == "seats" else 4 * running,
            max_num_batched_tokens=max(2048, 4 * running),
            headroom="watermark" if short_of == "seats" else "declared",
        )
        self.scheduler = Scheduler(build_policy(policy, params), limits)
        self.churn = False
        self.now = 0.0
        self.ids = count()
        self.next: list[Request] = []
        for i in range(running):
            self._arrive(self._made(1 + (i + 1) * OUTPUTS // running if churn else 10_000))
        while self.scheduler.waiting or self.scheduler.running.prefilling:
            self.step()
        for i in range(waiting):
            self._arrive(self._made(OUTPUTS, i % 3 * 5))
        self.churn = churn

    def step(self) -> None:
        """Plan, apply a fixed result, deliver each token to its stream's queue."""
        self.now += 0.02
        plan = self.scheduler.plan(self.now)
        self.scheduler.apply(plan, StepResult([7] * len(plan.emitting())), self.now)
        for event in self.scheduler.take_events():
            if type(event) is Emitted:
                deliver(map(list.append, map(stream_of, event.requests), event.tokens))
            elif type(event) is Finished and self.churn:
                self._arrive(self.next.pop() if self.next else self._made(OUTPUTS))

    def prepare(self, requests: int) -> None:
        """Make the requests that arrive in the next step: that is the work of whoever parses them, not of a step."""
        while len(self.next) < requests:
            self.next.append(self._made(OUTPUTS))

    def _arrive(self, r: Request) -> None:
        r.arrival = self.now
        self.scheduler.add(r, self.now)

    def _made(self, outputs: int, priority: int = 0) -> Request:
        n = next(self.ids)
        tokens = range(n * PROMPT_TOKENS, (n + 1) * PROMPT_TOKENS)
        slo = Slo(ttft=1.0 + n * REKEY_EVERY) if self.promises else NO_SLO
        r = Request(f"r{n}", token_ids=tokens, max_tokens=outputs, priority=priority, slo=slo, handle=[])
        self.scheduler.name_blocks(r)  # as the engine does before a request comes to its thread
        return r


def reference_loop_us() -> float:
    """Microseconds to append 256 ints to a list and sum it, median of 200."""
    times = []
    for _ in range(200):
        start = time.perf_counter_ns()
        values: list[int] = []
        for i in range(256):
            values.append(i)  # noqa: PERF402 - the appends are what is timed
        sum(values)
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3


def measure(load: Load, steps: int) -> float:
    """Median microseconds of a step."""
    times = []
    gc.collect()
    gc.freeze()
    for _ in range(steps):
        if load.churn:
            load.prepare(8)
        start = time.perf_counter_ns()
        load.step()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--json", action="store_true")
    args.add_argument("--policy", action="append")
    args.add_argument("--running", type=int, action="append")
    args.add_argument("--waiting", type=int, action="append")
    args.add_argument("--steps", type=int, default=400)
    args.add_argument("--repeats", type=int, default=5)
    options = args.parse_args()
    cases = [
        (policy, running, waiting, churn, short_of)
        for policy in options.policy or ("fcfs", "priority", "sjf")
        for running in options.running or RUNNING
        for waiting in options.waiting or WAITING
        for churn in (False, True)
        for short_of in (("seats", "kv") if churn else ("seats",))
    ]
    loads = {case: Load(*case) for case in cases}
    best = dict.fromkeys(cases, float("inf"))
    reference = float("inf")
    for _ in range(options.repeats):
        for case, load in loads.items():
            best[case] = min(best[case], measure(load, options.steps))
        reference = min(reference, reference_loop_us())
    rows = [
        {
            "policy": policy,
            "running": running,
            "waiting": waiting,
            "churn": churn,
            "short_of": short_of,
            "plan_apply_us_p50": round(best[policy, running, waiting, churn, short_of], 1),
            "reference_loop_us": round(reference, 2),
            "multiple_of_reference": round(best[policy, running, waiting, churn, short_of] / reference, 2),
        }
        for policy, running, waiting, churn, short_of in cases
    ]
    if options.json:
        machine = platform.processor() or platform.machine()
        print(json.dumps({"machine": machine, "python": platform.python_version(), "rows": rows}))
        return
    print(f"reference loop {reference:.2f} us")
    print("policy    running  waiting  churn  short of   us/step   x reference")
    for row in rows:
        print(
            f"{row['policy']:<9} {row['running']:>7} {row['waiting']:>8}  {row['churn']!s:<5}  {row['short_of']:<8}"
            f"{row['plan_apply_us_p50']:>9} {row['multiple_of_reference']:>12}"
        )


if __name__ == "__main__":
    main()
