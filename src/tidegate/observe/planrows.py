"""Plans become rows of the step log (observe/steplog.py), in a host that steps through them one by one."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.core.events import Event
from tidegate.core.plan import StepPlan
from tidegate.core.scheduler import Scheduler
from tidegate.engine.clock import Clock
from tidegate.observe.jsonlines import Lines
from tidegate.observe.steplog import StepRow, causal_pairs


class PlanRows:
    """Folds one scheduler's plans, in the order of their steps; remembers how much KV is behind each slot."""

    def __init__(self, replica: str = "0") -> None:
        self.replica = replica
        self._kv: dict[int, int] = {}

    def row(self, plan: StepPlan, start_s: float, seconds: float, *, waiting: int, free_blocks: int) -> StepRow | None:
        """The row of a plan that is not empty; None where it computes requests whose start was not seen.

        `waiting` and `free_blocks` are counts at about that time.
        """
        kv = self._kv
        for slot in plan.left:
            kv.pop(slot, None)
        for join in plan.joined:
            kv[join.slot] = join.cached
        if not all(slot in kv for slot in plan.decodes):
            return None
        each = 1 + plan.draft_tokens
        context = 0
        for slot in plan.decodes:
            context += kv[slot] + each
            kv[slot] += 1  # whatever is drafted, one token a decode is kept
        prefill = before = pairs = 0
        for chunk in plan.chunks:
            kv[chunk.slot] = chunk.start + chunk.length
            prefill += chunk.length
            before += chunk.start
            pairs += causal_pairs(chunk.start, chunk.length)
        return StepRow(
            start_s=start_s,
            seconds=seconds,
            prefill_tokens=prefill,
            decodes=len(plan.decodes) * each,
            context_tokens=context,
            running=len(kv),
            waiting=waiting,
            free_blocks=free_blocks,
            preempted=len(plan.preempted),
            replica=self.replica,
            prefill_context=before,
            prefill_pairs=pairs,
        )


class StepLog:
    """An engine `Observer` that writes a line for every step as it was computed.

    `start_s` is the engine's clock less `seconds`, so it is late by the little that applying the result took; who
    waits and what is free is counted then, too. Steps of requests that began before the log did are left out.
    """

    def __init__(self, out: Lines, scheduler: Scheduler, clock: Clock, replica: str = "0") -> None:
        self._out = out
        self._scheduler = scheduler
        self._clock = clock
        self._rows = PlanRows(replica)

    def events(self, events: Sequence[Event]) -> None:
        """Steps are about plans."""

    def step(self, plan: StepPlan, seconds: float) -> None:
        """One line for the step."""
        started, scheduler = self._clock.now() - seconds, self._scheduler
        waiting, free = len(scheduler.waiting), scheduler.kv.available
        row = self._rows.row(plan, started, seconds, waiting=waiting, free_blocks=free)
        if row is not None:
            self._out.write(row._asdict())
