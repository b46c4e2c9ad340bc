"""Plans become rows of the step log (observe/steplog.py), in a host that steps through them one by one."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.core.events import Event
from tidegate.core.plan import StepPlan
from tidegate.core.scheduler import Scheduler
from tidegate.engine.clock import Clock
from tidegate.observe.jsonlines import JsonLines
from tidegate.observe.steplog import StepRow


class PlanRows:
    """Folds one scheduler's plans, in the order of their steps; remembers how much KV is behind each slot."""

    def __init__(self, replica: str = "0") -> None:
        self.replica = replica
        self._kv: dict[int, int] = {}

    def row(self, plan: StepPlan, start_s: float, seconds: float, load: tuple[int, int, int]) -> StepRow:
        """The row of a plan that is not empty. `load` is running, waiting and free blocks after it was planned."""
        kv = self._kv
        for slot in plan.left:
            kv.pop(slot, None)
        for join in plan.joined:
            kv[join.slot] = join.cached
        each = 1 + plan.draft_tokens
        context = 0
        for slot in plan.decodes:
            context += kv.get(slot, 0) + each
            kv[slot] = kv.get(slot, 0) + 1  # whatever is drafted, one token a decode is kept
        prefill = 0
        for chunk in plan.chunks:
            kv[chunk.slot] = chunk.start + chunk.length
            prefill += chunk.length
        decodes = len(plan.decodes) * each
        return StepRow(start_s, seconds, prefill, decodes, context, *load, len(plan.preempted), self.replica)


class StepLog:
    """An engine `Observer` that writes a line for every step, as it was computed.

    `start_s` is the engine's clock less `seconds`, so it is late by the little that applying the result took. The
    load is what it is then: of two steps in the pipeline the one planned last has been counted already.
    """

    def __init__(self, out: JsonLines, scheduler: Scheduler, clock: Clock, replica: str = "0") -> None:
        self._out = out
        self._scheduler = scheduler
        self._clock = clock
        self._rows = PlanRows(replica)

    def events(self, events: Sequence[Event]) -> None:
        """Steps are about plans."""

    def step(self, plan: StepPlan, seconds: float) -> None:
        """One line for the step."""
        row = self._rows.row(plan, self._clock.now() - seconds, seconds, load_of(self._scheduler))
        self._out.write(row._asdict())


def load_of(scheduler: Scheduler) -> tuple[int, int, int]:
    """Who runs, who waits (parked requests aside) and the blocks that can be had, in constant time."""
    return len(scheduler.running), len(scheduler.waiting), scheduler.kv.available
