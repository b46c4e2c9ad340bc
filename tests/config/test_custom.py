"""Policies that an operator names as package.module:NAME: where they work, and how mistakes are told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidegate.config import resolve
from tidegate.core.policies.doors import QueueLimit
from tidegate.custom import find_policy
from tidegate.errors import ConfigError, InputError
from tidegate.simulate.scenario import parse
from tidegate.simulate.scenario_run import run

MODULE = '''
from dataclasses import dataclass, replace
from tidegate.core.policies.doors import QueueLimit
from tidegate.core.policies.orders import Fcfs
from tidegate.core.policy import Key
from tidegate.core.presets import Composition, Preset, build_policy

@dataclass(frozen=True)
class Last:
    """Last come, first served."""
    step: float = 1.0
    def tier(self, r, ctx):
        return 0
    def key(self, r, ctx):
        return Key(0, -self.step * r.seq)

@dataclass(frozen=True)
class Needy:
    step: float
    tier, key = Last.tier, Last.key

class Plain:
    tier = key = lambda self, r, ctx: 0

@dataclass(frozen=True)
class Half:
    def tier(self, r, ctx):
        return 0

PRESET = Preset("last first", Last, Composition(victim="least-work", share=0.25), {"max_num_batched_tokens": 512})
OF_PLAIN = Preset("no dataclass", Plain)
WITH_DOOR = Preset("a door", Last, Composition(max_waiting=3))
WHOLE = replace(build_policy("fcfs"), name="mine", order=Last())
GUARDED = replace(WHOLE, admit=QueueLimit(max_waiting=1))
NUMBER = 3
'''

SCENARIO = """
id: T
cfg: {kv: 64, budget: 64, max_seqs: 1}
reqs: [{id: A, t: 0, p: 16, o: 4}, {id: B, t: 1, p: 16, o: 4}, {id: C, t: 2, p: 16, o: 4}]
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules of this test, in the working directory."""
    texts = {"ownpolicy": MODULE, "broken": "1 / 0", "unmet": "import surely_not_there"}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in texts:
        sys.modules.pop(name, None)


def starts(named: str | None, **overrides: Any) -> list[str]:
    fates = run(parse(SCENARIO, {f"cfg.{k}": v for k, v in overrides.items()}), named).requests
    return sorted(fates, key=lambda name: fates[name].admitted_step or 0)


@pytest.mark.parametrize("name", ["Last", "PRESET", "WHOLE"])
def test_it_decides_in_a_scenario_and_in_a_configuration(name: str) -> None:
    assert starts(f"ownpolicy:{name}") == ["A", "C", "B"]
    policy = resolve({"scheduler": {"policy": f"ownpolicy:{name}"}}).build_policy()
    assert type(policy.order).__name__ == "Last"
    assert policy.admit == QueueLimit(max_waiting=1024), "the configuration's door"


def test_a_preset_composes_with_the_configuration() -> None:
    raw: dict[str, Any] = {
        "scheduler": {"policy": "ownpolicy:PRESET", "shed_hopeless": True},
        "policy": {"ownpolicy:PRESET": {"step": 2.0, "max_chunk": 7}},
        "aging": {"window": 5.0, "rate": 0.5},
    }
    config = resolve(raw)
    policy = config.build_policy()
    assert (policy.order.order.step, policy.order.window, policy.order.rate) == (2.0, 5.0, 0.5)  # type: ignore[attr-defined]
    assert (policy.budget.share, policy.budget.max_chunk) == (0.25, 7)  # type: ignore[attr-defined]
    assert policy.admit.sheds
    assert config.scheduler.max_num_batched_tokens == 512, "the limits of the preset, where the file says nothing"
    assert policy.name == "ownpolicy:PRESET"
    assert starts("ownpolicy:PRESET", params={"step": -1.0}) == ["A", "B", "C"]


def test_a_whole_policy_keeps_a_door_of_its_own() -> None:
    policy = resolve({"scheduler": {"policy": "ownpolicy:GUARDED"}}).build_policy()
    assert policy.admit == QueueLimit(max_waiting=1)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nowhere:X", "no module nowhere for a policy, neither installed nor in "),
        ("ownpolicy.sub:X", "no module ownpolicy.sub for a policy"),
        ("broken:X", "policy module broken cannot be loaded: ZeroDivisionError: division by zero"),
        ("unmet:X", "policy module unmet needs a module that is not there: surely_not_there"),
        ("ownpolicy:PRESETT", "module ownpolicy has no 'PRESETT'; did you mean PRESET?"),
        ("ownpolicy:NUMBER", "must be a Preset, an order class or a Policy, not int"),
        ("ownpolicy:Plain", "class Plain must be a dataclass"),
        ("ownpolicy:OF_PLAIN", "class Plain must be a dataclass"),
        ("ownpolicy:Half", "class Half is no order: it has no method key"),
        ("ownpolicy:", "'ownpolicy:' is not of the form package.module:NAME"),
        ("a b:X", "is not of the form"),
        (":X", "is not of the form"),
        ("fcsf", "unknown policy 'fcsf'; did you mean fcfs?"),
    ],
)
def test_a_wrong_name_is_told_in_one_sentence(name: str, told: str) -> None:
    for attempt in (find_policy, lambda name: resolve({"scheduler": {"policy": name}}), starts):
        with pytest.raises(InputError) as fault:
            attempt(name)
        if name != "fcsf":
            assert told in str(fault.value)
    with pytest.raises(ConfigError) as fault:
        find_policy(name)
    assert told in str(fault.value)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"policy": {"ownpolicy:WHOLE": {"share": 0.5}}}, "is a whole policy and has no parameters"),
        (
            {"scheduler": {"policy": "ownpolicy:WHOLE"}, "aging": {"window": 5.0}},
            'aging.window does nothing with scheduler.policy = "ownpolicy:WHOLE", whose order it does not change',
        ),
        (
            {"scheduler": {"policy": "ownpolicy:GUARDED", "max_waiting": 9}},
            'scheduler.max_waiting does nothing with scheduler.policy = "ownpolicy:GUARDED", which is whole, with a',
        ),
        (
            {"scheduler": {"policy": "ownpolicy:GUARDED"}, "classes": {"batch": {"max_waiting": 9}}},
            "classes.batch.max_waiting does nothing with scheduler.policy",
        ),
        ({"scheduler": {"policy": "ownpolicy:WITH_DOOR"}}, "a preset cannot set scheduler.max_waiting"),
        ({"scheduler": {"policy": "ownpolicy:Needy"}}, "needs its parameter 'step', which has no default"),
        ({"policy": {"ownpolicy:Last": {"stepp": 1.0}}}, "did you mean step"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(raw: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as fault:
        resolve(raw)
    assert told in str(fault.value)


def test_a_scenario_file_cannot_name_code() -> None:
    with pytest.raises(InputError, match=r"cfg\.policy names code"):
        starts(None, policy="ownpolicy:Last")
    assert "ownpolicy" not in sys.modules, "it was not even loaded"
    with pytest.raises(InputError, match=r"cfg\.params does nothing"):
        starts("ownpolicy:WHOLE", params={"share": 0.5})


def test_what_lies_in_the_working_directory_hides_nothing_that_is_installed(tmp_path: Path) -> None:
    (tmp_path / "hypothesis.py").write_text("X = 1", encoding="utf-8")
    sys.path[:] = [p for p in sys.path if p not in ("", str(tmp_path))]
    with pytest.raises(ConfigError, match="has no 'X'"):
        find_policy("hypothesis:X")
