"""The scenario tests, played on the real vLLM scheduler with our mixin."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.scenarios.conftest import Reading, _text
from tests.vllm.scenario import run
from tidegate.simulate.scenario import parse

_played = {}


@pytest.fixture
def play():
    """As tests/scenarios/conftest.py has it, in vLLM."""

    def play(name, policy=None, set=None, extra=(), without=(), steps=None, **doubles):
        key = (name, repr(policy), repr(set), repr(extra), repr(without), steps)
        if doubles:
            pytest.skip("a broken double of ours")
        if key not in _played:
            outcome = run(parse(_text(name, extra, without), set, source=name), policy, max_steps=steps)
            _played[key] = Reading(outcome)
        return _played[key]

    return play


for _path in sorted((Path(__file__).parents[1] / "scenarios").glob("test_*.py")):
    _module = importlib.import_module(f"tests.scenarios.{_path.stem}")
    for _name, _value in list(vars(_module).items()):
        if _name.startswith("test_") and any(m.name == "expects" for m in getattr(_value, "pytestmark", ())):
            globals()[f"{_name}"] = _value
