"""A step in which nobody comes or goes costs as much for many as for few: no line of Python is run for each."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import tidegate
from tests.vllm.test_door import engine_of
from tidegate.core.step_time import LearnedStepTime
from tidegate.integrations.vllm.scripted import Engine

OURS = str(Path(tidegate.__file__).parent)
STEPS = 64
"""Steps that are counted: a few rounds of block boundaries and refits."""


def steady(tmp_path, policy: str, running: int, waiting: int) -> Engine:
    """So many decode, so many wait for a seat; nobody ends."""
    toml = f'[scheduler]\npolicy = "{policy}"\nmax_waiting = 1000000\n'
    engine = engine_of(tmp_path, toml, num_blocks=8000, max_num_seqs=running, max_num_batched_tokens=8192)
    for n in range(running + waiting):
        prompt = [2 + (n * 31 + i) % 900 for i in range(40)]
        engine.add(engine.request(f"r{n}", prompt, 1000, priority=0 if n < running else 5))
    for _ in range(60):
        engine.step()
    assert len(engine.scheduler.running) == running
    return engine


def lines(engine: Engine) -> int:
    """Lines of ours that are run in so many steps, a round of a comprehension counted as one; the engine's double
    aside."""
    counted = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal counted
        file = frame.f_code.co_filename
        if not file.startswith(OURS) or file.endswith("scripted.py"):
            return None
        counted += event == "line"
        return trace

    before = sys.gettrace()
    for _ in range(STEPS):
        sys.settrace(trace)
        output = engine.schedule()
        sys.settrace(before)
        result = engine.compute()
        sys.settrace(trace)
        engine.apply(output, result)
        sys.settrace(before)
    return counted


@pytest.mark.parametrize("policy", ["fcfs", "joint"])
def test_a_steady_step_does_nothing_for_each(tmp_path, policy):
    few, many = lines(steady(tmp_path, policy, 8, 10)), lines(steady(tmp_path, policy, 96, 400))
    assert many - few < STEPS * (96 - 8) / 4
    assert few / STEPS < 400


def test_the_step_model_learns_from_a_part_of_steps_that_are_alike(tmp_path):
    engine = steady(tmp_path, "fcfs", 8, 0)
    learned: list[int] = []

    class Noted(LearnedStepTime):
        def observe(self, prefill_tokens: int, decodes: int, context_tokens: int, seconds: float) -> None:
            learned.append(decodes)

    engine.scheduler.tidegate.scheduler.ctx.step_time = Noted()
    for _ in range(40):
        engine.step()
    assert learned == [8] * 10
    engine.abort("r0")
    engine.step()
    assert learned[10:] == [7]
