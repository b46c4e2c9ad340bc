"""How commands take a workload: its parts, and how to read the columns of files among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tidegate.simulate.workload import Workload

Parts = Annotated[
    list[str],
    typer.Argument(
        help="A shipped trace, a .jsonl or .csv file, or a synthetic kind, each with items such as :batch,thin=0.5; "
        "several are merged. docs/workloads.md has them all.",
    ),
]
Map = Annotated[
    list[str] | None,
    typer.Option("--map", metavar="FIELD=COLUMN", help="A file's column of another name; may be repeated."),
]
TimeUnit = Annotated[
    str | None,
    typer.Option("--time-unit", help="Unit of a file's numeric arrivals: s, ms, us or ns; by default told from them."),
]


def load(parts: list[str], columns: list[str] | None, unit: str | None, seed: int, *, closed_loops: bool) -> Workload:
    """The workload that the options describe."""
    from tidegate.simulate.traces import load_workload
    from tidegate.simulate.workload_files import parse_map

    named = parse_map(columns) if columns else None
    return load_workload(parts, columns=named, unit=unit, seed=seed, closed_loops=closed_loops)
