"""Packs the original trace files into the Parquet files that ship in src/tidegate/simulate/data/.

usage: python scripts/pack_traces.py FOLDER   with these somewhere in it, plain or as .gz:
    AzureLLMInferenceTrace_{conv,code}.csv   Azure 2023
    conversation_trace.jsonl                 Mooncake, FAST25-release
    tiermix.csv                              columns t, class, prompt, output
    FCFS_{real,overload}.csv                 VTC's fair_bench/FCFS/all_results_{real,overload}.jsonl as CSV with the
                                             columns client, req_time_s, prompt_len, output_len (others are not read)
    fig10_emission_rps4.0_prop0.6.csv        AdaServe's exps/fig10/emission_*.json as CSV, without the prompts
"""

import csv
import gzip
import json
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TextIO

import pyarrow as pa
import pyarrow.parquet as pq

DATA = Path(__file__).resolve().parent.parent / "src" / "tidegate" / "simulate" / "data"


def seconds(stamp: str) -> float:
    """Seconds since midnight of the trace's day, to the 100 ns that the stamps have."""
    whole, _, fraction = stamp.partition(".")
    clock = datetime.fromisoformat(whole)
    return clock.hour * 3600 + clock.minute * 60 + clock.second + int(fraction or 0) / 10 ** len(fraction or "0")


def lines_of(source: Path) -> TextIO:
    """The text of a file, unpacked where its name ends in .gz."""
    if source.suffix == ".gz":
        return gzip.open(source, "rt", encoding="utf-8", newline="")
    return source.open(encoding="utf-8", newline="")


def csv_rows(source: Path) -> list[dict[str, str]]:
    with lines_of(source) as lines:
        return list(csv.DictReader(lines))


def azure(source: Path) -> pa.Table:
    rows = csv_rows(source)
    stamps = [seconds(r["TIMESTAMP"]) for r in rows]
    return pa.table(
        {
            "arrival_s": pa.array([round(s - stamps[0], 7) for s in stamps], pa.float64()),
            "prompt_tokens": pa.array([int(r["ContextTokens"]) for r in rows], pa.int32()),
            "output_tokens": pa.array([int(r["GeneratedTokens"]) for r in rows], pa.int32()),
        }
    )


def mooncake(source: Path) -> pa.Table:
    with lines_of(source) as lines:
        rows = [json.loads(line) for line in lines]
    return pa.table(
        {
            "tick_s": pa.array([r["timestamp"] / 1000 for r in rows], pa.float64()),
            "prompt_tokens": pa.array([r["input_length"] for r in rows], pa.int32()),
            "output_tokens": pa.array([r["output_length"] for r in rows], pa.int32()),
            "hash_ids": pa.array([r["hash_ids"] for r in rows], pa.list_(pa.int32())),
        }
    )


def renamed(rows: list[dict[str, str]], columns: dict[str, tuple[str, pa.DataType]], per_second: int = 1) -> pa.Table:
    """The table of `rows`; `columns` gives each new column's old name and type, `per_second` the unit of arrivals."""
    table = {}
    for name, (old, kind) in columns.items():
        values = [float(r[old]) if pa.types.is_floating(kind) else int(r[old]) for r in rows]
        table[name] = pa.array([round(v / per_second, 7) for v in values] if name == "arrival_s" else values, kind)
    return pa.table(table)


def tiermix(source: Path) -> pa.Table:
    return renamed(
        csv_rows(source),
        {
            "arrival_s": ("t", pa.float64()),
            "class": ("class", pa.int8()),
            "prompt_tokens": ("prompt", pa.int32()),
            "output_tokens": ("output", pa.int32()),
        },
    )


def vtc(source: Path) -> pa.Table:
    """What arrived; the artifact's measured latencies are results of its scheduler, and no part of a workload."""
    return renamed(
        csv_rows(source),
        {
            "arrival_s": ("req_time_s", pa.float64()),
            "client": ("client", pa.int32()),
            "prompt_tokens": ("prompt_len", pa.int32()),
            "output_tokens": ("output_len", pa.int32()),
        },
    )


def adaserve(source: Path) -> pa.Table:
    return renamed(
        csv_rows(source),
        {
            "arrival_s": ("emission_time_ms", pa.float64()),
            "prompt_tokens": ("input_length", pa.int32()),
            "output_tokens": ("output_length", pa.int32()),
            "slo_ratio": ("slo_ratio", pa.float64()),
        },
        per_second=1000,
    )


PACKED: dict[str, tuple[Callable[[Path], pa.Table], str]] = {
    "azure2023/conv.parquet": (azure, "AzureLLMInferenceTrace_conv.csv"),
    "azure2023/code.parquet": (azure, "AzureLLMInferenceTrace_code.csv"),
    "mooncake/conversation.parquet": (mooncake, "conversation_trace.jsonl"),
    "tiermix/tiermix.parquet": (tiermix, "tiermix.csv"),
    "vtc/real.parquet": (vtc, "FCFS_real.csv"),
    "vtc/overload.parquet": (vtc, "FCFS_overload.csv"),
    "adaserve/multislo.parquet": (adaserve, "fig10_emission_rps4.0_prop0.6.csv"),
}


def main(folder: Path) -> None:
    sources = {path.name.removesuffix(".gz"): path for path in folder.rglob("*") if path.is_file()}
    for name, (packer, source) in PACKED.items():
        table = packer(sources[source])
        target = DATA / name
        target.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, target, compression="zstd", compression_level=19, row_group_size=len(table))
        print(f"{target.relative_to(DATA)}: {len(table)} rows, {target.stat().st_size} bytes")


main(Path(sys.argv[1]))
