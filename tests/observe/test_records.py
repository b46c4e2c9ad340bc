"""The record format: what it holds, that files keep it, and what a summary makes of it."""

import json
from collections import deque
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.cli.summaries import print_summaries
from tidegate.core.events import Arrived, Finished, Rejected, Timing
from tidegate.core.limits import Limits
from tidegate.core.plan import StepResult
from tidegate.core.presets import build_policy
from tidegate.core.request import FinishReason, Rejection, Request
from tidegate.core.scheduler import Scheduler
from tidegate.core.slo import DEFAULT_CLASSES, Slo
from tidegate.errors import InputError, RequestRefused
from tidegate.observe.columns import Columns
from tidegate.observe.records import (
    COLUMNS,
    SCHEMA,
    Record,
    Recorder,
    RecordWriter,
    iter_records,
    read_records,
    records_columns,
    records_table,
    write_records,
)
from tidegate.observe.rowfiles import read_batches
from tidegate.observe.summary import ClassSummary, summarise, summarise_columns

DESIGNED = (
    "request_id, tenant, slo_class, priority, arrival_s, admitted_s, first_token_s, finish_s, prompt_tokens, "
    "output_tokens, cached_tokens, recomputed_tokens, swapped_blocks, preemptions, max_gap_s, p99_gap_s, ttft_s, "
    "tpot_s, e2e_s, slo_met, finish_reason, replica"
)

DONE = Record(
    "r", "acme", "batch", 10, 1.0, 1.5, 2.0, 4.0, 100, 5, 16, 0, 0, 0, 0.6, 0.6, 1.0, 0.5, 3.0, True, "length", "0"
)

maybe_seconds = st.none() | st.floats(0, 1e6)
records = st.builds(
    Record,
    request_id=st.text(min_size=1),
    tenant=st.text(),
    admitted_s=maybe_seconds,
    first_token_s=maybe_seconds,
    arrival_s=st.floats(0, 1e6),
    finish_s=st.floats(0, 1e6),
    e2e_s=st.floats(0, 1e6),
    max_gap_s=maybe_seconds,
    p99_gap_s=maybe_seconds,
    ttft_s=maybe_seconds,
    tpot_s=maybe_seconds,
    **dict.fromkeys(("priority", "prompt_tokens", "output_tokens", "cached_tokens"), st.integers(-(2**40), 2**40)),
    **dict.fromkeys(("recomputed_tokens", "swapped_blocks", "preemptions"), st.none() | st.integers(0, 2**40)),
)


def test_the_columns_are_the_designed_ones() -> None:
    assert ", ".join(COLUMNS) == DESIGNED


@given(rows=st.lists(records, max_size=5), suffix=st.sampled_from([".parquet", ".jsonl"]))
def test_files_keep_every_value(tmp_path_factory: pytest.TempPathFactory, rows: list[Record], suffix: str) -> None:
    path = tmp_path_factory.mktemp("records") / f"r{suffix}"
    write_records(rows, path)
    assert read_records(path) == rows


def test_what_is_no_records_file_is_an_input_error(tmp_path: Path) -> None:
    for name, content in (("a.parquet", b"no"), ("a.jsonl", b"{"), ("b.jsonl", b'{"x": 1}'), ("c.jsonl", b"[1]")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=name):
            read_records(tmp_path / name)
    with pytest.raises(InputError, match=r"\.parquet or \.jsonl"):
        write_records([DONE], tmp_path / "r.csv")
    with pytest.raises(InputError, match="cannot write"):
        write_records([DONE], tmp_path / "none" / "r.parquet")


def finished(request: Request, reason: FinishReason, missed: tuple[str, ...]) -> Finished:
    request.admitted_at, request.first_token_at = 2.0, 3.0
    request.preemptions, request.cached_tokens, request.recomputed_tokens = 2, 16, 48
    return Finished(9.0, request, reason, Timing(1.0, 2.0, 0.5, 8.0, 0.4, [*[0.8] * 99, 0.9]), missed)


def test_events_fold_into_one_row_a_request() -> None:
    recorder = Recorder(replica="left")
    asked = Request("a", prompt_tokens=100, arrival=1.0, tenant="acme", slo_class="offline", priority=5)
    refused = Request("b", prompt_tokens=9_999, arrival=4.0)
    recorder.observe([Arrived(1.0, asked)])
    recorder.observe(
        [
            Rejected(4.0, refused, Rejection.KV_CAPACITY, "too big", None),
            finished(asked, FinishReason.STOP, ()),
        ]
    )
    second, first = recorder.records
    assert first == Record(
        "a", "acme", "offline", 5, 1.0, 2.0, 3.0, 9.0, 100, 0, 16, 48, 0, 2, 0.9, 0.8, 2.0, 0.5, 8.0, True,
        "stop", "left",
    )  # fmt: skip
    assert (second.request_id, second.finish_reason, second.slo_met) == ("b", "refused", False)
    assert (second.admitted_s, second.ttft_s, second.e2e_s) == (None, None, 0.0)


@pytest.mark.parametrize(
    ("reason", "missed", "met"),
    [
        (FinishReason.LENGTH, (), True),
        (FinishReason.LENGTH_KV, (), True),
        (FinishReason.LENGTH, ("ttft",), False),
        (FinishReason.CANCELLED, (), False),
        (FinishReason.ERROR, (), False),
    ],
)
def test_a_promise_is_met_only_by_a_completed_request(reason: FinishReason, missed: tuple[str, ...], met: bool) -> None:
    recorder = Recorder()
    recorder.observe([finished(Request("a", prompt_tokens=1), reason, missed)])
    assert recorder.records[0].slo_met is met


def test_a_summary_counts_by_class_and_leaves_cancelled_requests_out_of_attainment() -> None:
    rows = [DONE._replace(ttft_s=float(i), slo_met=i <= 50, finish_s=101.0) for i in range(1, 101)]
    rows += [DONE._replace(finish_reason="cancelled", slo_met=False, ttft_s=None, e2e_s=1e9)]
    rows += [DONE._replace(slo_class="interactive", finish_reason="refused", slo_met=False, ttft_s=None)]
    summary = summarise(rows)
    assert list(summary) == ["batch", "interactive", "all"]
    batch = summary["batch"]
    assert batch.ttft_s == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert batch.e2e_s["p99"] == 3.0
    assert (batch.requests, batch.completed, batch.cancelled, batch.attainment) == (101, 100, 1, 0.5)
    assert batch.goodput == pytest.approx(50 / 100)
    assert summary["interactive"].attainment == 0.0
    assert summary["interactive"].ttft_s == {}
    assert summary["all"].attainment == pytest.approx(50 / 101)
    assert summary["all"].output_tokens_s == pytest.approx(102 * 5 / 100)
    assert summarise([]) == {}


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_file_is_summed_up_as_its_records_are(tmp_path: Path, suffix: str) -> None:
    rows = [DONE._replace(request_id=f"{i}", slo_class="batch" if i % 3 else "chat", e2e_s=i / 7) for i in range(100)]
    write_records(rows, tmp_path / f"records.{suffix}")
    assert summarise_columns(Columns(records_columns(tmp_path / f"records.{suffix}"))) == summarise(rows)


def test_columns_that_a_summary_does_not_look_at_are_never_read(tmp_path: Path) -> None:
    path = tmp_path / "records.parquet"
    table = records_table([DONE] * 3)
    spoiled = pa.field("tenant", pa.list_(pa.int64()))
    at = COLUMNS.index("tenant")
    pq.write_table(table.set_column(at, spoiled, pa.array([[1]] * 3, spoiled.type)), path)
    columns = Columns(records_columns(path))
    assert summarise_columns(columns)["batch"].requests == 3
    with pytest.raises(InputError, match="column tenant is list"):
        columns.names("tenant")


@given(
    asked=st.lists(
        st.tuples(st.floats(0, 20), st.integers(1, 60), st.integers(1, 20), st.sampled_from(["interactive", "batch"])),
        min_size=1,
        max_size=12,
    ),
    blocks=st.integers(2, 12),
)
def test_a_real_run_leaves_one_consistent_row_a_request(asked: list[tuple[float, int, int, str]], blocks: int) -> None:
    """A tight pool of 8-token blocks, so that some are refused and some preempted; a step lasts 1 s."""
    limits = Limits(num_blocks=blocks, block_size=8, max_num_seqs=4, max_num_batched_tokens=16, headroom="none")
    scheduler = Scheduler(build_policy("priority"), limits)
    recorder = Recorder()
    arriving = [
        Request(
            str(i), prompt_tokens=p, max_tokens=o, arrival=t, slo_class=name, priority=DEFAULT_CLASSES[name].priority,
            slo=Slo(ttft=5.0),
        )
        for i, (t, p, o, name) in enumerate(sorted(asked))
    ]  # fmt: skip
    waiting, now = deque(arriving), 0.0
    while waiting or scheduler.has_work:
        while waiting and waiting[0].arrival <= now:
            with suppress(RequestRefused):
                scheduler.add(waiting.popleft(), now)
        plan = scheduler.plan(now)
        now += 1.0
        if plan:
            scheduler.apply(plan, StepResult([7] * len(plan.emitting())), now)
        recorder.observe(scheduler.take_events())
    rows = {row.request_id: row for row in recorder.records}
    assert len(rows) == len(recorder.records) == len(asked)
    for request in arriving:
        row = rows[request.id]
        assert (row.prompt_tokens, row.arrival_s) == (request.prompt_tokens, request.arrival)
        if row.finish_reason == "refused":
            assert row.output_tokens == 0
            continue
        assert (row.finish_reason, row.output_tokens) == ("length", request.max_tokens)
        assert row.admitted_s is not None
        assert row.first_token_s is not None
        assert row.arrival_s <= row.admitted_s < row.first_token_s <= row.finish_s
        assert row.ttft_s == row.first_token_s - row.arrival_s
        assert row.e2e_s == row.finish_s - row.arrival_s
        assert row.slo_met is (row.ttft_s <= 5.0)
        if row.output_tokens > 1:
            assert row.tpot_s == pytest.approx((row.finish_s - row.first_token_s) / (row.output_tokens - 1))
            assert row.max_gap_s is not None
            assert row.max_gap_s >= row.tpot_s - 1e-9
        assert row.recomputed_tokens == 0 or row.preemptions


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_records_are_written_one_by_one_in_row_groups(tmp_path: Path, suffix: str) -> None:
    path, rows = tmp_path / f"r{suffix}", [DONE._replace(request_id=str(i)) for i in range(10)]
    with RecordWriter(path, row_group=4) as out:
        for row in rows:
            out.write(row)
            assert len(out._rows._waiting) < 4
    assert list(iter_records(path)) == rows
    if suffix == ".parquet":
        assert [pq.ParquetFile(path).metadata.row_group(i).num_rows for i in range(3)] == [4, 4, 2]


def test_reading_holds_a_row_group_at_a_time(tmp_path: Path) -> None:
    for name in ("r.parquet", "r.jsonl"):
        write_records([DONE] * 10, tmp_path / name)
        batches = list(read_batches(tmp_path / name, SCHEMA, "records", rows=4))
        assert [batch.num_rows for batch in batches] == [4, 4, 2]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tenant": 5}, "line 2: tenant is 5, not string"),
        ({"arrival_s": None}, "row 2 has no arrival_s"),
        ({"prompt_tokens": 2.5}, "line 2: prompt_tokens is 2.5, not int64"),
        ({"colour": "red"}, "line 2: unknown colour"),
        ({"replica": ...}, "line 2: missing replica"),
    ],
)
def test_a_faulty_line_is_told_by_row_and_column(tmp_path: Path, change: dict[str, object], complaint: str) -> None:
    write_records([DONE, DONE], path := tmp_path / "r.jsonl")
    first, second = path.read_text().splitlines()
    row = json.loads(second) | change
    row = {name: value for name, value in row.items() if value is not ...}
    path.write_text(f"{first}\n{json.dumps(row)}\n")
    with pytest.raises(InputError, match=f"r.jsonl holds no records: {complaint}"):
        read_records(path)


def test_a_faulty_column_of_parquet_is_told_by_name(tmp_path: Path) -> None:
    write_records([DONE], tmp_path / "r.parquet")
    table = pq.read_table(tmp_path / "r.parquet")
    pq.write_table(table.drop_columns(["ttft_s"]), tmp_path / "less.parquet")
    with pytest.raises(InputError, match=r"less\.parquet holds no records: missing ttft_s$"):
        read_records(tmp_path / "less.parquet")
    odd = table.set_column(0, "request_id", pa.array([[1]]))
    pq.write_table(odd, tmp_path / "odd.parquet")
    with pytest.raises(InputError, match="column request_id is list"):
        read_records(tmp_path / "odd.parquet")
    narrow = table.cast(pa.schema([f.with_type(pa.int32()) if f.type == pa.int64() else f for f in table.schema]))
    pq.write_table(narrow, tmp_path / "narrow.parquet")
    assert read_records(tmp_path / "narrow.parquet") == [DONE], "what fits is taken as it is meant"
    with pytest.raises(InputError, match="there is no such file"):
        read_records(tmp_path / "gone.parquet")
    with pytest.raises(InputError, match="it is a directory"):
        read_records(tmp_path.rename(tmp_path.with_suffix(".jsonl")))


def test_a_summary_tells_preemptions_tokens_computed_twice_and_cache_hits() -> None:
    rows = [
        DONE._replace(prompt_tokens=90, cached_tokens=40, output_tokens=10, recomputed_tokens=20, preemptions=2),
        DONE._replace(prompt_tokens=10, cached_tokens=0, output_tokens=10, recomputed_tokens=0, preemptions=0),
        DONE._replace(prompt_tokens=999, admitted_s=None, first_token_s=None, finish_reason="refused", output_tokens=0),
    ]
    summary = summarise(rows)["batch"]
    assert (summary.preemptions, summary.cache_hit) == (2, 40 / 100)
    assert summary.recompute_share == 20 / (50 + 10 + 20 + 10 + 10)
    unseen = DONE._replace(admitted_s=None, preemptions=None, recomputed_tokens=None, swapped_blocks=None)
    client = summarise([unseen])["batch"]
    assert (client.preemptions, client.recompute_share, client.cache_hit) == (None, None, 16 / 100)


def test_the_table_fits_120_columns_whatever_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    wide = {"p50": 0.1234, "p90": 0.5678, "p99": 0.9991}
    huge = {"p50": 12345.6, "p90": 23456.7, "p99": 34567.8}
    one = ClassSummary(1_000_000, 999_999, 5, 0.99987, 1234.5, 9e5, wide, {"p50": 0.0123}, huge, 99_999, 0.123, 0.99)
    runs = {
        "a run with a very long name indeed": {"a class with a long name": one, "all": one},
        "b [red]": {"all": one},
    }
    print_summaries(runs)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    assert any("b [red]" in line for line in lines), "names are no markup"
    assert sum("99.9%" in line for line in lines) == 3, "nobody reads 100 % where one was missed"
    assert [line.split()[0] for line in lines[-3:]] == ["a", "all", "all"]
    assert all("999k/1M" in line and "0.123/0.568/0.999" in line for line in lines[-3:]), "no number is cut"
    assert all(line.endswith(("12.3% 99.0%", "12.3% 99.0% ")) for line in lines[-3:])
