"""Scenarios with drawn numbers: written as a file would say them, parsed, and run.

A property draws sizes around a scenario so that its precondition holds by construction, and asserts what the scenario
expects in terms of those sizes. A mend that fits only the numbers of a file fails here.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import Phase, note, settings
from hypothesis import strategies as st

from tests.scenarios.conftest import Reading
from tidegate.core.scheduler import Scheduler
from tidegate.simulate.scenario import parse
from tidegate.simulate.scenario_run import run

few = settings(max_examples=20, phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink))

block_sizes = st.sampled_from([4, 8, 16, 32])
depths = st.sampled_from([1, 2])


class Behind(Scheduler):
    """The real scheduler, told of every step only once the next one is planned, as an engine of depth 2 does."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._computed: deque[tuple[Any, Any]] = deque()

    def plan(self, now: float) -> Any:
        plan = super().plan(now)
        if not plan and self._computed:
            super().apply(*self._computed.popleft(), now)
        return plan

    def apply(self, plan: Any, result: Any, now: float) -> None:
        self._computed.append((plan, result))
        if len(self._computed) > 1:
            super().apply(*self._computed.popleft(), now)


def play(
    cfg: Mapping[str, Any],
    reqs: Sequence[Mapping[str, Any]],
    policy: str | None = None,
    steps: int | None = None,
    depth: int = 1,
    **doubles: Any,
) -> Reading:
    """Run a scenario that says this; keys whose value is None are left out. Every run that ends, ends whole."""
    text = json.dumps({"id": "drawn", "cfg": _said(cfg), "reqs": [_said(r) for r in reqs]})
    note(f"depth {depth}: {text}")
    if depth > 1:
        doubles = {"scheduler": Behind, **doubles}
    outcome = run(parse(text), policy, max_steps=steps, **doubles)
    assert not outcome.stuck, outcome.steps[-1].held_back_by
    for name, stream in outcome.streams.items():
        assert stream == list(range(len(stream))), f"{name} lost, repeated or reordered a token"
    return Reading(outcome)


def blocks(tokens: int, size: int) -> int:
    """Blocks of `size` tokens that so many tokens take."""
    return -(-tokens // size)


def peak(prompt: int, outputs: int, size: int) -> int:
    """Blocks at the end of a request; its last token is never written."""
    return blocks(prompt + outputs - 1, size)


def _said(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if value is not None}
