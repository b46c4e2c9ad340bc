"""The scenario tests, played on the real vLLM scheduler with our mixin; and on stock vLLM, where it fails them.

docs/vllm.md has the table: which scenarios apply, which stock fails, and why others do not apply.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.conftest import Reading, _text
from tests.vllm.scenario import run
from tidegate.simulate.scenario import parse

ELSEWHERE = {"ended", "trace", "costs", "overload", "burst", "crowded"}
"""Fixtures that drive our scheduler by hand; tests/vllm/test_door.py and bench/vllm_step_cost.py have twins."""

NOT_IN_VLLM = {
    "test_s08_slo_policy_is": "decodes do not take turns",
    "test_s34_the_cheaper_victim_goes_the_cheaper_way": "no swap",
    "test_s34_recompute_where_copies_are_slow_or_have_no_room": "no swap",
    "test_s34_a_busy_copy_engine_counts": "no swap",
}

BOTH = ("stock fcfs", "stock priority")
STOCK_FAILS = {
    "test_s01_urgent_request_takes_a_seat": BOTH,
    "test_s02_urgent_request_takes_blocks": BOTH,
    "test_s05_preempted_returns_before_one_that_never_ran": ("stock priority",),
    "test_s09_ageing_bounds_the_wait": ("stock priority",),
    "test_s10_tiny_prompts_pass_the_huge_one": BOTH,
    "test_s13_no_step_breaks_the_promise": BOTH,
    "test_s15_short_ones_join_the_first_steps": BOTH,
    "test_s19_headroom_saves_work": BOTH,
    "test_s20_never_fit_is_refused_at_the_door": BOTH,
    "test_s20_others_do_not_notice": BOTH,
    "test_s21_never_its_own_victim": BOTH,
    "test_s24_parked_ones_are_dropped_in_time": BOTH,
    "test_s27_spare_blocks_are_used": BOTH,
    "test_s30_little_is_recomputed": BOTH,
    "test_s31_the_oldest_never_parks": ("stock priority",),
    "test_s32_victim_costs_least": BOTH,
    "test_s39_warm_goes_before_cold": BOTH,
    "test_s44_the_rest_is_refused": BOTH,
    "test_s46_they_never_compute": BOTH,
    "test_s52_the_blocked_adapter_is_not_passed_for_ever": BOTH,
    "test_s53_the_published_bound": BOTH,
    "test_s55_the_quiet_one_is_not_hurt": BOTH,
}

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


@pytest.mark.parametrize(("name", "stock"), [(name, stock) for name, those in STOCK_FAILS.items() for stock in those])
def test_stock_fails(name, stock):
    """The expectation bites: vLLM by itself does not meet it."""
    with pytest.raises(AssertionError):
        TESTS[name](player(stock))


def test_the_table_names_every_scenario():
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    table = page.split("### Scenarios")[1]
    files = (Path(__file__).parents[1] / "scenarios" / "data").glob("S*.yaml")
    assert {f.name.split("-")[0] for f in files} == set(re.findall(r"\bS\d\d\b", table))
