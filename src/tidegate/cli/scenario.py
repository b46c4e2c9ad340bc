"""`tidegate scenario`: a YAML scenario, step by step."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tidegate.simulate.scenario import Scenario
    from tidegate.simulate.scenario_run import Outcome, Step

NAMES_SHOWN = 4
REQUESTS_SHOWN = 24


def scenario(
    files: Annotated[list[Path], typer.Argument(help="Scenario files (docs/scenarios.md describes them).")],
    policy: Annotated[
        str | None, typer.Option(help="Run under this policy (or package.module:NAME) instead of the file's.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="cfg.key=value or REQUEST.key=value; may be repeated."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after so many steps.")] = None,
    rows: Annotated[int, typer.Option(min=2, help="Rows of the table, equal steps in one row.")] = 40,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for Perfetto here (one scenario only).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every step as JSON, one document per file.")] = False,
) -> None:
    """Run scenarios on the real scheduler and a scripted executor, and show each step.

    A file that cannot be run is told on standard error, and the next one runs; the exit code is then 2.
    """
    from tidegate.errors import InputError
    from tidegate.simulate.scenario import parse, parse_override

    if policy == "":
        raise InputError("--policy names no policy")
    if trace is not None and len(files) > 1:
        raise InputError(f"--trace writes one scenario to one file; name one of the {len(files)} files")
    changes = dict(parse_override(text) for text in overrides or ())
    faulty = False
    for file in files:
        try:
            outcome = _run(parse(_read(file), changes, source=file.name), policy, steps, trace)
        except InputError as error:
            faulty = True
            typer.echo(f"tidegate: {' '.join(str(error).split())}", err=True)
            continue
        if as_json:
            sys.stdout.write(json.dumps(outcome.to_json()) + "\n")
        else:
            _show(outcome, rows)
    if faulty:
        raise typer.Exit(2)


def _run(scenario: Scenario, policy: str | None, steps: int | None, trace: Path | None) -> Outcome:
    from tidegate.observe.trace import TraceWriter
    from tidegate.simulate.scenario_run import run

    if trace is None:
        return run(scenario, policy, max_steps=steps)
    with TraceWriter(trace) as writer:
        return run(scenario, policy, max_steps=steps, trace=writer)


def _read(file: Path) -> str:
    from tidegate.errors import InputError

    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{file} is not a text file in UTF-8") from None


def _show(outcome: Outcome, limit: int) -> None:
    from tidegate.cli.output import print_table

    timed = outcome.scenario.config.step_ms is not None
    table = [_row(span, timed) for span in _spans(outcome.steps)]
    if table:
        title = f"{outcome.scenario.id} under {outcome.policy}: {outcome.scenario.title}"
        print_table(_elided(table, limit), title=title)
    typer.echo("")
    requests: list[dict[str, Any]] = [
        {"request": name, **{key: getattr(fate, key) for key in fate.__slots__}}
        for name, fate in outcome.requests.items()
    ]
    print_table(_elided(requests, REQUESTS_SHOWN))
    for priority, wait in outcome.waits.items():
        if wait.waiting_now:
            typer.echo(
                f"starving: {wait.waiting_now} of priority {priority} never got a seat; "
                f"{wait.longest_now_id} waits {wait.longest_now:g}"
            )
    if outcome.stuck:
        typer.echo("stuck: requests wait, nothing is scheduled, and nothing is to come")
    for line in outcome.scenario.expect:
        typer.echo(f"expected: {line}")


def _spans(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Runs of steps that differ in nothing but their number, time and free blocks."""
    span: list[Step] = []
    for step in steps:
        if span and _same(span[-1], step):
            span.append(step)
            continue
        if span:
            yield span
        span = [step]
    if span:
        yield span


def _same(a: Step, b: Step) -> bool:
    quiet = not (b.admitted or b.preempted or b.restored or b.rejected or a.finished)
    return (
        quiet
        and a.scheduled == b.scheduled
        and (a.waiting, a.running, a.held_back_by) == (b.waiting, b.running, b.held_back_by)
    )


def _row(span: Sequence[Step], timed: bool) -> dict[str, Any]:
    """One row of the table; the time of the first step only where it is not its number."""
    first, last = span[0], span[-1]
    decodes = [name for name, tokens in first.scheduled.items() if tokens == 1]
    chunks = [f"{name}:{tokens}" for name, tokens in first.scheduled.items() if tokens != 1]
    return {
        "step": f"{first.step}" if first is last else f"{first.step}-{last.step}",
        **({"time": f"{first.time:.4g}"} if timed else {}),
        "tokens": sum(first.scheduled.values()),
        "one each": _names(decodes),
        "chunks": _names(chunks),
        "what happened": "; ".join(_happenings(span)),
        "free": last.free_blocks,
        "waiting": last.waiting,
        "running": last.running,
        "held back by": last.held_back_by,
    }


def _happenings(span: Sequence[Step]) -> Iterator[str]:
    first, last = span[0], span[-1]
    if first.admitted:
        yield f"in {_names(first.admitted)}"
    if first.restored:
        yield f"back {_names(first.restored)}"
    for victim in first.preempted:
        yield f"out {victim['id']} ({victim['mode']}: {victim['reason']})"
    for refused in first.rejected:
        yield f"refused {refused['id']} ({refused['reason']})"
    if last.finished:
        yield f"ends {_names(last.finished)}"


def _names(names: Sequence[str]) -> str:
    shown = " ".join(names[:NAMES_SHOWN])
    return f"{shown} +{len(names) - NAMES_SHOWN}" if len(names) > NAMES_SHOWN else shown


def _elided(rows: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """The first and last of more than `limit` rows, and a row that says how many are between."""
    if len(rows) <= limit:
        return rows
    head, tail = limit - limit // 4, limit // 4
    name = next(iter(rows[0]))
    gap = dict.fromkeys(rows[0], "") | {name: f"... {len(rows) - limit} more"}
    return [*rows[:head], gap, *rows[-tail:]] if tail else [*rows[:head], gap]
