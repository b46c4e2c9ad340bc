"""`tidegate policies`: what `scheduler.policy` may name, and the parameters of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tidegate.core.presets import Preset


def policies(
    name: Annotated[
        str | None,
        typer.Argument(help="One of them, or package.module:NAME: its parameters, their defaults and places."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the policies and presets, one a line; or the parameters of one."""
    from tidegate.cli.output import print_json, print_table
    from tidegate.core.presets import DEFAULT_POLICY, PRESETS

    if name is not None:
        _show(name, as_json)
        return
    rows = [
        {"name": name, "default": name == DEFAULT_POLICY, "summary": preset.summary} for name, preset in PRESETS.items()
    ]
    if as_json:
        print_json(rows)
    else:
        print_table([row | {"default": "default" if row["default"] else ""} for row in rows])


def _show(name: str, as_json: bool) -> None:
    from tidegate.cli.output import print_json, print_table
    from tidegate.core.policy import Policy
    from tidegate.custom import find_policy
    from tidegate.errors import InputError

    found = find_policy(name)
    if isinstance(found, Policy):
        raise InputError(f"policy {name} is whole: it was composed in Python and has no parameters")
    rows = _parameters(name, found)
    if as_json:
        print_json({"name": name, "summary": found.summary, "parameters": rows, "limits": dict(found.limits)})
        return
    typer.echo(f"{name}: {found.summary}")
    print_table([row | {"default": _told(row["default"])} for row in rows])
    for option, value in found.limits.items():
        typer.echo(f"[scheduler] {option} = {_told(value)} unless the file says otherwise")


def _parameters(name: str, preset: Preset) -> list[dict[str, Any]]:
    """Each parameter that does something here, with the place in a configuration where it is set."""
    from tidegate.config import DOOR, SAID_ELSEWHERE, SchedulerConfig
    from tidegate.core.presets import defaults

    section = f'policy."{name}"' if ":" in name else f"policy.{name}"
    door = {option: getattr(SchedulerConfig(), option) for option in DOOR}
    return [
        {"parameter": option, "default": value, "set_as": SAID_ELSEWHERE.get(option, f"{section}.{option}")}
        for option, value in (defaults(preset) | door).items()
    ]


def _told(value: Any) -> str:
    """A value as TOML has it; a dash for none."""
    if value is None or value == {}:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
