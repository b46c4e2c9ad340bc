"""How much may come in a minute: token buckets. Pure; time is an argument, in seconds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field


class Bucket:
    """What may be taken: it comes back evenly, up to a minute's worth, which may be taken at once.

    More than there is may be taken by whoever turns out to have used more than was foreseen; the next one waits for it.
    """

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be taken, 0 if now; for more than a minute's worth until all is there."""
        short = min(amount, self.per_minute) - self.level(now)
        return max(0.0, short * 60 / self.per_minute)

    def take(self, amount: float, now: float) -> None:
        """Take `amount`, or give it back where it is below 0."""
        self._level = min(self.level(now) - amount, float(self.per_minute))
        self._at = max(now, self._at)

    def level(self, now: float) -> float:
        """What is there now."""
        back = max(0.0, now - self._at) * self.per_minute / 60
        return min(float(self.per_minute), self._level + back)


@dataclass(frozen=True, slots=True)
class Rate:
    """What may come in a minute; None is no end. `whose` it is has one bucket for each."""

    whose: Hashable
    requests: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TooMuch:
    """`unit` ("requests" or "tokens") of `rate` are used up for `seconds`."""

    rate: Rate
    unit: str
    seconds: float


@dataclass(slots=True)
class Charge:
    """What was taken for one request, until it is known what it used."""

    tokens: int
    buckets: list[Bucket] = field(default_factory=list)

    def settle(self, used: int, now: float) -> None:
        """It used so many tokens: the rest comes back, or what is missing is taken. Only the first call counts."""
        for bucket in self.buckets:
            bucket.take(used - self.tokens, now)
        self.buckets = []


class Rates:
    """The buckets that are in use. The longest unused go beyond `remembered`: after a minute they are full anyway."""

    def __init__(self, remembered: int = 20_000) -> None:
        self._remembered = remembered
        self._buckets: OrderedDict[tuple[Hashable, str], Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def charge(self, rates: list[Rate], tokens: int, now: float) -> Charge | TooMuch:
        """Take one request of `tokens` tokens from all of `rates`, or nothing from any, if one has too little."""
        wanted: list[tuple[Bucket, int, str]] = []
        longest: TooMuch | None = None
        for rate in rates:
            for unit, limit, amount in (("requests", rate.requests, 1), ("tokens", rate.tokens, tokens)):
                if limit is None:
                    continue
                bucket = self._bucket((rate.whose, unit), limit, now)
                wanted.append((bucket, amount, unit))
                seconds = bucket.wait(amount, now)
                if seconds > 0 and (longest is None or seconds > longest.seconds):
                    longest = TooMuch(rate, unit, seconds)
        if longest is not None:
            return longest
        for bucket, amount, _ in wanted:
            bucket.take(amount, now)
        return Charge(tokens, [bucket for bucket, _, unit in wanted if unit == "tokens"])

    def _bucket(self, name: tuple[Hashable, str], limit: int, now: float) -> Bucket:
        found = self._buckets.get(name)
        if found is None:
            found = self._buckets[name] = Bucket(limit, now)
            if len(self._buckets) > self._remembered:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(name)
        found.per_minute = limit  # a new configuration may say another
        return found
