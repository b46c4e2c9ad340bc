"""The real traces that ship with Tidegate, as package data, so that nobody needs a download.

Each lies in `data/<name>/` as a Parquet file beside an ATTRIBUTION.md (origin, licence, what was changed).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from sys import intern

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.simulate.workload import Workload, WorkloadRequest

MOONCAKE_TICK_S = 3.0
MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Trace:
    """One shipped trace. `load` reads it whole. `slo_class` is empty where each row has a class of its own."""

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


def spread(
    ticks: npt.NDArray[np.float64], width: float, rng: np.random.Generator | None = None
) -> npt.NDArray[np.float64]:
    """Spread arrivals that were recorded in ticks of `width` seconds over their tick.

    `ticks` must not fall. Given their number, the arrivals of a Poisson process are uniform over the
    tick, so that is what they become, in order; from a fixed seed, the same every time, where no `rng` is given.
    """
    offsets = (rng or np.random.default_rng(0)).random(len(ticks)) * width
    return np.sort(ticks + offsets)


TIERMIX_CLASSES = ("interactive", "completion", "offline", "batch")


def _tiermix(trace: Trace, table: pa.Table) -> tuple[WorkloadRequest, ...]:
    columns = [table[name].to_pylist() for name in ("arrival_s", "prompt_tokens", "output_tokens", "class")]
    return tuple(
        WorkloadRequest(t, p, o, slo_class=TIERMIX_CLASSES[number]) for t, p, o, number in zip(*columns, strict=True)
    )


def _vtc(trace: Trace, table: pa.Table) -> tuple[WorkloadRequest, ...]:
    columns = [table[name].to_pylist() for name in ("arrival_s", "prompt_tokens", "output_tokens", "client")]
    tenants = [intern(f"client-{client}") for client in columns.pop()]
    return tuple(
        WorkloadRequest(t, p, o, tenant, trace.slo_class) for t, p, o, tenant in zip(*columns, tenants, strict=True)
    )


ADASERVE_CLASSES = {1.2: "coding", -50.0: "chat", -150.0: "summary"}  # by the artifact's slo_ratio


def _adaserve(trace: Trace, table: pa.Table) -> tuple[WorkloadRequest, ...]:
    columns = [table[name].to_pylist() for name in ("arrival_s", "prompt_tokens", "output_tokens", "slo_ratio")]
    return tuple(
        WorkloadRequest(t, p, o, slo_class=ADASERVE_CLASSES[ratio]) for t, p, o, ratio in zip(*columns, strict=True)
    )


_APACHE, _CC_BY = "Apache-2.0", "CC-BY-4.0"
_SPLITWISE, _VTC = "Splitwise, ISCA 2024", "VTC, OSDI 2024"

TRACES: dict[str, Trace] = {
    t.name: t
    for t in (
        Trace("azure-conv", "azure2023/conv.parquet", "interactive", _CC_BY, _SPLITWISE, _azure),
        Trace("azure-code", "azure2023/code.parquet", "completion", _CC_BY, _SPLITWISE, _azure),
        Trace(
            "mooncake-conversation",
            "mooncake/conversation.parquet",
            "interactive",
            _APACHE,
            "Mooncake, FAST 2025",
            _mooncake,
        ),
        Trace("tiermix", "tiermix/tiermix.parquet", "", _CC_BY, _SPLITWISE, _tiermix),
        Trace("vtc-real", "vtc/real.parquet", "interactive", _APACHE, _VTC, _vtc),
        Trace("vtc-overload", "vtc/overload.parquet", "interactive", _APACHE, _VTC, _vtc),
        Trace("adaserve-multislo", "adaserve/multislo.parquet", "", _APACHE, "AdaServe, 2025", _adaserve),
    )
}
