"""`tidegate tune`: parameters of a policy with which a workload fares better, as a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
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
    RateScale,
    Replicas,
    RouteName,
    Seed,
    Tp,
    cost_model,
    engine_json,
    engine_setup,
    engine_title,
    fleet_setup,
    load_setups,
)
from tidegate.cli.workload_options import Map, Parts, TimeUnit
from tidegate.cli.workload_options import load as load_parts

if TYPE_CHECKING:
    from tidegate.config import Config
    from tidegate.simulate.tuning import Score, Trials, Tuned
    from tidegate.simulate.workload import Workload


class Search(NamedTuple):
    """What the command line says of the search."""

    policy: str
    objective: str
    trials: int
    hold_out: float
    seed: int


def tune(
    workload: Parts,
    out: Annotated[Path, typer.Option(help="Write the configuration to this file.")],
    columns: Map = None,
    time_unit: TimeUnit = None,
    policy: Annotated[str, typer.Option(help="The policy whose parameters are searched.")] = "joint",
    objective: Annotated[
        str, typer.Option(help="goodput: requests in SLO a second. attainment: that of the class that fares worst.")
    ] = "goodput",
    trials: Annotated[int, typer.Option(min=1, help="Settings that are tried, the present one first.")] = 50,
    hold_out: Annotated[float, typer.Option(help="The share of the requests, the last ones, that judges.")] = 0.3,
    force: Annotated[
        bool, typer.Option("--force", help="Write what was found even where it is no better on what was held out.")
    ] = False,
    rate_scale: RateScale = 1.0,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Search a policy's parameters on a workload, judge them on its last requests, and write a configuration.

    What is searched, and what the numbers mean, is in docs/capacity.md.
    """
    from tidegate.cli.output import print_json
    from tidegate.errors import InputError
    from tidegate.simulate.tuning import OBJECTIVES, Trials

    if objective not in OBJECTIVES:
        raise InputError(f"no objective {objective!r}; there are: {', '.join(OBJECTIVES)}")
    if not out.parent.is_dir():
        raise InputError(f"cannot write {out}: there is no folder {out.parent}")
    cost = cost_model(hardware, model, tp, host_overhead, cost_model_name)
    options = {"num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    ((settings, _),) = load_setups([policy], cost, config, options)
    fleet = fleet_setup(Engines(replicas, (), None, route, seed), settings)
    load = load_parts(workload, columns, time_unit, seed, closed_loops=False).rate_scaled(rate_scale)
    search = Search(policy, objective, trials, hold_out, seed)
    tuned = _tune(search, settings, load, Trials(partial(engine_setup, cost=cost), fleet, declared))
    better = tuned.gain(objective) > 0
    written = tuned.config if better or force else settings
    _write(out, search, load, tuned, written)
    changed = written is not settings
    if as_json:
        engines = {**engine_json(cost), "replicas": fleet.engines, "route": fleet.route_name}
        print_json(_document(search, load, engines, tuned, out, changed))
    else:
        title = f"{load.name}, {load.total:,} requests, {engine_title(cost, fleet)}"
        _show(search, title, tuned, out, changed)


def _tune(search: Search, settings: Config, load: Workload, trials: Trials) -> Tuned:
    """The search, beneath a progress bar on a terminal."""
    from tidegate.cli.output import progress_bar
    from tidegate.simulate import tuning

    with progress_bar(f"tuning {search.policy}", search.trials) as bar:

        def tried() -> None:
            if bar is not None:
                bar.advance(bar.task_ids[0])

        return tuning.tune(
            settings,
            load,
            trials,
            objective=search.objective,
            count=search.trials,
            hold_out=search.hold_out,
            seed=search.seed,
            on_trial=tried,
        )


def _write(out: Path, search: Search, load: Workload, tuned: Tuned, config: Config) -> None:
    """The whole configuration, below a comment that says where it comes from."""
    from tidegate.config import to_toml
    from tidegate.errors import InputError

    old, new = (score.of(search.objective) for score in tuned.held_out)
    was = "with what was found" if config is tuned.config and tuned.after != tuned.before else "as it was"
    comment = (
        f"# Policy {search.policy}, {was}: {search.trials} trials on {load.name}, seed {search.seed}.\n"
        f"# {search.objective} on the {search.hold_out:.0%} held out: {old:.4g} as it was, {new:.4g} as found.\n"
    )
    try:
        out.write_text(comment + to_toml(config), encoding="utf-8")
    except OSError as e:
        raise InputError(f"cannot write {out}: {e.strerror}") from e


def _document(
    search: Search, load: Workload, engines: Mapping[str, Any], tuned: Tuned, out: Path, changed: bool
) -> dict[str, Any]:
    """The documented output of `--json` (docs/capacity.md)."""
    return {
        "workload": load.name,
        "requests": load.total,
        **engines,
        **search._asdict(),
        "parameters": {
            name: {"before": value, "after": tuned.after[name]} for name, value in sorted(tuned.before.items())
        },
        "searched": _pair_json(tuned.searched),
        "held_out": _pair_json(tuned.held_out),
        "gain": round(tuned.gain(search.objective), 6),
        "out": str(out),
        "written": "after" if changed else "before",
    }


def _pair_json(scores: tuple[Score, Score]) -> dict[str, Any]:
    return {
        when: {
            "goodput": round(score.goodput, 6),
            "attainment": {name: round(share, 6) for name, share in score.attainment.items()},
        }
        for when, score in zip(("before", "after"), scores, strict=True)
    }


def _show(search: Search, title: str, tuned: Tuned, out: Path, changed: bool) -> None:
    from tidegate.cli.output import print_table

    rows = [
        {"requests": part, "parameters": when, "goodput/s": f"{score.goodput:.4g}"}
        | {name: f"{share:.2%}" for name, share in score.attainment.items()}
        for part, scores in (("searched", tuned.searched), ("held out", tuned.held_out))
        for when, score in zip(("before", "after"), scores, strict=True)
    ]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    typer.echo(title)
    print_table([{name: row.get(name) for name in columns} for row in rows])
    typer.echo(f"\n{_verdict(search, tuned)}\n")
    print_table(
        [
            {"parameter": name, "before": f"{value:g}", "after": f"{tuned.after[name]:g}"}
            for name, value in sorted(tuned.before.items())
        ]
    )
    typer.echo(f"\nwrote {out}, parameters as {'found' if changed else 'they were'}")


def _verdict(search: Search, tuned: Tuned) -> str:
    """What the search gained on the requests that it did not see."""
    old, new = (score.of(search.objective) for score in tuned.held_out)
    if tuned.after == tuned.before:
        return f"{search.trials} trials found nothing better than what was there"
    change = f"{search.objective} on what was held out: {old:.4g} before, {new:.4g} after"
    if old:
        change += f" ({new / old - 1:+.1%})"
    return change if new > old else f"{change}: no gain, so nothing is worth changing"
