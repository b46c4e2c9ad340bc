"""`tidegate simulate`: a workload on the real scheduler and a virtual clock, under one policy or several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidegate.cli.engine_options import (
    ConfigFile,
    Declared,
    Engines,
    Hardware,
    HostOverhead,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    ModelShape,
    NumBlocks,
    Policies,
    RateScale,
    Replicas,
    RouteName,
    Seed,
    Tp,
    cost_model,
    engine_json,
    engine_title,
    fleet_setup,
    load_setup,
    policy_names,
)
from tidegate.cli.workload_options import Map, Parts, TimeUnit
from tidegate.cli.workload_options import load as load_parts

if TYPE_CHECKING:
    from tidegate.config import Config
    from tidegate.executors.sim.cost import CostModel
    from tidegate.observe.records import Record, RecordWriter
    from tidegate.observe.steplog import StepWriter
    from tidegate.observe.summary import ClassSummary
    from tidegate.simulate.run import EngineSetup, FleetSetup, Totals
    from tidegate.simulate.workload import Workload


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy's run: how each class fared, how much was simulated, and the wall clock's seconds that took."""

    policy: str
    num_blocks: int
    summary: dict[str, ClassSummary]
    totals: Totals
    wall_s: float


def simulate(
    workload: Parts,
    columns: Map = None,
    time_unit: TimeUnit = None,
    policy: Policies = None,
    hardware: Hardware = "h100",
    model: ModelShape = "llama-3.1-8b",
    tp: Tp = 1,
    num_blocks: NumBlocks = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    host_overhead: HostOverhead = 0.0,
    declared: Declared = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N requests.")] = None,
    rate_scale: RateScale = 1.0,
    replicas: Replicas = None,
    pool: Annotated[
        list[str] | None,
        typer.Option(metavar="N:CLASS,...", help="N engines for these classes alone; repeat it instead of --replicas."),
    ] = None,
    borrow: Annotated[
        int | None,
        typer.Option(min=1, help="Use engines of other pools with at least so many outstanding requests fewer."),
    ] = None,
    route: RouteName = None,
    seed: Seed = 0,
    config: ConfigFile = None,
    out: Annotated[
        Path | None, typer.Option(help="Write POLICY.records.parquet and POLICY.steps.parquet to this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Simulate a workload under one policy or several, and compare how each class fares.

    The scheduler is the one that serves; only the clock and the accelerator are made up (docs/simulate.md).
    """
    from tidegate.cli.output import print_json

    cost = cost_model(hardware, model, tp, host_overhead)
    options = {"num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    runs = [(name, *load_setup(name, cost, config, options)) for name in policy_names(policy)]
    fleet = fleet_setup(Engines(replicas, tuple(pool or ()), borrow, route, seed), runs[0][1])
    load = load_parts(workload, columns, time_unit, seed, closed_loops=True).rate_scaled(rate_scale)
    load = load if limit is None else load.limited(limit)
    if out is not None:
        _make_folder(out)
    outcomes = [_run(name, settings, setup, load, fleet, declared, out) for name, settings, setup in runs]
    if out is not None:
        _report(out, load, runs[0][1], outcomes)
    if as_json:
        print_json(_document(load, cost, fleet, outcomes))
    else:
        _show(load, cost, fleet, outcomes)


def _make_folder(out: Path) -> None:
    from tidegate.errors import InputError

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(f"cannot write to {out}: {e.strerror}") from e


def _run(
    name: str,
    settings: Config,
    setup: EngineSetup,
    load: Workload,
    fleet: FleetSetup,
    declared: int | None,
    out: Path | None,
) -> Outcome:
    from tidegate.cli.output import progress_bar
    from tidegate.observe.columns import Columns
    from tidegate.observe.records import read_records_table
    from tidegate.observe.summary import summarise_columns
    from tidegate.simulate.run import simulate

    begin = perf_counter()
    with progress_bar(f"{load.name} under {name}", load.total) as bar, _files(name, out) as (path, records, steps):

        def keep(ended: list[Record]) -> None:
            for record in ended:
                records.write(record)

        def arrived(number: int) -> None:
            if bar is not None:
                bar.update(bar.task_ids[0], completed=number)

        totals = simulate(
            load,
            setup,
            keep,
            fleet=fleet,
            classes=settings.slo_classes,
            declared=declared,
            on_step=None if steps is None else steps.write,
            on_arrival=None if bar is None else arrived,
        )
        records.close()
        summary = summarise_columns(Columns(read_records_table(path)))
    return Outcome(name, setup.limits.num_blocks, summary, totals, perf_counter() - begin)


@contextmanager
def _files(name: str, out: Path | None) -> Iterator[tuple[Path, RecordWriter, StepWriter | None]]:
    """Where the records and steps of a run go; without a folder, records go to one that is gone afterwards."""
    from tempfile import TemporaryDirectory

    from tidegate.observe.records import RecordWriter
    from tidegate.observe.steplog import StepWriter

    if out is None:
        with TemporaryDirectory(prefix="tidegate-") as folder:
            path = Path(folder) / "records.parquet"
            with RecordWriter(path) as records:
                yield path, records, None
        return
    path = _file(out, name, "records")
    with RecordWriter(path) as records, StepWriter(_file(out, name, "steps")) as steps:
        yield path, records, steps


def _file(out: Path, policy: str, what: str) -> Path:
    return out / f"{policy.replace(':', '-')}.{what}.parquet"


def _report(out: Path, load: Workload, settings: Config, outcomes: list[Outcome]) -> None:
    """The comparison on a page."""
    from tidegate.observe.report import Run, write_report

    runs = [
        Run(o.policy, _file(out, o.policy, "records"), _file(out, o.policy, "steps"), pool_blocks=o.num_blocks)
        for o in outcomes
    ]
    write_report(runs, out / "report.html", promises=settings.slo_classes, title=f"{load.name}, simulated")


def _document(load: Workload, cost: CostModel, fleet: FleetSetup, outcomes: list[Outcome]) -> dict[str, Any]:
    """The documented output of `--json` (docs/simulate.md)."""
    from tidegate.cli.summaries import summaries_json

    return {
        "workload": load.name,
        "requests": load.total,
        **engine_json(cost),
        "replicas": fleet.engines,
        "route": fleet.route_name,
        "policies": {
            o.policy: {
                "num_blocks": o.num_blocks,
                "steps": o.totals.steps,
                "simulated_s": o.totals.seconds,
                "classes": classes,
            }
            for o, classes in zip(
                outcomes, summaries_json({o.policy: o.summary for o in outcomes}).values(), strict=True
            )
        },
    }


def _show(load: Workload, cost: CostModel, fleet: FleetSetup, outcomes: list[Outcome]) -> None:
    from tidegate.cli.summaries import print_summaries

    title = f"{load.name}, {load.total:,} requests, {engine_title(cost, fleet)}"
    print_summaries({o.policy: o.summary for o in outcomes}, title)
    for o in outcomes:
        speed = o.totals.requests / o.wall_s
        typer.echo(
            f"{o.policy}: {o.num_blocks:,} KV blocks; {o.totals.steps:,} steps, {o.totals.seconds:,.0f} s "
            f"simulated in {o.wall_s:.1f} s ({speed:,.0f} requests/s)"
        )
