"""The cost model as the step model of policies: what a scheduler knows that has learned its engine well."""

from __future__ import annotations

from typing import ClassVar

from tidegate.executors.sim.step_cost import StepCost


class CostTime:
    """A `StepModel` (core/step_time.py) that is right, but for what no step model is told: how long the prefix before
    a chunk is. A chunk counts as if it began its prompt.

    chunk: tokens of one prefill step at most
    """

    __slots__ = ("_chunk", "_cost", "_decode")

    learns: ClassVar[bool] = False

    def __init__(self, cost: StepCost, chunk: int) -> None:
        self._cost = cost
        self._chunk = chunk
        self._decode = cost.step_seconds(decodes=1)

    @property
    def decode(self) -> float:
        """Seconds of a step that decodes one request."""
        return self._decode

    @property
    def single(self) -> float:
        """The same."""
        return self._decode

    def service(self, prefill_tokens: float, outputs: float) -> float:
        """Seconds to compute `prefill_tokens` and then `outputs` one by one, alone."""
        return self.prefill(prefill_tokens) + outputs * self._decode

    def prefill(self, tokens: float) -> float:
        """Seconds to compute `tokens` of a prompt alone, in chunks."""
        return self._cost.prefill_seconds(max(1, round(tokens)), 0, self._chunk) if tokens > 0 else 0.0

    def step(self, prefill_tokens: float, decodes: float, context_tokens: float = 0.0) -> float:
        """Seconds of one step: prompt tokens, decode tokens, and KV tokens that the decodes read."""
        return self._cost.estimate(prefill_tokens, decodes, context_tokens)

    def observe(self, prefill_tokens: int, decodes: int, context_tokens: int, seconds: float) -> None:
        """There is nothing to learn."""
