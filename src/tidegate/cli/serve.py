"""`tidegate serve`: a model behind an OpenAI-compatible API."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tidegate.config import Config
    from tidegate.executors.torch.executor import TorchExecutor


def serve(
    model: Annotated[
        str | None, typer.Option(help="A known name (`tidegate models`), a directory, a GGUF file or a hub id.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration file (TOML).")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 by default.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 8000 by default, 0 takes a free one.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="A policy of `tidegate policies`, or package.module:NAME.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Requests that run at once.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Tokens of one request, prompt and output.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="Memory for the KV cache, such as 2GiB.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the model.")] = None,
) -> None:
    """Serve a model over OpenAI's API until SIGTERM or Ctrl-C has let its requests finish."""
    from tidegate.cli.environment import config_path
    from tidegate.config import load_config

    settings = load_config(
        config_path(config),
        {
            "model": {"name": model, "threads": threads},
            "server": {"host": host, "port": port},
            "scheduler": {
                "policy": policy,
                "max_num_seqs": max_num_seqs,
                "max_model_len": max_model_len,
                "kv_memory": kv_memory,
            },
        },
    )
    _need_extras()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    _serve(settings)


def _need_extras() -> None:
    """Say which part is missing before anything is fetched or loaded."""
    from importlib.util import find_spec

    from tidegate.errors import MissingExtra

    for package in ("fastapi", "uvicorn", "prometheus_client", "torch", "transformers", "tokenizers"):
        if find_spec(package) is None:
            raise MissingExtra(f"serving needs {package}: pip install 'tidegate[serve]'")


def _serve(config: Config) -> None:
    from tidegate.api.listening import bind
    from tidegate.cli.environment import cache_dir
    from tidegate.server.assembly import assemble
    from tidegate.server.run import run

    with bind(config.server.host, config.server.port) as sock:
        served = assemble(config, cache_dir())
        asyncio.run(served.begin())
        try:
            run(
                served.app,
                served.engine,
                sock,
                drain_seconds=config.server.drain_seconds,
                max_connections=config.server.max_connections,
                ready=lambda: _say_ready(config, served.executor, sock),
            )
        finally:
            served.close()


def _say_ready(config: Config, executor: TorchExecutor, sock: socket.socket) -> None:
    """Where it is, and how to try it."""
    from tidegate.api.listening import is_exposed, url_of

    url = url_of(sock)
    if is_exposed(sock) and not config.server.api_keys:
        typer.echo("warning: anybody who reaches this address may use the model; set server.api_keys", err=True)
    body = '{"messages": [{"role": "user", "content": "Why do tides come twice a day?"}]}'
    kv_tokens = executor.num_blocks * executor.block_size
    how = f"{executor.dtype_name}, {executor.threads} threads, {kv_tokens} KV tokens, policy {config.scheduler.policy}"
    typer.echo(f"{executor.model_name} is ready at {url} ({how}; Ctrl-C drains and stops)")
    typer.echo(f"try: curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
