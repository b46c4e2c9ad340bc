"""What a simulation asks of a cost model: how long steps take, of one model on one kind of hardware."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from math import inf

from tidegate.errors import InputError
from tidegate.executors.sim.hardware import Hardware
from tidegate.executors.sim.models import ModelShape


class StepCost(ABC):
    """Seconds of steps. `step_seconds` says it all; a model that can answer the rest faster overrides it.

    name:          what results call the cost model
    kv_shares:     over how many GPUs, each with a link of its own, a token's KV is spread
    host_overhead: seconds that the host adds to each step (scheduling, launching, sampling)

    Raises InputError for a `tp` that cannot share the heads evenly.
    """

    __slots__ = ("hardware", "host_overhead", "kv_shares", "model", "name", "tp")

    def __init__(
        self, name: str, hardware: Hardware, model: ModelShape, tp: int = 1, host_overhead: float = 0.0
    ) -> None:
        if tp < 1 or model.heads % tp or (model.kv_heads % tp and tp % model.kv_heads):
            raise InputError(
                f"{model.name} with {model.heads} heads and {model.kv_heads} KV heads cannot be spread over {tp} GPUs"
            )
        self.name = name
        self.hardware = hardware
        self.model = model
        self.tp = tp
        self.kv_shares = min(tp, model.kv_heads)
        self.host_overhead = host_overhead

    @property
    @abstractmethod
    def validated(self) -> bool:
        """Whether step times come from measurements on this hardware."""

    @abstractmethod
    def step_seconds(self, chunks: Iterable[tuple[int, int]] = (), decodes: int = 0, context: int = 0) -> float:
        """Seconds of one step; 0 of an empty one.

        chunks:  (start, length) of each prefill chunk in tokens: `start` tokens of its request lie before it
        decodes: requests that decode, one token each
        context: tokens that they hold, summed over all of them
        """

    def decode_span(self, decodes: int, context: int, steps: int, seconds: float = inf) -> list[float]:
        """Seconds of each of `steps` steps in a row that decode the same requests, the first behind `context` tokens.

        To the last bit what `step_seconds` says of each. Of fewer of them, at least one, where these seem to take
        `seconds` together.
        """
        if seconds < inf:
            steps = min(steps, 2 + int(seconds / self.step_seconds(decodes=decodes, context=context)))
        return [
            self.step_seconds(decodes=decodes, context=held)
            for held in range(context, context + steps * decodes, decodes)
        ]

    def estimate(self, prefill_tokens: float, decodes: float, context_tokens: float = 0.0) -> float:
        """Seconds of one step whose prompt tokens are one chunk from the start of a prompt, for policies."""
        length = round(prefill_tokens)
        return self.step_seconds(((0, length),) if length else (), round(decodes), round(context_tokens))

    def prefill_seconds(self, tokens: int, cached: int = 0, chunk: int | None = None) -> float:
        """Seconds to compute a prompt of `tokens` alone, of which the first `cached` are there already.

        `chunk` cuts it into steps of so many tokens. Raises ValueError where nothing is left to compute.
        """
        check_prefill(tokens, cached, chunk)
        size = tokens if chunk is None else chunk
        return sum(self.step_seconds(((at, min(size, tokens - at)),)) for at in range(cached, tokens, size))


def check_prefill(tokens: int, cached: float, chunk: int | None) -> None:
    """Raise ValueError for what is no prefill."""
    if not 0 <= cached < tokens:
        raise ValueError(f"cached must be from 0 to under {tokens} tokens, not {cached}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"a chunk must be at least 1 token, not {chunk}")
