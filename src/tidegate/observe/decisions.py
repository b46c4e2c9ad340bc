"""The decision log: why each request was admitted, evicted, restored or refused, and what holds the others back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidegate.core.events import Computed, Emitted, Event
from tidegate.core.explain import remembered, words
from tidegate.core.plan import StepPlan
from tidegate.core.request import Request
from tidegate.observe.jsonlines import Lines
from tidegate.observe.records import Recorder


class DecisionLog:
    """Writes a line for every decision, and one whenever what holds the waiting back changes. No text of prompts."""

    def __init__(self, out: Lines) -> None:
        self._out = out
        self._held_back_by: str | None = None

    def events(self, events: Sequence[Event]) -> None:
        """One line for each that is a decision."""
        for event in events:
            if not isinstance(event, Emitted | Computed):
                told = words(remembered(event))
                self._out.write({"time": event.now, **told, **_who(event.request)})

    def step(self, plan: StepPlan, seconds: float) -> None:
        """One line where the constraint that keeps somebody waiting is another than in the step before."""
        if plan.held_back_by != self._held_back_by:
            self._held_back_by = plan.held_back_by
            self._out.write({"time": plan.now, "event": "held back", "step": plan.step, "by": plan.held_back_by})


class LabelledDecisions:
    """Decisions of one or many engines to one file, each line with its engine's name; takes events as an observer."""

    def __init__(self, out: Lines) -> None:
        self._out = out
        self._logs: dict[str, DecisionLog] = {}

    def __call__(self, events: Sequence[Event], replica: str) -> None:
        if replica not in self._logs:
            self._logs[replica] = DecisionLog(Labelled(self._out, replica))
        self._logs[replica].events(events)


class Labelled:
    """Lines of one engine."""

    def __init__(self, out: Lines, replica: str) -> None:
        self._out = out
        self._replica = replica

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one object with the engine's name."""
        self._out.write({**line, "replica": self._replica})


class RecordLog:
    """Writes a record (observe/records.py) for every request as it ends."""

    def __init__(self, out: Lines) -> None:
        self._out = out
        self._recorder = Recorder()

    def events(self, events: Sequence[Event]) -> None:
        """One line for each request that ended or was refused."""
        self._recorder.observe(events)
        for record in self._recorder.records:
            self._out.write(record._asdict())
        self._recorder.records.clear()

    def step(self, plan: StepPlan, seconds: float) -> None:
        """Records are about requests."""


def _who(r: Request) -> dict[str, object]:
    key = r.key
    return {
        "request_id": r.id,
        "tenant": r.tenant,
        "class": r.slo_class,
        "priority": r.priority,
        "tier": None if key is None else key.tier,
        "score": None if key is None else key.score,
        "prompt_tokens": r.prompt_tokens,
        "output_tokens": r.emitted,
        "preemptions": r.preemptions,
    }
