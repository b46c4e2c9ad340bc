"""Who is told what happened in vLLM: the decision log, records, the step log, and Prometheus."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from math import inf
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from prometheus_client import REGISTRY

from tidegate.config import Config
from tidegate.core.events import Event, Finished
from tidegate.core.plan import StepPlan
from tidegate.integrations.vllm.scheduler import VllmScheduler
from tidegate.observe.decisions import DecisionLog, Labelled, RecordLog
from tidegate.observe.jsonlines import JsonLines, Lines
from tidegate.observe.metrics import Metrics
from tidegate.observe.steplog import StepRow, causal_pairs

if TYPE_CHECKING:
    from tidegate.integrations.vllm.host import Host

_log = logging.getLogger("vllm.tidegate")


class Observer(Protocol):
    """Somebody who is told what happened, in the scheduler's thread: be quick, never raise, never block."""

    def events(self, events: Sequence[Event]) -> None:
        """What happened since the last call, in order."""

    def step(self, plan: StepPlan, seconds: float) -> None:
        """A step was computed, and took so long."""

    def close(self) -> None:
        """Write what waits. Idempotent."""


def observers_of(config: Config, host: Host, metrics: bool, rank: int) -> list[Observer]:
    """Those that `[observe]` asks for, whose lines have the formats of our own engine, and Prometheus.

    In shadow mode what would have been goes to the decision log as well. `rank` is the engine's among those of one
    vLLM (data parallelism): each is a process that writes files of its own.
    """
    observe, scheduler = config.observe, host.scheduler
    found: list[Observer] = []
    if observe.decisions is not None:
        decisions = JsonLines(of_rank(observe.decisions, rank), observe.max_bytes)
        found.append(LogFile(decisions, ExplainedDecisions(decisions, scheduler)))
        host.out = decisions
    if observe.records is not None:
        records = JsonLines(of_rank(observe.records, rank), observe.max_bytes)
        found.append(LogFile(records, RecordLog(Labelled(records, str(rank)))))
    if observe.steps is not None:
        steps = JsonLines(of_rank(observe.steps, rank), observe.max_bytes)
        found.append(LogFile(steps, StepLog(steps, scheduler, str(rank))))
    if metrics:
        found.append(Exported(config, scheduler))
    return found


def of_rank(path: str, rank: int) -> Path:
    """`records.jsonl` of the first engine, `records.1.jsonl` of the next."""
    whole = Path(path)
    return whole.with_suffix(f".{rank}{whole.suffix}") if rank else whole


class Log(Protocol):
    """A log of our own engine."""

    def events(self, events: Sequence[Event]) -> None: ...
    def step(self, plan: StepPlan, seconds: float) -> None: ...


class LogFile:
    """A log with the file it writes."""

    def __init__(self, file: JsonLines, log: Log) -> None:
        self._file = file
        self.events = log.events
        self.step = log.step

    def close(self) -> None:
        """Write what waits."""
        self._file.close()


class ExplainedDecisions(DecisionLog):
    """A decision log that explains every request when it has ended: what is known of it and its last decisions in one
    line, as `explain` tells it, since nobody can ask a scheduler in vLLM's process."""

    def __init__(self, out: Lines, scheduler: VllmScheduler) -> None:
        super().__init__(out)
        self._out = out
        self._scheduler = scheduler

    def events(self, events: Sequence[Event]) -> None:
        """One line for each decision."""
        super().events(events)
        for event in events:
            if isinstance(event, Finished):
                told = self._scheduler.explain(event.request.id)
                self._out.write({"time": event.now, "event": "explained", "missed": event.missed, **(told or {})})


class StepLog:
    """A line for every step; who waits and what is free is counted when it was computed."""

    def __init__(self, out: Lines, scheduler: VllmScheduler, replica: str) -> None:
        self._out = out
        self._scheduler = scheduler
        self._replica = replica

    def events(self, events: Sequence[Event]) -> None:
        """Steps are about plans."""

    def step(self, plan: StepPlan, seconds: float) -> None:
        """One line for the step."""
        scheduler = self._scheduler
        row = StepRow(
            start_s=plan.now,
            seconds=seconds,
            prefill_tokens=sum(chunk.length for chunk in plan.chunks),
            decodes=len(plan.decodes),
            context_tokens=plan.context,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_blocks=scheduler.kv.available,
            preempted=len(plan.preempted),
            replica=self._replica,
            prefill_context=sum(chunk.start for chunk in plan.chunks),
            prefill_pairs=sum(causal_pairs(chunk.start, chunk.length) for chunk in plan.chunks),
        )
        self._out.write(row._asdict())


GAUGES_EVERY = 1.0
"""Seconds between two looks at how many wait and run."""


class Exported:
    """Metrics in the registry that vLLM's own stand in, so that its `/metrics` shows them.

    vLLM's engine is a process of its own; its metrics reach the server's `/metrics` where PROMETHEUS_MULTIPROC_DIR
    names a directory for both.
    """

    standing: ClassVar[Exported | None] = None

    def __init__(self, config: Config, scheduler: VllmScheduler) -> None:
        if Exported.standing is not None:  # an engine in this process that was not shut down
            Exported.standing.close()
        Exported.standing = self
        self._metrics = Metrics(list(config.classes), config.server.tenant_labels, REGISTRY)
        self._scheduler = scheduler
        self._looked_at = -inf
        self.events = self._metrics.events
        if parent_process() is not None and "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            _log.info("Tidegate's metrics are seen at /metrics where PROMETHEUS_MULTIPROC_DIR names an empty directory")

    def step(self, plan: StepPlan, seconds: float) -> None:
        """A step was computed."""
        self._metrics.step(plan, seconds)
        if plan.now >= self._looked_at + GAUGES_EVERY:
            self._looked_at = plan.now
            self._metrics.load(self._scheduler.snapshot(plan.now))

    def close(self) -> None:
        """Take them out of the registry, for the next scheduler in this process."""
        self._metrics.unregister()
