"""One run to be compared: its records, and what lies beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from tidegate.errors import InputError
from tidegate.observe.columns import Columns, Floats, Source
from tidegate.observe.comparison.words import short
from tidegate.observe.records import Record, records_columns, records_suffix, records_table
from tidegate.observe.steplog import StepRow, read_steps_table, steps_table

ALONE = "records"
"""A file of this name is told by its directory's, and its companions have no name of their own."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run of one workload under one policy, simulated or real.

    name:        as it is shown; runs of one name, one measured and one not, share a colour
    records:     a file of records (docs/records.md), or the records, or a table of them
    steps:       the step log, as a file or rows; without it there is no KV use over time
    decisions:   the decision log of a server or simulation; without it, preemptions are counted but not explained
    measured:    on a real engine; drawn dashed
    pool_blocks: KV blocks of one replica; unknown, the most that the step log ever saw free count as all
    """

    name: str
    records: Path | Sequence[Record] | pa.Table
    steps: Path | Sequence[StepRow] | None = None
    decisions: Path | None = None
    measured: bool = False
    pool_blocks: int | None = None

    @classmethod
    def of_file(cls, path: Path, name: str | None = None, measured: bool = False) -> Run:
        """A records file with the step and decision log beside it, where there are any.

        Beside `NAME.parquet` those are `NAME.steps.parquet` (or `.jsonl`) and `NAME.decisions.jsonl`; beside
        `records.parquet`, `steps.parquet` and `decisions.jsonl`. Raises InputError for another suffix.
        """
        records_suffix(path)
        stem = path.name.removesuffix(path.suffix).removesuffix(f".{ALONE}")
        prefix = "" if stem == ALONE else f"{stem}."
        steps = [path.with_name(f"{prefix}steps{suffix}") for suffix in (".parquet", ".jsonl")]
        decisions = path.with_name(f"{prefix}decisions.jsonl")
        return cls(
            name=name or (path.resolve().parent.name if stem == ALONE else stem),
            records=path,
            steps=next((file for file in steps if file.exists()), None),
            decisions=decisions if decisions.exists() else None,
            measured=measured,
        )


def is_companion(path: Path) -> bool:
    """Whether a file is one that lies beside records by its name."""
    stem, suffix = path.name.removesuffix(path.suffix), path.suffix
    kind = stem.rpartition(".")[2]
    return (kind == "steps" and suffix in (".parquet", ".jsonl")) or (kind == "decisions" and suffix == ".jsonl")


class Loaded:
    """A run that was read. Moments are seconds from its first arrival."""

    def __init__(self, run: Run, colour: int) -> None:
        self.run = run
        self.colour = colour
        self.columns = Columns(_records(run))
        if not len(self.columns):
            raise InputError(f"{_source(run)}: there is no record to report")
        self.origin = float(self.columns.numbers("arrival_s").min())
        self.steps = _steps(run)

    @property
    def name(self) -> str:
        """As it is shown."""
        name = short(self.run.name)
        return f"{name} (measured)" if self.run.measured else name

    @property
    def source(self) -> str:
        """Where its records came from."""
        return _source(self.run)


def _source(run: Run) -> str:
    return str(run.records) if isinstance(run.records, Path) else f"run {run.name}"


def _records(run: Run) -> Source:
    if isinstance(run.records, Path):
        return records_columns(run.records)
    return run.records if isinstance(run.records, pa.Table) else records_table(run.records)


def _steps(run: Run) -> dict[str, dict[str, Floats]] | None:
    """The step log's columns by replica, in order of time; None where there is no step."""
    if run.steps is None:
        return None
    table = read_steps_table(run.steps) if isinstance(run.steps, Path) else steps_table(run.steps)
    found: dict[str, dict[str, Floats]] = {}
    for replica in sorted(set(table["replica"].to_pylist())):
        rows = table.filter(pa.compute.equal(table["replica"], replica)).sort_by("start_s")
        names = ("start_s", "seconds", "running", "waiting", "free_blocks")
        found[replica] = {name: np.asarray(rows[name].to_numpy(), dtype=np.float64) for name in names}
    return found or None
