"""What an engine step costs in seconds, from hardware, model and tensor parallel degree.

    t = t0 + [(F_lin / (peak*e1))^p + (W / (bw*e2))^p]^(1/p) + KV / (bw*e4) + F_attn / (peak*e3) + host overhead

F_lin   2 FLOPs per token and linear parameter. The output head is not in it: the constants were fitted without.
W       bytes of all weights, read once a step, partly hidden behind F_lin
KV      bytes of keys and values that were computed in earlier steps and are read in this one: whole contexts of
        decodes, and what lies before a prefill chunk
F_attn  4 * layers * heads * head_dim FLOPs per query-key pair of prefill chunks, over the causal half. Decodes
        have none: their attention waits for KV to arrive and computes meanwhile.

With tensor parallel degree `tp` each GPU does its share of all four terms; KV heads that are fewer than `tp` are
held by several GPUs. There is no term for communication between GPUs, so tp > 1 comes out too fast.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from tidegate.executors.sim.hardware import Hardware
from tidegate.executors.sim.models import ModelShape
from tidegate.executors.sim.step_cost import StepCost, check_prefill


class CostModel(StepCost):
    """Seconds of steps by the formula. The fitted constants contain no host overhead.

    The coefficients are public so that a hot loop may use them itself: a step of decodes costs
    `base_s + ((decodes * token_s)**p + weights_p)**(1 / p) + context * kv_token_s`.

    base_s:       t0 and host overhead, a step
    token_s:      linear layers, a token
    weights_p:    seconds of reading all weights, to the power of p
    kv_token_s:   reading one token's KV
    pair_s:       attention, a query-key pair
    """

    __slots__ = ("_root", "base_s", "kv_token_s", "p", "pair_s", "token_s", "weights_p")

    def __init__(self, hardware: Hardware, model: ModelShape, tp: int = 1, host_overhead: float = 0.0) -> None:
        super().__init__("formula", hardware, model, tp, host_overhead)
        self.p = hardware.p
        compute, memory = hardware.peak_flops * tp, hardware.memory_bandwidth * tp
        self.base_s = hardware.t0 + host_overhead
        self.token_s = 2 * model.linear_parameters / (compute * hardware.e1)
        self.weights_p = (model.weight_bytes / (memory * hardware.e2)) ** hardware.p
        self.kv_token_s = model.kv_bytes_per_token / (hardware.memory_bandwidth * self.kv_shares * hardware.e4)
        self.pair_s = model.attention_flops / (compute * hardware.e3)
        self._root = 1 / hardware.p

    @property
    def validated(self) -> bool:
        return self.hardware.validated

    def step_seconds(self, chunks: Iterable[tuple[int, int]] = (), decodes: int = 0, context: int = 0) -> float:
        tokens, read, pairs = decodes, context, 0.0
        for start, length in chunks:
            tokens += length
            read += start
            pairs += _pairs(start, length)
        if not tokens:
            return 0.0
        return self.base_s + self._linear(tokens) + read * self.kv_token_s + pairs * self.pair_s

    def decode_span(self, decodes: int, context: int, steps: int, seconds: float = inf) -> list[float]:
        fixed, read = self.base_s + self._linear(decodes), self.kv_token_s
        if seconds < inf:  # so many if none is shorter than the first
            steps = min(steps, 2 + int(seconds / (fixed + context * read)))
        return [fixed + held * read for held in range(context, context + steps * decodes, decodes)]

    def estimate(self, prefill_tokens: float, decodes: float, context_tokens: float = 0.0) -> float:
        # Asked several times in every plan, hence without further calls: `step_seconds` of such a step.
        linear = (((prefill_tokens + decodes) * self.token_s) ** self.p + self.weights_p) ** self._root
        pairs = prefill_tokens * (prefill_tokens + 1) * 0.5
        return float(self.base_s + linear + context_tokens * self.kv_token_s + pairs * self.pair_s)

    def decode_seconds(self, batch: int, context: int) -> float:
        """Seconds of one step that decodes `batch` requests, each behind `context` tokens."""
        return self.step_seconds(decodes=batch, context=batch * context)

    def prefill_seconds(self, tokens: int, cached: float = 0, chunk: int | None = None) -> float:
        """A closed form of adding up `step_seconds` over the chunks, so any length takes the same time.

        Each chunk reads the weights and all KV before it again. `cached` may be a fraction, for estimates.
        """
        check_prefill(tokens, cached, chunk)
        todo = tokens - cached
        size = todo if chunk is None else min(chunk, todo)
        full = int(todo // size)
        rest = todo - full * size
        steps = full + (rest > 0)
        read = steps * cached + size * steps * (steps - 1) / 2
        seconds = steps * self.base_s + full * self._linear(size) + read * self.kv_token_s
        if rest:
            seconds += self._linear(rest)
        return seconds + _pairs(cached, todo) * self.pair_s

    def _linear(self, tokens: float) -> float:
        """Seconds of the linear layers, weight reads overlapped."""
        return float(((tokens * self.token_s) ** self.p + self.weights_p) ** self._root)


def _pairs(start: float, length: float) -> float:
    """Query-key pairs of `length` tokens behind `start`: each sees those before it and itself."""
    return length * start + length * (length + 1) / 2
