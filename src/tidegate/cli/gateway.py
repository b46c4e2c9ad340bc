"""`tidegate gateway`: one OpenAI-compatible address before many engines."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import socket

    from tidegate.config import Config
    from tidegate.gateway.run import Service


def gateway(
    config: Annotated[Path | None, typer.Option(help="Configuration file (TOML) with [gateway].")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 by default.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 8080 by default, 0 takes a free one.")
    ] = None,
) -> None:
    """Route requests to engines by cache, load and class until SIGTERM or Ctrl-C has let streams finish."""
    from tidegate.cli.environment import config_path

    _need_extras()
    from tidegate.api.listening import bind
    from tidegate.gateway.run import run
    from tidegate.gateway.settings import load

    path = config_path(config)
    said = {"gateway": {"host": host, "port": port}}
    settings = load(path, said)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    with bind(settings.gateway.host, settings.gateway.port) as sock:
        run(settings, path, os.environ, sock, lambda service: _say_ready(settings, service, sock), said)


def _need_extras() -> None:
    from importlib.util import find_spec

    from tidegate.errors import MissingExtra

    for package in ("httptools", "uvloop", "msgspec", "aiohttp", "prometheus_client"):
        if find_spec(package) is None:
            raise MissingExtra(f"the gateway needs {package}: pip install 'tidegate[gateway]'")


def _say_ready(config: Config, service: Service, sock: socket.socket) -> None:
    from tidegate.api.listening import is_exposed, url_of

    if is_exposed(sock) and not config.gateway.api_keys:
        typer.echo("warning: anybody who reaches this address may use the engines; set gateway.api_keys", err=True)
    names = [replica.name for replica in service.fleet]
    engines = f"engines {', '.join(names[:5])}{' and others' if len(names) > 5 else ''}" if names else "no engine yet"
    how = f"{engines}; route {config.gateway.route}, policy {config.scheduler.policy}"
    typer.echo(f"the gateway is ready at {url_of(sock)} ({how}; Ctrl-C drains and stops)")
