"""Who may wait: a client that is turned away gets an end and a reason, and vLLM keeps nothing of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.request import RequestStatus

from tidegate.integrations.vllm import TidegateScheduler
from tidegate.integrations.vllm.scripted import Engine, make_config, make_scheduler, run, whole


def engine_of(tmp_path, toml: str, **sizes) -> Engine:
    file = tmp_path / "tidegate.toml"
    file.write_text(toml)
    sizes = {"num_blocks": 101, "max_num_seqs": 2, "max_num_batched_tokens": 64} | sizes
    return Engine(make_scheduler(TidegateScheduler, make_config(additional={"tidegate": str(file)}, **sizes)))


def add(engine: Engine, name: str, prompt: int = 20, outputs: int = 10, **more) -> None:
    engine.add(engine.request(name, list(range(2, 2 + prompt)), outputs, **more))


@pytest.mark.expects("S43", 0)
@pytest.mark.expects("S48", 1)
def test_the_queue_has_an_end_and_everybody_an_answer(tmp_path):
    engine = engine_of(tmp_path, "[scheduler]\nmax_waiting = 3\n")
    for n in range(20):
        add(engine, f"r{n}")
    assert len(engine.scheduler.waiting) == 3
    run(engine)
    assert len(engine.ends) == 20
    refused = [name for name, end in engine.ends.items() if end.name == "ABORT"]
    assert len(refused) == 17
    assert all("queue_full: the queue is full" in str(engine.told[name].stop_reason) for name in refused)
    assert whole(engine.scheduler)
    assert not engine.scheduler.requests


def test_a_refusal_is_told_although_nothing_else_runs(tmp_path):
    engine = engine_of(tmp_path, "[scheduler]\n")
    add(engine, "r", xargs={"slo_class": "gold"})
    run(engine)
    assert engine.ends["r"].name == "ABORT"
    assert engine.told["r"].stop_reason == (
        "tidegate: unknown slo_class 'gold'; known classes are interactive, completion, offline, batch"
    )


@pytest.mark.expects("S46", 0)
def test_who_waits_too_long_ends(tmp_path):
    engine = engine_of(tmp_path, '[scheduler]\npolicy = "fcfs"\n', max_num_seqs=1)
    add(engine, "long", outputs=50)
    engine.step()
    add(engine, "late", xargs={"queue_ttl_ms": 0.001})
    engine.step()
    assert (engine.ends["late"].name, engine.told["late"].stop_reason) == ("ABORT", "tidegate: timeout")
    assert engine.streams["late"] == []
    run(engine)
    assert len(engine.streams["long"]) == 50
    assert whole(engine.scheduler)


@pytest.mark.expects("S20", 0)
def test_what_never_fits_is_refused_and_blocks_nobody(tmp_path):
    engine = engine_of(tmp_path, '[scheduler]\npolicy = "fcfs"\n', num_blocks=11)
    add(engine, "huge", prompt=400)
    add(engine, "small")
    run(engine)
    assert (engine.ends["huge"].name, engine.ends["small"].name) == ("ABORT", "LENGTH")
    assert "kv_capacity" in engine.told["huge"].stop_reason


def test_a_better_class_takes_the_place_of_the_worst_that_waits(tmp_path):
    engine = engine_of(tmp_path, "[scheduler]\nmax_waiting = 1\ndisplace_waiting = true\n", max_num_seqs=1)
    add(engine, "first", outputs=30)
    engine.step()
    add(engine, "batch", xargs={"slo_class": "batch"})
    add(engine, "chat", xargs={"slo_class": "interactive"})
    run(engine)
    assert {name: end.name for name, end in engine.ends.items()} == {
        "first": "LENGTH",
        "batch": "ABORT",
        "chat": "LENGTH",
    }
    assert engine.told["batch"].stop_reason == "tidegate: displaced"


def test_who_waits_for_a_grammar_takes_nobodys_place(tmp_path):
    """vLLM compiles grammars beside the loop; until one is there its request is passed by, and then it runs."""
    engine = engine_of(tmp_path, '[scheduler]\npolicy = "fcfs"\n', max_num_seqs=1)
    grammar = engine.request("grammar", list(range(2, 22)), 5)
    grammar.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    grammar.structured_output_request = SimpleNamespace(grammar=None)
    engine.add(grammar)
    add(engine, "plain")
    engine.step()
    assert [r.request_id for r in engine.scheduler.running] == ["plain"]
    assert len(engine.scheduler.waiting) == 1
    grammar.structured_output_request.grammar = object()
    while grammar.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        engine.step()
    grammar.structured_output_request = None
    run(engine)
    assert len(engine.streams["grammar"]) == 5


def test_a_grammar_that_does_not_compile_is_told(tmp_path):
    engine = engine_of(tmp_path, "[scheduler]\n")
    grammar = engine.request("grammar", list(range(2, 22)), 5)
    grammar.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    grammar.structured_output_request = SimpleNamespace(grammar=ValueError("no such rule"))
    engine.add(grammar)
    run(engine)
    assert engine.ends["grammar"].name == "ERROR"
    assert not engine.scheduler.requests
    assert not engine.scheduler.tidegate.scheduler.has_work


def test_a_session_goes_on(tmp_path):
    """Streaming input: between two inputs the session holds blocks and waits in vLLM's second queue."""
    engine = engine_of(tmp_path, '[scheduler]\npolicy = "fcfs"\n')
    first = engine.request("s", list(range(2, 22)), 3)
    first.resumable = True
    engine.add(first)
    for _ in range(5):
        engine.step()
    assert first.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    add(engine, "plain")
    more = engine.request("s", list(range(50, 60)), 4)
    more.resumable = True
    engine.scheduler.add_request(more)
    for _ in range(30):
        engine.step()
    assert len(engine.streams["s"]) == 7
    assert len(engine.streams["plain"]) == 10
    engine.scheduler.add_request(engine.request("s", [2], 1))
    engine.abort("s")
    run(engine)
    assert whole(engine.scheduler)
