"""Workload files: what may stand in them, and what is said of a bad line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tidegate.errors import InputError
from tidegate.simulate.workload import WorkloadRequest
from tidegate.simulate.workload_files import Columns, parse_map, read_requests, read_workload

ROW = {"arrival_s": 1.5, "prompt_tokens": 700, "output_tokens": 20}
FOREIGN = Columns({"arrival_s": "ts", "prompt_tokens": "in", "output_tokens": "out"})


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
        (
            json.dumps({"arrival_s": 1}),
            "2: prompt_tokens is missing .is it in another column. --map prompt_tokens=COLUMN",
        ),
        ("3", "2: "),
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


def arrivals(folder: Path, *stamps: Any, columns: Columns = FOREIGN) -> list[float]:
    """What becomes of stamps in the column `ts`."""
    lines = [json.dumps({"ts": stamp, "in": 3, "out": 4, "region": "eu"}) for stamp in stamps]
    return [r.arrival_s for r in read_workload(written(folder, "\n".join(lines)), columns)]


@pytest.mark.parametrize(
    ("stamps", "expected"),
    [
        (("2023-11-16 18:15:46.6805900", "2023-11-16 18:15:50.9951690"), [0.0, 4.314579]),
        (("2023-12-31T23:59:59Z", "2024-01-01T00:00:01.25Z"), [0.0, 2.25]),
        (("2024-01-01T01:00:00+01:00", "2024-01-01T00:00:02+0000"), [0.0, 2.0]),
        ((1700000000, 1700000001.5), [0.0, 1.5]),
        ((1700000000000, 1700000000250), [0.0, 0.25]),
        ((1700000000000000, 1700000000000007), [0.0, 7e-6]),
        ((1700000000000000000, 1700000000000000007), [0.0, 7e-9]),
        (("1700000000000", "1700000000250"), [0.0, 0.25]),
        ((5.0, 7.0), [0.0, 2.0]),
        ((9, 7, 8), [0.0, 1.0, 2.0]),
    ],
)
def test_stamps_become_seconds_from_the_first_arrival(
    tmp_path: Path, stamps: tuple[Any, ...], expected: list[float]
) -> None:
    assert arrivals(tmp_path, *stamps) == pytest.approx(expected, abs=1e-9)


def test_a_unit_can_be_declared(tmp_path: Path) -> None:
    assert arrivals(tmp_path, 3000, 4500, columns=Columns(FOREIGN.named, "ms")) == [0.0, 1.5]
    with pytest.raises(InputError, match=r"unknown unit of time 'min'; known are s, ms, us, ns"):
        Columns({}, "min")


def test_stamps_in_a_column_called_arrival_s_are_told_from_seconds(tmp_path: Path) -> None:
    rows = [ROW | {"arrival_s": stamp} for stamp in ("2024-01-01T00:00:00", "2024-01-01T00:01:00")]
    assert [r.arrival_s for r in read_workload(written(tmp_path, "\n".join(map(json.dumps, rows))))] == [0.0, 60.0]
    rows = [ROW | {"arrival_s": stamp} for stamp in (1.7e9 + 2, 1.7e9)]
    assert [r.arrival_s for r in read_workload(written(tmp_path, "\n".join(map(json.dumps, rows))))] == [0.0, 2.0]


@pytest.mark.parametrize(
    ("stamps", "complaint"),
    [
        (
            (1700000000, "2024-01-01T00:00:00"),
            r"load.jsonl:2: arrival_s: '2024.*' is not a number, as the first row has",
        ),
        (("2024-01-01T00:00:00", 5), "load.jsonl:2: arrival_s: 5 is a number, but the first row has a date"),
        (("2024-01-01T00:00:00", "2024-01-01T00:00:00Z"), "load.jsonl:2: .* some stamps have a time zone"),
        (("yesterday",), "load.jsonl:1: arrival_s: 'yesterday' is not a number or ISO 8601"),
        (("2024-13-01T00:00:00",), "load.jsonl:1: arrival_s: month must be in 1..12"),
        ((1, "NaN"), "load.jsonl:2: arrival_s: 'NaN' is not a number"),
        ((1, "1e999999999"), "load.jsonl:2: arrival_s: '1e999999999' is not a number"),
        ((None,), "load.jsonl:1: arrival_s is mapped to 'ts', which has no value here"),
    ],
)
def test_a_bad_stamp_is_named(tmp_path: Path, stamps: tuple[Any, ...], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        arrivals(tmp_path, *stamps)


def test_a_map_takes_what_it_names_and_leaves_the_rest(tmp_path: Path) -> None:
    text = "ts,in,out,user,region,slo_class\n2024-01-01 00:00:00,10,2,7,eu,batch\n2024-01-01 00:00:01,11,3,,us,\n"
    columns = Columns({**FOREIGN.named, "tenant": "user"})
    assert read_workload(written(tmp_path, text, "load.csv"), columns).requests == (
        WorkloadRequest(0.0, 10, 2, "7", "batch"),
        WorkloadRequest(1.0, 11, 3),
    )


@pytest.mark.parametrize(
    ("named", "complaint"),
    [
        (
            {"prompt_tokens": "inn"},
            r"load.csv:2: prompt_tokens is mapped to 'inn', which has no value here; did you mean 'in'",
        ),
        ({"tenant": "usr"}, r"load.csv: no line has a value in the mapped column 'usr'; did you mean 'user'"),
    ],
)
def test_a_map_to_no_column_names_the_nearest(tmp_path: Path, named: dict[str, str], complaint: str) -> None:
    path = written(tmp_path, "ts,in,out,user\n0,1,2,3\n", "load.csv")
    with pytest.raises(InputError, match=complaint):
        read_workload(path, Columns(FOREIGN.named | named))


@pytest.mark.parametrize(
    ("items", "complaint"),
    [
        (["arrival_s"], "--map arrival_s is not of the form FIELD=COLUMN"),
        (["arrival_s="], "--map arrival_s= is not of the form"),
        (["tenant=a", "tenant=b"], "--map: tenant is given twice"),
        (["arival_s=ts"], "no field 'arival_s'; did you mean 'arrival_s'"),
    ],
)
def test_a_bad_map_is_told(items: list[str], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        Columns(parse_map(items))


def test_a_packed_file_is_read_as_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(ROW).encode()))
    assert read_workload(path).name == "load"
    path.write_bytes(gzip.compress(json.dumps(ROW).encode())[:-9])
    with pytest.raises(InputError, match="cannot read"):
        read_workload(path)
    path.write_bytes(b"no gzip")
    with pytest.raises(InputError, match="cannot read"):
        read_workload(path)


def test_records_are_a_workload(tmp_path: Path) -> None:
    """In the order of their ends, on whatever clock; of whoever had no output nobody knows how long it would be."""
    row = {"tenant": "acme", "slo_class": "batch", "priority": 10, "finish_s": 1007.0, "replica": "0", "ttft_s": None}
    rows = [
        row | {"request_id": "shed", "arrival_s": 1000.0, "prompt_tokens": 5, "output_tokens": 0},
        row | {"request_id": "b", "arrival_s": 1003.0, "prompt_tokens": 30, "output_tokens": 2},
        row | {"request_id": "a", "arrival_s": 1001.5, "prompt_tokens": 40, "output_tokens": 9},
    ]
    path = written(tmp_path, "".join(json.dumps(r) + "\n" for r in rows))
    assert read_workload(path).requests == (
        WorkloadRequest(0.0, 40, 9, "acme", "batch", 10),
        WorkloadRequest(1.5, 30, 2, "acme", "batch", 10),
    )


@pytest.mark.parametrize("line", ["3", "[1]", '"x"', "null", "1" * 5000, "[" * 100_000])
@pytest.mark.parametrize("columns", [Columns(), FOREIGN])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: str, columns: Columns) -> None:
    first = json.dumps({"ts": 1, "in": 2, "out": 3} if columns.named else ROW)
    with pytest.raises(InputError, match=r"load\.jsonl:2: "):
        read_workload(written(tmp_path, f"{first}\n{line}\n"), columns)


def test_requests_are_read_one_at_a_time(tmp_path: Path) -> None:
    """The first is there before the second line is looked at."""
    requests = read_requests(written(tmp_path, json.dumps(ROW) + "\n{"))
    assert next(requests).prompt_tokens == 700
    with pytest.raises(InputError, match="2: not JSON"):
        next(requests)


def test_an_unquoted_monster_of_a_cell_is_no_fault(tmp_path: Path) -> None:
    text = "arrival_s,prompt_tokens,output_tokens,hash_ids\n0,1,1," + "1" * (1 << 24) + "1\n"
    with pytest.raises(InputError, match=r"load.csv:2: not CSV: field larger"):
        read_workload(written(tmp_path, text, "load.csv"))
