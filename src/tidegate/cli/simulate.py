"""`tidegate simulate`: a workload on the real scheduler and a virtual clock, under one policy or several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tidegate.cli.workload_options import Map, Parts, TimeUnit
from tidegate.cli.workload_options import load as load_parts
from tidegate.routing.route import ROUTES

if TYPE_CHECKING:
    from tidegate.config import Config
    from tidegate.executors.sim.cost import CostModel
    from tidegate.observe.records import Record, RecordWriter
    from tidegate.observe.steplog import StepWriter
    from tidegate.observe.summary import ClassSummary
    from tidegate.routing.route import Route
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


class Engines(NamedTuple):
    """What the command line says of several engines."""

    replicas: int | None
    pools: tuple[str, ...]
    borrow: int | None
    route: str | None
    seed: int


def simulate(
    workload: Parts,
    columns: Map = None,
    time_unit: TimeUnit = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy (see `tidegate policies`); repeat it to compare. joint without.")
    ] = None,
    hardware: Annotated[
        str, typer.Option(help="A name of `tidegate hardware`, or a .toml of `tidegate calibrate`.")
    ] = "h100",
    model: Annotated[str, typer.Option(help="A model shape (see `tidegate cost --list`).")] = "llama-3.1-8b",
    tp: Annotated[int, typer.Option(help="GPUs that share the model (tensor parallel degree).")] = 1,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, help="KV blocks; by default what the weights leave of the memory holds.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Requests that run at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of one step at most.")] = None,
    host_overhead: Annotated[
        float, typer.Option(min=0, help="Milliseconds that the host adds to every step (scheduling, sampling).")
    ] = 0.0,
    declared: Annotated[
        int | None, typer.Option(min=1, help="Output tokens that every request declares; its true number without.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N requests.")] = None,
    rate_scale: Annotated[float, typer.Option(help="Let requests arrive this many times as fast.")] = 1.0,
    replicas: Annotated[int | None, typer.Option(min=1, help="Engines, each as described; one without.")] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option(metavar="N:CLASS,...", help="N engines for these classes alone; repeat it instead of --replicas."),
    ] = None,
    borrow: Annotated[
        int | None,
        typer.Option(min=1, help="Use engines of other pools with at least so many outstanding requests fewer."),
    ] = None,
    route: Annotated[str | None, typer.Option(help=f"Who gets a request: {', '.join(ROUTES)}. joint without.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of what the workload decides by lot, and of --route random.")
    ] = 0,
    config: Annotated[Path | None, typer.Option(help="Configuration: policy parameters, classes, limits.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write POLICY.records.parquet and POLICY.steps.parquet to this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Simulate a workload under one policy or several, and compare how each class fares.

    The scheduler is the one that serves; only the clock and the accelerator are made up (docs/simulate.md).
    """
    from tidegate.cli.output import print_json
    from tidegate.errors import InputError
    from tidegate.executors.sim.cost import CostModel
    from tidegate.executors.sim.models import find_model
    from tidegate.simulate.hardware_file import named_hardware

    cost = CostModel(named_hardware(hardware), find_model(model), tp, host_overhead / 1e3)
    options = {"num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    names = list(policy or ["joint"])
    if len(set(names)) < len(names):
        raise InputError("the same --policy is named twice")
    runs = [(name, *_setup(name, cost, config, options)) for name in names]
    fleet = _fleet(Engines(replicas, tuple(pool or ()), borrow, route, seed), runs[0][1])
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


def _setup(name: str, cost: CostModel, path: Path | None, options: dict[str, Any]) -> tuple[Config, EngineSetup]:
    """The configuration with `name` as its policy, and the engine that it describes."""
    from functools import partial

    from tidegate.cli.environment import config_path
    from tidegate.config import load_config
    from tidegate.errors import ConfigError
    from tidegate.predictors.choice import build_predictor
    from tidegate.simulate.run import EngineSetup
    from tidegate.simulate.sizing import pool_blocks

    settings = load_config(config_path(path), {"scheduler": {**options, "policy": name}})
    s = settings.scheduler
    if s.disk_blocks is not None or s.disk_kv_memory is not None:
        raise ConfigError("scheduler.disk_kv_memory (or disk_blocks): a simulation has no file to swap to")
    blocks = s.num_blocks or pool_blocks(cost, s.block_size, s.kv_memory)
    host = s.host_blocks or (pool_blocks(cost, s.block_size, s.host_kv_memory) if s.host_kv_memory else 0)
    limits = settings.limits(blocks, None, host)
    build_predictor(settings.predictor)  # so that a bad file is told now
    return settings, EngineSetup(settings.build_policy(), limits, cost, partial(build_predictor, settings.predictor))


def _fleet(engines: Engines, settings: Config) -> FleetSetup:
    """Pools and route. Raises InputError for options that contradict each other, or would do nothing."""
    from tidegate.errors import InputError
    from tidegate.routing.pools import Pools
    from tidegate.routing.route import build_route
    from tidegate.simulate.run import FleetSetup

    pools, of_class = _pools(engines.pools, settings) if engines.pools else ([("", engines.replicas or 1)], {})
    count = sum(n for _, n in pools)
    if engines.pools and engines.replicas is not None:
        raise InputError("--pool says how many engines there are; leave --replicas out")
    if engines.borrow is not None and len(pools) < 2:
        raise InputError("--borrow does nothing without a second --pool")
    if count == 1 and engines.route is not None:
        raise InputError("--route does nothing with one engine; set --replicas")
    if count == 1:
        return FleetSetup()
    name, seed, rules = engines.route or "joint", engines.seed, Pools(of_class, engines.borrow)

    def build(token_s: float, kv_tokens: int) -> Route:
        return build_route(name, token_s=token_s, seed=seed, pools=rules, remembered=kv_tokens)

    build(1.0, 1)  # so that a bad name is told now
    return FleetSetup(pools, build, name)


def _pools(texts: Sequence[str], settings: Config) -> tuple[list[tuple[str, int]], dict[str, str]]:
    """(name and engines of each pool, the pool of each class), from "N:CLASS,CLASS" texts."""
    from tidegate.errors import InputError

    pools: list[tuple[str, int]] = []
    of_class: dict[str, str] = {}
    for text in texts:
        number, _, classes = text.partition(":")
        if not number.isdecimal() or int(number) < 1 or not classes:
            raise InputError(
                f"--pool {text}: must be a number of engines and classes, such as 2:interactive,completion"
            )
        pools.append((classes, int(number)))
        for name in classes.split(","):
            if name not in settings.classes:
                raise InputError(f"--pool {text}: no class {name!r}; there are: {', '.join(sorted(settings.classes))}")
            if name in of_class:
                raise InputError(f"--pool {text}: class {name} has a pool already")
            of_class[name] = classes
    return pools, of_class


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
        "hardware": cost.hardware.name,
        "validated": cost.hardware.validated,
        "model": cost.model.name,
        "tp": cost.tp,
        "host_overhead_s": round(cost.base_s - cost.hardware.t0, 9),
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

    unvalidated = "" if cost.hardware.validated else " (unvalidated)"
    gpus = f"{cost.tp} x {cost.hardware.name}" if cost.tp > 1 else cost.hardware.name
    if fleet.engines > 1:
        gpus = f"{fleet.engines} engines of {gpus}, route {fleet.route_name}"
    title = f"{load.name}, {load.total:,} requests, {cost.model.name} on {gpus}{unvalidated}"
    print_summaries({o.policy: o.summary for o in outcomes}, title)
    for o in outcomes:
        speed = o.totals.requests / o.wall_s
        typer.echo(
            f"{o.policy}: {o.num_blocks:,} KV blocks; {o.totals.steps:,} steps, {o.totals.seconds:,.0f} s "
            f"simulated in {o.wall_s:.1f} s ({speed:,.0f} requests/s)"
        )
