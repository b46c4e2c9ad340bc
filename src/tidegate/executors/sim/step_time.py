"""The cost model as the step model of policies: what a scheduler knows that has learned its engine well."""

from __future__ import annotations

from typing import ClassVar

from tidegate.executors.sim.cost import CostModel


class CostTime:
    """A `StepModel` (core/step_time.py) that is right, but for what no step model is told: how long the prefix before
    a chunk is. A chunk counts as if it began its prompt.

    chunk: tokens of one prefill step at most
    """

    __slots__ = (
        "_base_s", "_chunk", "_cost", "_decode", "_kv_token_s", "_p", "_pair_s", "_root", "_token_s", "_weights_p",
    )  # fmt: skip

    learns: ClassVar[bool] = False

    def __init__(self, cost: CostModel, chunk: int) -> None:
        self._cost = cost
        self._chunk = chunk
        self._base_s, self._token_s, self._pair_s = cost.base_s, cost.token_s, cost.pair_s
        self._kv_token_s, self._weights_p, self._p, self._root = cost.kv_token_s, cost.weights_p, cost.p, 1 / cost.p
        self._decode = cost.step_seconds(decodes=1)

    @property
    def decode(self) -> float:
        """Seconds of a step that decodes one request."""
        return self._decode

    def service(self, prefill_tokens: float, outputs: float) -> float:
        """Seconds to compute `prefill_tokens` and then `outputs` one by one, alone."""
        return self.prefill(prefill_tokens) + outputs * self._decode

    def prefill(self, tokens: float) -> float:
        """Seconds to compute `tokens` of a prompt alone, in chunks."""
        return self._cost.prefill_seconds(max(1, round(tokens)), 0, self._chunk) if tokens > 0 else 0.0

    def step(self, prefill_tokens: float, decodes: float, context_tokens: float = 0.0) -> float:
        """Seconds of one step: prompt tokens, decode tokens, and KV tokens that the decodes read."""
        # Asked several times in every plan, hence without further calls: `CostModel.step_seconds` of such a step.
        linear = (((prefill_tokens + decodes) * self._token_s) ** self._p + self._weights_p) ** self._root
        pairs = prefill_tokens * (prefill_tokens + 1) * 0.5
        return float(self._base_s + linear + context_tokens * self._kv_token_s + pairs * self._pair_s)

    def observe(self, prefill_tokens: int, decodes: int, context_tokens: int, seconds: float) -> None:
        """There is nothing to learn."""
