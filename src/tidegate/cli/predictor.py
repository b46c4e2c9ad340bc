"""`tidegate predictor train`: a learned output-length predictor from records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidegate.cli.bare import help_without_command

app = typer.Typer(
    rich_markup_mode=None, add_completion=False, invoke_without_command=True, help="Learn to predict output lengths."
)


@app.callback()
def _group(ctx: typer.Context) -> None:
    """Learn to predict output lengths."""
    help_without_command(ctx)


@app.command()
def train(
    records: Annotated[list[Path], typer.Argument(help="Records, .parquet or .jsonl, of runs in their order in time.")],
    out: Annotated[Path, typer.Option(help="Write the predictor to this file.")],
    quantile: Annotated[
        list[float] | None, typer.Option(help="Learn this quantile; may be repeated. By default 0.5 and 0.9.")
    ] = None,
    declared: Annotated[
        int | None, typer.Option(min=1, help="Compare with max_tokens N; by default the most that was needed before.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
) -> None:
    """Learn output lengths from the older requests, measure on the newest, and write the predictor."""
    from dataclasses import asdict

    from tidegate.cli.output import print_json, print_table
    from tidegate.errors import InputError
    from tidegate.observe.records import read_records
    from tidegate.predictors import training
    from tidegate.predictors.learned import save_model

    if not out.parent.is_dir():
        raise InputError(f"cannot write {out}: there is no folder {out.parent}")
    if quantile and len(set(quantile)) < len(quantile):
        raise InputError("the same --quantile is named twice")
    runs = [(str(path), read_records(path)) for path in records]
    done = training.train(runs, quantile or training.DEFAULT_QUANTILES, declared)
    save_model(done.model, out)
    scores = [asdict(score) for score in done.scores]
    measured = ("pinball", "median_absolute_error", "coverage")
    counts = {name: getattr(done, name) for name in ("trained", "held_out", "left_out", "declared")}
    if as_json:
        print_json({"out": str(out), "bytes": out.stat().st_size, **counts, "scores": scores})
        return
    typer.echo(
        f"learned from {done.trained} requests, measured on the {done.held_out} after them ({done.left_out} left out); "
        f"declared is {done.declared} tokens for everybody"
    )
    print_table([score | {name: round(score[name], 3) for name in measured} for score in scores])
    typer.echo(f"wrote {out} ({out.stat().st_size} bytes)")
