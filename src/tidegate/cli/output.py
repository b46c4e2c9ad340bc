"""How commands print: tables for people, JSON for programs, progress only on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

PIPE_WIDTH = 200


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_table(rows: Sequence[Mapping[str, Any]], title: str | None = None) -> None:
    """Rows as a table; the first row's keys head the columns, numbers stand right, None is a dash."""
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in rows[0] if rows else ():
        number = any(isinstance(row[name], int | float) for row in rows)
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*("-" if cell is None else str(cell) for cell in row.values()))
    console.print(table)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Progress | None]:
    """A progress bar with one task on standard error, or None where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        bar.add_task(what, total=total)
        yield bar
