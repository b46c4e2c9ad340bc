"""Ends requests at their true number of outputs where they declared more, as a stop token would."""

from __future__ import annotations

import heapq

from tidegate.core.plan import StepPlan
from tidegate.core.request import FinishReason, Request, Status


class TrueEnds:
    """A calendar of true ends by step. Nobody emits more than once a step, so nobody is looked at before it is due."""

    def __init__(self) -> None:
        self._steps = 0
        self._serial = 0
        self._due: list[tuple[int, int, Request]] = []

    def watch(self, r: Request) -> None:
        """`r` arrives."""
        if r.oracle_tokens is not None and r.max_tokens is not None and r.oracle_tokens < r.max_tokens:
            self._enter(r, r.oracle_tokens)

    @property
    def quiet(self) -> int | None:
        """In how many steps from now on nobody ends; None: nobody ever does."""
        return self._due[0][0] - self._steps - 1 if self._due else None

    def pass_steps(self, steps: int) -> None:
        """So many steps were taken in which nobody ends."""
        self._steps += steps

    def of(self, plan: StepPlan) -> list[tuple[int, FinishReason]]:
        """Who ends with the step that was just planned, as `StepResult.finished` has it."""
        self._steps += 1
        finished: list[tuple[int, FinishReason]] = []
        while self._due and self._due[0][0] <= self._steps:
            r = heapq.heappop(self._due)[-1]
            if r.status is Status.FINISHED:
                continue
            if r.oracle_tokens is not None and r.sampled < r.oracle_tokens:
                self._enter(r, r.oracle_tokens - r.sampled)
            else:
                finished.append((plan.emitting().index(r.slot), FinishReason.STOP))
        return finished

    def _enter(self, r: Request, outputs: int) -> None:
        self._serial += 1
        heapq.heappush(self._due, (self._steps + outputs, self._serial, r))
