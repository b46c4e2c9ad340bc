"""The scenario tests, played on the real vLLM scheduler with our mixin; and on stock vLLM, where it fails them.

docs/vllm.md has the table: which scenarios apply, which stock fails, and why others do not apply.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.conftest import Reading, _text
from tests.vllm.scenario import run
from tidegate.simulate.scenario import parse

ELSEWHERE = {"ended", "trace", "costs", "overload", "burst"}
"""Fixtures that drive our scheduler by hand; tests/vllm/test_door.py and bench/vllm_step_cost.py have twins."""

NOT_IN_VLLM = {
    "test_s08_slo_policy_is": "decodes do not take turns",
    "test_s34_the_cheaper_victim_goes_the_cheaper_way": "no swap",
    "test_s34_recompute_where_copies_are_slow_or_have_no_room": "no swap",
    "test_s34_a_busy_copy_engine_counts": "no swap",
}

STOCK_FAILS: dict[str, str] = {}

_played: dict[Any, Reading] = {}


def player(stock: str | None = None) -> Callable[..., Reading]:
    """`play` of tests/scenarios/conftest.py, in vLLM; with `stock` whatever the policy is to be."""

    def play(name, policy=None, set=None, extra=(), without=(), steps=None, **doubles):
        if doubles:
            pytest.skip("a broken double of our own scheduler")
        policy = stock or policy
        key = (name, repr(policy), repr(set), repr(extra), repr(without), steps)
        if key not in _played:
            outcome = run(parse(_text(name, extra, without), set, source=name), policy, max_steps=steps)
            _played[key] = Reading(outcome)
        return _played[key]

    return play


@pytest.fixture
def play():
    return player()


def expectations() -> Iterator[tuple[str, Any]]:
    """Every test of a line of a scenario's `expect` that can be played."""
    for path in sorted((Path(__file__).parents[1] / "scenarios").glob("test_*.py")):
        for name, test in vars(importlib.import_module(f"tests.scenarios.{path.stem}")).items():
            marks = getattr(test, "pytestmark", ())
            if not name.startswith("test_") or not any(mark.name == "expects" for mark in marks):
                continue
            if not ELSEWHERE & set(inspect.signature(test).parameters) and name not in NOT_IN_VLLM:
                yield name, test


TESTS = dict(expectations())
globals().update(TESTS)
