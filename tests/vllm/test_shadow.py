"""Shadow mode decides and logs, and vLLM does exactly what it would have done alone."""

from __future__ import annotations

import json
import random

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tidegate.integrations.vllm import TidegateAsyncScheduler, TidegateScheduler
from tidegate.integrations.vllm.scripted import Engine, make_config, make_scheduler, run, whole


def shadowed(tmp_path, more: str = "") -> str:
    toml = tmp_path / "tidegate.toml"
    toml.write_text(
        f'[scheduler]\npolicy = "priority"\n{more}[vllm]\nmode = "shadow"\n'
        f'[observe]\ndecisions = "{tmp_path}/decisions.jsonl"\nrecords = "{tmp_path}/records.jsonl"\n'
    )
    return str(toml)


def played(cls, depth: int, toml: str | None, seed: int) -> tuple[list, Engine]:
    config = make_config(
        num_blocks=41, max_num_seqs=4, max_num_batched_tokens=64, asynchronous=depth > 1,
        additional={"tidegate": toml} if toml else {},
    )  # fmt: skip
    engine, rng, told = Engine(make_scheduler(cls, config), depth), random.Random(seed), []
    for n in range(150):
        if n < 60 and rng.random() < 0.5:
            prompt = [rng.randrange(2, 900) for _ in range(rng.randrange(1, 90))]
            priority = rng.choice((0, 10))
            engine.add(engine.request(f"r{n}", prompt, rng.randrange(1, 60), priority=priority))
        if rng.random() < 0.05 and engine.scheduler.requests:
            engine.abort(rng.choice(sorted(engine.scheduler.requests)))
        output = engine.step()
        if output is not None:
            told.append((dict(output.num_scheduled_tokens), set(output.preempted_req_ids or ())))
    run(engine)
    assert whole(engine.scheduler)
    return [*told, engine.streams, engine.ends], engine


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("stock", "ours", "depth"), [(Scheduler, TidegateScheduler, 1), (AsyncScheduler, TidegateAsyncScheduler, 2)]
)
def test_vllm_acts_as_if_it_were_alone(tmp_path, stock, ours, depth, seed):
    told, engine = played(ours, depth, shadowed(tmp_path), seed)
    assert told == played(stock, depth, None, seed)[0]
    scheduler = engine.scheduler.tidegate.scheduler
    assert not scheduler.has_work
    assert not scheduler.running.members
    engine.scheduler.tidegate.close()
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert {r["request_id"] for r in records} == set(engine.streams)
    assert all(r["output_tokens"] == len(engine.streams[r["request_id"]]) for r in records)


def test_what_would_have_been_is_logged(tmp_path):
    """Four long batch requests hold all seats; for an urgent one ours would have preempted, vLLM lets it wait."""
    config = make_config(
        num_blocks=200, max_num_seqs=4, max_num_batched_tokens=512, additional={"tidegate": shadowed(tmp_path)}
    )
    engine = Engine(make_scheduler(TidegateScheduler, config))
    for n in range(4):
        engine.add(engine.request(f"batch{n}", list(range(2, 60)), 100, priority=10))
    for _ in range(3):
        engine.step()
    engine.add(engine.request("urgent", list(range(2, 60)), 5))
    for _ in range(10):
        engine.step()
    assert engine.streams["urgent"] == []
    engine.scheduler.tidegate.close()
    lines = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    would = [line for line in lines if line["event"] == "would"]
    assert would[0]["admit"] == ["urgent"]
    assert would[0]["preempt"][0]["request_id"].startswith("batch")
    assert "seat wanted by urgent" in would[0]["preempt"][0]["reason"]
    assert (would[0]["vllm_admitted"], would[0]["vllm_preempted"]) == ([], [])
    assert len(would) < 10


def test_nobody_is_refused(tmp_path):
    config = make_config(
        num_blocks=200, max_num_seqs=1, max_num_batched_tokens=512,
        additional={"tidegate": shadowed(tmp_path, "max_waiting = 1\n")},
    )  # fmt: skip
    engine = Engine(make_scheduler(TidegateScheduler, config))
    for n in range(5):
        engine.add(engine.request(f"r{n}", list(range(2, 60)), 5))
    run(engine)
    assert all(len(stream) == 5 for stream in engine.streams.values())
    engine.scheduler.tidegate.close()
    lines = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    ends = [line for line in lines if line["event"] == "would end"]
    assert ends
    assert all(line["reason"].startswith("refused, queue_full") for line in ends)
