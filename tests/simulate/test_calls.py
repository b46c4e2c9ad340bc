"""What a simulated request costs in calls of functions: the same everywhere, unlike seconds (bench/sim_speed.py)."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from tidegate.core.limits import Limits
from tidegate.core.presets import build_policy
from tidegate.executors.sim.cost import CostModel
from tidegate.executors.sim.hardware import find_hardware
from tidegate.executors.sim.models import find_model
from tidegate.observe.records import Record
from tidegate.simulate.run import EngineSetup, simulate
from tidegate.simulate.traces import load_workload

POOL = Limits(num_blocks=26_000, block_size=16, max_num_seqs=256, max_num_batched_tokens=2048)


def calls(policy: str, requests: int) -> int:
    """Calls of Python functions in the simulation of so many requests of azure-conv."""
    load = load_workload(f"azure-conv:first={requests}")
    setup = EngineSetup(build_policy(policy), POOL, CostModel(find_hardware("h100"), find_model("llama-3.1-8b")))
    records: list[Record] = []
    n = 0

    def note(frame: FrameType, event: str, what: Any) -> None:
        nonlocal n
        n += event == "call"

    sys.setprofile(note)
    try:
        simulate(load, setup, records.extend)
    finally:
        sys.setprofile(None)
    assert len(records) == requests
    return n


@pytest.mark.parametrize(("policy", "most"), [("joint", 355), ("vllm-v1", 295)])
def test_a_request_costs_few_calls(policy: str, most: int) -> None:
    """The loop of a plain Python simulator is what it calls: 8,000 requests a second leave 0.35 us for each."""
    a_request = (calls(policy, 900) - calls(policy, 300)) / 600
    assert a_request <= most
