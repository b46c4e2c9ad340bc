"""`tidegate traces`: what ships, and `tidegate traces show`: what a workload is like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidegate.cli.workload_options import Map, Parts, TimeUnit, load

if TYPE_CHECKING:
    from tidegate.simulate.profile import GroupProfile, Profile

MOST_GROUPS = 10

app = typer.Typer(
    rich_markup_mode=None, add_completion=False, invoke_without_command=True, help="Workload traces that ship."
)


@app.callback()
def traces(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the workload traces that ship with Tidegate."""
    from tidegate.cli.output import print_json, print_table
    from tidegate.simulate.traces import TRACES

    if ctx.invoked_subcommand is not None:
        return
    rows: list[dict[str, Any]] = []
    for trace in TRACES.values():
        workload = trace.load()
        rows.append(
            {
                "name": trace.name,
                "requests": len(workload),
                "duration_s": round(workload.duration_s, 1),
                "rate_s": round(workload.rate, 2),
                "prompt_tokens": sum(r.prompt_tokens for r in workload),
                "output_tokens": sum(r.output_tokens for r in workload),
                "classes": list(dict.fromkeys(r.slo_class for r in workload)),
                "licence": trace.licence,
                "cite": trace.cite,
            }
        )
    if as_json:
        print_json(rows)
    else:
        print_table([row | {"classes": ", ".join(row["classes"])} for row in rows])


@app.command()
def show(
    workload: Parts,
    columns: Map = None,
    time_unit: TimeUnit = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of what is decided by lot.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables and pictures.")] = False,
) -> None:
    """Show what a workload is like: rates, burstiness, lengths, classes, ideal cache hits, and a picture."""
    from dataclasses import asdict

    from tidegate.cli.output import print_json
    from tidegate.simulate.profile import profile

    shown = profile(load(workload, columns, time_unit, seed, closed_loops=False))
    if as_json:
        print_json({"parts": workload} | asdict(shown))
    else:
        _print(shown)


def _print(shown: Profile) -> None:
    from dataclasses import asdict

    from tidegate.cli.output import print_table

    typer.echo(f"{shown.name}: {shown.requests} requests over {shown.duration_s:.1f} s")
    for line in _facts(shown):
        typer.echo(line)
    typer.echo()
    lengths = {"prompt": shown.prompt_tokens, "output": shown.output_tokens}
    print_table(
        [{"tokens": name} | asdict(values) | {"mean": round(values.mean, 1)} for name, values in lengths.items()]
    )
    typer.echo()
    print_table(_groups("class", shown.classes))
    if len(shown.tenants) > 1:
        typer.echo()
        print_table(_groups("tenant", shown.tenants))
    for line in _pictures(shown):
        typer.echo(line)


def _facts(shown: Profile) -> list[str]:
    mean = "all at once" if shown.rate_s is None else f"{shown.rate_s:.2f}/s on average"
    lines = [f"rate        {mean}, {shown.peak_minute_rate_s:.2f}/s in the busiest minute"]
    if shown.gap_cv is not None:
        lines.append(f"burstiness  gaps vary by {shown.gap_cv:.2f} times their mean (Poisson 1)")
    if shown.dispersion is not None:
        of = f"variance / mean of arrivals in {shown.window_s:g} s (Poisson 1)"
        lines.append(f"dispersion  {shown.dispersion:.2f}: {of}")
    if shown.prefix_hit is not None:
        hit = f"{shown.prefix_hit.blocks:.1%} of blocks, {shown.prefix_hit.tokens:.1%} of prompt tokens"
        lines.append(f"prefixes    an unbounded cache would hit {hit}")
    return lines


def _groups(kind: str, groups: Mapping[str, GroupProfile]) -> list[dict[str, Any]]:
    """Rows for the largest groups, and one for what is left."""
    rows: list[dict[str, Any]] = [
        {kind: name, "requests": g.requests, "share": g.share, "prompt": g.prompt_tokens, "output": g.output_tokens}
        for name, g in groups.items()
    ]
    if len(rows) > MOST_GROUPS:
        rest = rows[MOST_GROUPS - 1 :]
        sums = {key: sum(row[key] for row in rest) for key in rest[0] if key != kind}
        rows = [*rows[: MOST_GROUPS - 1], {kind: f"({len(rest)} more)"} | sums]
    return [row | {"share": f"{row['share']:.1%}"} for row in rows]


def _pictures(shown: Profile) -> list[str]:
    from tidegate.cli.picture import lying, standing

    end_s = shown.bin_s * len(shown.arrivals_per_bin)
    most = f"{max(shown.arrivals_per_bin) / shown.bin_s:.3g}/s"
    over_time = [f"|{line}|" for line in standing(shown.arrivals_per_bin)]
    axis = f" 0 s{f'{end_s:.0f} s':>{len(shown.arrivals_per_bin) - 3}}"
    lines = ["", f"arrivals over time, {shown.bin_s:.3g} s a column, the highest {most}", *over_time, axis]
    if len(shown.classes) > 1:  # each against its own highest
        by_class = shown.class_arrivals_per_bin.items()
        lines += [f"|{standing(counts, 1)[0]}| {name}, {max(counts) / shown.bin_s:.3g}/s" for name, counts in by_class]
    for what, histogram in (("prompts", shown.prompt_histogram), ("outputs", shown.output_histogram)):
        lines += ["", f"{what} by tokens, up to", *lying({str(most): count for most, count in histogram.items()})]
    return lines
