"""Chunks where memory is what others wait for: as large as the decodes that hold it can spare."""

from __future__ import annotations

import pytest

from tests.core.harness import Run, limits, request
from tidegate.core.decode_load import DecodeLoad
from tidegate.core.plan import StepResult
from tidegate.core.policies.adaptive import AdaptiveBudget
from tidegate.core.policy import PolicyContext
from tidegate.core.predict import HistoryPredictor, StepTime
from tidegate.core.presets import build_policy
from tidegate.core.scheduler import Scheduler
from tidegate.core.slo import NO_SLO, Slo
from tidegate.core.view import StepView


class Roofline(StepTime):
    """A step takes 12 ms, in which 100 tokens are computed for nothing, and 0.1 ms for each token beyond them."""

    def step(self, prefill_tokens: float, decodes: float, context_tokens: float = 0.0) -> float:
        return 0.012 + 1e-4 * max(0.0, prefill_tokens + decodes - 100)


CTX = PolicyContext(HistoryPredictor(), Roofline())
BUDGET = AdaptiveBudget(floor=25)


class Holding:
    """Decodes, and the KV tokens that they hold."""

    def __init__(self, decodes: int, context: int) -> None:
        self._decodes = decodes
        self.context = context

    def __len__(self) -> int:
        return self._decodes


def step_of(context: int, crowd: int | None) -> StepView:
    return StepView(0.0, 800, 0, DecodeLoad((Holding(10, context),)), crowd=crowd)


@pytest.mark.parametrize(
    ("context", "crowd", "tokens"),
    [
        (100_000, 4000, 100),  # decodes hold the memory: what they spare, and not a token more
        (100_000, None, 800),  # nobody waits for memory
        (0, 4000, 800),  # the prompt is all that holds any
        (4000, 100_000, 800),  # unfinished prompts hold most of it: they had better be done soon
    ],
)
def test_a_chunk_costs_the_least_memory(context: int, crowd: int | None, tokens: int) -> None:
    assert BUDGET.chunk(request("r", 4000, 9), 4000, 800, step_of(context, crowd), False, CTX) == tokens


def test_who_was_promised_something_is_not_held_up() -> None:
    r = request("r", 4000, 9, slo=Slo(ttft=9.0))
    assert BUDGET.chunk(r, 4000, 800, step_of(100_000, 4000), True, CTX) == 800


def test_what_others_were_given_counts() -> None:
    r = request("r", 4000, 9)
    assert BUDGET.chunk(r, 4000, 740, step_of(100_000, 4000), True, CTX) == 40, "60 of 800 are gone"
    assert BUDGET.chunk(r, 4000, 500, step_of(100_000, 4000), True, CTX) == 1, "a full step: but it gets on"


def test_nothing_is_spared_where_every_token_takes_as_long_as_the_first() -> None:
    straight = PolicyContext(HistoryPredictor(), StepTime(prefill_token=1e-4, decode=0.01))
    assert BUDGET.chunk(request("r", 4000, 9), 4000, 800, step_of(100_000, 4000), True, straight) == 800


def chunks_once_memory_is_free(waiting: int) -> list[int]:
    """Of the fourth prompt, of which memory holds three, in the first steps after one of these has gone."""
    made = limits(num_blocks=200, max_num_batched_tokens=1024, prefix_caching=False)
    scheduler = Scheduler(build_policy("joint", {"floor": 25}), made, PolicyContext(HistoryPredictor(), Roofline()))
    chunks: list[int] = []
    for n in range(3 + waiting):
        scheduler.add(request(f"r{n}", 1000, 200), 0.0)
    for step in range(9):
        if step == 5:
            scheduler.abort("r0", 5.0)
        plan = scheduler.plan(float(step))
        if step >= 5:
            chunks += [chunk.length for chunk in plan.chunks]
        scheduler.apply(plan, StepResult([1] * len(plan.emitting())), float(step))
    return chunks


def test_the_planner_tells_when_memory_is_short() -> None:
    assert chunks_once_memory_is_free(waiting=2) == [127] * 4, "two decodes hold twice as much as the prompt"
    assert chunks_once_memory_is_free(waiting=1) == [127, 873], "nobody waits any more"


@pytest.mark.parametrize("depth", [1, 2])
def test_all_end_where_memory_is_short(depth: int) -> None:
    made = limits(num_blocks=40, max_num_batched_tokens=256)
    ctx = PolicyContext(HistoryPredictor(), Roofline())
    run = Run(Scheduler(build_policy("joint", {"floor": 25}), made, ctx), depth)
    run.add(*(request(f"r{n}", 150 + n, 20, slo=Slo(ttft=9.0) if n % 3 == 0 else NO_SLO) for n in range(12)))
    run.until_idle()
    assert len(run.received) == 12
    assert all(tokens == list(range(20)) for tokens in run.received.values())
