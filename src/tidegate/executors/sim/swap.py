"""Swap against recompute: what it costs to take a request's KV away and bring it back, by either way.

Swapping copies KV to host memory and back over the link. Recomputing drops it, keeps the token ids, and prefills
prompt and output again. Both are priced for a request alone on its GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from tidegate.errors import InputError
from tidegate.executors.sim.cost import CostModel

TOKEN_ID_BYTES = 4  # int32
LONGEST = 1 << 20  # tokens; no served context is longer today


class Price(NamedTuple):
    """Both ways for one request, in seconds and bytes.

    host_bytes:     host memory that a swapped request holds
    token_id_bytes: host memory that a recomputed one holds instead
    """

    tokens: int
    kv_bytes: int
    swap_one_way_s: float
    swap_round_trip_s: float
    recompute_s: float
    host_bytes: int
    token_id_bytes: int

    @property
    def cheaper(self) -> str:
        """The way that takes less time, "swap" or "recompute"."""
        return "swap" if self.swap_round_trip_s < self.recompute_s else "recompute"


@dataclass(frozen=True, slots=True)
class SwapOrRecompute:
    """Prices of a request's two ways back.

    link_bandwidth: bytes/s, one way, of the link of each GPU; None is the hardware's. Where GPUs share a link,
                    give each its share
    queue_s:        seconds that each copy waits before the link is free, out and back alike
    cached_share:   of the tokens, what the prefix cache still holds when the request returns, in [0, 1). It
                    spares recomputing; a swap copies all, because nobody knows beforehand what stays cached
    chunk:          tokens of one prefill step; None computes the prompt in one

    Raises InputError for values outside of these.
    """

    cost: CostModel
    link_bandwidth: float | None = None
    queue_s: float = 0.0
    cached_share: float = 0.0
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.link_bandwidth is not None and not 0 < self.link_bandwidth < math.inf:
            raise InputError(f"a link must carry more than 0 GB/s, not {self.link_bandwidth / 1e9:g}")
        if not 0 <= self.queue_s < math.inf:
            raise InputError(f"a queue must be 0 seconds or more, not {self.queue_s:g}")
        if not 0 <= self.cached_share < 1:
            raise InputError(f"a cached share must be from 0 to under 1, not {self.cached_share:g}")
        if self.chunk is not None and self.chunk < 1:
            raise InputError(f"a chunk must be at least 1 token, not {self.chunk}")

    @property
    def link(self) -> float:
        """Bytes/s, one way, of the link of each GPU."""
        return self.link_bandwidth or self.cost.hardware.link_bandwidth

    def one_way_s(self, tokens: int) -> float:
        """Seconds to copy the KV of `tokens` out, or back; each GPU copies its own share."""
        return self.queue_s + tokens * self.cost.model.kv_bytes_per_token / (self.cost.kv_shares * self.link)

    def round_trip_s(self, tokens: int) -> float:
        """Seconds to copy the KV of `tokens` out and back."""
        return 2 * self.one_way_s(tokens)

    def recompute_s(self, tokens: int) -> float:
        """Seconds to prefill what is not cached of `tokens`."""
        return self.cost.prefill_seconds(tokens, cached=self.cached_share * tokens, chunk=self.chunk)

    def price(self, tokens: int) -> Price:
        """Both ways for a request of `tokens`, at least 1."""
        kv_bytes = tokens * self.cost.model.kv_bytes_per_token
        return Price(
            tokens=tokens,
            kv_bytes=kv_bytes,
            swap_one_way_s=self.one_way_s(tokens),
            swap_round_trip_s=self.round_trip_s(tokens),
            recompute_s=self.recompute_s(tokens),
            host_bytes=kv_bytes,
            token_id_bytes=tokens * TOKEN_ID_BYTES,
        )

    def break_even(self, longest: int = LONGEST) -> int | None:
        """The fewest tokens from which on, up to `longest`, a swap's round trip is always the cheaper way.

        1 if it is at every length, None if it is not at `longest` itself. It may be cheaper at shorter lengths
        as well, where reading the weights for a few tokens costs more than copying them.
        """
        last = self._last_recompute(1, longest)
        if last is None:
            return 1
        return None if last == longest else last + 1

    def _last_recompute(self, low: int, high: int) -> int | None:
        """The longest request in [low, high] for which recomputing costs no more than a swap, or None.

        The difference of the two may change its sign several times (chunks make steps), so it is not bisected
        itself. But each grows with length: where the shortest recompute costs more than the longest swap,
        there is none in between. What cannot be excluded is halved, the longer half first.
        """
        if self.recompute_s(high) <= self.round_trip_s(high):
            return high
        if self.recompute_s(low) > self.round_trip_s(high) or low == high:
            return None
        middle = (low + high) // 2
        found = self._last_recompute(middle + 1, high)
        return self._last_recompute(low, middle) if found is None else found
