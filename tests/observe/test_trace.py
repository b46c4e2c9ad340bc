"""The trace holds every step and every request, in the form that trace viewers read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tests.core.harness import Run, limits, request
from tidegate.errors import InputError
from tidegate.observe.trace import TraceWriter

ROOT = Path(__file__).resolve().parents[2]

NUMBER, NAME = {"type": "number", "minimum": 0}, {"type": "string", "minLength": 1}
BASE = {"ph": NAME, "pid": {"type": "integer"}, "tid": {"type": "integer"}, "ts": NUMBER, "name": NAME, "cat": NAME}


def kind(phases: list[str], **more: Any) -> dict[str, Any]:
    properties = {**BASE, "args": {"type": "object"}, **more, "ph": {"enum": phases}}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


# What the trace event format asks of the phases that are used here: complete slices, counters, instants, metadata and
# nestable asynchronous slices.
FORMAT = {
    "type": "array",
    "items": {
        "oneOf": [
            kind(["X"], dur=NUMBER),
            kind(["b", "e", "n"], id={"type": "string", "pattern": "^0x[0-9a-f]+$"}),
            kind(["i"], s={"enum": ["g", "p", "t"]}),
            kind(["C"], args={"type": "object", "minProperties": 1, "additionalProperties": {"type": "number"}}),
            kind(["M"], name={"enum": ["process_name", "thread_name"]}, args={"type": "object", "required": ["name"]}),
        ]
    },
}


def traced(path: Path, depth: int = 1) -> tuple[Run, list[dict[str, Any]]]:
    """A run with a displaced, a refused and a cancelled request, and its trace."""
    run = Run.of("priority", limits(max_num_seqs=2), depth)
    run.add(request("long", 64, 20, priority=5), request("<b>&\"'", 8, 4, priority=5))
    run.steps(3)
    run.add(request("urgent", 16, 2, priority=0), request("endless", 9_999, 1), request("gone", 16, 9, priority=9))
    run.abort("gone")
    run.until_idle()
    with TraceWriter(path) as trace:
        for at, plan in enumerate(run.plans):
            trace.events([event for event in run.events if event.now == at])
            if plan:
                trace.plan(plan, float(at), 1.0, waiting=0, free_blocks=5)
        trace.events([event for event in run.events if event.now >= len(run.plans)])
    return run, json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_trace_is_what_viewers_accept(tmp_path: Path, depth: int) -> None:
    _, events = traced(tmp_path / "t.json", depth)
    jsonschema_rs.validate(FORMAT, events)
    assert {event["ph"] for event in events} == set("XbeniCM")


@pytest.mark.parametrize("depth", [1, 2])
def test_spans_of_a_request_nest_and_end_in_order(tmp_path: Path, depth: int) -> None:
    _, events = traced(tmp_path / "t.json", depth)
    open_spans: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "b":
            assert not open_spans[event["id"]] or event["ts"] >= open_spans[event["id"]][-1][1]
            open_spans[event["id"]].append((event["name"], event["ts"]))
        elif event["ph"] == "e":
            name, began = open_spans[event["id"]].pop()
            assert (name, True) == (event["name"], event["ts"] >= began)
    assert not any(open_spans.values())


def test_slices_of_a_thread_do_not_overlap(tmp_path: Path) -> None:
    run, events = traced(tmp_path / "t.json")
    steps = [event for event in events if event["ph"] == "X"]
    assert len(steps) == sum(bool(plan) for plan in run.plans)
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(steps))
    assert steps[0]["args"]["prefill_tokens"] == 72


def test_every_request_has_its_phases_and_every_preemption_its_reason(tmp_path: Path) -> None:
    run, events = traced(tmp_path / "t.json")
    named = {event["id"]: event["name"] for event in reversed(events) if event["ph"] == "b"}
    phases = defaultdict(list)
    for event in events:
        if event["ph"] == "b" and event["name"] in ("queued", "prefill", "decode", "preempted"):
            phases[named[event["id"]]].append(event["name"])
    assert phases["urgent"] == ["queued", "prefill", "decode"]
    (_, victim, reason), *others = run.preemptions()
    assert not others
    assert phases[victim][-3:] == ["preempted", "prefill", "decode"]
    assert phases["gone"] == ["queued"]
    assert "endless" in named.values()
    (instant,) = [event for event in events if event["ph"] == "i"]
    assert instant["args"] == {"request": victim, "class": "interactive", "mode": "recompute", "reason": reason}
    ends = [event["args"]["finish"] for event in events if event["ph"] == "e" and "finish" in event["args"]]
    assert sorted(ends) == ["cancelled", "length", "length", "length"]


def test_nothing_is_kept_of_requests_that_ended(tmp_path: Path) -> None:
    run = Run.of("fcfs", limits())
    with TraceWriter(tmp_path / "t.json") as trace:
        for n in range(50):
            run.add(request(f"r{n}", 8, 2))
            run.until_idle()
            trace.events(run.events)
            run.events.clear()
            assert not trace._live
            assert not any(trace._starting.values())


def test_a_run_that_broke_off_leaves_one_event_a_line(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "t.json")
    trace.events(Run.of("fcfs", limits()).events)
    trace.close()
    trace.close()
    first, *lines = (tmp_path / "t.json").read_text(encoding="utf-8").splitlines()
    assert (first, lines[-1]) == ("[", "]")
    assert all(json.loads(line.rstrip(",")) for line in lines[:-1])
    with pytest.raises(InputError, match="cannot write"):
        TraceWriter(tmp_path / "none" / "t.json")


def test_a_scenario_writes_its_trace(tmp_path: Path) -> None:
    scenario = next((ROOT / "tests" / "scenarios" / "data").glob("S01-*.yaml"))
    out = tmp_path / "t.json"
    command = [sys.executable, "-m", "tidegate", "scenario", str(scenario), "--json", "--trace", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT / "src")})
    told, events = json.loads(done.stdout), json.loads(out.read_text(encoding="utf-8"))
    jsonschema_rs.validate(FORMAT, events)
    steps = [event for event in events if event["ph"] == "X"]
    assert len(steps) == sum(bool(step["scheduled"]) for step in told["steps"])
    assert {e["name"] for e in events if e["ph"] == "b"} >= set(told["requests"])
    twice = subprocess.run(
        [*command, str(scenario)], capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT / "src")}
    )
    assert (twice.returncode, "--trace" in twice.stderr) == (2, True)
