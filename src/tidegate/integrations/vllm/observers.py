"""Who is told what happened in vLLM: the decision log, records, the step log, and Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from tidegate.config import Config
from tidegate.core.events import Event
from tidegate.core.plan import StepPlan
from tidegate.integrations.vllm.scheduler import VllmScheduler
from tidegate.observe.decisions import DecisionLog, RecordLog
from tidegate.observe.jsonlines import JsonLines, Lines
from tidegate.observe.steplog import StepRow, causal_pairs


class Observer(Protocol):
    """Somebody who is told what happened, in the scheduler's thread: be quick, never raise, never block."""

    def events(self, events: Sequence[Event]) -> None:
        """What happened since the last call, in order."""

    def step(self, plan: StepPlan, seconds: float) -> None:
        """A step was computed, and took so long."""

    def close(self) -> None:
        """Write what waits. Idempotent."""


def observers_of(config: Config, scheduler: VllmScheduler) -> list[Observer]:
    """Those that `[observe]` asks for; their lines have the formats of our own engine."""
    observe = config.observe
    logs: list[tuple[str | None, Callable[[Lines], Any]]] = [
        (observe.decisions, DecisionLog),
        (observe.records, RecordLog),
        (observe.steps, lambda out: StepLog(out, scheduler)),
    ]
    return [LogFile(JsonLines(Path(path), observe.max_bytes), log) for path, log in logs if path is not None]


class LogFile:
    """A log with the file it writes."""

    def __init__(self, file: JsonLines, log: Callable[[Lines], Any]) -> None:
        self._file = file
        log_to = log(file)
        self.events: Callable[[Sequence[Event]], None] = log_to.events
        self.step: Callable[[StepPlan, float], None] = log_to.step

    def close(self) -> None:
        self._file.close()


class StepLog:
    """A line for every step; who waits and what is free is counted when it was computed."""

    def __init__(self, out: Lines, scheduler: VllmScheduler) -> None:
        self._out = out
        self._scheduler = scheduler

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
            replica="0",
            prefill_context=sum(chunk.start for chunk in plan.chunks),
            prefill_pairs=sum(causal_pairs(chunk.start, chunk.length) for chunk in plan.chunks),
        )
        self._out.write(row._asdict())
