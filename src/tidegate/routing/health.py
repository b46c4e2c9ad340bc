"""Whether an engine may be sent requests, from how those sent before ended. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import exp, inf


class Failure(StrEnum):
    """How an engine failed a request. What the client did wrong (4xx) is none, and neither is "come back later"."""

    REFUSED = "refused"
    """No connection."""
    RESET = "reset"
    """The connection ended before the first byte of an answer."""
    CUT = "cut"
    """The answer ended before its end."""
    STALL = "stall"
    """No first token, or no further one, within the time allowed."""
    ERROR = "error"
    """A 5xx answer other than 503."""


LOSES_CACHE = frozenset({Failure.REFUSED, Failure.RESET, Failure.STALL})
"""After one of these nobody goes there for its cache: it was restarted, or hangs."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """When an engine is given up, and for how long. Times are seconds.

    in_a_row:  so many failures without a success between them open the breaker
    share:     or `least` failures within about `window`, if they are this share of all that ended
    first:     how long it is open the first time; twice as long each further time, at most `longest`
    steady:    a probe whose answer has run for so long counts as a success
    penalty:   what one recent failure adds to the engine's cost; it fades with `window`
    """

    in_a_row: int = 3
    share: float = 0.2
    least: int = 5
    window: float = 10.0
    first: float = 1.0
    longest: float = 30.0
    steady: float = 5.0
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.in_a_row < 1 or self.least < 1 or not 0 < self.share <= 1:
            raise ValueError(f"failures must be at least 1 and their share above 0 and at most 1, not {self}")
        if not (self.window > 0 and 0 < self.first <= self.longest and self.steady >= 0 and self.penalty >= 0):
            raise ValueError(f"times must be above 0, and the longest at least the first, not {self}")


TOLERANCE = Tolerance()
MOST_RETRY_AFTER = 60.0
"""Seconds; an engine that asks for more is tried again then."""


class Breaker:
    """One engine's. closed: requests go there. open: none do. half-open: one does, the probe, whose end decides.

    After Nygard, Release It! (2007). Whoever sends asks `allows` and then tells `sent`, with nothing between the two,
    and tells the end of every request with the number that `sent` gave it.
    """

    __slots__ = (
        *("_at", "_closed_at", "_in_a_row", "_level", "_open_until", "_probe", "_serial", "_steady_at"),
        *("_successes", "_tolerance", "busy_until", "failures"),
    )

    def __init__(self, tolerance: Tolerance = TOLERANCE) -> None:
        self._tolerance = tolerance
        self.failures = self._successes = 0.0
        """Fading counts, as of `_at`: 0 where there were none."""
        self._at = 0.0
        self._in_a_row = 0
        self._level = 0  # how often it opened without a good while between
        self._closed_at = -inf
        self._open_until: float | None = None  # None while closed; half-open from then on
        self._serial = 0
        self._probe = 0  # the number of the probe under way; 0 if there is none
        self._steady_at = inf
        self.busy_until = -inf
        """The engine asked for no requests until then."""

    def state(self, now: float) -> str:
        """ "closed", "open" or "half-open"."""
        self._settle(now)
        if self._open_until is None:
            return "closed"
        return "open" if now < self._open_until else "half-open"

    def allows(self, now: float) -> bool:
        """Whether a request may go there."""
        return now >= self.busy_until and (self._open_until is None or self.up(now))

    def up(self, now: float) -> bool:
        """Whether a request might go there, but for what the engine asked: one that is busy is up."""
        self._settle(now)
        return self._open_until is None or (now >= self._open_until and not self._probe)

    def retry_at(self, now: float) -> float:
        """When it may allow a request again, if not now: what a Retry-After is made of."""
        return max(now, self.busy_until, self._open_until or now)

    def penalty_s(self, now: float) -> float:
        """Seconds that recent failures add to the cost: a fast failure must not look like a fast engine."""
        return self.recent_failures(now) * self._tolerance.penalty if self.failures else 0.0

    def recent_failures(self, now: float) -> float:
        """Failures, each fading away."""
        return self.failures * exp(min(0.0, self._at - now) / self._tolerance.window) if self.failures else 0.0

    def sent(self, now: float) -> int:
        """A request goes there. Returns the number of a probe, and 0 for a request that is none."""
        if self._open_until is None or self._probe:
            return 0
        self._serial += 1
        self._probe, self._steady_at = self._serial, inf
        return self._probe

    def answers(self, now: float, probe: int) -> None:
        """The first token of a request came."""
        if probe and probe == self._probe:
            self._steady_at = now + self._tolerance.steady

    def succeeded(self, now: float, probe: int = 0) -> None:
        """A request ended well."""
        self._settle(now)
        self._fade(now)
        if probe and probe == self._probe:
            self._close(now)
        elif self._open_until is None:
            self._successes += 1.0
            self._in_a_row = 0

    def failed(self, now: float, probe: int = 0) -> bool:
        """A request failed there. Returns whether that opened the breaker."""
        self._settle(now)
        self._fade(now)
        self.failures += 1.0
        if probe and probe == self._probe:
            return self._open(now)
        if self._open_until is not None:
            return False  # sent before it opened
        self._in_a_row += 1
        t, all_of_them = self._tolerance, self.failures + self._successes
        often = self.failures > t.least - 0.5 and self.failures >= t.share * all_of_them
        return self._open(now) if self._in_a_row >= t.in_a_row or often else False

    def released(self, probe: int) -> None:
        """A request ended in a way that says nothing of the engine: its client left, or asked for nonsense."""
        if probe and probe == self._probe:
            self._probe = 0

    def busy(self, now: float, retry_after: float, probe: int = 0) -> None:
        """The engine asks for no requests for so many seconds; that is no failure."""
        self.released(probe)
        self.busy_until = max(self.busy_until, now + min(max(retry_after, 0.0), MOST_RETRY_AFTER))

    def _settle(self, now: float) -> None:
        if self._probe and now >= self._steady_at:
            self._close(now)

    def _close(self, now: float) -> None:
        self._open_until, self._probe, self._closed_at = None, 0, now
        self.failures = self._successes = 0.0
        self._in_a_row = 0

    def _open(self, now: float) -> bool:
        t = self._tolerance
        if self._open_until is None and now - self._closed_at > t.longest:
            self._level = 0
        self._open_until = now + min(t.first * 2.0**self._level, t.longest)
        self._level = min(self._level + 1, 64)
        self._probe = 0
        return True

    def _fade(self, now: float) -> None:
        """Fading counts are those of `now` from here on."""
        if now > self._at:
            kept = exp((self._at - now) / self._tolerance.window)
            self.failures, self._successes, self._at = self.failures * kept, self._successes * kept, now
