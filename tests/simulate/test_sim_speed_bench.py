"""The shape of `bench/sim_speed.py --json`, on a handful of requests."""

from __future__ import annotations

import json
from pathlib import Path

from bench import sim_speed
from tidegate.simulate.traces import load_workload


def test_rows_have_the_documented_fields() -> None:
    rows = sim_speed.measure(sim_speed.Case("few", "azure-conv:first=20", 4.0, 2), ["joint", "fcfs"], 1, None)
    assert [list(row) for row in rows] == [["workload", "policy", "tidegate_req_s", "dynamo_req_s", "ratio"]] * 2
    assert [row["policy"] for row in rows] == ["joint", "fcfs"]
    assert all(row["tidegate_req_s"] > 0 and row["ratio"] is None for row in rows)


def test_requests_without_names_share_nothing_in_the_written_trace(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    sim_speed.write_mooncake(load_workload("azure-conv:first=30"), trace)
    names = [name for line in trace.read_text().splitlines() for name in json.loads(line)["hash_ids"]]
    assert len(names) == len(set(names))
