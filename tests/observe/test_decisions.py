"""The decision log and the record log of a server: complete, bounded, never in the engine's way."""

import json
import threading
from pathlib import Path

import pytest

from tests.core.harness import Run, limits, request
from tidegate.errors import InputError
from tidegate.observe import jsonlines
from tidegate.observe.decisions import DecisionLog, RecordLog
from tidegate.observe.jsonlines import JsonLines, LineFile
from tidegate.observe.records import read_records


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_decision_is_a_line_with_its_numbers(tmp_path: Path) -> None:
    out = JsonLines(tmp_path / "d.jsonl", 1 << 20)
    log = DecisionLog(out)
    run = Run.of("priority", limits(max_num_seqs=1, host_blocks=64), restore="auto")
    run.add(request("long", 64, 20, priority=5))
    run.steps(3)
    run.add(request("urgent", 16, 2, priority=0), request("endless", 9_999, 1))
    run.until_idle()
    for plan in run.plans:
        log.step(plan, 0.01)
    log.events(run.events)
    out.close()
    told = lines(tmp_path / "d.jsonl")
    of = {kind: [t for t in told if t["event"] == kind] for kind in {t["event"] for t in told}}
    assert [t["request_id"] for t in of["admitted"]] == ["long", "urgent"]
    (evicted,) = of["preempted"]
    assert evicted["request_id"] == "long"
    assert "seat wanted by urgent (priority 0 < 5)" in evicted["reason"]
    assert "recompute" in evicted["reason"]
    assert (evicted["tier"], evicted["preemptions"], evicted["time"]) == (5, 1, 3.0)
    assert of["restored"][0]["request_id"] == "long"
    assert of["rejected"][0]["reason"] == "kv_capacity"
    assert {t["reason"] for t in of["finished"]} == {"length"}
    assert "seats" in {t["by"] for t in of["held back"]}


def test_records_come_as_requests_end(tmp_path: Path) -> None:
    out = JsonLines(tmp_path / "r.jsonl", 1 << 20)
    log = RecordLog(out)
    run = Run.of("fcfs", limits())
    run.add(request("a", 8, 4), request("b", 8, 2))
    run.until_idle()
    log.events(run.events)
    out.close()
    assert [(r.request_id, r.output_tokens) for r in read_records(tmp_path / "r.jsonl")] == [("b", 2), ("a", 4)]


def test_a_file_never_outgrows_its_bound(tmp_path: Path) -> None:
    out = JsonLines(tmp_path / "d.jsonl", 1_000)
    for n in range(500):
        out.write({"n": n})
    out.close()
    assert {p.name for p in tmp_path.iterdir()} == {"d.jsonl", "d.jsonl.1"}
    assert all(p.stat().st_size <= 1_000 for p in tmp_path.iterdir())
    assert lines(tmp_path / "d.jsonl")[-1] == {"n": 499}


def test_a_simulation_loses_no_line(tmp_path: Path) -> None:
    run = Run.of("fcfs", limits())
    run.add(request("a", 8, 4), request("b", 8, 2))
    run.until_idle()
    out = LineFile(tmp_path / "d.jsonl")
    log = DecisionLog(out)
    for _ in range(2 * jsonlines.BACKLOG // len(run.events)):
        log.events(run.events)
    out.close()
    assert len(lines(tmp_path / "d.jsonl")) == 6 * (2 * jsonlines.BACKLOG // len(run.events))
    with pytest.raises(InputError, match="cannot write"):
        LineFile(tmp_path / "none" / "d.jsonl")


def test_a_stuck_disk_loses_lines_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jsonlines, "BACKLOG", 5)
    stuck = threading.Event()
    out = JsonLines(tmp_path / "d.jsonl", 1 << 20)
    emit = out._file.emit
    monkeypatch.setattr(out._file, "emit", lambda record: (stuck.wait(), emit(record)))
    for n in range(50):
        out.write({"n": n})
    stuck.set()
    out.close()
    out.close()
    written = lines(tmp_path / "d.jsonl")
    assert out.dropped > 0
    assert len(written) + out.dropped == 50
    assert "lines were dropped" in caplog.text


def test_a_path_that_cannot_be_written_is_told_at_start(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write"):
        JsonLines(tmp_path / "none" / "d.jsonl", 1_000)
