"""Rows to a Parquet file as they come, so that a run of any length holds only the last few in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.errors import InputError

BATCH = 65_536
"""Rows in memory, and rows of a row group."""


class ParquetRows:
    """Writes tuples in the order of `schema`. A file that is there is replaced. Close it, or use it in a `with`.

    Raises InputError if the file cannot be written.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._rows: list[Sequence[Any]] = []
        try:
            self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        except OSError as e:
            raise InputError(f"cannot write {path}: {e.strerror or e}") from e

    def write(self, row: Sequence[Any]) -> None:
        """Append one row."""
        self._rows.append(row)
        if len(self._rows) >= BATCH:
            self._flush()

    def extend(self, rows: Iterable[Sequence[Any]]) -> None:
        """Append these rows."""
        self._rows.extend(rows)
        if len(self._rows) >= BATCH:
            self._flush()

    def close(self) -> None:
        """Write what is left and close the file."""
        if self._rows:
            self._flush()
        self._writer.close()

    def __enter__(self) -> ParquetRows:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _flush(self) -> None:
        columns = zip(*self._rows, strict=True)
        arrays = [pa.array(c, f.type) for c, f in zip(columns, self._schema, strict=True)]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        self._rows = []
