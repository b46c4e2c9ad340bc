"""A trace of every step and every request in the JSON trace event format, for Perfetto and Chrome's viewer.

Each replica is a process. Its thread "steps" holds a slice per step and an instant per preemption with its reason;
each request is a track of its own (nestable asynchronous events): one slice from arrival to end, in it `queued`,
`prefill`, `decode`, `preempted`; counters tell the load and the free KV blocks. Times are microseconds.

The file is an array of events, one a line, written as they happen: what is kept in memory are the live requests,
and a run that broke off leaves a file that viewers still read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tidegate.core.events import Admitted, Arrived, Emitted, Event, Finished, Preempted, Rejected, Restored
from tidegate.core.plan import StepPlan
from tidegate.core.request import Request
from tidegate.errors import InputError
from tidegate.observe.planrows import PlanRows
from tidegate.observe.steplog import StepRow

STEPS = 1
"""The thread of a replica's steps."""


class _Live:
    """A request that has not ended: its replica's process, its number, and the phase that it is in."""

    __slots__ = ("number", "phase", "pid")

    def __init__(self, pid: int, number: int) -> None:
        self.pid = pid
        self.number = number
        self.phase = "queued"


class TraceWriter:
    """Folds events and steps of one or many replicas into a trace file, in bounded memory.

    Use it in a `with`, or call `close`. A file that is there is replaced. Raises InputError for a path that cannot
    be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror or error}") from error
        self._file.write("[")
        self._empty = True
        self._pids: dict[str, int] = {}
        self._live: dict[tuple[int, str], _Live] = {}
        self._starting: dict[int, set[str]] = {}
        self._load: dict[int, tuple[int, int, int]] = {}
        self._rows: dict[str, PlanRows] = {}
        self._numbers = 0

    def events(self, events: Iterable[Event], replica: str = "0") -> None:
        """Take what a replica's scheduler told, in order."""
        pid = self._pid(replica)
        for event in events:
            match event:
                case Emitted():
                    self._emitted(event, pid)
                case Arrived():
                    self._arrived(event.request, pid)
                case Rejected():
                    self._rejected(event, pid)
                case Admitted():
                    self._phase(pid, event.request, "prefill", event.now, {"cached_tokens": event.cached})
                case Restored():
                    told = {"cached_tokens": event.cached, "recomputed_tokens": event.recompute}
                    self._phase(pid, event.request, "prefill", event.now, told)
                case Preempted():
                    self._preempted(event, pid)
                case Finished():
                    self._finished(event, pid)

    def step(self, row: StepRow) -> None:
        """Take a step that was computed."""
        pid = self._pid(row.replica)
        kinds = [name for name, size in (("prefill", row.prefill_tokens), ("decode", row.decodes)) if size]
        args = {name: value for name, value in row._asdict().items() if name not in ("start_s", "seconds", "replica")}
        name = " + ".join(kinds) or "copies"
        self._write("X", pid, row.start_s, name=name, cat="step", tid=STEPS, dur=_micros(row.seconds), args=args)
        load = (row.running, row.waiting, row.free_blocks)
        if self._load.get(pid) != load:
            self._load[pid] = load
            requests = {"running": row.running, "waiting": row.waiting}
            self._write("C", pid, row.start_s, name="requests", cat="load", tid=STEPS, args=requests)
            free = {"free": row.free_blocks}
            self._write("C", pid, row.start_s, name="KV blocks", cat="load", tid=STEPS, args=free)

    def plan(
        self, plan: StepPlan, start_s: float, seconds: float, *, waiting: int, free_blocks: int, replica: str = "0"
    ) -> None:
        """Take a step as its plan, in a host that has no rows."""
        if replica not in self._rows:
            self._rows[replica] = PlanRows(replica)
        row = self._rows[replica].row(plan, start_s, seconds, waiting=waiting, free_blocks=free_blocks)
        if row is not None:
            self.step(row)

    def close(self) -> None:
        """End the file. Idempotent."""
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Requests -----------------------------------------------------------------------------------------

    def _arrived(self, r: Request, pid: int) -> None:
        self._numbers += 1
        live = self._live[pid, r.id] = _Live(pid, self._numbers)
        self._span("b", live, r.id, r.arrival, _facts(r))
        self._span("b", live, live.phase, r.arrival, {})

    def _rejected(self, event: Rejected, pid: int) -> None:
        self._numbers += 1
        live = _Live(pid, self._numbers)
        told = {"rejected": event.reason.value, "message": event.message}
        self._span("b", live, event.request.id, event.now, _facts(event.request))
        self._span("e", live, event.request.id, event.now, told)

    def _phase(self, pid: int, r: Request, phase: str, now: float, args: dict[str, Any]) -> None:
        """`r` goes over into `phase`."""
        live = self._live.get((pid, r.id))
        if live is None:
            return
        self._span("e", live, live.phase, now, {})
        live.phase = phase
        self._span("b", live, phase, now, args)
        starting = self._starting.setdefault(pid, set())
        if phase == "prefill":
            starting.add(r.id)
        else:
            starting.discard(r.id)

    def _emitted(self, event: Emitted, pid: int) -> None:
        """Whoever computed its prompt, or computed it again, decodes from its next token on."""
        starting = self._starting.get(pid)
        if starting:
            for r in event.requests:
                if r.id in starting:
                    self._phase(pid, r, "decode", event.now, {})

    def _preempted(self, event: Preempted, pid: int) -> None:
        r, told = event.request, {"mode": event.mode, "reason": event.reason}
        if live := self._live.get((pid, r.id)):
            self._span("n", live, "preempted", event.now, told)
        self._phase(pid, r, "preempted", event.now, told)
        told = {"request": r.id, "class": r.slo_class, **told}
        self._write("i", pid, event.now, name=f"preempted {r.id}", cat="preemption", tid=STEPS, s="t", args=told)

    def _finished(self, event: Finished, pid: int) -> None:
        r = event.request
        live = self._live.pop((pid, r.id), None)
        if live is None:
            return
        self._starting.get(pid, set()).discard(r.id)
        told = {"finish": event.reason.value, "missed": ", ".join(event.missed), "output_tokens": r.emitted}
        self._span("e", live, live.phase, event.now, {})
        self._span("e", live, r.id, event.now, told | {"preemptions": r.preemptions})

    # The file -----------------------------------------------------------------------------------------

    def _pid(self, replica: str) -> int:
        """The process of a replica, named when it is first seen."""
        if replica not in self._pids:
            pid = self._pids[replica] = len(self._pids) + 1
            named: dict[str, Any] = {"process_name": {"name": f"replica {replica}"}, "thread_name": {"name": "steps"}}
            for name, args in named.items():
                self._write("M", pid, 0.0, name=name, cat="__metadata", tid=STEPS, args=args)
        return self._pids[replica]

    def _span(self, ph: str, live: _Live, name: str, now: float, args: dict[str, Any]) -> None:
        self._write(ph, live.pid, now, name=name, cat="request", tid=STEPS, id=f"0x{live.number:x}", args=args)

    def _write(self, ph: str, pid: int, now: float, **fields: Any) -> None:
        event = {"ph": ph, "pid": pid, "ts": _micros(now), **fields}
        self._file.write(("\n" if self._empty else ",\n") + json.dumps(event, separators=(",", ":")))
        self._empty = False


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _facts(r: Request) -> dict[str, Any]:
    return {"class": r.slo_class, "tenant": r.tenant, "priority": r.priority, "prompt_tokens": r.prompt_tokens}
