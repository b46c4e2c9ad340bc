"""Reads workloads from CSV and JSONL files, Tidegate's own or anybody's with a map of their columns."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from sys import intern
from typing import IO, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tidegate.core.slo import DEFAULT_CLASS
from tidegate.errors import InputError
from tidegate.simulate.nearest import nearest
from tidegate.simulate.timestamps import EPOCH_SECONDS, PER_SECOND, Stamps, as_number
from tidegate.simulate.workload import DEFAULT_HASH_BLOCK, Workload, WorkloadRequest

MAX_CELL = 1 << 24  # a long prompt's hash_ids outgrow the csv module's own limit


class _Row(BaseModel):
    """One line of a workload file, as users write it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    arrival_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    prompt_tokens: Annotated[int, Field(ge=1)]
    output_tokens: Annotated[int, Field(ge=1)]
    tenant: Annotated[str, Field(min_length=1, coerce_numbers_to_str=True)] = "default"
    slo_class: Annotated[str, Field(min_length=1)] = DEFAULT_CLASS
    priority: int | None = None
    hash_ids: tuple[int, ...] = ()
    hash_block_tokens: Annotated[int, Field(ge=1)] = DEFAULT_HASH_BLOCK

    def request(self, arrival_s: float | None) -> WorkloadRequest:
        """The request; `arrival_s` (seconds, also below 0) instead of the row's own where it is given."""
        blocks = -(-self.prompt_tokens // self.hash_block_tokens)
        if len(self.hash_ids) > blocks:
            raise ValueError(
                f"hash_ids has {len(self.hash_ids)} entries, but {self.prompt_tokens} prompt tokens "
                f"are only {blocks} blocks of hash_block_tokens={self.hash_block_tokens}"
            )
        return WorkloadRequest(
            self.arrival_s if arrival_s is None else arrival_s,
            self.prompt_tokens,
            self.output_tokens,
            intern(self.tenant),
            intern(self.slo_class),
            self.priority,
            self.hash_ids,
            self.hash_block_tokens,
        )


FIELDS = tuple(_Row.model_fields)


class Columns:
    """Which column of a file each field of a request stands in, and how to read the arrivals.

    named: column by field, for fields that stand in a column of another name. Where it is empty, a column
           that is no field is an error, as it may be a typing error; else such columns are ignored.
    unit:  of numeric arrivals: s, ms, us or ns; None tells stamps since 1970 by their size and takes all
           else for seconds
    """

    def __init__(self, named: Mapping[str, str] | None = None, unit: str | None = None) -> None:
        self.named = dict(named or {})
        for name in self.named:
            if name not in FIELDS:
                raise InputError(f"a map of columns has no field {name!r}; {nearest(name, FIELDS)}")
        self._unnamed = tuple(name for name in FIELDS if name not in self.named)
        if unit is not None and unit not in PER_SECOND:
            raise InputError(f"unknown unit of time {unit!r}; known are {', '.join(PER_SECOND)}")
        self.unit = unit

    def of(self, row: Any) -> Any:
        """The row by its fields, whatever its columns are called. Raises ValueError for a missing column."""
        if not self.named or not isinstance(row, dict):
            return row
        taken = {name: row[name] for name in self._unnamed if name in row}
        for name, column in self.named.items():
            if column in row:
                taken[name] = row[column]
            elif name in _REQUIRED:
                raise ValueError(f"{name} is mapped to {column!r}, which has no value here; {nearest(column, [*row])}")
        return taken

    def stamps(self, first_row: Any) -> Stamps | None:
        """How to read arrivals; None for plain seconds from the start of the workload."""
        if self.unit is not None or "arrival_s" in self.named:
            return Stamps(self.unit)
        stamp = first_row.get("arrival_s") if isinstance(first_row, dict) else None
        number = as_number(stamp)
        if number is None:
            return Stamps() if isinstance(stamp, str) and stamp[:1].isdigit() else None
        return Stamps() if number >= EPOCH_SECONDS else None


_REQUIRED = tuple(name for name, f in _Row.model_fields.items() if f.is_required())


def parse_map(items: list[str]) -> dict[str, str]:
    """{"arrival_s": "TIMESTAMP"} from ["arrival_s=TIMESTAMP"]."""
    named = {}
    for item in items:
        name, equals, column = item.partition("=")
        if not (name and equals and column):
            raise InputError(f"--map {item} is not of the form FIELD=COLUMN, such as arrival_s=TIMESTAMP")
        if name in named:
            raise InputError(f"--map: {name} is given twice")
        named[name] = column
    return named


def is_workload_file(path: Path) -> bool:
    """Whether the name says that this is a file to read a workload from."""
    return _suffix(path) in _READERS


def read_workload(path: Path, columns: Columns | None = None) -> Workload:
    """Read a workload file (see `read_requests`) into a Workload named as the file.

    Rows may stand in any order. Arrivals that are dates, times since 1970, in a declared unit or in a column
    of another name are shifted so that the first is at 0 s; plain `arrival_s` are taken as they stand.
    """
    requests = list(read_requests(path, columns))
    if not requests:
        raise InputError(f"{path}: holds no request")
    if any(later.arrival_s < earlier.arrival_s for earlier, later in pairwise(requests)):
        requests.sort(key=attrgetter("arrival_s"))
    start = min(0.0, requests[0].arrival_s)
    if start < 0:
        for index, request in enumerate(requests):
            requests[index] = replace(request, arrival_s=request.arrival_s - start)
    return Workload(path.name.removesuffix(".gz").removesuffix(_suffix(path)), tuple(requests))


def read_requests(path: Path, columns: Columns | None = None) -> Iterator[WorkloadRequest]:
    """The requests of a file in the order of its lines, read one at a time.

    JSONL (one object a line) or CSV (with a header), told apart by the suffix, also with .gz. Fields are those
    of `WorkloadRequest`; arrival_s, prompt_tokens and output_tokens are required. In CSV an empty cell
    means the default and hash_ids are separated by spaces. Arrivals that are stamps count from the first
    line's, so one of an unsorted file may be below 0. Records (observe/records.py) are read as they are; those
    without an output are left out, since nobody knows how long they would have been. Raises InputError naming the
    file and the line.
    """
    columns = columns or Columns()
    reader = _READERS.get(_suffix(path))
    if reader is None:
        raise InputError(f"{path}: a workload file ends in .jsonl or .csv (or these and .gz)")
    stamps: Stamps | None = None
    unseen = set(columns.named.values())
    raw: Any = {}
    try:
        with _opened(path) as lines:
            for index, (line, raw) in enumerate(reader(path, lines)):
                try:
                    row = columns.of(raw)
                    unseen = unseen.difference(raw) if unseen and isinstance(raw, dict) else unseen
                    if _is_record(raw) and not columns.named:
                        row = {name: raw[name] for name in FIELDS if name in raw}
                        stamps = stamps or Stamps("s")
                        if row.get("output_tokens") == 0:
                            continue
                    elif index == 0:
                        stamps = columns.stamps(row)
                    request = _request(row, stamps)
                except ValidationError as e:
                    raise InputError(f"{path}:{line}: {_complaint(e, raw)}") from e
                except ValueError as e:
                    raise InputError(f"{path}:{line}: {e}") from e
                yield request
    except UnicodeDecodeError as e:
        raise InputError(f"{path}: not UTF-8 text (byte {e.start})") from e
    except (OSError, EOFError, zlib.error) as e:
        raise InputError(f"cannot read {path}: {getattr(e, 'strerror', None) or e}") from e
    for column in sorted(unseen) if isinstance(raw, dict) and raw else ():
        raise InputError(f"{path}: no line has a value in the mapped column {column!r}; {nearest(column, [*raw])}")


def _is_record(row: Any) -> bool:
    """Whether a row tells how a request was served."""
    return isinstance(row, dict) and "request_id" in row and "finish_s" in row


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _jsonl_rows(path: Path, lines: IO[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as e:
            raise InputError(f"{path}:{number}: not JSON: {e.msg} at column {e.colno}") from e
        except (ValueError, RecursionError) as e:  # a number of thousands of digits, brackets a thousand deep
            raise InputError(f"{path}:{number}: not JSON: {e}") from e
        yield number, {key: value for key, value in row.items() if value is not None} if isinstance(row, dict) else row


def _csv_rows(path: Path, lines: IO[str]) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(MAX_CELL)
    reader = csv.DictReader(lines)
    try:
        for cells in reader:
            if None in cells:
                raise InputError(f"{path}:{reader.line_num}: more cells than the header has columns")
            yield reader.line_num, {name: cell for name, cell in cells.items() if cell}
    except csv.Error as e:
        raise InputError(f"{path}:{reader.line_num + 1}: not CSV: {e}") from e


_READERS: dict[str, Callable[[Path, IO[str]], Iterator[tuple[int, Any]]]] = {".jsonl": _jsonl_rows, ".csv": _csv_rows}


def _request(row: Any, stamps: Stamps | None) -> WorkloadRequest:
    if isinstance(row, dict) and isinstance(row.get("hash_ids"), str):
        row["hash_ids"] = row["hash_ids"].split()
    if stamps is None or not isinstance(row, dict) or "arrival_s" not in row:
        return _Row.model_validate(row).request(None)
    try:
        arrival_s = stamps.seconds(row["arrival_s"])
    except ValueError as e:
        raise ValueError(f"arrival_s: {e}") from None
    row["arrival_s"] = 0.0
    return _Row.model_validate(row).request(arrival_s)


def _complaint(e: ValidationError, raw: Any) -> str:
    """What is wrong with a row, and how to mend it, in one line."""
    first = e.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        message = f"unknown field {where}; the fields are {', '.join(FIELDS)}"
    elif first["type"] == "missing":
        message = f"{where} is missing"
    else:
        return f"{where}: {first['msg']}, not {first['input']!r}" if where else first["msg"]
    missing = [name for name in _REQUIRED if name not in raw]
    if missing:
        message += f" (is it in another column? --map {missing[0]}=COLUMN; there are {', '.join(map(str, raw))})"
    return message
