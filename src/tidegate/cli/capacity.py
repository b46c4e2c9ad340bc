"""`tidegate capacity`: the largest load whose promises are kept, and how many engines a load needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import median, median_high
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

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
    from tidegate.executors.sim.step_cost import StepCost
    from tidegate.simulate.capacity import Answer, Case
    from tidegate.simulate.run import FleetSetup
    from tidegate.simulate.workload import Workload

CLOSER = 1.15
"""The grid's ratio for every sample but the first, whose capacity the others start from."""

Ask: TypeAlias = "Callable[[Case, Workload, Answer | None, Callable[[float], None]], Answer]"
"""Finds the answer on one sample: the case, the sample, the answer before it, and who is told of attempts."""


@dataclass(frozen=True, slots=True)
class Found:
    """What one policy's samples answered, in their order; the first is the workload itself.

    rates: arrivals a second of each sample, at load 1
    """

    policy: str
    num_blocks: int
    rates: list[float]
    answers: list[Answer]

    @property
    def values(self) -> list[float]:
        """What was found on each sample."""
        return [answer.value for answer in self.answers]

    @property
    def requests_s(self) -> list[float]:
        """The loads that were found, as requests a second."""
        return [value * rate for value, rate in zip(self.values, self.rates, strict=True)]


def capacity(
    workload: Parts,
    columns: Map = None,
    time_unit: TimeUnit = None,
    policy: Policies = None,
    attain: Annotated[
        float, typer.Option(help="The share of its requests for which each class keeps its promises.")
    ] = 0.99,
    class_attain: Annotated[
        list[str] | None, typer.Option(metavar="CLASS=SHARE", help="Another share for one class; may be repeated.")
    ] = None,
    at: Annotated[
        float | None, typer.Option(metavar="LOAD", help="Ask instead how many engines this load needs.")
    ] = None,
    precision: Annotated[
        float | None,
        typer.Option(min=0.001, max=1, help="How close a load that fails is to the answer, as a share; 0.02 without."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Samples: the workload itself, and others drawn from it.")] = 3,
    hardware: Hardware = "h100",
    model: ModelShape = "llama-3.1-8b",
    tp: Tp = 1,
    cost_model_name: CostModelName = "formula",
    num_blocks: NumBlocks = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    host_overhead: HostOverhead = 0.0,
    declared: Declared = None,
    replicas: Replicas = None,
    route: RouteName = None,
    seed: Seed = 0,
    config: ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Find the largest load at which every class keeps its promises, under each policy.

    A load is a multiplier of the workload's own rate; docs/capacity.md says how it is found.
    """
    from tidegate.cli.output import print_json
    from tidegate.errors import InputError
    from tidegate.simulate.capacity import PRECISION, Case, shares_of

    if at is not None and replicas is not None:
        raise InputError("--at asks how many engines there must be; leave --replicas out")
    if at is not None and precision is not None:
        raise InputError("--precision does nothing with --at: engines are whole")
    precision = precision or PRECISION
    cost = cost_model(hardware, model, tp, host_overhead, cost_model_name)
    options = {"num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    names = policy_names(policy)
    runs = [(name, *made) for name, made in zip(names, load_setups(names, cost, config, options), strict=True)]
    classes = runs[0][1].slo_classes
    engines = Engines(replicas if at is None else 2, (), None, route, seed)
    fleet = fleet_setup(engines, runs[0][1])
    samples = _samples(workload, columns, time_unit, seed, seeds)
    shares = shares_of(samples[0], classes, attain, _shares(class_attain or ()))
    if at is not None:
        samples = [sample.rate_scaled(at) for sample in samples]
    cases = [(name, Case(setup, shares, fleet, classes, declared)) for name, _, setup in runs]
    found = _find(cases, samples, _loads(precision) if at is None else _engines)
    if as_json:
        asked = {
            "attain": shares,
            "seeds": seeds,
            "seed": seed,
            "precision": precision if at is None else None,
            "at": at,
        }
        print_json(_document(samples[0], cost, fleet, asked, found))
    else:
        _show(samples[0], cost, fleet, at, found)


def _shares(texts: Sequence[str]) -> dict[str, float]:
    """Share by class, from "CLASS=SHARE" texts."""
    from tidegate.errors import InputError

    shares: dict[str, float] = {}
    for text in texts:
        name, _, share = text.partition("=")
        try:
            number = float(share)
        except ValueError:
            raise InputError(f"--class-attain {text}: must be a class and a share, such as completion=0.9") from None
        if name in shares:
            raise InputError(f"--class-attain {text}: class {name} has a share already")
        shares[name] = number
    return shares


def _samples(parts: list[str], columns: list[str] | None, unit: str | None, seed: int, seeds: int) -> list[Workload]:
    """The workload, and others that it might have been: what it decides by lot anew, and a tenth left out by lot."""
    from tidegate.simulate.capacity import drawn

    def one(number: int) -> Workload:
        load = load_parts(parts, columns, unit, seed + number, closed_loops=False)
        return drawn(load, (seed, number, 0)) if number else load

    return [one(number) for number in range(seeds)]


def _loads(precision: float) -> Ask:
    """Asks for the largest load. Each sample but the first starts close to the one before it."""
    from tidegate.simulate.capacity import largest_load

    def ask(case: Case, sample: Workload, before: Answer | None, on_try: Callable[[float], None]) -> Answer:
        if before is None or not before.value:
            return largest_load(case, sample, precision=precision, on_try=on_try)
        return largest_load(case, sample, start=before.value, ratio=CLOSER, precision=precision, on_try=on_try)

    return ask


def _engines(case: Case, sample: Workload, before: Answer | None, on_try: Callable[[float], None]) -> Answer:
    """Asks for the fewest engines."""
    from tidegate.simulate.capacity import smallest_fleet

    return smallest_fleet(case, sample, on_try=on_try)


def _find(cases: Sequence[tuple[str, Case]], samples: Sequence[Workload], ask: Ask) -> list[Found]:
    """The answers of every policy on every sample, beneath a progress bar on a terminal."""
    from tidegate.cli.output import progress_bar

    done: list[Found] = []
    with progress_bar("capacity", len(cases) * len(samples)) as bar:
        for name, case in cases:
            found = Found(name, case.setup.limits.num_blocks, [sample.rate for sample in samples], [])
            done.append(found)
            for number, sample in enumerate(samples, 1):

                def on_try(value: float, what: str = f"{name}, sample {number}") -> None:
                    if bar is not None:
                        bar.update(bar.task_ids[0], description=f"{what}, trying {value:.3g}")

                before = found.answers[-1] if found.answers else None
                found.answers.append(ask(case, sample, before, on_try))
                if bar is not None:
                    bar.advance(bar.task_ids[0])
    return done


def _document(
    load: Workload, cost: StepCost, fleet: FleetSetup, asked: Mapping[str, Any], found: Sequence[Found]
) -> dict[str, Any]:
    """The documented output of `--json` (docs/capacity.md)."""
    at = asked["at"]
    return {
        "workload": load.name,
        "requests": load.total,
        **engine_json(cost),
        "replicas": fleet.engines if at is None else None,
        "route": fleet.route_name,
        **asked,
        "policies": {f.policy: _loads_json(f) if at is None else _engines_json(f) for f in found},
    }


def _loads_json(found: Found) -> dict[str, Any]:
    return {
        "num_blocks": found.num_blocks,
        "load": _spread(found.values),
        "requests_s": _spread(found.requests_s),
        "samples": [{"load": round(a.value, 4), "limited_by": a.limited_by} for a in found.answers],
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": round(min(values), 4), "median": round(median(values), 4), "max": round(max(values), 4)}


def _engines_json(found: Found) -> dict[str, Any]:
    low, middle, high = min(found.values), median_high(found.values), max(found.values)
    return {
        "num_blocks": found.num_blocks,
        "engines": {"min": _whole(low), "median": _whole(middle), "max": _whole(high)},
        "samples": [{"engines": _whole(a.value), "limited_by": a.limited_by} for a in found.answers],
    }


def _whole(engines: float) -> int | None:
    """A number of engines, None where none is enough."""
    return int(engines) if isfinite(engines) else None


def _show(load: Workload, cost: StepCost, fleet: FleetSetup, at: float | None, found: Sequence[Found]) -> None:
    from tidegate.cli.output import print_table

    requests = f"{load.name}, {load.total:,} requests at {load.rate:.3g}/s"
    if at is None:
        typer.echo(f"{requests}, {engine_title(cost, fleet)}")
        print_table([_load_row(f) for f in found])
        return
    one = replace(fleet, pools=(("", 1),))
    typer.echo(f"{requests} ({at:g} times), engines of {engine_title(cost, one)}, route {fleet.route_name}")
    print_table([_engines_row(f) for f in found])


def _load_row(found: Found) -> dict[str, Any]:
    return {
        "policy": found.policy,
        "load": f"{_unbounded(found)}{median(found.values):.3g}",
        "from": f"{min(found.values):.3g}",
        "to": f"{max(found.values):.3g}",
        "requests/s": f"{_unbounded(found)}{median(found.requests_s):.3g}",
        "first to miss": _limited_by(found),
        "KV blocks": found.num_blocks,
    }


def _engines_row(found: Found) -> dict[str, Any]:
    low, middle, high = min(found.values), median_high(found.values), max(found.values)
    cells = {"engines": middle, "from": low, "to": high}
    from tidegate.simulate.capacity import MOST_ENGINES

    most = f">{MOST_ENGINES}"
    return {
        "policy": found.policy,
        **{name: most if _whole(v) is None else _whole(v) for name, v in cells.items()},
        "first to miss": _limited_by(found),
        "KV blocks": found.num_blocks,
    }


def _unbounded(found: Found) -> str:
    """What stands before a load beyond which nobody looked."""
    return ">" if all(answer.limited_by is None for answer in found.answers) else ""


def _limited_by(found: Found) -> str | None:
    """The classes that miss just beyond what was found, the most frequent first."""
    counted = Counter(answer.limited_by for answer in found.answers if answer.limited_by is not None)
    return ", ".join(name for name, _ in counted.most_common()) or None
