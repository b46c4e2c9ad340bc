"""The real traces that ship with Tidegate, as package data, so that nobody needs a download.

Each lies in `data/<name>/` as a Parquet file beside an ATTRIBUTION.md (origin, licence, what was changed).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.errors import InputError
from tidegate.simulate.workload import Workload, WorkloadRequest, read_workload

MOONCAKE_TICK_S = 3.0
MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Trace:
    """One shipped trace. `load` reads it whole."""

    name: str
    file: str
    slo_class: str
    licence: str
    cite: str
    build: Callable[[Trace, pa.Table], tuple[WorkloadRequest, ...]]

    def load(self) -> Workload:
        data = files("tidegate.simulate") / "data" / self.file
        with data.open("rb") as raw:
            return Workload(self.name, self.build(self, pq.read_table(pa.PythonFile(raw))))


def load_workload(name: str) -> Workload:
    """The workload called `name`: a shipped trace, or else a file (see `read_workload`)."""
    if name in TRACES:
        return TRACES[name].load()
    path = Path(name)
    if path.suffix in (".jsonl", ".csv") or path.exists():
        return read_workload(path)
    raise InputError(f"no workload {name!r}: name a .jsonl or .csv file, or a shipped trace ({', '.join(TRACES)})")


def _azure(trace: Trace, table: pa.Table) -> tuple[WorkloadRequest, ...]:
    columns = [table[name].to_pylist() for name in ("arrival_s", "prompt_tokens", "output_tokens")]
    return tuple(WorkloadRequest(t, p, o, slo_class=trace.slo_class) for t, p, o in zip(*columns, strict=True))


def _mooncake(trace: Trace, table: pa.Table) -> tuple[WorkloadRequest, ...]:
    arrivals = spread(table["tick_s"].to_numpy(), MOONCAKE_TICK_S).tolist()
    columns = [table[name].to_pylist() for name in ("prompt_tokens", "output_tokens", "hash_ids")]
    return tuple(
        WorkloadRequest(
            t, p, o, slo_class=trace.slo_class, hash_ids=tuple(ids), hash_block_tokens=MOONCAKE_BLOCK_TOKENS
        )
        for t, p, o, ids in zip(arrivals, *columns, strict=True)
    )


def spread(ticks: npt.NDArray[np.float64], width: float) -> npt.NDArray[np.float64]:
    """Spread arrivals that were recorded in ticks of `width` seconds over their tick.

    `ticks` must not fall. Given their number, the arrivals of a Poisson process are uniform over the
    tick, so that is what they become, from a fixed seed: the same every time, and in order.
    """
    offsets = np.random.default_rng(0).random(len(ticks)) * width
    return np.sort(ticks + offsets)


TRACES: dict[str, Trace] = {
    t.name: t
    for t in (
        Trace("azure-conv", "azure2023/conv.parquet", "interactive", "CC-BY-4.0", "Splitwise, ISCA 2024", _azure),
        Trace("azure-code", "azure2023/code.parquet", "completion", "CC-BY-4.0", "Splitwise, ISCA 2024", _azure),
        Trace(
            "mooncake-conversation",
            "mooncake/conversation.parquet",
            "interactive",
            "Apache-2.0",
            "Mooncake, FAST 2025",
            _mooncake,
        ),
    )
}
