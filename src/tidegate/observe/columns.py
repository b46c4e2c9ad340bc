"""Records as arrays, so that a million of them are grouped and counted in a second or two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.core.request import FinishReason
from tidegate.observe.records import COMPLETED

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class Source(Protocol):
    """What has columns: a table, or a file of which each is read when it is asked for."""

    @property
    def num_rows(self) -> int: ...
    def __getitem__(self, name: str) -> pa.ChunkedArray: ...


class _Chosen:
    """Some rows of a source, copied only in the columns that are looked at."""

    def __init__(self, source: Source, mask: Mask) -> None:
        self._source, self._mask = source, pa.array(mask)
        self.num_rows = int(mask.sum())

    def __getitem__(self, name: str) -> pa.ChunkedArray:
        return self._source[name].filter(self._mask)


class Columns:
    """Records (observe/records.py) read column by column; what is null is NaN."""

    def __init__(self, source: Source) -> None:
        self._table = source
        self._numbers: dict[str, Floats] = {}

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def numbers(self, name: str) -> Floats:
        """A column of numbers or booleans."""
        if name not in self._numbers:
            column = self._table[name].cast(pa.float64())
            self._numbers[name] = np.asarray(column.to_numpy(), dtype=np.float64)
        return self._numbers[name]

    def known(self, name: str) -> Floats:
        """The numbers of a column that are there."""
        values = self.numbers(name)
        return values[~np.isnan(values)]

    def names(self, name: str) -> tuple[list[str], npt.NDArray[np.int64]]:
        """A column of text: the different values in order, and for each row which of them it has."""
        coded = self._table[name].combine_chunks().dictionary_encode()
        if isinstance(coded, pa.ChunkedArray):
            coded = coded.combine_chunks()
        values = coded.dictionary.to_pylist()
        order = sorted(range(len(values)), key=lambda i: values[i])
        rank = np.empty(len(values), dtype=np.int64)
        rank[order] = np.arange(len(values))
        return [values[i] for i in order], rank[coded.indices.to_numpy()]

    def texts(self, name: str, rows: Sequence[int]) -> list[str]:
        """A column of text at some rows."""
        return [str(value) for value in self._table[name].take(list(rows)).to_pylist()]

    def where(self, mask: Mask) -> Columns:
        """The rows that `mask` holds."""
        return Columns(_Chosen(self._table, mask))

    def groups(self, name: str) -> Iterator[tuple[str, Columns]]:
        """The rows of each value of a text column, by value in order: one group after the other."""
        values, codes = self.names(name)
        for i, value in enumerate(values):
            yield value, self if len(values) == 1 else self.where(codes == i)

    @property
    def completed(self) -> Mask:
        """Who got all of the answer."""
        return self._ended(list(COMPLETED))

    @property
    def cancelled(self) -> Mask:
        """Whom the client gave up."""
        return self._ended([FinishReason.CANCELLED.value])

    def _ended(self, reasons: list[str]) -> Mask:
        found = pc.is_in(self._table["finish_reason"], value_set=pa.array(reasons, pa.string()))
        return np.asarray(found.to_numpy(), dtype=np.bool_)

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last end; 0 of nothing."""
        if not len(self):
            return 0.0
        return float(self.numbers("finish_s").max() - self.numbers("arrival_s").min())
