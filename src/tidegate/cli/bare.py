"""A group of commands that is called without one."""

from __future__ import annotations

import typer


def help_without_command(ctx: typer.Context) -> None:
    """Print the group's help on standard error and leave with exit code 2, where no command was named."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help(), err=True)
        raise typer.Exit(2)
