"""The one record format for simulated and real runs: a row per request, as Parquet or JSONL.

Reports, comparisons and validation read only this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import starmap
from math import ceil
from pathlib import Path
from types import NoneType
from typing import NamedTuple, get_args, get_type_hints

import numpy as np
import pyarrow as pa

from tidegate.core.events import Event, Finished, Rejected, Timing
from tidegate.core.request import FinishReason, Request
from tidegate.observe.rowfiles import ROW_GROUP, ParquetColumns, RowWriter, read_batches, read_rows, row_suffix

WHAT = "records"
COMPLETED = frozenset({FinishReason.STOP.value, FinishReason.LENGTH.value, FinishReason.LENGTH_KV.value})


class Record(NamedTuple):
    """What became of one request.

    Times are seconds; `*_s` of a moment is on the run's clock, `ttft_s`, `tpot_s`, `e2e_s` and the gaps
    are durations. Sizes are tokens or, where the name says so, blocks. None is what never happened or
    what the writer cannot know (a client does not see admissions).

    arrival_s, admitted_s, first_token_s, finish_s: moments
    cached_tokens:     prompt tokens that the prefix cache spared
    recomputed_tokens: tokens computed a second time after preemptions
    swapped_blocks:    blocks copied to the host and back
    max_gap_s, p99_gap_s: largest and 99th percentile (nearest rank) gap between two tokens
    tpot_s:            mean gap after the first token; None below two outputs
    slo_met:           the request completed and kept every promise of its class
    finish_reason:     as the scheduler's FinishReason
    replica:           which instance served it
    """

    request_id: str
    tenant: str
    slo_class: str
    priority: int
    arrival_s: float
    admitted_s: float | None
    first_token_s: float | None
    finish_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    recomputed_tokens: int | None
    swapped_blocks: int | None
    preemptions: int | None
    max_gap_s: float | None
    p99_gap_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    slo_met: bool
    finish_reason: str
    replica: str


COLUMNS = Record._fields

_ARROW = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}


def _column(name: str, kind: type) -> pa.Field:
    """The column of a field of `kind`, which is a type or "that type or None"."""
    kinds = get_args(kind) or (kind,)
    return pa.field(name, _ARROW[kinds[0]], nullable=NoneType in kinds)


SCHEMA = pa.schema([_column(name, kind) for name, kind in get_type_hints(Record).items()])


class Recorder:
    """Folds a scheduler's events into records: one for every request that came to the door."""

    def __init__(self, replica: str = "0") -> None:
        self.replica = replica
        self.records: list[Record] = []

    def observe(self, events: Iterable[Event]) -> None:
        """Take events in the order in which they happened."""
        for event in events:
            if isinstance(event, Finished):
                self.records.append(self._row(event.request, event.now, event.reason, event.timing, event.missed))
            elif isinstance(event, Rejected):
                never = Timing(None, None, None, event.now - event.request.arrival, 0.0)
                self.records.append(self._row(event.request, event.now, FinishReason.REFUSED, never, ()))

    def _row(self, r: Request, now: float, reason: FinishReason, timing: Timing, missed: Sequence[str]) -> Record:
        max_gap, p99_gap = _largest(timing.gaps)
        ended = reason.value
        return Record(  # by position: names would take as long as all the rest of this
            r.id,
            r.tenant,
            r.slo_class,
            r.priority,
            r.arrival,
            r.admitted_at,
            r.first_token_at,
            now,
            r.prompt_tokens,
            r.emitted,
            r.cached_tokens,
            r.recomputed_tokens,
            r.swapped_blocks,
            r.preemptions,
            max_gap,
            p99_gap,
            timing.ttft,
            timing.tpot,
            timing.e2e,
            ended in COMPLETED and not missed,
            ended,
            self.replica,
        )


def _largest(gaps: Sequence[float]) -> tuple[float | None, float | None]:
    """Maximum and 99th percentile (nearest rank); None of nothing."""
    if len(gaps) < 100:  # of so few they are the same
        longest = max(gaps, default=None)
        return longest, longest
    rank = ceil(0.99 * len(gaps)) - 1
    ascending = np.array(gaps)
    ascending.sort()  # the few hundred of a request are sorted sooner than a rank of them is found
    return ascending.item(-1), ascending.item(rank)


class RecordWriter:
    """Writes records one by one in bounded memory, as Parquet or JSONL by the suffix.

    A file that is there is replaced. Use it in a `with`, or call `close`. `row_group` is how many records are held.
    Raises InputError for a path that cannot be written.
    """

    def __init__(self, path: Path, row_group: int = ROW_GROUP) -> None:
        self._rows = RowWriter(path, SCHEMA, WHAT, row_group)

    def write(self, record: Record) -> None:
        """Append one record."""
        self._rows.write(record)

    def close(self) -> None:
        """Write what waits, and the end of the file. Idempotent."""
        self._rows.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_records(records: Iterable[Record], path: Path) -> None:
    """Write Parquet or JSONL, told apart by the suffix. A file that is there is replaced."""
    with RecordWriter(path) as out:
        for record in records:
            out.write(record)


def iter_records(path: Path) -> Iterator[Record]:
    """The records of a file one by one, in bounded memory.

    Raises InputError naming the file and what is wrong with it, such as a column that is missing.
    """
    for batch in read_batches(path, SCHEMA, WHAT):
        yield from starmap(Record, zip(*(column.to_pylist() for column in batch.columns), strict=True))


def read_records(path: Path) -> list[Record]:
    """All records of a file. Raises InputError as `iter_records` does."""
    return list(iter_records(path))


def records_columns(path: Path) -> pa.Table | ParquetColumns:
    """The columns of a file, of which only those that are looked at take memory where it is Parquet.

    Raises InputError as `iter_records` does, for what a column holds when it is looked at.
    """
    return ParquetColumns(path, SCHEMA, WHAT) if records_suffix(path) == ".parquet" else read_rows(path, SCHEMA, WHAT)


def records_table(records: Sequence[Record]) -> pa.Table:
    """Records as columns."""
    columns = zip(*records, strict=True) if records else [()] * len(COLUMNS)
    arrays = [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def records_suffix(path: Path) -> str:
    """The suffix of a records file, checked; call it before a long run rather than after."""
    return row_suffix(path, WHAT)
