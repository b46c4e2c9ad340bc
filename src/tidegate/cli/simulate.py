"""`tidegate simulate`: a workload on the real scheduler and a virtual clock, under one policy or several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tidegate.routing.route import ROUTES

if TYPE_CHECKING:
    from tidegate.config import Config
    from tidegate.executors.sim.cost import CostModel
    from tidegate.observe.records import Record
    from tidegate.observe.summary import ClassSummary
    from tidegate.routing.route import Route
    from tidegate.simulate.instance import StepSink
    from tidegate.simulate.run import EngineSetup, FleetSetup, RecordSink, Totals
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
    seed: int | None


def simulate(
    workloads: Annotated[
        list[str],
        typer.Argument(
            metavar="WORKLOAD...",
            help="A .jsonl or .csv file or a shipped trace (see `tidegate traces`), NAME:CLASS to give it a class. "
            "Several are merged by arrival.",
        ),
    ],
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy (see `tidegate policies`); repeat it to compare. joint without.")
    ] = None,
    hardware: Annotated[str, typer.Option(help="A name of `tidegate hardware`.")] = "h100",
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
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of --route random.")] = None,
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
    from tidegate.executors.sim.hardware import find_hardware
    from tidegate.executors.sim.models import find_model

    cost = CostModel(find_hardware(hardware), find_model(model), tp, host_overhead / 1e3)
    options = {"num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    names = list(policy or ["joint"])
    if len(set(names)) < len(names):
        raise InputError("the same --policy is named twice")
    runs = [(name, *_setup(name, cost, config, options)) for name in names]
    fleet = _fleet(Engines(replicas, tuple(pool or ()), borrow, route, seed), runs[0][1])
    load = _load(workloads, runs[0][1], rate_scale, limit)
    if out is not None:
        _make_folder(out)
    outcomes = [_run(name, settings, setup, load, fleet, declared, out) for name, settings, setup in runs]
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
    if engines.seed is not None and engines.route != "random":
        raise InputError("--seed does nothing without --route random")
    if count == 1:
        return FleetSetup()
    name, seed, rules = engines.route or "joint", engines.seed or 0, Pools(of_class, engines.borrow)

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


def _load(names: list[str], settings: Config, rate_scale: float, limit: int | None) -> Workload:
    """The workloads, merged by arrival."""
    import heapq
    from dataclasses import replace

    from tidegate.simulate.traces import load_workload
    from tidegate.simulate.workload import Workload

    parts = []
    for text in names:
        name, _, slo_class = text.rpartition(":")
        if slo_class not in settings.classes:
            name, slo_class = text, ""
        part = load_workload(name)
        if slo_class:
            part = replace(part, requests=tuple(replace(r, slo_class=slo_class) for r in part.requests))
        parts.append(part)
    merged = heapq.merge(*(part.requests for part in parts), key=lambda r: r.arrival_s)
    load = Workload("+".join(part.name for part in parts), tuple(merged))
    load = load if limit is None else load.limited(limit)
    return load if rate_scale == 1 else load.rate_scaled(rate_scale)


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
    from tidegate.observe.summary import summarise
    from tidegate.simulate.run import simulate

    records: list[Record] = []
    begin = perf_counter()
    with progress_bar(f"{load.name} under {name}", len(load)) as bar, _files(name, out, records) as (keep, on_step):

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
            on_step=on_step,
            on_arrival=None if bar is None else arrived,
        )
    return Outcome(name, setup.limits.num_blocks, summarise(records), totals, perf_counter() - begin)


@contextmanager
def _files(name: str, out: Path | None, records: list[Record]) -> Iterator[tuple[RecordSink, StepSink | None]]:
    """Where records and steps of a run go: into `records`, and into files in `out` if there is one."""
    from tidegate.observe.parquet import ParquetRows
    from tidegate.observe.records import write_records
    from tidegate.observe.steplog import STEP_SCHEMA

    if out is None:
        yield records.extend, None
        return
    stem = name.replace(":", "-")
    with ParquetRows(out / f"{stem}.steps.parquet", STEP_SCHEMA) as steps:
        yield records.extend, steps.write
    write_records(records, out / f"{stem}.records.parquet")


def _document(load: Workload, cost: CostModel, fleet: FleetSetup, outcomes: list[Outcome]) -> dict[str, Any]:
    """The documented output of `--json` (docs/simulate.md)."""
    return {
        "workload": load.name,
        "requests": len(load),
        "hardware": cost.hardware.name,
        "validated": cost.hardware.validated,
        "model": cost.model.name,
        "tp": cost.tp,
        "host_overhead_s": cost.base_s - cost.hardware.t0,
        "replicas": fleet.engines,
        "route": fleet.route_name,
        "policies": {
            o.policy: {
                "num_blocks": o.num_blocks,
                "steps": o.totals.steps,
                "simulated_s": o.totals.seconds,
                "classes": {name: asdict(summary) for name, summary in o.summary.items()},
            }
            for o in outcomes
        },
    }


def _show(load: Workload, cost: CostModel, fleet: FleetSetup, outcomes: list[Outcome]) -> None:
    from tidegate.cli.output import print_table
    from tidegate.cli.replay import summary_row

    unvalidated = "" if cost.hardware.validated else " (unvalidated)"
    gpus = f"{cost.tp} x {cost.hardware.name}" if cost.tp > 1 else cost.hardware.name
    if fleet.engines > 1:
        gpus = f"{fleet.engines} engines of {gpus}, route {fleet.route_name}"
    title = f"{load.name}, {len(load):,} requests, {cost.model.name} on {gpus}{unvalidated}"
    rows = [
        {"policy": o.policy, **summary_row(name, asdict(summary))}
        for o in outcomes
        for name, summary in o.summary.items()
    ]
    print_table(rows, title=title)
    for o in outcomes:
        speed = o.totals.requests / o.wall_s
        typer.echo(
            f"{o.policy}: {o.num_blocks:,} KV blocks; {o.totals.steps:,} steps, {o.totals.seconds:,.0f} s "
            f"simulated in {o.wall_s:.1f} s ({speed:,.0f} requests/s)"
        )
