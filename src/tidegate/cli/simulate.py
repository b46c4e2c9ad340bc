"""`tidegate simulate`: a workload on the real scheduler and a virtual clock, under one policy or several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tidegate.cli.engine_options import (
    ConfigFile,
    CostModelName,
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
    load_setups,
    policy_names,
)
from tidegate.cli.workload_options import Map, Parts, TimeUnit
from tidegate.cli.workload_options import load as load_parts

if TYPE_CHECKING:
    from tidegate.config import Config
    from tidegate.executors.sim.step_cost import StepCost
    from tidegate.observe.records import Record, RecordWriter
    from tidegate.observe.steplog import StepRow
    from tidegate.observe.summary import ClassSummary
    from tidegate.simulate.instance import Observer, StepSink
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


class RunFiles(NamedTuple):
    """What one run writes to. path: of its records; on_step: takes a row of every step."""

    path: Path
    records: RecordWriter
    on_step: StepSink | None = None
    observers: Sequence[Observer] = ()


@dataclass(frozen=True, slots=True)
class Files:
    """What runs write: records and steps to the folder `out`, a trace and the decisions where they are asked for."""

    out: Path | None
    trace: bool
    decisions: bool

    @contextmanager
    def of(self, policy: str) -> Iterator[RunFiles]:
        """The open files of a policy's run; without a folder, records go to one that is gone afterwards."""
        from tidegate.observe.decisions import LabelledDecisions
        from tidegate.observe.jsonlines import LineFile
        from tidegate.observe.records import RecordWriter
        from tidegate.observe.steplog import StepWriter
        from tidegate.observe.trace import TraceWriter

        with ExitStack() as stack:
            if self.out is None:
                path = Path(stack.enter_context(TemporaryDirectory(prefix="tidegate-"))) / "records.parquet"
                yield RunFiles(path, stack.enter_context(RecordWriter(path)))
                return
            path = _file(self.out, policy, "records.parquet")
            records = stack.enter_context(RecordWriter(path))
            sinks: list[StepSink] = [stack.enter_context(StepWriter(_file(self.out, policy, "steps.parquet"))).write]
            observers: list[Observer] = []
            if self.trace:
                trace = stack.enter_context(TraceWriter(_file(self.out, policy, "trace.json")))
                sinks.append(trace.step)
                observers.append(trace.events)
            if self.decisions:
                lines = stack.enter_context(closing(LineFile(_file(self.out, policy, "decisions.jsonl"))))
                observers.append(LabelledDecisions(lines))
            yield RunFiles(path, records, sinks[0] if len(sinks) == 1 else partial(_each, sinks), observers)


def _each(sinks: Sequence[StepSink], row: StepRow) -> None:
    for sink in sinks:
        sink(row)


def simulate(
    workload: Parts,
    columns: Map = None,
    time_unit: TimeUnit = None,
    policy: Policies = None,
    hardware: Hardware = "h100",
    model: ModelShape = "llama-3.1-8b",
    tp: Tp = 1,
    cost_model_name: CostModelName = "formula",
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
        float | None,
        typer.Option(min=0.01, max=1, help="Use another pool once waiting took this part of the promised TTFT."),
    ] = None,
    route: RouteName = None,
    seed: Seed = 0,
    config: ConfigFile = None,
    out: Annotated[
        Path | None, typer.Option(help="Write POLICY.records.parquet and POLICY.steps.parquet to this folder.")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="And POLICY.trace.json: every step and request, for Perfetto.")
    ] = False,
    decisions: Annotated[
        bool, typer.Option("--decisions", help="And POLICY.decisions.jsonl: why each was admitted, evicted, refused.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Simulate a workload under one policy or several, and compare how each class fares.

    The scheduler is the one that serves; only the clock and the accelerator are made up (docs/simulate.md).
    """
    from tidegate.cli.output import print_json
    from tidegate.errors import InputError

    if out is None and (trace or decisions):
        raise InputError(f"{'--trace' if trace else '--decisions'} writes into a folder: add --out")
    cost = cost_model(hardware, model, tp, host_overhead, cost_model_name)
    options = {"num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    names = policy_names(policy)
    runs = [(name, *made) for name, made in zip(names, load_setups(names, cost, config, options), strict=True)]
    fleet = fleet_setup(Engines(replicas, tuple(pool or ()), borrow, route, seed), runs[0][1])
    load = load_parts(workload, columns, time_unit, seed, closed_loops=True).rate_scaled(rate_scale)
    load = load if limit is None else load.limited(limit)
    if out is not None:
        _make_folder(out)
    files = Files(out, trace, decisions)
    outcomes = [_run(name, settings, setup, load, fleet, declared, files) for name, settings, setup in runs]
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
    files: Files,
) -> Outcome:
    from tidegate.cli.output import progress_bar
    from tidegate.observe.columns import Columns
    from tidegate.observe.records import records_columns
    from tidegate.observe.summary import summarise_columns
    from tidegate.simulate.run import simulate

    begin = perf_counter()
    with progress_bar(f"{load.name} under {name}", load.total) as bar, files.of(name) as run:

        def keep(ended: list[Record]) -> None:
            for record in ended:
                run.records.write(record)

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
            on_step=run.on_step,
            observers=run.observers,
            on_arrival=None if bar is None else arrived,
        )
        run.records.close()
        summary = summarise_columns(Columns(records_columns(run.path)))
    return Outcome(name, setup.limits.num_blocks, summary, totals, perf_counter() - begin)


def _file(out: Path, policy: str, what: str) -> Path:
    return out / f"{policy.replace(':', '-')}.{what}"


def _report(out: Path, load: Workload, settings: Config, outcomes: list[Outcome]) -> None:
    """The comparison on a page."""
    from tidegate.observe.report import Run, write_report

    runs = []
    for o in outcomes:
        records, steps = (_file(out, o.policy, f"{what}.parquet") for what in ("records", "steps"))
        runs.append(Run(o.policy, records, steps, pool_blocks=o.num_blocks))
    write_report(runs, out / "report.html", promises=settings.slo_classes, title=f"{load.name}, simulated")


def _document(load: Workload, cost: StepCost, fleet: FleetSetup, outcomes: list[Outcome]) -> dict[str, Any]:
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


def _show(load: Workload, cost: StepCost, fleet: FleetSetup, outcomes: list[Outcome]) -> None:
    from tidegate.cli.summaries import print_summaries

    title = f"{load.name}, {load.total:,} requests, {engine_title(cost, fleet)}"
    print_summaries({o.policy: o.summary for o in outcomes}, title)
    for o in outcomes:
        speed = o.totals.requests / o.wall_s
        typer.echo(
            f"{o.policy}: {o.num_blocks:,} KV blocks; {o.totals.steps:,} steps, {o.totals.seconds:,.0f} s "
            f"simulated in {o.wall_s:.1f} s ({speed:,.0f} requests/s)"
        )
