"""The step log: a row per engine step, simulated or real, as Parquet or JSONL. Calibration and reports read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import pyarrow as pa

from tidegate.observe.rowfiles import MAY_BE_MISSING, ROW_GROUP, RowWriter, read_batches, read_rows, row_suffix

WHAT = "steps"


class StepRow(NamedTuple):
    """One step that was computed.

    start_s:        when the executor began with it, seconds on the run's clock (that of the records)
    seconds:        how long the executor was busy with it
    prefill_tokens: prompt tokens computed, recomputed ones included
    decodes:        tokens computed by decodes, drafts included
    context_tokens: KV tokens that the decodes read, their own included
    running:        requests with a seat
    waiting:        requests without one, preempted ones included, those that may not start yet left out
    free_blocks:    KV blocks that can be had, cached ones that nobody holds included
    preempted:      requests that gave way when it was planned
    replica:        which instance computed it
    prefill_context: KV tokens before the prompt chunks, which they read; None where the writer does not know
    prefill_pairs:  query-key pairs of the prompt chunks, over the causal half; None where the writer does not know
    """

    start_s: float
    seconds: float
    prefill_tokens: int
    decodes: int
    context_tokens: int
    running: int
    waiting: int
    free_blocks: int
    preempted: int
    replica: str
    prefill_context: int | None = None
    prefill_pairs: int | None = None


_ARROW: Mapping[Any, pa.DataType] = {
    float: pa.float64(),
    int: pa.int64(),
    str: pa.string(),
    int | None: pa.int64(),
}

STEP_SCHEMA = pa.schema(
    [
        pa.field(name, _ARROW[kind])
        if name in StepRow._field_defaults
        else pa.field(name, _ARROW[kind], nullable=False)
        for name, kind in get_type_hints(StepRow).items()
    ],
    metadata={MAY_BE_MISSING: ",".join(StepRow._field_defaults)},
)
"""Columns with a default are missing in logs that were written before there were such columns."""


def causal_pairs(start: int, length: int) -> int:
    """Query-key pairs of a chunk of `length` tokens behind `start`: each sees those before it and itself."""
    return length * start + length * (length + 1) // 2


class StepWriter:
    """Writes steps one by one in bounded memory, as Parquet or JSONL by the suffix.

    A file that is there is replaced. Use it in a `with`, or call `close`. Raises InputError for a path that cannot
    be written.
    """

    def __init__(self, path: Path, row_group: int = ROW_GROUP) -> None:
        self._rows = RowWriter(path, STEP_SCHEMA, WHAT, row_group)

    def write(self, row: StepRow) -> None:
        """Append one step."""
        self._rows.write(row)

    def close(self) -> None:
        """Write what waits, and the end of the file. Idempotent."""
        self._rows.close()

    def __enter__(self) -> StepWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_steps(rows: Iterable[StepRow], path: Path) -> None:
    """Write a step log, Parquet or JSONL by the suffix. A file that is there is replaced."""
    with StepWriter(path) as out:
        for row in rows:
            out.write(row)


def iter_steps(path: Path) -> Iterator[StepRow]:
    """The steps of a log one by one, in bounded memory.

    Raises InputError naming the file and what is wrong with it, such as a column that is missing.
    """
    for batch in read_batches(path, STEP_SCHEMA, WHAT):
        yield from starmap(StepRow, zip(*(column.to_pylist() for column in batch.columns), strict=True))


def read_steps(path: Path) -> list[StepRow]:
    """All steps of a log. Raises InputError as `iter_steps` does."""
    return list(iter_steps(path))


def read_steps_table(path: Path) -> pa.Table:
    """All steps of a log as columns. Raises InputError as `iter_steps` does."""
    return read_rows(path, STEP_SCHEMA, WHAT)


def steps_table(rows: Iterable[StepRow]) -> pa.Table:
    """Steps as columns."""
    return pa.Table.from_pylist([row._asdict() for row in rows], schema=STEP_SCHEMA)


def steps_suffix(path: Path) -> str:
    """The suffix of a step log, checked; call it before a long run rather than after."""
    return row_suffix(path, WHAT)
