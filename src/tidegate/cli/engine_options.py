"""How commands that simulate take an engine and a fleet: hardware, model, limits, policies, routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tidegate.routing.route import ROUTES

if TYPE_CHECKING:
    from tidegate.config import Config
    from tidegate.executors.sim.step_cost import StepCost
    from tidegate.routing.route import Route
    from tidegate.simulate.run import EngineSetup, FleetSetup

Policies = Annotated[
    list[str] | None,
    typer.Option("--policy", help="A policy (see `tidegate policies`); repeat it to compare. joint without."),
]
Hardware = Annotated[str, typer.Option(help="A name of `tidegate hardware`, or a .toml of `tidegate calibrate`.")]
ModelShape = Annotated[str, typer.Option(help="A model shape (see `tidegate cost --list`).")]
Tp = Annotated[int, typer.Option(help="GPUs that share the model (tensor parallel degree).")]
CostModelName = Annotated[
    str,
    typer.Option(
        "--cost-model",
        help="formula, or the kernel tables of aiconfigurator, for one of its backends: aiconfigurator:vllm.",
    ),
]
NumBlocks = Annotated[
    int | None, typer.Option(min=1, help="KV blocks; by default what the weights leave of the memory holds.")
]
MaxNumSeqs = Annotated[int | None, typer.Option(min=1, help="Requests that run at once.")]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(min=1, help="Tokens of one step at most.")]
HostOverhead = Annotated[
    float, typer.Option(min=0, help="Milliseconds that the host adds to every step (scheduling, sampling).")
]
Declared = Annotated[
    int | None, typer.Option(min=1, help="Output tokens that every request declares; its true number without.")
]
RateScale = Annotated[float, typer.Option(help="Let requests arrive this many times as fast.")]
Replicas = Annotated[int | None, typer.Option(min=1, help="Engines, each as described; one without.")]
RouteName = Annotated[
    str | None, typer.Option("--route", help=f"Who gets a request: {', '.join(ROUTES)}. joint without.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of what the workload and the route decide by lot.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Configuration: policy parameters, classes, limits.")]


class Engines(NamedTuple):
    """What the command line says of several engines."""

    replicas: int | None
    pools: tuple[str, ...]
    borrow: float | None
    route: str | None
    seed: int


def cost_model(hardware: str, model: str, tp: int, host_overhead_ms: float, name: str) -> StepCost:
    """The cost model called `name` of a model on the named hardware. Raises InputError for unknown names."""
    from tidegate.errors import InputError
    from tidegate.executors.sim.cost import CostModel
    from tidegate.executors.sim.models import find_model
    from tidegate.simulate.hardware_file import named_hardware

    found, shape, overhead = named_hardware(hardware), find_model(model), host_overhead_ms / 1e3
    if name == "formula":
        return CostModel(found, shape, tp, overhead)
    from tidegate.executors.sim.kernel_tables import BACKENDS, KernelTables

    library, _, backend = name.partition(":")
    if library != "aiconfigurator":
        raise InputError(f"no cost model {name!r}; there are: formula, aiconfigurator")
    return KernelTables(found, shape, tp, overhead, backend or BACKENDS[0])


def policy_names(given: Sequence[str] | None) -> list[str]:
    """The policies to run, each once. Raises InputError for one that is named twice."""
    from tidegate.errors import InputError

    names = list(given or ["joint"])
    if len(set(names)) < len(names):
        raise InputError("the same --policy is named twice")
    return names


def load_setups(
    names: Sequence[str], cost: StepCost, path: Path | None, options: Mapping[str, Any]
) -> list[tuple[Config, EngineSetup]]:
    """The configuration with each of `names` as its policy, and the engine that it describes."""
    from tidegate.cli.environment import config_path
    from tidegate.config import load_configs

    configs = load_configs(config_path(path), names, {"scheduler": options})
    return [(settings, engine_setup(settings, cost)) for settings in configs]


def engine_setup(settings: Config, cost: StepCost) -> EngineSetup:
    """The engine that a configuration describes. Raises ConfigError where it has what no simulation has."""
    from functools import partial

    from tidegate.errors import ConfigError
    from tidegate.predictors.choice import build_predictor
    from tidegate.simulate.run import EngineSetup
    from tidegate.simulate.sizing import pool_blocks

    s = settings.scheduler
    if s.disk_blocks is not None or s.disk_kv_memory is not None:
        raise ConfigError("scheduler.disk_kv_memory (or disk_blocks): a simulation has no file to swap to")
    blocks = s.num_blocks or pool_blocks(cost, s.block_size, s.kv_memory)
    host = s.host_blocks or (pool_blocks(cost, s.block_size, s.host_kv_memory) if s.host_kv_memory else 0)
    limits = settings.limits(blocks, None, host)
    build_predictor(settings.predictor)  # so that a bad file is told now
    predictor = partial(build_predictor, settings.predictor)
    return EngineSetup(settings.build_policy(), limits, cost, predictor, s.pipeline_depth)


def fleet_setup(engines: Engines, settings: Config) -> FleetSetup:
    """Pools and route. Raises InputError for options that contradict each other, or would do nothing."""
    from random import Random

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
    promises = {name: c.slo for name, c in settings.slo_classes.items()}
    name, seed, rules = engines.route or "joint", engines.seed, Pools(of_class, engines.borrow, promises)

    def build() -> Route:
        return build_route(name, random=Random(seed), pools=rules)

    build()  # so that a bad name is told now
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


def engine_json(cost: StepCost) -> dict[str, Any]:
    """What is the same for every policy: the documented fields that say on what was simulated."""
    return {
        "hardware": cost.hardware.name,
        "validated": cost.validated,
        "model": cost.model.name,
        "tp": cost.tp,
        "cost_model": cost.name,
        "host_overhead_s": cost.host_overhead,
    }


def engine_title(cost: StepCost, fleet: FleetSetup) -> str:
    """The same in words: what runs on what, and behind which route."""
    by = "" if cost.name == "formula" else f", step times of {cost.name}"
    unvalidated = "" if cost.validated else " (unvalidated)"
    gpus = f"{cost.tp} x {cost.hardware.name}" if cost.tp > 1 else cost.hardware.name
    if fleet.engines > 1:
        gpus = f"{fleet.engines} engines of {gpus}, route {fleet.route_name}"
    return f"{cost.model.name} on {gpus}{unvalidated}{by}"
