"""Turns the time stamps of a file into seconds since its first row.

A file's stamps are of one kind, which its first row shows: ISO 8601 (with any number of digits after the
seconds), or numbers. A number's unit is declared or, for the time since 1970, told from its size.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
EPOCH_SECONDS = 10**8  # 1973 as seconds since 1970: no workload lasts so long, and no stamp of a real one is older
MOST_DIGITS = 30
_ISO = re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,](\d+))?(Z|[+-]\d\d:?\d\d)?")
_SECOND = timedelta(seconds=1)


class Stamps:
    """Reads the stamps of one file in the order of its rows.

    unit: of numbers, one of PER_SECOND; None takes seconds, or milli-, micro- or nanoseconds where the first
    stamp is so large that it must count from 1970 in them.
    """

    def __init__(self, unit: str | None = None) -> None:
        self._unit = unit
        self._first: Decimal | datetime | None = None
        self._first_fraction = 0.0
        self._per_second = Decimal(1)

    def seconds(self, stamp: Any) -> float:
        """Seconds since the first stamp that was read; below 0 for an earlier one.

        Raises ValueError for what is no stamp, or one of another kind than the first.
        """
        number = as_number(stamp)
        return self._of_date(str(stamp)) if number is None else self._of_number(number)

    def _of_number(self, number: Decimal) -> float:
        if self._first is None:
            self._per_second = Decimal(PER_SECOND[self._unit or epoch_unit(number)])
            self._first = number
        if isinstance(self._first, datetime):
            raise ValueError(f"{number} is a number, but the first row has a date and a time")
        return float((number - self._first) / self._per_second)

    def _of_date(self, text: str) -> float:
        found = _ISO.fullmatch(text.strip())
        if found is None or isinstance(self._first, Decimal):
            wanted = "a number, as the first row has" if isinstance(self._first, Decimal) else "a number or ISO 8601"
            raise ValueError(f"{text!r} is not {wanted} (as 2023-11-16T18:15:46.68)")
        clock, digits, zone = found.groups()
        moment = datetime.fromisoformat(clock + (zone or ""))
        fraction = int(digits) / 10 ** len(digits) if digits else 0.0
        if self._first is None:
            self._first, self._first_fraction = moment, fraction
        assert isinstance(self._first, datetime)  # noqa: S101 - the other kind was refused above
        if (moment.tzinfo is None) != (self._first.tzinfo is None):
            raise ValueError(f"{text!r}: some stamps have a time zone and some have none")
        return (moment - self._first) / _SECOND + (fraction - self._first_fraction)


def as_number(stamp: Any) -> Decimal | None:
    """The stamp as a number of sensible size, None where it is none."""
    try:
        number = Decimal(str(stamp).strip())
    except InvalidOperation:
        return None
    return number if number.is_finite() and number.adjusted() < MOST_DIGITS else None


def epoch_unit(number: Decimal) -> str:
    """The unit in which `number` counts from 1970 to a day of our times; seconds for smaller numbers."""
    scale = abs(number) / EPOCH_SECONDS
    return next((unit for unit, per in reversed(PER_SECOND.items()) if scale >= per), "s")
