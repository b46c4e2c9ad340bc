"""The step log: what a row says is what the scheduler did, and files keep it."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.harness import Run, limits, request
from tidegate.core.plan import StepPlan
from tidegate.core.scheduler import Scheduler
from tidegate.engine.clock import VirtualClock
from tidegate.errors import InputError
from tidegate.observe.jsonlines import JsonLines
from tidegate.observe.planrows import PlanRows, StepLog
from tidegate.observe.records import read_records
from tidegate.observe.steplog import StepRow, StepWriter, iter_steps, read_steps, read_steps_table, write_steps

FIELDS = (
    "start_s seconds prefill_tokens decodes context_tokens running waiting free_blocks preempted replica "
    "prefill_context prefill_pairs"
)
ROW = StepRow(1.5, 0.02, 300, 7, 9_000, 8, 3, 40, 1, "0")

rows = st.builds(
    StepRow,
    *(st.floats(0, 1e9, allow_nan=False) for _ in range(2)),
    *(st.integers(0, 2**40) for _ in range(7)),
    replica=st.text(),
    prefill_context=st.none() | st.integers(0, 2**40),
    prefill_pairs=st.none() | st.integers(0, 2**40),
)


def test_the_columns_are_those_that_calibration_reads() -> None:
    assert StepRow._fields == tuple(FIELDS.split())


@given(steps=st.lists(rows, max_size=7), suffix=st.sampled_from([".parquet", ".jsonl"]), group=st.integers(1, 4))
def test_files_keep_every_step(
    tmp_path_factory: pytest.TempPathFactory, steps: list[StepRow], suffix: str, group: int
) -> None:
    path = tmp_path_factory.mktemp("steps") / f"s{suffix}"
    with StepWriter(path, row_group=group) as out:
        for row in steps:
            out.write(row)
    assert read_steps(path) == steps
    assert read_steps_table(path).num_rows == len(steps)


def test_a_file_of_another_kind_is_told_by_its_columns(tmp_path: Path) -> None:
    write_steps([ROW], tmp_path / "s.parquet")
    with pytest.raises(InputError, match=r"s\.parquet holds no records: missing request_id.*unknown start_s"):
        read_records(tmp_path / "s.parquet")
    (tmp_path / "s.jsonl").write_text(json.dumps(ROW._asdict()) + "\n" + json.dumps(ROW._asdict() | {"decodes": "x"}))
    with pytest.raises(InputError, match=r"s\.jsonl holds no steps: line 2: decodes is 'x', not int64"):
        list(iter_steps(tmp_path / "s.jsonl"))


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_log_from_before_chunks_were_told_is_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"s{suffix}"
    old = {name: value for name, value in ROW._asdict().items() if not name.startswith("prefill_") or value == 300}
    if suffix == ".jsonl":
        path.write_text(json.dumps(old))
    else:
        pq.write_table(pa.Table.from_pylist([old]), path)
    assert read_steps(path) == [ROW]


class Told:
    """A scheduler whose every plan is folded, beside what the scheduler itself says of the step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, scheduler: Scheduler) -> None:
        self.rows: list[tuple[StepRow, int, int]] = []
        fold, plan_as_before = PlanRows(), scheduler.plan

        def plan(now: float) -> StepPlan:
            made = plan_as_before(now)
            if made:
                row = fold.row(made, now, 1.0, waiting=len(scheduler.waiting), free_blocks=scheduler.kv.available)
                assert row is not None
                step = scheduler._lifecycle.in_flight[-1]
                self.rows.append((row, made.context, len(scheduler.running) + len(step.last)))
            return made

        monkeypatch.setattr(scheduler, "plan", plan)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("restore", ["recompute", "swap"])
def test_context_and_seats_are_what_the_scheduler_counts(
    monkeypatch: pytest.MonkeyPatch, depth: int, restore: str
) -> None:
    run = Run.of("priority", limits(num_blocks=20, max_num_seqs=4, host_blocks=64), depth, restore=restore)
    told = Told(monkeypatch, run.scheduler)
    arrivals = [(3 * n, request(f"p{n}", 20 + 7 * n, 25, priority=9 - n)) for n in range(6)]
    run.until_idle(arrivals)
    assert run.preemptions()
    assert all(row.context_tokens == context for row, context, _ in told.rows if row.decodes)
    assert all(row.running == seats for row, _, seats in told.rows)
    assert sum(row.prefill_tokens + row.decodes for row, _, _ in told.rows) == sum(p.num_tokens for p in run.plans)


def test_an_engine_writes_each_step_and_leaves_out_those_it_did_not_see_begin(tmp_path: Path) -> None:
    out = JsonLines(tmp_path / "s.jsonl", 1 << 20)
    run = Run.of("fcfs", limits())
    run.add(request("before", 16, 3))
    run.steps(2)
    clock = VirtualClock(5.0)
    log = StepLog(out, run.scheduler, clock)
    log.events(run.events)
    while run.scheduler.has_work:
        if plan := run.step():
            log.step(plan, 0.25)
    run.add(request("after", 16, 3))
    while run.scheduler.has_work:
        if plan := run.step():
            clock.advance(1.0)
            log.step(plan, 0.25)
    out.close()
    steps = read_steps(tmp_path / "s.jsonl")
    assert [(s.start_s, s.prefill_tokens, s.decodes, s.context_tokens) for s in steps] == [
        (5.75, 16, 0, 0),
        (6.75, 0, 1, 17),
        (7.75, 0, 1, 18),
    ]
