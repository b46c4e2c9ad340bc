"""`tidegate replay`: a workload against a real server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidegate.cli.workload_options import Map, Parts, TimeUnit
from tidegate.cli.workload_options import load as load_parts

if TYPE_CHECKING:
    from tidegate.config import Config
    from tidegate.simulate.replay import Replay, Target
    from tidegate.simulate.workload import Workload


def replay(
    workload: Parts,
    columns: Map = None,
    time_unit: TimeUnit = None,
    url: Annotated[str, typer.Option(help="The OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model to ask for; by default the server's first.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Send only the first N requests.")] = None,
    rate_scale: Annotated[float, typer.Option(help="Let requests arrive this many times as fast.")] = 1.0,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="At most N requests at a time; later ones wait for a place.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the prompts' random token ids and of what the workload decides by lot.")
    ] = 0,
    token_ids: Annotated[
        tuple[int, int], typer.Option(metavar="LOW HIGH", help="Prompts hold token ids from LOW to HIGH-1.")
    ] = (1_000, 30_000),
    timeout: Annotated[float, typer.Option(help="Seconds without a byte after which a request failed.")] = 600.0,
    config: Annotated[Path | None, typer.Option(help="Configuration with the classes to judge by.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write records to this .parquet or .jsonl file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Replay a workload against a real server.

    Requests are sent when they are due; what a client sees is measured and recorded.
    """
    from tidegate.cli.environment import api_key, config_path
    from tidegate.config import load_config
    from tidegate.errors import InputError
    from tidegate.observe.records import COMPLETED, records_suffix, write_records
    from tidegate.simulate.replay import Replay, Target

    if out is not None:
        records_suffix(out)
    if not 0 <= token_ids[0] < token_ids[1]:
        raise InputError(f"--token-ids {token_ids[0]} {token_ids[1]}: LOW must be at least 0 and below HIGH")
    if not timeout > 0:
        raise InputError(f"--timeout must be above 0, not {timeout:g}")
    settings: Config = load_config(config_path(config))
    target = Target(
        url=url.rstrip("/").removesuffix("/v1"),
        model=model,
        api_key=api_key(),
        seed=seed,
        token_ids=token_ids,
        concurrency=concurrency,
        timeout_s=timeout,
        classes=settings.slo_classes,
    )
    load = load_parts(workload, columns, time_unit, seed, closed_loops=True).rate_scaled(rate_scale)
    load = load if limit is None else load.limited(limit)
    run = Replay(load, target)
    interrupted = _run(run, load)
    if out is not None:
        write_records(run.records, out)
    _report(run, target, workload, interrupted, as_json)
    if interrupted:
        raise KeyboardInterrupt
    if run.records and not any(record.finish_reason in COMPLETED for record in run.records):
        typer.echo(f"tidegate: none of {len(run.records)} requests completed", err=True)
        raise typer.Exit(1)


def _run(run: Replay, load: Workload) -> bool:
    """Replay to the end; True where the user broke it off."""
    import asyncio

    from tidegate.cli.output import progress_bar

    with progress_bar(load.name, load.total) as bar:
        if bar is not None:
            run.on_record = lambda: bar.advance(bar.task_ids[0])
        try:
            asyncio.run(run.run())
        except KeyboardInterrupt:
            return True
    return False


def _report(run: Replay, target: Target, parts: list[str], interrupted: bool, as_json: bool) -> None:
    from tidegate.cli.output import print_json
    from tidegate.cli.summaries import print_summaries, summaries_json
    from tidegate.observe.summary import summarise

    summaries = summarise(run.records)
    if as_json:
        print_json(
            {
                "workload": run.workload.name,
                "parts": parts,
                "url": target.url,
                "model": run.model,
                "requests": run.workload.total,
                "recorded": len(run.records),
                "interrupted": interrupted,
                "send_delay_s": run.send_delay_s,
                "failures": dict(run.failures.most_common()),
                "classes": summaries_json({run.workload.name: summaries})[run.workload.name],
            }
        )
        return
    print_summaries({run.workload.name: summaries})
    for message, count in run.failures.most_common(5):
        typer.echo(f"{count} failed: {message}")
    if run.send_delay_s > 0.05:
        typer.echo(f"This client fell behind: it sent a request {run.send_delay_s:.2f} s after it was due.")
