"""When quiet steps end, and which of them may still be planned."""

from __future__ import annotations

from math import inf

import pytest

from tidegate.core.quiet import QuietSteps
from tidegate.executors.sim.cost import CostModel
from tidegate.executors.sim.executor import SimExecutor
from tidegate.executors.sim.hardware import find_hardware
from tidegate.executors.sim.models import find_model


def ends(until: float, last: float, steps: int = 50) -> list[float]:
    """The ends of quiet steps from 1.0 s on, asked for up to `until`, each to be planned before `last`."""
    executor = SimExecutor(CostModel(find_hardware("h100"), find_model("llama-3.1-8b")), 16)
    times: list[float] = []
    executor.extend(times, QuietSteps(steps, False, last, 4, 1000), 1.0, until)
    return times


WHOLE = ends(inf, inf)


@pytest.mark.parametrize("n", [0, 1, 17, 49])
@pytest.mark.parametrize("within", [0.0, 1e-5])
def test_the_first_that_ends_at_or_after_the_bound_is_the_last(n: int, within: float) -> None:
    bound = WHOLE[n] - within
    assert ends(inf, bound) == WHOLE[: n + 1]
    assert ends(bound, inf) == WHOLE[: n + 1 + (within == 0.0)]  # what ends at `until` is not after it
    assert ends(bound, bound) == WHOLE[: n + 1]
