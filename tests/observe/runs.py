"""Runs to report on, made up: four classes, three tenants, two policies, and a measured one."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from tidegate.observe.records import Record, write_records
from tidegate.observe.steplog import StepRow, write_steps

CLASSES = {"interactive": 0, "completion": 0, "offline": 5, "batch": 10}


def made_up(count: int, slow: float = 1.0, seed: int = 0) -> list[Record]:
    """`count` records; latencies grow with `slow`. Every seventh was preempted, every 20th refused."""
    dice = random.Random(seed)
    return [_record(i, slow, dice) for i in range(count)]


def _record(i: int, slow: float, dice: random.Random) -> Record:
    name = dice.choice(list(CLASSES))
    arrival = 100.0 + i * 0.2
    ttft, tpot, outputs = (
        dice.lognormvariate(-1.5, 1.0) * slow,
        dice.lognormvariate(-3.3, 0.3) * slow,
        dice.randint(2, 90),
    )
    finish = arrival + ttft + tpot * (outputs - 1)
    refused = i % 20 == 19
    record = Record(
        request_id=f"r{i}",
        tenant=dice.choice(["acme", "globex", "initech"]),
        slo_class=name,
        priority=CLASSES[name],
        arrival_s=arrival,
        admitted_s=arrival + ttft / 2,
        first_token_s=arrival + ttft,
        finish_s=finish,
        prompt_tokens=dice.randint(10, 4000),
        output_tokens=outputs,
        cached_tokens=0,
        recomputed_tokens=50 * (i % 7 == 0),
        swapped_blocks=0,
        preemptions=int(i % 7 == 0),
        max_gap_s=tpot * 2,
        p99_gap_s=tpot * 2,
        ttft_s=ttft,
        tpot_s=tpot,
        e2e_s=finish - arrival,
        slo_met=ttft < 0.5,
        finish_reason="length",
        replica="0",
    )
    if not refused:
        return record
    never = dict.fromkeys(("admitted_s", "first_token_s", "max_gap_s", "p99_gap_s", "ttft_s", "tpot_s"))
    ended = {"finish_s": arrival, "e2e_s": 0.0, "output_tokens": 0, "slo_met": False, "finish_reason": "refused"}
    return record._replace(**never, **ended)


def as_a_client_sees(records: Sequence[Record]) -> list[Record]:
    """The same without what only the engine knows."""
    unseen = dict.fromkeys(("admitted_s", "recomputed_tokens", "swapped_blocks", "preemptions"))
    return [r._replace(**unseen) for r in records]


def write_run(folder: Path, name: str, records: Sequence[Record]) -> Path:
    """Records with a step log and a decision log beside them, as a simulation leaves them."""
    write_records(records, folder / f"{name}.parquet")
    end = max(r.finish_s for r in records)
    steps = [StepRow(100 + t, 1.0, 200, 5, 900, 5, t % 9, 1000 - 9 * (t % 90), 0, "0") for t in range(int(end - 100))]
    write_steps(steps, folder / f"{name}.steps.parquet")
    lines = [
        {"time": 101.0, "event": "preempted", "mode": mode, "reason": reason, "class": "batch", "request_id": "r7"}
        for mode, reason in (
            ("recompute", "seat wanted by r3 (priority 0 < 10)"),
            ("recompute", "seat wanted by r99 (priority 5 < 10)"),
            ("swap", "KV blocks wanted by running requests; swap 12.5 ms < recompute 60 ms"),
        )
    ]
    text = "".join(json.dumps(line) + "\n" for line in ({"time": 100.0, "event": "arrived"}, *lines))
    (folder / f"{name}.decisions.jsonl").write_text(text, encoding="utf-8")
    return folder / f"{name}.parquet"
