"""Rows of one fixed schema in files, Parquet or JSON lines: written row by row, read batch by batch.

Neither side ever holds more than one row group. What a file lacks is told by the file, the row and the column.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.errors import InputError

ROW_GROUP = 32_768
"""Rows that are held in memory, and that make up a row group of Parquet."""

NAMES_TOLD = 6

MAY_BE_MISSING = b"may_be_missing"
"""Metadata of a schema: its columns, joined by commas, that a file may lack; they are read as nulls."""


def row_suffix(path: Path, what: str) -> str:
    """The suffix of a file of `what` ("records"), checked; call it before a long run rather than after."""
    if path.suffix not in (".parquet", ".jsonl"):
        raise InputError(f"{path}: {what} are written as .parquet or .jsonl")
    return path.suffix


class RowWriter:
    """Writes tuples in the order of `schema` to `path`, told apart by the suffix; a file that is there is replaced.

    Holds at most `row_group` rows. Use it in a `with`, or call `close`: only then is a Parquet file whole.
    Raises InputError for a path that cannot be written.
    """

    def __init__(self, path: Path, schema: pa.Schema, what: str, row_group: int = ROW_GROUP) -> None:
        self.path = path
        self.rows = 0
        self._schema = schema
        self._row_group = row_group
        self._waiting: list[Sequence[Any]] = []
        suffix = row_suffix(path, what)
        try:
            self._text = path.open("w", encoding="utf-8") if suffix == ".jsonl" else None
            self._parquet = None if self._text else pq.ParquetWriter(path, schema, compression="zstd")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror or error}") from error

    def write(self, row: Sequence[Any]) -> None:
        """Append one row."""
        self.rows += 1
        self._waiting.append(row)
        if len(self._waiting) >= self._row_group:
            self._flush()

    def close(self) -> None:
        """Write what waits, and the end of the file. Idempotent."""
        self._flush()
        for file in (self._text, self._parquet):
            if file is not None:
                file.close()
        self._text = self._parquet = None

    def _flush(self) -> None:
        rows, self._waiting = self._waiting, []
        if not rows:
            return
        try:
            if self._text is not None:
                names = self._schema.names
                self._text.writelines(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)
            elif self._parquet is not None:
                columns = zip(*rows, strict=True)
                arrays = [pa.array(c, f.type) for c, f in zip(columns, self._schema, strict=True)]
                self._parquet.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}") from error

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read_batches(
    path: Path, schema: pa.Schema, what: str, rows: int = ROW_GROUP, only: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Batches of at most `rows` rows in the columns of `schema`, checked: names, types, and no null where none may be.

    `what` names the rows in messages ("records"); `only` are the columns to read, where that is not all. Raises
    InputError that says which file, row and column is wrong.
    """
    wanted = schema if only is None else pa.schema([schema.field(name) for name in only])
    reader = _parquet_batches if row_suffix(path, what) == ".parquet" else _jsonl_batches
    if not path.is_file():
        raise InputError(f"cannot read {path}: {'it is a directory' if path.is_dir() else 'there is no such file'}")
    first = 1
    try:
        for batch in reader(path, schema, what, rows, wanted):
            _check_nulls(path, batch, what, first)
            first += batch.num_rows
            yield batch
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise InputError(f"{path} holds no {what}: {error}") from error


def read_rows(path: Path, schema: pa.Schema, what: str) -> pa.Table:
    """The whole file as a table. Raises InputError as `read_batches` does."""
    return pa.Table.from_batches(read_batches(path, schema, what), schema=schema)


class ParquetColumns:
    """A Parquet file, of which a column is read when it is asked for: memory for those alone that are looked at.

    Raises InputError as `read_batches` does: for names at once, for what a column holds when it is read.
    """

    def __init__(self, path: Path, schema: pa.Schema, what: str) -> None:
        self._path, self._schema, self._what = path, schema, what
        self.num_rows = sum(batch.num_rows for batch in self._batches(schema.names[:1]))

    def __getitem__(self, name: str) -> pa.ChunkedArray:
        field = self._schema.field(name)
        return pa.chunked_array([batch.column(0) for batch in self._batches([name])], field.type)

    def _batches(self, only: Sequence[str]) -> Iterator[pa.RecordBatch]:
        return read_batches(self._path, self._schema, self._what, only=only)


def _parquet_batches(path: Path, schema: pa.Schema, what: str, rows: int, only: pa.Schema) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        _check_names(f"{path} holds no {what}", file.schema_arrow.names, schema)
        for batch in file.iter_batches(rows, columns=only.names):
            there = batch.schema.names
            columns = [
                _cast(path, batch.column(field.name), field, what)
                if field.name in there
                else pa.nulls(batch.num_rows, field.type)
                for field in only
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=only)


def _cast(path: Path, column: pa.Array, field: pa.Field, what: str) -> pa.Array:
    try:
        return column.cast(field.type)
    except pa.ArrowException as error:
        raise InputError(
            f"{path} holds no {what}: column {field.name} is {column.type}, not {field.type} ({error})"
        ) from error


def _jsonl_batches(path: Path, schema: pa.Schema, what: str, rows: int, only: pa.Schema) -> Iterator[pa.RecordBatch]:
    with path.open(encoding="utf-8") as lines:
        waiting: list[tuple[int, dict[str, Any]]] = []
        for number, line in enumerate(lines, 1):
            if line.strip():
                waiting.append((number, _json_row(path, number, line, schema, what)))
            if len(waiting) >= rows:
                yield _as_batch(path, waiting, only, what)
                waiting = []
        if waiting:
            yield _as_batch(path, waiting, only, what)


def _json_row(path: Path, number: int, line: str, schema: pa.Schema, what: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"{path} holds no {what}: line {number} is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise InputError(f"{path} holds no {what}: line {number} is no object but {line.strip()[:40]!r}")
    if row.keys() != set(schema.names):
        _check_names(f"{path} holds no {what}: line {number}", list(row), schema)
        return dict.fromkeys(schema.names) | row
    return row


def _as_batch(path: Path, rows: list[tuple[int, dict[str, Any]]], schema: pa.Schema, what: str) -> pa.RecordBatch:
    try:
        columns = [_column([row[field.name] for _, row in rows], field) for field in schema]
    except _NO_VALUES:
        for number, row in rows:
            for field in schema:
                try:
                    _column([row[field.name]], field)
                except _NO_VALUES as error:
                    value = repr(row[field.name])[:40]
                    raise InputError(
                        f"{path} holds no {what}: line {number}: {field.name} is {value}, not {field.type}"
                    ) from error
        raise
    return pa.RecordBatch.from_arrays(columns, schema=schema)


_NO_VALUES = (pa.ArrowException, OverflowError, TypeError, UnicodeError)


def _column(values: list[Any], field: pa.Field) -> pa.Array:
    """Values as a column; a fraction is no whole number, which Arrow alone would cut off."""
    if pa.types.is_integer(field.type) and any(type(value) is float for value in values):
        raise TypeError("not a whole number")
    return pa.array(values, field.type)


def _check_names(where: str, names: Sequence[str], schema: pa.Schema) -> None:
    spared = (schema.metadata or {}).get(MAY_BE_MISSING, b"").decode().split(",")
    missing = [name for name in schema.names if name not in names and name not in spared]
    unknown = [name for name in names if name not in schema.names]
    told = [f"{kind} {_some(odd)}" for kind, odd in (("missing", missing), ("unknown", unknown)) if odd]
    if told:
        raise InputError(f"{where}: {'; '.join(told)}")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_TOLD} more" if len(names) > NAMES_TOLD else ""
    return ", ".join(name[:40] for name in names[:NAMES_TOLD]) + more


def _check_nulls(path: Path, batch: pa.RecordBatch, what: str, first: int) -> None:
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if not field.nullable and column.null_count:
            row = first + column.is_null().to_pylist().index(True)
            raise InputError(f"{path} holds no {what}: row {row} has no {field.name}")
