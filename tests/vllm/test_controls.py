"""What vLLM does to all requests at once: pausing, and dropping the prefix cache under those who run."""

from __future__ import annotations

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.vllm.test_random import check
from tidegate.integrations.vllm import TidegateAsyncScheduler, TidegateScheduler
from tidegate.integrations.vllm.scripted import Engine, make_config, make_scheduler, run, token, whole

KINDS = [(TidegateScheduler, 1), (TidegateAsyncScheduler, 2)]


def busy(cls: type, depth: int) -> Engine:
    """Two run, three wait."""
    config = make_config(num_blocks=60, max_num_seqs=2, max_num_batched_tokens=64, asynchronous=depth > 1)
    engine = Engine(make_scheduler(cls, config), depth)
    for n in range(5):
        engine.add(engine.request(f"r{n}", list(range(2 + n, 40)), 20))
    for _ in range(4):
        engine.step()
    assert len(engine.scheduler.running) == 2
    return engine


def everybody_is_served(engine: Engine) -> None:
    run(engine)
    assert engine.streams == {f"r{n}": [token(f"r{n}", i) for i in range(20)] for n in range(5)}
    assert whole(engine.scheduler)
    assert not engine.scheduler.tidegate.scheduler.has_work


@pytest.mark.parametrize(("cls", "depth"), KINDS)
def test_while_new_ones_are_held_back_the_running_go_on(cls, depth):
    engine = busy(cls, depth)
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for _ in range(40):
        engine.step()
    assert {name: len(stream) for name, stream in engine.streams.items() if stream} == {"r0": 20, "r1": 20}
    check(engine)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    everybody_is_served(engine)


@pytest.mark.parametrize(("cls", "depth"), KINDS)
def test_nobody_goes_on_while_all_are_paused(cls, depth):
    engine = busy(cls, depth)
    while engine.in_flight:
        engine.update()
    before = {name: len(stream) for name, stream in engine.streams.items()}
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    for _ in range(5):
        engine.step()
    assert {name: len(stream) for name, stream in engine.streams.items()} == before
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    everybody_is_served(engine)


@pytest.mark.parametrize(("cls", "depth"), KINDS)
def test_the_cache_is_dropped_under_those_who_run(cls, depth):
    """As after new weights: whoever runs is computed again, in its turn, and loses or repeats no token."""
    engine = busy(cls, depth)
    while engine.in_flight:
        engine.update()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    check(engine)
    assert not engine.scheduler.running
    engine.step()
    assert {r.request_id for r in engine.scheduler.running} == {"r0", "r1"}
    everybody_is_served(engine)
