"""How long an output will be, and how long a step takes. Policies read these through their context."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from dataclasses import dataclass
from hashlib import blake2b
from math import exp
from statistics import NormalDist
from typing import ClassVar, Protocol

from tidegate.core.view import Described, RequestView
from tidegate.errors import ConfigError


class Predictor(Protocol):
    """Predicts output lengths in tokens and learns from requests that ended."""

    def output_tokens(self, r: RequestView) -> float:
        """Predicted outputs of `r` in all, at least 1. An estimate, for orders."""
        ...

    def output_quantile(self, r: RequestView, share: float) -> float:
        """Outputs of `r` in all that are enough with probability `share` (0 to 1), for reserving memory.

        At least 1, never more than `r` declared, and not less for a larger share.
        """
        ...

    def observe(self, r: Described, outputs: int) -> None:
        """`r` ended by itself after `outputs` tokens."""
        ...


class OraclePredictor:
    """Knows the truth (`Request.oracle_tokens`). For simulation; falls back to what was declared."""

    def output_tokens(self, r: RequestView) -> float:
        known = r.oracle_tokens if r.oracle_tokens is not None else r.max_tokens
        return float(known or 1)

    def output_quantile(self, r: RequestView, share: float) -> float:
        return within_declared(r, self.output_tokens(r))

    def observe(self, r: Described, outputs: int) -> None:
        """There is nothing to learn."""


class HistoryPredictor:
    """A quantile of recent outputs of the same tenant, class and prompt size (powers of two).

    Of a group's n remembered lengths, ascending from index 0, the one at `floor(share * n)`: the smallest that
    more than that share of them do not exceed. A group without history answers for its class, then what was
    declared, then `default` tokens.

    It decays: a group forgets a length after `depth` further ones, and all of them when `keys` other groups
    have been fed since. So at most `keys * depth` lengths are held, each twice: by age and by rank. A prediction
    looks up two groups and sorts nothing. Bad at what no other request of the group tells.

    Raises ConfigError for a depth or keys below 1 or a quantile outside 0 to 1.
    """

    def __init__(self, quantile: float = 0.5, depth: int = 64, keys: int = 1024, default: int = 256) -> None:
        if depth < 1 or keys < 1 or not 0 <= quantile <= 1:
            raise ConfigError(
                f"a history needs a depth and keys of at least 1 and a quantile from 0 to 1, not {depth}, {keys} "
                f"and {quantile}"
            )
        self.quantile = quantile
        self.depth = depth
        self.keys = keys
        self.default = default
        self._history: OrderedDict[tuple[str, str, int] | str, _Lengths] = OrderedDict()

    def output_tokens(self, r: RequestView) -> float:
        return self.output_quantile(r, self.quantile)

    def output_quantile(self, r: RequestView, share: float) -> float:
        for key in self._groups(r):
            lengths = self._history.get(key)
            if lengths is not None:
                return within_declared(r, lengths.at(share))
        return within_declared(r, self.default if r.max_tokens is None else r.max_tokens)

    def observe(self, r: Described, outputs: int) -> None:
        for key in self._groups(r):
            lengths = self._history.get(key)
            if lengths is None:
                lengths = self._history[key] = _Lengths()
            else:
                self._history.move_to_end(key)
            lengths.add(outputs, self.depth)
        while len(self._history) > self.keys:
            self._history.popitem(last=False)

    @staticmethod
    def _groups(r: Described) -> tuple[tuple[str, str, int], str]:
        return (r.tenant, r.slo_class, r.prompt_tokens.bit_length()), r.slo_class


class _Lengths:
    """The last lengths of one group, by age and by rank. Never empty once something was added."""

    __slots__ = ("_by_age", "_by_rank")

    def __init__(self) -> None:
        self._by_age: deque[int] = deque()
        self._by_rank: list[int] = []

    def add(self, length: int, depth: int) -> None:
        if len(self._by_age) == depth:
            del self._by_rank[bisect_left(self._by_rank, self._by_age.popleft())]
        self._by_age.append(length)
        insort(self._by_rank, length)

    def at(self, share: float) -> int:
        ranked = self._by_rank
        return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


class NoisyPredictor:
    """What `inner` predicts, wrong by a factor of its own for every request: `exp(error * z)`.

    z is standard normal, a function of `seed` and the request's id alone, so that a request meets the same
    error whenever it is asked for, in every policy that is compared. The median factor is 1; with an `error`
    of 0.5 two thirds of the predictions lie within a factor of 1.65, with 1.0 within 2.7. `output_tokens` is
    not capped by what was declared: where that is the truth, as in most traces, a cap would hide half of the
    error.

    Raises ConfigError for an error below 0 or beyond 10, where `exp` leaves all sense and soon the numbers.
    """

    def __init__(self, inner: Predictor, error: float, seed: int = 0) -> None:
        if not 0 <= error <= MAX_ERROR:
            raise ConfigError(f"the error of a noisy predictor must be from 0 to {MAX_ERROR:g}, not {error}")
        self.inner = inner
        self.error = error
        self.seed = seed

    def output_tokens(self, r: RequestView) -> float:
        return max(1.0, self.inner.output_tokens(r) * self.factor(r.id))

    def output_quantile(self, r: RequestView, share: float) -> float:
        return within_declared(r, self.inner.output_quantile(r, share) * self.factor(r.id))

    def observe(self, r: Described, outputs: int) -> None:
        self.inner.observe(r, outputs)

    def factor(self, request_id: str) -> float:
        """By how much the prediction for this request is wrong: above 1 is too long."""
        digest = blake2b(repr((self.seed, request_id)).encode(), digest_size=8).digest()
        # 52 bits and a half: a float between 0 and 1 that is never either, where z would be infinite.
        uniform = ((int.from_bytes(digest) >> 12) + 0.5) / 2**52
        return exp(self.error * _STANDARD_NORMAL.inv_cdf(uniform))


MAX_ERROR = 10.0

_STANDARD_NORMAL = NormalDist()


def within_declared(r: RequestView, tokens: float) -> float:
    """`tokens`, but at least 1 and at most what `r` declared."""
    if r.max_tokens is not None:
        tokens = min(tokens, r.max_tokens)
    return float(max(1, tokens))


@dataclass(frozen=True, slots=True)
class StepTime:
    """A `StepModel` (core/step_time.py) that is given: seconds per prompt token, and of a step that decodes."""

    prefill_token: float = 1e-4
    decode: float = 0.02

    learns: ClassVar[bool] = False

    @property
    def single(self) -> float:
        """Seconds of a step that decodes one request."""
        return self.step(0, 1)

    def service(self, prefill_tokens: float, outputs: float) -> float:
        """Seconds to compute `prefill_tokens` and then `outputs` one by one, alone."""
        return prefill_tokens * self.prefill_token + outputs * self.decode

    def prefill(self, tokens: float) -> float:
        """Seconds that `tokens` of a prompt add to the steps that compute them."""
        return tokens * self.prefill_token

    def step(self, prefill_tokens: float, decodes: float, context_tokens: float = 0.0) -> float:
        """Seconds of one step; any number of decodes takes as long as one."""
        return prefill_tokens * self.prefill_token + (self.decode if decodes else 0.0)

    def observe(self, prefill_tokens: int, decodes: int, context_tokens: int, seconds: float) -> None:
        """There is nothing to learn."""
