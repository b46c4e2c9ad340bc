"""`tidegate config show`: the resolved whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidegate.cli.bare import help_without_command

app = typer.Typer(
    rich_markup_mode=None, add_completion=False, invoke_without_command=True, help="Look at the configuration."
)


@app.callback()
def _group(ctx: typer.Context) -> None:
    """Look at the configuration."""
    help_without_command(ctx)


@app.command()
def show(
    config: Annotated[Path | None, typer.Option(help="Configuration file; the defaults without one.")] = None,
) -> None:
    """Print every setting that has a value, as TOML that `--config` reads again."""
    from tidegate.cli.environment import config_path
    from tidegate.config import load_config, to_toml

    typer.echo(to_toml(load_config(config_path(config))), nl=False)
