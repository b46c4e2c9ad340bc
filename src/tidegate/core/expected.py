"""How far those who run are predicted to grow: the head-room `quantile`.

Each running request is expected to come to hold as many blocks as a quantile of its predicted outputs fills. The
sum of what is still to come is kept as requests are seated, grow and leave. One that outlives its prediction
gets a new one: the quantile that is to it what the first was to all, or twice its outputs so far where the
predictor knows of none that long.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from tidegate.core.limits import Limits
from tidegate.core.policy import PolicyContext
from tidegate.core.request import Request

DEFAULT_QUANTILE = 0.9


class ExpectedGrowth:
    """Blocks by which running requests are expected to grow; `total` is that of all of them."""

    def __init__(self, limits: Limits, ctx: PolicyContext) -> None:
        self.total = 0
        self._ctx = ctx
        self._share = DEFAULT_QUANTILE if limits.headroom_quantile is None else limits.headroom_quantile
        self._size = limits.block_size
        self._peaks: dict[Request, int] = {}

    def peak(self, r: Request, held: int) -> int:
        """Blocks that `r` is expected to hold at its end, if it holds `held` now; at most what it declared."""
        for share in (self._share, 1 - (1 - self._share) ** 2):
            outputs = ceil(self._ctx.predictor.output_quantile(r, share))
            if outputs > r.sampled:
                return max(held, self._blocks(r, outputs))
        return max(held, self._blocks(r, 2 * r.sampled))

    def seat(self, r: Request) -> None:
        """`r` was seated with its lease."""
        held = _held(r)
        self._peaks[r] = self.peak(r, held)
        self.total += self._peaks[r] - held

    def left(self, r: Request) -> int:
        """Blocks by which the running `r` is expected to grow."""
        return max(0, self._peaks[r] - _held(r))

    def grow(self, requests: Iterable[Request]) -> None:
        """Each of these has just got one more block."""
        for r in requests:
            held = _held(r)
            if held <= self._peaks[r]:
                self.total -= 1
            else:
                self._peaks[r] = self.peak(r, held)
                self.total += self._peaks[r] - held

    def vacate(self, r: Request) -> None:
        """`r` gives its lease back."""
        self.total -= self.left(r)
        del self._peaks[r]

    def _blocks(self, r: Request, outputs: int) -> int:
        """Blocks with `outputs` outputs; the last token is never written."""
        return min(r.footprint, -(-(r.prompt_tokens + outputs - 1) // self._size))


def _held(r: Request) -> int:
    assert r.lease is not None
    return len(r.lease.table)
