"""One engine with its model, observers and application, as a configuration says: whoever serves it starts it here."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI

from tidegate.config import Config
from tidegate.core.policy import PolicyContext
from tidegate.core.predict import OraclePredictor, Predictor
from tidegate.core.scheduler import Scheduler
from tidegate.core.step_time import LearnedStepTime
from tidegate.engine.loop import Engine, Observer
from tidegate.errors import ConfigError
from tidegate.observe.decisions import DecisionLog, RecordLog
from tidegate.observe.jsonlines import JsonLines
from tidegate.observe.metrics import Metrics
from tidegate.observe.planrows import StepLog
from tidegate.predictors.choice import build_predictor
from tidegate.server.app import create_app
from tidegate.server.service import Service
from tidegate.server.warmup import warm_up

if TYPE_CHECKING:  # torch takes seconds to import
    from tidegate.executors.torch.executor import TorchExecutor

# Threads take the interpreter's lock in turns of this many seconds: with Python's 5 ms a step would
# wait that long for its turn whenever the HTTP side is busy.
_SWITCH_SECONDS = 0.0005
DEFAULT_KV_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Served:
    """An engine that was put together and not begun. `begin` it once before `app` is served, `close` it at the end."""

    executor: TorchExecutor
    scheduler: Scheduler
    context: PolicyContext
    predictor: Predictor
    engine: Engine
    service: Service
    metrics: Metrics
    logs: Mapping[str, JsonLines]
    app: FastAPI

    async def begin(self) -> None:
        """Start the engine, warm it up, and only then let observers and predictors see what it does."""
        self.engine.start()
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            await warm_up(self.engine, self.service.vocabulary, self.scheduler.limits.pool_tokens)
        except BaseException:
            self.engine.stop()
            raise
        self.context.predictor = self.predictor  # only now: what warmed the machine up is no history
        self.context.step_time = LearnedStepTime()
        self.engine.observers += [self.metrics, *_observers(self.logs, self.scheduler, self.engine)]

    def close(self) -> None:
        """Stop the engine, whose clients get `EngineDead`, and close the files. Idempotent."""
        self.engine.stop()
        for file in self.logs.values():
            file.close()


def assemble(config: Config, cache: Path) -> Served:
    """Load the model, fetched into the folder `cache` where it is not there yet, and put the rest around it.

    Raises InputError: lengths cannot be known, a file cannot be written, the model cannot be had, or memory does not
    suffice.
    """
    if config.predictor.kind == "oracle":
        raise ConfigError('predictor.kind "oracle" knows lengths only in a simulation; use "history" or "learned"')
    predictor, logs = build_predictor(config.predictor), _log_files(config)  # before anything slow begins
    executor = build_executor(config, cache)
    pools = (executor.host_blocks, executor.disk_blocks)
    limits = config.limits(executor.num_blocks, executor.max_model_len, *pools)
    context = PolicyContext(OraclePredictor(), LearnedStepTime())
    scheduler = Scheduler(config.build_policy(), limits, context)
    engine = Engine(scheduler, executor, depth=config.scheduler.pipeline_depth)
    service = Service(engine, executor, **config.service_limits)
    metrics = Metrics(list(config.classes), tenants=config.server.tenant_labels)
    app = create_app(service, metrics, config)
    return Served(executor, scheduler, context, predictor, engine, service, metrics, logs, app)


def _log_files(config: Config) -> dict[str, JsonLines]:
    """The files that are written as the engine goes, by option of `[observe]`."""
    paths = {
        "decisions": config.observe.decisions,
        "records": config.observe.records,
        "steps": config.observe.steps,
    }
    return {name: JsonLines(Path(path), config.observe.max_bytes) for name, path in paths.items() if path is not None}


def _observers(logs: Mapping[str, JsonLines], scheduler: Scheduler, engine: Engine) -> Iterator[Observer]:
    """Who fills each of the files."""
    if "decisions" in logs:
        yield DecisionLog(logs["decisions"])
    if "records" in logs:
        yield RecordLog(logs["records"])
    if "steps" in logs:
        yield StepLog(logs["steps"], scheduler, engine.clock)


def build_executor(config: Config, cache: Path) -> TorchExecutor:
    """The executor of the configured model, with the pools that the configuration gives it."""
    from tidegate.executors.torch.executor import TorchExecutor
    from tidegate.executors.torch.hardware import available_cores
    from tidegate.executors.torch.model import load_model
    from tidegate.executors.torch.weights import ensure_model

    wanted = config.scheduler
    threads = config.model.threads or available_cores()
    files = ensure_model(config.model.name, cache)
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
