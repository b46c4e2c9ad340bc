"""`tidegate report`: runs side by side, in a table and on a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tidegate.observe.report import Run


def report(
    records: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=]RECORDS…", help="Files of records, or directories of them; a name to show."),
    ] = None,
    measured: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]RECORDS", help="Records of a real engine, drawn dashed; may be repeated."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write the comparison page here.")] = None,
    title: Annotated[str, typer.Option(help="The page's title.")] = "Comparison of runs",
    config: Annotated[Path | None, typer.Option(help="Configuration with the classes' promises to show.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summaries as JSON.")] = False,
) -> None:
    """Compare runs by their records, simulated or measured.

    A step log NAME.steps.parquet (or .jsonl) and a decision log NAME.decisions.jsonl beside NAME.parquet are used too.
    """
    from tidegate.cli.environment import config_path
    from tidegate.cli.output import print_json
    from tidegate.cli.summaries import print_summaries, summaries_json
    from tidegate.config import load_config
    from tidegate.errors import InputError
    from tidegate.observe.report import load_runs, write_page
    from tidegate.observe.summary import summarise_columns

    if out is not None and out.suffix not in (".html", ".htm"):
        raise InputError(f"--out {out}: the page is HTML; name it FILE.html")
    runs = [*_runs(records or (), measured=False), *_runs(measured or (), measured=True)]
    if not runs:
        raise InputError("name the records of at least one run, as `tidegate simulate` or `tidegate replay` wrote them")
    promises = load_config(config_path(config)).slo_classes
    loaded = load_runs(runs)
    if out is not None:
        write_page(loaded, out, promises=promises, title=title)
    summaries = {run.name: summarise_columns(run.columns) for run in loaded}
    if as_json:
        print_json({"report": None if out is None else str(out), "runs": summaries_json(summaries)})
        return
    print_summaries(summaries)
    if out is not None:
        typer.echo(f"the comparison is in {out}")


def _runs(arguments: Sequence[str], *, measured: bool) -> Iterator[Run]:
    """The runs that were named; a directory stands for the records in it, and what lies beside records for itself."""
    from tidegate.observe.report import Run

    for argument in arguments:
        name, equals, rest = argument.partition("=")
        named = bool(equals) and not Path(argument).exists()
        path = Path(rest if named else argument)
        for file in _records_in(path):
            yield Run.of_file(file, name if named else None, measured)


def _records_in(path: Path) -> list[Path]:
    from tidegate.errors import InputError
    from tidegate.observe.comparison.run import is_companion

    if not path.is_dir():
        return [] if is_companion(path) and path.exists() else [path]
    found = [file for suffix in ("parquet", "jsonl") for file in path.glob(f"*.{suffix}") if not is_companion(file)]
    if not found:
        raise InputError(f"{path} holds no records: no .parquet or .jsonl file but step and decision logs")
    return sorted(found)
