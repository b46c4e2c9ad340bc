"""The syntax of a workload's parts: `SOURCE[:ITEM,ITEM,...]`, an item being `key=value` or a class's name.

`azure-conv`, `azure-conv:interactive`, `azure-code:slice=0..20m,thin=0.5,completion` and
`poisson:rate=4,count=1000,prompt=512,output=128` are parts. docs/workloads.md describes them for users.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from tidegate.errors import InputError
from tidegate.simulate.draws import parse_seconds, plain_number
from tidegate.simulate.named import exists
from tidegate.simulate.nearest import nearest
from tidegate.simulate.reshape import between, delayed, labelled, rows, thinned, unticked
from tidegate.simulate.seeds import SeedKey
from tidegate.simulate.workload import Workload

Step = Callable[[Workload, SeedKey], Workload]
_CLASS = re.compile(r"[A-Za-z_][\w-]*")
_MAP = "map."


@dataclass(frozen=True, slots=True)
class Part:
    """One part as it was written.

    keys:  what the source itself is told
    steps: what is done to it, in the order in which it was written
    map, unit: the columns of a file
    """

    text: str
    source: str
    keys: Mapping[str, str]
    steps: tuple[tuple[str, str], ...]
    map: Mapping[str, str]
    unit: str | None
    seed: int | None


def _slice(value: str) -> Step:
    start, end = _range(value, parse_seconds)
    return lambda workload, _: between(workload, start or 0.0, inf if end is None else end)


def _rows(value: str) -> Step:
    start, end = _range(value, _whole)
    return lambda workload, _: rows(workload, start or 0, end)


def _first(value: str) -> Step:
    count = _whole(value)
    return lambda workload, _: workload.limited(count)


def _thin(value: str) -> Step:
    share = plain_number(value)
    return lambda workload, key: thinned(workload, share, key)


def _scale(value: str) -> Step:
    factor = plain_number(value)
    return lambda workload, _: workload.rate_scaled(factor)


def _spread(value: str) -> Step:
    tick_s = parse_seconds(value)
    return lambda workload, key: unticked(workload, tick_s, key)


def _at(value: str) -> Step:
    delay_s = parse_seconds(value)
    return lambda workload, _: delayed(workload, delay_s)


def _class(value: str) -> Step:
    if not _CLASS.fullmatch(value):
        raise ValueError(f"{value!r} is neither key=value nor a class's name")
    return lambda workload, _: labelled(workload, slo_class=value)


def _tenant(value: str) -> Step:
    return lambda workload, _: labelled(workload, tenant=value)


def _priority(value: str) -> Step:
    try:
        priority = int(value)
    except ValueError:
        raise ValueError(f"{value!r} is no whole number") from None
    return lambda workload, _: labelled(workload, priority=priority)


STEPS: dict[str, Callable[[str], Step]] = {
    "slice": _slice,
    "rows": _rows,
    "first": _first,
    "thin": _thin,
    "scale": _scale,
    "spread": _spread,
    "at": _at,
    "class": _class,
    "tenant": _tenant,
    "priority": _priority,
}
REPEATABLE = ("slice", "rows", "first", "thin", "scale", "spread", "at")


def parse_part(text: str, known: Callable[[str], bool]) -> Part:
    """The part written in `text`; `known` tells names of sources that are no files. Raises InputError."""
    source, items = _source(text, known)
    keys: dict[str, str] = {}
    steps: list[tuple[str, str]] = []
    for item in items.split(",") if items else ():
        key, value = _item(text, item)
        if key in keys or (key not in REPEATABLE and any(key == done for done, _ in steps)):
            raise InputError(f"{text}: {key} is given twice")
        if key in STEPS:
            steps.append((key, value))
        else:
            keys[key] = value
    columns = {key.removeprefix(_MAP): keys.pop(key) for key in [*keys] if key.startswith(_MAP)}
    seed = keys.pop("seed", None)
    unit = keys.pop("unit", None)
    return Part(text, source, keys, tuple(steps), columns, unit, None if seed is None else _seed(text, seed))


def apply_steps(workload: Workload, part: Part, key: SeedKey) -> Workload:
    """Do to the workload what the part says, in its order. `key` seeds what is decided by lot."""
    for number, (name, value) in enumerate(part.steps):
        try:
            workload = STEPS[name](value)(workload, (*key, number))
        except (ValueError, InputError) as e:
            raise InputError(f"{part.text}: {name}: {e}") from e
    return workload


def refuse_unknown(part: Part, known: tuple[str, ...]) -> None:
    """Raise InputError, naming the nearest key, where the part has a key that its source does not know."""
    for key in part.keys:
        if key not in known:
            raise InputError(f"{part.text}: unknown key {key!r}; {nearest(key, (*known, *STEPS, 'seed'))}")


def _source(text: str, known: Callable[[str], bool]) -> tuple[str, str]:
    """What stands before the colon and what behind it. A file's path may hold colons of its own."""
    head, _, tail = text.partition(":")
    if known(head):
        return head, tail
    head, colon, tail = text.rpartition(":")
    return (head, tail) if colon and not exists(Path(text)) else (text, "")


def _item(text: str, item: str) -> tuple[str, str]:
    key, equals, value = item.strip().partition("=")
    if not equals:
        key, value = "class", key
    if not key or not value:
        raise InputError(f"{text}: {item!r} is neither key=value nor a class's name")
    return key.strip(), value.strip()


def _range(value: str, parse: Callable[[str], Any]) -> tuple[Any, Any]:
    """Both ends of `a..b`, None for one that is left out."""
    low, dots, high = value.partition("..")
    if not dots:
        raise ValueError(f"{value!r} is no range: write 10..20, 10.. or ..20")
    start, end = (parse(end) if end else None for end in (low, high))
    if end is not None and (start or 0) >= end:
        raise ValueError(f"the range {value} is empty")
    return start, end


def _whole(value: str) -> int:
    if not value.isdecimal():
        raise ValueError(f"{value!r} is no whole number of 0 or more")
    return int(value)


def _seed(text: str, value: str) -> int:
    try:
        return _whole(value)
    except ValueError as e:
        raise InputError(f"{text}: seed: {e}") from None
