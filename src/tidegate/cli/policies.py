"""`tidegate policies`: what `scheduler.policy` may name."""

from __future__ import annotations

from typing import Annotated

import typer


def policies(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the policies and presets, one a line."""
    from tidegate.cli.output import print_json, print_table
    from tidegate.core.presets import DEFAULT_POLICY, PRESETS

    rows = [
        {"name": name, "default": name == DEFAULT_POLICY, "summary": preset.summary} for name, preset in PRESETS.items()
    ]
    if as_json:
        print_json(rows)
    else:
        print_table([row | {"default": "default" if row["default"] else ""} for row in rows])
