"""docs/policies.md tells of every policy, and of each what it must."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tidegate.core.policies.restores import Cheaper, Recompute
from tidegate.core.policies.victims import LowestPriority, MostHeadroom, Newest
from tidegate.core.presets import DEFAULT_POLICY, PRESETS, build_policy, defaults

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
SECTIONS: dict[str, str] = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
OF_POLICIES = {title: text for title, text in SECTIONS.items() if "`" in title}


def test_every_policy_has_its_place_and_none_other() -> None:
    named = [name for title in OF_POLICIES for name in re.findall(r"`([\w-]+)`", title)]
    assert sorted(named) == sorted(PRESETS)
    assert f"`{DEFAULT_POLICY}` (the default)" in SECTIONS


@pytest.mark.parametrize("title", OF_POLICIES)
def test_each_says_when_and_what_for(title: str) -> None:
    text = OF_POLICIES[title]
    for part in ("**Use ", "**Bad at**", "**Source**", "**Window**"):
        assert part.rstrip() in text, part


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_of_an_order_are_told_with_their_defaults(name: str) -> None:
    (text,) = (text for title, text in OF_POLICIES.items() if f"`{name}`" in title)
    own = set(defaults(PRESETS[name])) - set(defaults(PRESETS["fcfs"]))
    assert {option for option in own if f"`{option}`" not in text and option not in FORMULAS} == set()


FORMULAS = {"quantum", "ratio", "w_in", "w_out"}  # told inside of formulas


def test_what_policies_are_composed_with_is_as_the_page_says() -> None:
    built = {name: build_policy(name) for name in PRESETS}
    near = {name for name, policy in built.items() if policy.victim == MostHeadroom(tiers=True)}
    adaptive = {name for name in PRESETS if PRESETS[name].defaults.budget == "adaptive"}
    assert near == adaptive == {"joint", "sla"}
    plain = {name for name, policy in built.items() if policy.victim == Newest()}
    assert plain == {"edf", "fastserve", "sarathi", "sglang-lpm", "vllm-v0", "vllm-v1", "vtc"}
    assert all(isinstance(built[name].restore, Recompute) for name in plain - {"vllm-v0"})
    for name in set(PRESETS) - plain:
        assert isinstance(built[name].restore, Cheaper)
        assert isinstance(built[name].victim, LowestPriority | MostHeadroom)
