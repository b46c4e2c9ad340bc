"""How long an output will be, and how long a step takes. Policies read these through their context."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Protocol

from tidegate.core.view import RequestView


class Predictor(Protocol):
    """Predicts output lengths in tokens and learns from requests that ended."""

    def output_tokens(self, r: RequestView) -> float:
        """Predicted outputs of `r` in all, at least 1."""
        ...

    def observe(self, r: RequestView, outputs: int) -> None:
        """`r` ended by itself after `outputs` tokens."""
        ...


class OraclePredictor:
    """Knows the truth (`Request.oracle_tokens`). For simulation; falls back to what was declared."""

    def output_tokens(self, r: RequestView) -> float:
        known = r.oracle_tokens if r.oracle_tokens is not None else r.max_tokens
        return float(known or 1)

    def observe(self, r: RequestView, outputs: int) -> None:
        """There is nothing to learn."""


class HistoryPredictor:
    """The `quantile` of recent outputs of the same tenant, class and prompt size (powers of two).

    Memory is bounded: `depth` lengths for each of the `keys` most recently used groups. A group
    without history answers for its class, then what was declared, then `default` tokens.
    """

    def __init__(self, quantile: float = 0.5, depth: int = 64, keys: int = 1024, default: int = 256) -> None:
        self.quantile = quantile
        self.depth = depth
        self.keys = keys
        self.default = default
        self._history: OrderedDict[tuple[str, str, int] | str, deque[int]] = OrderedDict()

    def output_tokens(self, r: RequestView) -> float:
        for key in self._groups(r):
            lengths = self._history.get(key)
            if lengths:
                ranked = sorted(lengths)
                predicted = ranked[min(len(ranked) - 1, int(self.quantile * len(ranked)))]
                break
        else:
            predicted = r.max_tokens if r.max_tokens is not None else self.default
        if r.max_tokens is not None:
            predicted = min(predicted, r.max_tokens)
        return float(max(1, predicted))

    def observe(self, r: RequestView, outputs: int) -> None:
        for key in self._groups(r):
            lengths = self._history.get(key)
            if lengths is None:
                lengths = self._history[key] = deque(maxlen=self.depth)
            else:
                self._history.move_to_end(key)
            lengths.append(outputs)
        while len(self._history) > self.keys:
            self._history.popitem(last=False)

    @staticmethod
    def _groups(r: RequestView) -> tuple[tuple[str, str, int], str]:
        return (r.tenant, r.slo_class, r.prompt_tokens.bit_length()), r.slo_class


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of service: `prefill_token` per prompt token, `decode` per output token."""

    prefill_token: float = 1e-4
    decode: float = 0.02

    def service(self, prefill_tokens: float, outputs: float) -> float:
        """Seconds to compute `prefill_tokens` and then `outputs` one by one, alone."""
        return prefill_tokens * self.prefill_token + outputs * self.decode
