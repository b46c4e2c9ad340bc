"""How many requests may be sent a second time."""

from __future__ import annotations

from math import exp

RESERVE = 20.0
"""Re-routes that are always allowed within a memory's time: a share of little traffic is nothing."""
MEMORY_SECONDS = 60.0


class RetryBudget:
    """Re-routes as a share of traffic, so that a fleet in trouble is not given a multiple of its load.

        re-routed <= reserve + share * sent,   both counted with weights that fall by 1/e in MEMORY_SECONDS

    The idea of a share instead of a count per request is that of Finagle's retry budgets; the decay in place of
    their window is ours. `share` may be exchanged at any time.
    Bad at: telling requests that are dear to repeat from those that are cheap.
    """

    def __init__(self, share: float, reserve: float = RESERVE) -> None:
        self.share = share
        self._reserve = reserve
        self._sent = 0.0
        self._rerouted = 0.0
        self._at = 0.0

    def sent(self, now: float) -> None:
        """A request was sent for the first time."""
        self._decay(now)
        self._sent += 1.0

    def take(self, now: float) -> bool:
        """Whether one more may be sent again; it counts as sent."""
        self._decay(now)
        if self._rerouted + 1.0 > self._reserve + self.share * self._sent:
            return False
        self._rerouted += 1.0
        return True

    def _decay(self, now: float) -> None:
        if now > self._at:
            left = exp((self._at - now) / MEMORY_SECONDS)
            self._sent *= left
            self._rerouted *= left
            self._at = now
