"""Options that do nothing: each row of the table is right, complete with what would have to change, and told."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import pytest
import yaml

from tidegate.config import resolve, resolve_each, to_toml
from tidegate.config.idle import CLASSES, SCHEDULING, SECTIONS, WITHOUT_CLASSES, WITHOUT_SCORE
from tidegate.config.resolve import _filled_in
from tidegate.core.policies.orders import Aged
from tidegate.core.policy import PolicyContext
from tidegate.core.predict import OraclePredictor, StepTime
from tidegate.core.presets import PRESETS, build_policy
from tidegate.core.request import Request
from tidegate.errors import ConfigError
from tidegate.simulate import scenario_run
from tidegate.simulate.scenario import parse
from tidegate.simulate.scenario_run import run

POOL: dict[str, Any] = {"kv": 40, "budget": 64, "max_seqs": 6}
TIGHT = {**POOL, "headroom": "none"}
SWAP = {"host_blocks": 64, "cost": {"copy_block_us": 100}}

# What does nothing: the configuration around it, its place in a scenario, two values of it that make no difference,
# and what makes them differ.
CASES: dict[str, tuple[dict[str, Any], str, tuple[Any, Any], dict[str, Any]]] = {
    "watermark": ({**TIGHT, "policy": "fcfs"}, "cfg.watermark", (0.01, 0.4), {"headroom": "watermark"}),
    "quantile's watermark": ({**POOL, "headroom": "quantile"}, "cfg.watermark", (0.01, 0.4), {"headroom": "watermark"}),
    "bypass_bound": (
        {**TIGHT, "policy": "vllm-v1"},
        "cfg.limits.bypass_bound",
        (0, 60),
        {"params": {"backfill": True}},
    ),
    "nearly_done": ({**TIGHT, "policy": "vllm-v1"}, "cfg.limits.nearly_done", (0, 60), {"params": {"spare": True}}),
    "max_prefill_steps": (
        {**TIGHT, "policy": "fcfs"},
        "cfg.params.max_prefill_steps",
        (1, 9),
        {"mixed_batches": False},
    ),
    "displace": ({**TIGHT, "policy": "fcfs"}, "cfg.params.displace", (False, True), {"policy": "priority"}),
    "displace under sjf": ({**TIGHT, "policy": "sjf"}, "cfg.params.displace", (False, True), {"policy": "joint"}),
    "displace_waiting": (
        {**TIGHT, "policy": "edf", "max_waiting": 3},
        "cfg.params.displace_waiting",
        (False, True),
        {"policy": "priority"},
    ),
    "aging_window": ({**TIGHT, "policy": "fcfs"}, "cfg.params.aging_window", (None, 1.0), {"policy": "priority"}),
    "aging_rate": (
        {**TIGHT, "policy": "priority", "params": {"aging_window": 9.0}},
        "cfg.params.aging_rate",
        (0.1, 9.0),
        {"policy": "sjf"},
    ),
    "aging_rate of levels": (
        {**TIGHT, "policy": "mlfq", "params": {"aging_window": 9.0}},
        "cfg.params.aging_rate",
        (0.1, 9.0),
        {"policy": "sjf"},
    ),
    "host_blocks": (
        {**TIGHT, "policy": "vllm-v1", "cost": {"prefill_tok_us": 900}},
        "cfg.host_blocks",
        (0, 64),
        {"params": {"restore": "swap"}},
    ),
    "disk_blocks": (
        {**TIGHT, "policy": "vllm-v1", "cost": {"prefill_tok_us": 900}},
        "cfg.disk_blocks",
        (0, 64),
        {"params": {"restore": "swap"}},
    ),
    "restore": ({**TIGHT, "policy": "fcfs"}, "cfg.params.restore", ("recompute", "swap"), SWAP),
    "w_cache": (
        {**POOL, "policy": "joint", "prefix_caching": False},
        "cfg.params.w_cache",
        (0.0, 90.0),
        {"prefix_caching": True},
    ),
    "beta": (
        {**POOL, "policy": "prefix", "prefix_caching": False},
        "cfg.params.beta",
        (1.0, 90000.0),
        {"prefix_caching": True},
    ),
    "age": (
        {**POOL, "policy": "sglang-lpm", "prefix_caching": False},
        "cfg.params.age",
        (0.0, 900.0),
        {"prefix_caching": True},
    ),
    "policy": ({**POOL, "prefix_caching": False}, "cfg.policy", ("vllm-v1", "sglang-lpm"), {"prefix_caching": True}),
    "hold_pending": (
        {**POOL, "policy": "fcfs", "prefix_caching": False},
        "cfg.params.hold_pending",
        (False, True),
        {"prefix_caching": True},
    ),
    "partial_prefills": ({**TIGHT, "policy": "fcfs"}, "cfg.partial_prefills", (7, 90), {"max_seqs": 20, "budget": 900}),
    "stall_steps": (
        {**POOL, "headroom": "declared", "policy": "priority"},
        "cfg.limits.stall_steps",
        (0, 9),
        {"headroom": "none"},
    ),
    **{
        f"{place} with nobody to evict": (
            {**POOL, "headroom": "declared", "policy": "sjf", **around},
            f"cfg.{place}",
            values,
            {"headroom": "none"},
        )
        for place, values, around in (
            ("limits.resume_span", (0, 500), {}),
            ("limits.max_preemptions", (0, 9), {}),
            ("limits.nearly_done", (0, 60), {}),
            ("params.victim", ("newest", "least-work"), {}),
            ("params.spare", (False, True), {}),
            ("params.restore", ("recompute", "swap"), SWAP),
            ("host_blocks", (0, 64), {"params": {"restore": "swap"}}),
        )
    },
    "max_chunk": ({**TIGHT, "policy": "fcfs"}, "cfg.params.max_chunk", (65, 900), {"budget": 100}),
    "floor": (
        {**TIGHT, "policy": "joint", "step_ms": "10 + 1*tokens"},
        "cfg.params.floor",
        (65, 900),
        {"budget": 900},
    ),
}


def workload(seed: int) -> list[dict[str, Any]]:
    """Requests of three classes and tenants, some with a common prefix, more than the pool holds at once."""
    draw = random.Random(seed)
    return [
        {
            "id": f"R{n}",
            "t": draw.randrange(60),
            "p": draw.randrange(40, 200),
            "o": draw.randrange(4, 90),
            "prio": draw.randrange(3),
            "tenant": f"t{draw.randrange(3)}",
            **({"share": 32} if draw.random() < 0.4 else {}),
            **({"slo": {"ttft": 40, "tpot": 0.03}} if draw.random() < 0.5 else {}),
        }
        for n in range(24)
    ]


def played(seed: int, cfg: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    text = yaml.safe_dump({"id": "T", "cfg": cfg, "reqs": shared(workload(seed))})
    told = run(parse(text, {place: value}), max_steps=1500).to_json()
    return {**told, "policy": ""}


def shared(reqs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those with a prefix as families of two, because the members of a family share it."""
    return [{**r, "x": 2} if "share" in r else r for r in reqs]


@pytest.mark.parametrize("name", CASES)
def test_what_is_refused_does_nothing_and_what_would_have_to_change_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, place, values, companion = CASES[name]
    with pytest.raises(ConfigError, match=rf"^{place} does nothing (with|without|above) "):
        played(1, cfg, place, values[1])
    active = {**cfg, **companion}
    if "params" in cfg and "params" in companion:
        active["params"] = {**cfg["params"], **companion["params"]}
    played(1, active, place, values[1])
    monkeypatch.setattr(scenario_run, "_refuse_idle", lambda *_: None)
    for seed in range(4):
        assert played(seed, cfg, place, values[0]) == played(seed, cfg, place, values[1])
    assert any(played(seed, active, place, values[0]) != played(seed, active, place, values[1]) for seed in range(8))
