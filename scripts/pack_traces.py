"""Packs the original trace files into the Parquet files that ship in src/tidegate/simulate/data/.

usage: python scripts/pack_traces.py FOLDER   with AzureLLMInferenceTrace_{conv,code}.csv.gz and
                                              conversation_trace.jsonl.gz (Mooncake) in it
"""

import csv
import gzip
import json
import sys
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

DATA = Path(__file__).resolve().parent.parent / "src" / "tidegate" / "simulate" / "data"


def seconds(stamp: str) -> float:
    """Seconds since midnight of the trace's day, to the 100 ns that the stamps have."""
    whole, _, fraction = stamp.partition(".")
    clock = datetime.fromisoformat(whole)
    return clock.hour * 3600 + clock.minute * 60 + clock.second + int(fraction or 0) / 10 ** len(fraction or "0")


def azure(source: Path) -> pa.Table:
    with gzip.open(source, "rt", encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    stamps = [seconds(r["TIMESTAMP"]) for r in rows]
    return pa.table(
        {
            "arrival_s": pa.array([round(s - stamps[0], 7) for s in stamps], pa.float64()),
            "prompt_tokens": pa.array([int(r["ContextTokens"]) for r in rows], pa.int32()),
            "output_tokens": pa.array([int(r["GeneratedTokens"]) for r in rows], pa.int32()),
        }
    )


def mooncake(source: Path) -> pa.Table:
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return pa.table(
        {
            "tick_s": pa.array([r["timestamp"] / 1000 for r in rows], pa.float64()),
            "prompt_tokens": pa.array([r["input_length"] for r in rows], pa.int32()),
            "output_tokens": pa.array([r["output_length"] for r in rows], pa.int32()),
            "hash_ids": pa.array([r["hash_ids"] for r in rows], pa.list_(pa.int32())),
        }
    )


def main(folder: Path) -> None:
    sources = {path.name: path for path in folder.rglob("*.gz")}
    packed = {
        "azure2023/conv.parquet": azure(sources["AzureLLMInferenceTrace_conv.csv.gz"]),
        "azure2023/code.parquet": azure(sources["AzureLLMInferenceTrace_code.csv.gz"]),
        "mooncake/conversation.parquet": mooncake(sources["conversation_trace.jsonl.gz"]),
    }
    for name, table in packed.items():
        target = DATA / name
        target.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, target, compression="zstd", compression_level=19, row_group_size=len(table))
        print(f"{target.relative_to(DATA)}: {len(table)} rows, {target.stat().st_size} bytes")


main(Path(sys.argv[1]))
