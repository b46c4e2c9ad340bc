"""Workload files and how workloads are reshaped."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import InputError
from tidegate.simulate.workload import Workload, WorkloadRequest
from tidegate.simulate.workload_files import read_workload

ROW = {"arrival_s": 1.5, "prompt_tokens": 700, "output_tokens": 20}


def written(folder: Path, text: str, name: str = "load.jsonl") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_jsonl_and_csv_say_the_same(tmp_path: Path) -> None:
    row = ROW | {"tenant": "acme", "slo_class": "batch", "priority": 3, "hash_ids": [4, 7], "hash_block_tokens": 512}
    by_json = written(tmp_path, json.dumps(row) + "\n\n" + json.dumps(ROW | {"arrival_s": 0}) + "\n")
    by_csv = written(
        tmp_path,
        "arrival_s,prompt_tokens,output_tokens,tenant,slo_class,priority,hash_ids,hash_block_tokens\n"
        "1.5,700,20,acme,batch,3,4 7,512\n0,700,20,,,,,\n",
        "load.csv",
    )
    expected = (
        WorkloadRequest(0.0, 700, 20),
        WorkloadRequest(1.5, 700, 20, "acme", "batch", 3, (4, 7), 512),
    )
    assert read_workload(by_json).requests == read_workload(by_csv).requests == expected
    assert read_workload(by_json).name == "load"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "2: not JSON"),
        ("[1]", "2: "),
        (json.dumps(ROW | {"prompt_tokens": 0}), "2: prompt_tokens: .* greater than or equal to 1, not 0"),
        (json.dumps(ROW | {"arrival_s": -1}), "2: arrival_s"),
        (json.dumps(ROW | {"arrival_s": float("nan")}), "2: arrival_s"),
        (json.dumps(ROW | {"prompt": 3}), "2: unknown field prompt; the fields are arrival_s"),
        (json.dumps({"arrival_s": 1}), "2: prompt_tokens is missing"),
        (json.dumps(ROW | {"hash_ids": [1, 2, 3]}), "2: hash_ids has 3 entries, but 700 prompt tokens are only 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = written(tmp_path, json.dumps(ROW) + "\n" + line + "\n")
    with pytest.raises(InputError, match=f"load.jsonl:{complaint}"):
        read_workload(path)


def test_a_csv_line_with_too_many_cells_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, "arrival_s,prompt_tokens,output_tokens\n0,1,2\n0,1,2,3\n", "load.csv")
    with pytest.raises(InputError, match=r"load\.csv:3: more cells"):
        read_workload(path)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [("empty.jsonl", "\n", "holds no request"), ("load.txt", "x", "ends in .jsonl or .csv")],
)
def test_a_file_without_requests_is_refused(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        read_workload(written(tmp_path, text, name))


def test_missing_and_binary_files_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        read_workload(tmp_path / "none.jsonl")
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="not UTF-8"):
        read_workload(tmp_path / "x.jsonl")


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0.01, 100), st.integers(1, 40))
def test_reshaping_keeps_order_and_everything_but_time(arrivals: list[float], factor: float, count: int) -> None:
    workload = Workload("w", tuple(WorkloadRequest(t, i + 1, 2) for i, t in enumerate(sorted(arrivals))))
    scaled = workload.rate_scaled(factor).limited(count)
    assert len(scaled) == min(count, len(workload))
    assert [r.prompt_tokens for r in scaled] == [r.prompt_tokens for r in workload][:count]
    times = [r.arrival_s for r in scaled]
    assert times == sorted(times)
    assert scaled.duration_s == pytest.approx(workload.limited(count).duration_s / factor)


@pytest.mark.parametrize("factor", [0, -1, float("nan")])
def test_a_rate_scale_must_be_positive(factor: float) -> None:
    with pytest.raises(InputError, match="above 0"):
        Workload("w", ()).rate_scaled(factor)
