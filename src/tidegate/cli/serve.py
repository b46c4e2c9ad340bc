"""`tidegate serve`: a model behind an OpenAI-compatible API."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tidegate.config import Config
    from tidegate.core.scheduler import Scheduler
    from tidegate.engine.loop import Engine, Observer
    from tidegate.executors.torch.executor import TorchExecutor
    from tidegate.observe.jsonlines import JsonLines

# Threads take the interpreter's lock in turns of this many seconds: with Python's 5 ms a step would
# wait that long for its turn whenever the HTTP side is busy.
_SWITCH_SECONDS = 0.0005
DEFAULT_KV_BYTES = 1 << 30


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
    _need_lengths_that_can_be_known(settings)
    _need_extras()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    _serve(settings)


def _need_lengths_that_can_be_known(config: Config) -> None:
    from tidegate.errors import ConfigError

    if config.predictor.kind == "oracle":
        raise ConfigError('predictor.kind "oracle" knows lengths only in a simulation; use "history" or "learned"')


def _need_extras() -> None:
    """Say which part is missing before anything is fetched or loaded."""
    from importlib.util import find_spec

    from tidegate.errors import MissingExtra

    for package in ("fastapi", "uvicorn", "prometheus_client", "torch", "transformers", "tokenizers"):
        if find_spec(package) is None:
            raise MissingExtra(f"serving needs {package}: pip install 'tidegate[serve]'")


def _serve(config: Config) -> None:
    from tidegate.api.listening import bind
    from tidegate.core.policy import PolicyContext
    from tidegate.core.predict import OraclePredictor
    from tidegate.core.scheduler import Scheduler
    from tidegate.core.step_time import LearnedStepTime
    from tidegate.engine.loop import Engine
    from tidegate.observe.metrics import Metrics
    from tidegate.predictors.choice import build_predictor
    from tidegate.server.app import create_app
    from tidegate.server.run import run
    from tidegate.server.service import Service
    from tidegate.server.warmup import warm_up

    predictor = build_predictor(config.predictor)
    with bind(config.server.host, config.server.port) as sock:
        logs = _log_files(config)
        executor = _executor(config)
        pools = (executor.host_blocks, executor.disk_blocks)
        limits = config.limits(executor.num_blocks, executor.max_model_len, *pools)
        context = PolicyContext(OraclePredictor(), LearnedStepTime())
        scheduler = Scheduler(config.build_policy(), limits, context)
        engine = Engine(scheduler, executor, depth=config.scheduler.pipeline_depth)
        service = Service(engine, executor, **config.service_limits)
        metrics = Metrics(list(config.classes), tenants=config.server.tenant_labels)
        engine.start()
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            asyncio.run(warm_up(engine, service.vocabulary, limits.pool_tokens))
        except BaseException:
            engine.stop()
            raise
        context.predictor = predictor  # only now: what warmed the machine up is no history
        context.step_time = LearnedStepTime()
        engine.observers += [metrics, *_observers(logs, scheduler, engine)]
        app = create_app(service, metrics, config)
        drain = config.server.drain_seconds
        try:
            run(app, engine, sock, drain_seconds=drain, ready=lambda: _say_ready(config, executor, sock))
        finally:
            for file in logs.values():
                file.close()


def _log_files(config: Config) -> dict[str, JsonLines]:
    """The files that this server writes as it goes, by option of `[observe]`; opened before anything slow begins."""
    from tidegate.observe.jsonlines import JsonLines

    paths = {
        "decisions": config.observe.decisions,
        "records": config.observe.records,
        "steps": config.observe.steps,
    }
    return {name: JsonLines(Path(path), config.observe.max_bytes) for name, path in paths.items() if path is not None}


def _observers(logs: Mapping[str, JsonLines], scheduler: Scheduler, engine: Engine) -> Iterator[Observer]:
    """Who fills each of the files."""
    from tidegate.observe.decisions import DecisionLog, RecordLog
    from tidegate.observe.planrows import StepLog

    if "decisions" in logs:
        yield DecisionLog(logs["decisions"])
    if "records" in logs:
        yield RecordLog(logs["records"])
    if "steps" in logs:
        yield StepLog(logs["steps"], scheduler, engine.clock)


def _executor(config: Config) -> TorchExecutor:
    from tidegate.cli.environment import cache_dir
    from tidegate.executors.torch.executor import TorchExecutor
    from tidegate.executors.torch.hardware import available_cores
    from tidegate.executors.torch.model import load_model
    from tidegate.executors.torch.weights import ensure_model

    wanted = config.scheduler
    threads = config.model.threads or available_cores()
    files = ensure_model(config.model.name, cache_dir())
    loaded = load_model(files.path, name=files.name, dtype=config.model.dtype)
    memory = None if wanted.num_blocks is not None else wanted.kv_memory or DEFAULT_KV_BYTES
    return TorchExecutor(
        loaded,
        block_size=wanted.block_size,
        num_blocks=wanted.num_blocks,
        kv_bytes=memory,
        max_num_seqs=wanted.max_num_seqs,
        max_model_len=wanted.max_model_len,
        threads=threads,
        host_blocks=wanted.host_blocks or 0,
        host_kv_bytes=wanted.host_kv_memory,
        disk_blocks=wanted.disk_blocks or 0,
        disk_kv_bytes=wanted.disk_kv_memory,
        disk_path=Path(wanted.disk_kv_path) if wanted.disk_kv_path is not None else None,
    )


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
