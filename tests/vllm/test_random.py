"""Random requests with aborts under KV pressure: vLLM's counts and ours agree, nobody is lost, the pool is whole."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from tidegate.core.request import Status
from tidegate.integrations.vllm import TidegateAsyncScheduler, TidegateScheduler
from tidegate.integrations.vllm.scripted import Engine, make_config, make_scheduler, token, whole
from tidegate.integrations.vllm.seats import VllmSeats

POLICIES = ("fcfs", "priority", "sjf", "joint", "sla", "edf", "fair", "lcf", "mlfq", "prefix", "vllm-v1", "sglang-lpm")
ENDED = {"STOP", "LENGTH", "ABORT"}


PREEMPTED: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def looked_at_one_by_one(monkeypatch):
    """Who decodes, what they read and who needs a block is what a look at each of them says, before every plan."""
    refresh = VllmSeats.refresh

    def checked(seats: VllmSeats) -> None:
        refresh(seats)
        handles = {r: r.handle for r in seats.members if r not in seats.prefilling}
        assert all(h.num_tokens + h.num_output_placeholders - h.num_computed_tokens <= 1 for h in handles.values())
        decodes = {
            r
            for r, h in handles.items()
            if not h.num_output_placeholders
            or r.prompt_tokens + h.max_tokens > h.num_computed_tokens + 2 - h.num_output_placeholders
        }
        assert set(seats.decodes.members) == decodes
        assert len(seats.decodes.members) == len(decodes)
        assert seats.decodes.context == sum(handles[r].num_computed_tokens + 1 for r in decodes)
        crossing = {r for r in decodes if not handles[r].num_computed_tokens % seats.kv.block_size}
        assert set(seats.decodes.crossers) == crossing
        assert len(seats.decodes.crossers) == len(crossing)

    monkeypatch.setattr(VllmSeats, "refresh", checked)


def check(engine: Engine) -> None:
    """What vLLM holds is what we think it holds."""
    scheduler, ours = engine.scheduler, engine.scheduler.tidegate.scheduler
    assert {r.id for r in ours.running.members} == {r.request_id for r in scheduler.running}
    assert all(r.status is Status.RUNNING for r in ours.running.members)
    assert ours._lifecycle.requests.keys() == scheduler.requests.keys()
    waiting = {r.request_id for r in scheduler.waiting}
    assert waiting == {r.request_id for r in scheduler.requests.values() if r.status != RequestStatus.RUNNING}
    assert len(scheduler.waiting) == len(waiting)
    for r in ours._lifecycle.requests.values():
        assert r.preemptions == r.handle.num_preemptions
        PREEMPTED[r.id] = max(PREEMPTED[r.id], r.preemptions)
        assert (r.lease is not None) == (r.handle.status == RequestStatus.RUNNING)
    pool = scheduler.kv_cache_manager.block_pool
    held = {b.block_id for r in ours.running.members for b in r.lease.table}
    assert len(held) == pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    assert ours.running.peak_blocks == sum(r.footprint for r in ours.running.members)


def drive(engine: Engine, rng: random.Random, requests: int, *, pressure: int) -> dict[str, int]:
    """Hand in so many requests, abort some wherever they are, run to the end; returns how each was to end."""
    declared, unlucky = {}, set()
    prefixes = [[rng.randrange(2, 900) for _ in range(96)] for _ in range(2)]
    added = 0
    for _ in range(100_000):
        while added < requests and len(engine.scheduler.requests) < pressure and rng.random() < 0.7:
            name = f"r{added}"
            prompt = rng.choice(prefixes)[: rng.randrange(97)] + [
                rng.randrange(2, 900) for _ in range(rng.randrange(1, 60))
            ]
            outputs, stop = rng.randrange(1, 40), rng.randrange(1, 60)
            xargs = {"tenant": rng.choice("abc"), "slo_class": rng.choice(("interactive", "offline", "batch"))}
            engine.add(
                engine.request(name, prompt, outputs, stop_after=stop, priority=rng.choice((0, 0, -1, 5)), xargs=xargs)
            )
            declared[name] = min(outputs, stop)
            added += 1
        live = sorted(engine.scheduler.requests)
        if live and rng.random() < 0.15:
            unlucky.add(gone := rng.choice(live))
            engine.abort(gone)
        check(engine)
        if not live and added == requests and not engine.in_flight:
            break
        if engine.scheduler.has_requests():
            engine.step()
        elif engine.in_flight:
            engine.update()
    assert whole(engine.scheduler)
    for name, outputs in declared.items():
        stream = engine.streams[name]
        assert stream[: outputs - 1] == [token(name, i) for i in range(min(len(stream), outputs - 1))]
        if name not in unlucky:
            assert engine.ends[name].name in ENDED
            assert len(stream) == outputs
    return declared


def engine_of(policy: str, asynchronous: bool, tmp: object, **sizes: int) -> Engine:
    toml = tmp / "tidegate.toml"
    toml.write_text(f'[scheduler]\npolicy = "{policy}"\nmax_waiting = 100000\n')
    config = make_config(asynchronous=asynchronous, additional={"tidegate": str(toml)}, **sizes)
    cls = TidegateAsyncScheduler if asynchronous else TidegateScheduler
    return Engine(make_scheduler(cls, config), depth=2 if asynchronous else 1)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_thousand_requests_under_pressure(tmp_path, asynchronous):
    PREEMPTED.clear()
    engine = engine_of("joint", asynchronous, tmp_path, num_blocks=61, max_num_seqs=16, max_num_batched_tokens=96)
    told = drive(engine, random.Random(7), 1000, pressure=40)
    assert len(told) == 1000
    assert PREEMPTED.total() > 20


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    policy=st.sampled_from(POLICIES),
    asynchronous=st.booleans(),
    blocks=st.integers(12, 80),
    seats=st.integers(1, 12),
    budget=st.integers(12, 200),
    pressure=st.integers(1, 40),
)
def test_whatever_comes(tmp_path, seed, policy, asynchronous, blocks, seats, budget, pressure):
    sizes = {"num_blocks": blocks + 1, "max_num_seqs": seats, "max_num_batched_tokens": budget}
    drive(engine_of(policy, asynchronous, tmp_path, **sizes), random.Random(seed), 60, pressure=pressure)
