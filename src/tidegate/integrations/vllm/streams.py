"""When clients got their tokens: one entry a step, from which each request's gaps are read where its stream breaks.

While the same requests emit in step after step, nothing is done for any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidegate.core.request import Request
from tidegate.core.timing import StepTimes

FORGET_EVERY = 8192
"""Steps after which times are forgotten that nobody's stream reaches back to."""


class Streams:
    """Who emitted in the last step, and since which step without a break."""

    def __init__(self) -> None:
        self._times = StepTimes()
        self._clock = 0
        self._ids: Sequence[str] = ()
        self._requests: list[Request] = []
        self._since: dict[Request, int] = {}

    def go_on(self, ids: Sequence[str]) -> bool:
        """Whether these are who emitted in the last step, all of them alive."""
        return ids == self._ids

    def emitted(
        self, ids: Sequence[str], known: Mapping[str, Request], now: float
    ) -> tuple[list[Request], list[Request]]:
        """At `now` (seconds) each of these emitted a token. Returns them, and those of whom it is the first."""
        self._clock += 1
        self._times.record(now)
        if not self._clock % FORGET_EVERY:
            self._times.forget(min(self._since.values(), default=self._clock))
        if self.go_on(ids):
            return self._requests, []
        requests = [known[i] for i in ids]
        for r in self._since.keys() - set(requests):
            self._close(r, self._clock - 1)
        first = [r for r in requests if r not in self._since and self._open(r, now)]
        self._ids, self._requests = ids, requests
        return requests, first

    def end(self, r: Request) -> None:
        """`r` has ended: its gaps are read now."""
        if r in self._since:
            self._close(r, self._clock)
            self._ids = ()

    def _open(self, r: Request, now: float) -> bool:
        """`r` emits from this step on; True if it never did before."""
        self._since[r] = self._clock
        first, last = r.first_token_at is None, r.last_token_at
        if last is None:
            r.first_token_at = now
        else:
            r.gaps.append(now - last)
        return first

    def _close(self, r: Request, until: int) -> None:
        r.gaps += self._times.gaps(self._since.pop(r), until)
        r.last_token_at = self._times.at(until)
