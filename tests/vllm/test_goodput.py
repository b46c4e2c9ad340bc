"""The load of `bench/vllm_goodput.py` on a virtual clock, on vLLM's own scheduler: what the order alone is worth.

A step takes 35.5 ms, 0.215 ms more for each prompt token, 0.85 ms for each decode, and 12 ms where it computes any
prompt: a small model on two cores.
"""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from bench.vllm_goodput import CLASSES, SYSTEMS, TOML, arrivals, summary
from tidegate.integrations.vllm import TidegateScheduler
from tidegate.integrations.vllm.attach import attach
from tidegate.integrations.vllm.scripted import Engine, make_config, make_scheduler

SECONDS = 40.0


def seconds_of(prefill: int, decodes: int) -> float:
    return 0.0355 + 0.000215 * prefill + 0.00085 * decodes + 0.012 * (prefill > 0)


def played(system: str, rate: float, toml: str) -> tuple[dict, int]:
    """What the clients of a system saw, and how often stock or ours preempted."""
    clock, rng = [0.0], random.Random(2)

    class Clocked(TidegateScheduler):
        def _make_host(self):
            return attach(self, lambda: clock[0], lambda: clock[0])

    config = make_config(
        num_blocks=110, block_size=32, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512,
        additional={"tidegate": toml} if system == "tidegate" else {},
        policy="priority" if system == "stock priority" else "fcfs",
    )  # fmt: skip
    engine = Engine(make_scheduler(Clocked if system == "tidegate" else Scheduler, config))
    coming = list(reversed(arrivals(rate, SECONDS)))
    kinds, times = {}, defaultdict(list)
    preempted = 0
    while coming or engine.scheduler.has_requests():
        if not engine.scheduler.has_requests():
            clock[0] = max(clock[0], coming[-1][0])
        while coming and coming[-1][0] <= clock[0]:
            at, kind = coming.pop()
            tokens, outputs, priority, *_ = CLASSES[kind]
            name, prompt = f"r{len(kinds)}", [rng.randrange(2, 900) for _ in range(tokens)]
            kinds[name] = (at, kind)
            xargs = {"slo_class": kind}
            engine.add(engine.request(name, prompt, outputs, priority=priority, arrival=at, xargs=xargs))
        before = {name: len(engine.streams[name]) for name in kinds}
        output = engine.schedule()
        preempted += len(output.preempted_req_ids or ())
        decodes = sum(n == 1 and before[name] > 0 for name, n in output.num_scheduled_tokens.items())
        clock[0] += seconds_of(output.total_num_scheduled_tokens - decodes, decodes)
        engine.update()
        for name, had in before.items():
            times[name] += [clock[0]] * (len(engine.streams[name]) - had)
    seen = []
    for name, (at, kind) in kinds.items():
        tokens, own = CLASSES[kind][0], times[name]
        in_time = sum(t <= SECONDS for t in own) + tokens * (own[0] <= SECONDS)
        seen.append(
            {
                "class": kind,
                "ttft": own[0] - at,
                "e2e": own[-1] - at,
                "end": own[-1],
                "tokens": tokens + len(own),
                "in_time": in_time,
            }
        )
    return summary(seen, SECONDS), preempted


@pytest.mark.parametrize("rate", [1.5])
def test_the_urgent_come_first_and_little_is_lost(tmp_path, rate):
    (tmp_path / "t.toml").write_text(TOML)
    told = {system: played(system, rate, str(tmp_path / "t.toml")) for system in SYSTEMS}
    (fcfs, gave_way), (priority, _), (ours, _) = (told[system] for system in SYSTEMS)
    assert gave_way > 20  # stock's own, for want of memory
    assert ours["interactive"]["ttft_p99_s"] * 3 <= fcfs["interactive"]["ttft_p99_s"]
    assert ours["interactive"]["ttft_p99_s"] <= 1.1 * priority["interactive"]["ttft_p99_s"]
    assert ours["interactive"]["attained"] >= priority["interactive"]["attained"]
    assert ours["offline"]["attained"] >= priority["offline"]["attained"]
    assert ours["tokens_per_s"] >= 0.95 * fcfs["tokens_per_s"]
    assert ours["tokens_per_s_loaded"] >= 0.95 * fcfs["tokens_per_s_loaded"]
    assert ours["batch"]["attained"] > priority["batch"]["attained"]
