"""Where nothing waits, ours decides what stock vLLM decides, step by step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tidegate.integrations.vllm import TidegateAsyncScheduler, TidegateScheduler
from tidegate.integrations.vllm.scripted import Engine, make_config, make_scheduler, whole

SYNC = (Scheduler, TidegateScheduler, 1)
ASYNC = (AsyncScheduler, TidegateAsyncScheduler, 2)
STEPS = 400


def decided(cls: type, depth: int, seed: int, toml: str | None, shared: bool = True, **sizes: int) -> list[Any]:
    """What every step computes, of whom, and with which blocks new to them; the streams and ends at last."""
    additional = {} if toml is None else {"tidegate": toml}
    config = make_config(asynchronous=depth > 1, additional=additional, **sizes)
    engine, rng = Engine(make_scheduler(cls, config), depth), random.Random(seed)
    prefixes = [[rng.randrange(2, 900) for _ in range(200)] for _ in range(3)]
    told: list[Any] = []
    for index in range(STEPS):
        for n in range(rng.choice((0, 0, 0, 1, 2)) if index < STEPS // 2 else 0):
            prompt = rng.choice(prefixes)[: rng.randrange(200) if shared else 0] + [
                rng.randrange(2, 900) for _ in range(rng.randrange(1, 120))
            ]
            outputs = rng.randrange(1, 40)
            stop = rng.randrange(1, 40)
            engine.add(engine.request(f"r{index}-{n}", prompt, outputs, stop_after=stop, priority=rng.choice((0, 5))))
        if rng.random() < 0.1 and engine.scheduler.running:
            engine.abort(rng.choice(sorted(r.request_id for r in engine.scheduler.running)))
        output = engine.step()
        if output is not None:
            blocks = [(r.req_id, r.block_ids, r.num_computed_tokens) for r in output.scheduled_new_reqs]
            cached = output.scheduled_cached_reqs
            grown = dict(zip(cached.req_ids, cached.new_block_ids, strict=True))
            told.append((dict(output.num_scheduled_tokens), blocks, grown, set(output.finished_req_ids)))
    assert whole(engine.scheduler)
    return [*told, engine.streams, {name: end.name for name, end in engine.ends.items()}]


AMPLE = {"num_blocks": 4000, "max_num_seqs": 128, "max_num_batched_tokens": 4096}


def configured(tmp_path: Path, policy: str, more: str = "") -> str:
    toml = tmp_path / "tidegate.toml"
    toml.write_text(f'[scheduler]\npolicy = "{policy}"\nmax_waiting = 10000\n{more}')
    return str(toml)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", ["fcfs", "vllm-v1"])
@pytest.mark.parametrize(("stock", "ours", "depth"), [SYNC, ASYNC])
def test_nothing_waits(tmp_path, stock, ours, depth, policy, seed):
    """The same tokens of the same requests in the same blocks, in every step."""
    assert decided(ours, depth, seed, configured(tmp_path, policy), **AMPLE) == decided(
        stock, depth, seed, None, **AMPLE
    )


@pytest.mark.parametrize("policy", ["priority", "sjf", "joint", "sla", "fair", "mlfq", "prefix"])
@pytest.mark.parametrize(("stock", "ours", "depth"), [SYNC, ASYNC])
def test_nothing_waits_in_any_order(tmp_path, stock, ours, depth, policy):
    """Orders that put arrivals of one step in another order give them other blocks, and nothing else."""
    toml = configured(tmp_path, policy, f'[policy.{policy}]\nbudget = "fixed"\n')
    told, expected = decided(ours, depth, 3, toml, False, **AMPLE), decided(stock, depth, 3, None, False, **AMPLE)
    assert [step[0] for step in told[:-2]] == [step[0] for step in expected[:-2]]
    assert told[-2:] == expected[-2:]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("stock", "ours", "depth"), [SYNC, ASYNC])
def test_prompts_that_share_a_step(tmp_path, stock, ours, depth, seed):
    """Also where prompts have to be cut and the seats are few, preset `vllm-v1` decides as vLLM does."""
    toml = configured(tmp_path, "vllm-v1", 'headroom = "none"\n')
    sizes = {"num_blocks": 4000, "max_num_seqs": 12, "max_num_batched_tokens": 128}
    assert decided(ours, depth, seed, toml, **sizes) == decided(stock, depth, seed, None, **sizes)
