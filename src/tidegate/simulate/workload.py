"""What arrives when: a `Workload` is a named list of requests in order of arrival.

Times are seconds from the start of the workload, sizes are tokens. A workload says nothing about
policies or machines, so that one workload serves a simulation and a replay alike.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tidegate.core.slo import DEFAULT_CLASS
from tidegate.errors import InputError

DEFAULT_HASH_BLOCK = 512


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request.

    `hash_ids` name the prompt's blocks of `hash_block_tokens` tokens, the last one possibly partial;
    two requests whose ids agree from the start share that much of their prompt. Empty means that
    nothing is known to be shared. `priority` None takes the class's.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = "default"
    slo_class: str = DEFAULT_CLASS
    priority: int | None = None
    hash_ids: tuple[int, ...] = ()
    hash_block_tokens: int = DEFAULT_HASH_BLOCK


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, and the name under which results report them."""

    name: str
    requests: tuple[WorkloadRequest, ...]

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[WorkloadRequest]:
        return iter(self.requests)

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last; 0 for fewer than two requests."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s if self.requests else 0.0

    @property
    def rate(self) -> float:
        """Mean arrivals per second; 0 where all arrive at once."""
        return (len(self) - 1) / self.duration_s if self.duration_s else 0.0

    def limited(self, count: int) -> Workload:
        """The first `count` requests."""
        return replace(self, requests=self.requests[:count])

    def rate_scaled(self, factor: float) -> Workload:
        """The same requests arriving `factor` times as fast."""
        if not factor > 0:
            raise InputError(f"a rate scale must be above 0, not {factor:g}")
        return replace(self, requests=tuple(replace(r, arrival_s=r.arrival_s / factor) for r in self.requests))


class _Row(BaseModel):
    """One line of a workload file, as users write it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    arrival_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    prompt_tokens: Annotated[int, Field(ge=1)]
    output_tokens: Annotated[int, Field(ge=1)]
    tenant: Annotated[str, Field(min_length=1)] = "default"
    slo_class: Annotated[str, Field(min_length=1)] = DEFAULT_CLASS
    priority: int | None = None
    hash_ids: tuple[int, ...] = ()
    hash_block_tokens: Annotated[int, Field(ge=1)] = DEFAULT_HASH_BLOCK

    def request(self) -> WorkloadRequest:
        blocks = -(-self.prompt_tokens // self.hash_block_tokens)
        if len(self.hash_ids) > blocks:
            raise ValueError(
                f"hash_ids has {len(self.hash_ids)} entries, but {self.prompt_tokens} prompt tokens "
                f"are only {blocks} blocks of hash_block_tokens={self.hash_block_tokens}"
            )
        return WorkloadRequest(**dict(self))


def read_workload(path: Path) -> Workload:
    """Read a workload file: JSONL (one object a line) or CSV (with a header), told apart by the suffix.

    Fields are those of `WorkloadRequest`; arrival_s, prompt_tokens and output_tokens are required. In
    CSV an empty cell means the default and hash_ids are separated by spaces. Rows may stand in any
    order. Raises InputError naming the file and the line.
    """
    readers: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {".jsonl": _jsonl_rows, ".csv": _csv_rows}
    reader = readers.get(path.suffix)
    if reader is None:
        raise InputError(f"{path}: a workload file ends in .jsonl or .csv")
    try:
        requests = [_parse(path, line, row) for line, row in reader(path)]
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise InputError(f"{path}: not UTF-8 text (byte {e.start})") from e
    if not requests:
        raise InputError(f"{path}: holds no request")
    return Workload(path.stem, tuple(sorted(requests, key=lambda r: r.arrival_s)))


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as e:
                raise InputError(f"{path}:{number}: not JSON: {e.msg} at column {e.colno}") from e


def _csv_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        for cells in reader:
            if None in cells:
                raise InputError(f"{path}:{reader.line_num}: more cells than the header has columns")
            row: dict[str, Any] = {name: cell for name, cell in cells.items() if cell}
            if "hash_ids" in row:
                row["hash_ids"] = row["hash_ids"].split()
            yield reader.line_num, row


def _parse(path: Path, line: int, row: Any) -> WorkloadRequest:
    try:
        return _Row.model_validate(row).request()
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            message = f"unknown field {where}; the fields are {', '.join(_Row.model_fields)}"
        elif first["type"] == "missing":
            message = f"{where} is missing"
        else:
            message = f"{where}: {first['msg']}, not {first['input']!r}" if where else first["msg"]
        raise InputError(f"{path}:{line}: {message}") from e
    except ValueError as e:
        raise InputError(f"{path}:{line}: {e}") from e
