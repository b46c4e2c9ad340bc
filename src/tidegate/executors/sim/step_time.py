"""The cost model as the step model of policies: what a scheduler knows that has learned its engine well."""

from __future__ import annotations

from typing import ClassVar

from tidegate.executors.sim.step_cost import StepCost


class CostTime:
    """A `StepModel` (core/step_time.py) that is right, but for what no step model is told: how long the prefix before
    a chunk is. A chunk counts as if it began its prompt.

    chunk: tokens of one prefill step at most
    """

    __slots__ = ("_chunk", "_cost", "decode", "single", "step")

    learns: ClassVar[bool] = False

    def __init__(self, cost: StepCost, chunk: int) -> None:
        self._cost = cost
        self._chunk = chunk
        self.decode = self.single = cost.step_seconds(decodes=1)
        self.step = cost.estimate  # itself: asked several times in every plan

    def service(self, prefill_tokens: float, outputs: float) -> float:
        """Seconds to compute `prefill_tokens` and then `outputs` one by one, alone."""
        return self.prefill(prefill_tokens) + outputs * self.decode

    def prefill(self, tokens: float) -> float:
        """Seconds to compute `tokens` of a prompt alone, in chunks."""
        return self._cost.prefill_seconds(max(1, round(tokens)), 0, self._chunk) if tokens > 0 else 0.0

    def observe(self, prefill_tokens: int, decodes: int, context_tokens: int, seconds: float) -> None:
        """There is nothing to learn."""
