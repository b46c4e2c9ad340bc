"""The step log: one row for every step of a simulated or a real engine."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa


class StepRow(NamedTuple):
    """One step, as it was planned.

    start_s, seconds: when it began on the run's clock, and how long it took
    prefill_tokens:   prompt tokens computed
    decodes:          requests that decoded a token
    context_tokens:   KV tokens that those read
    running, waiting: requests with a seat once the step is planned (those that end with it have given theirs up),
                      and those that wait, the preempted included
    free_blocks:      KV blocks that can be had, cached ones that nobody holds included
    preempted:        requests that gave way
    replica:          which instance
    """

    start_s: float
    seconds: float
    prefill_tokens: int
    decodes: int
    context_tokens: int
    running: int
    waiting: int
    free_blocks: int
    preempted: int
    replica: str


STEP_SCHEMA = pa.schema(
    [
        pa.field("start_s", pa.float64(), nullable=False),
        pa.field("seconds", pa.float64(), nullable=False),
        *(pa.field(name, pa.int64(), nullable=False) for name in StepRow._fields[2:-1]),
        pa.field("replica", pa.string(), nullable=False),
    ]
)
