"""Four engines behind each route: how much of the prompts is cached where it goes, and when first tokens come.

    python bench/gateway_cache.py [--json] [--limit N] [--scale S …]

Two loads, on four simulated engines (Llama-3.1-70B on 8 A100 each, `vllm-v1`, 8,192 tokens a step), each of which a
route sees from outside. Every route gets the same requests and the same seed.

`mooncake`: every fourth conversation of Mooncake's trace (Qin et al., FAST 2025), whole, so that prefixes are shared
as much as there; `validation/mooncake.py` has the whole trace and 16 engines. Scale s divides all arrival times.

`zipf`: prompts that begin with one of 100 prefixes of 4,096 tokens, of which the most popular has 41 % of the
requests (k to the power of -1.5): more than one engine's share, so whoever follows prefixes alone overloads one engine.
Load is how many requests were at an engine on average, waiting or running, of those that came after the first quarter:
before that caches are cold and every route overloads all four. The bound is 1.3 times the mean of the four.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from statistics import fmean
from typing import Any

from tidegate.cli.output import print_json, print_table
from tidegate.core.limits import Limits
from tidegate.core.presets import build_policy
from tidegate.executors.sim.cost import CostModel
from tidegate.executors.sim.hardware import find_hardware
from tidegate.executors.sim.models import find_model
from tidegate.observe.records import Record
from tidegate.routing.route import ROUTES, Route, build_route
from tidegate.simulate.profile import prefix_hit
from tidegate.simulate.run import EngineSetup, FleetSetup, simulate
from tidegate.simulate.sizing import pool_blocks
from tidegate.simulate.traces import load_workload
from tidegate.simulate.workload import Workload

ENGINES, TP, BLOCK, SEED = 4, 8, 16, 0
SCALES = (1.0, 2.0, 3.0, 4.0)
THIN = 4
"""Of so many conversations one is kept."""
MOST_ABOVE_MEAN = 1.3
ZIPF = "families:rate=70,count=4000,families=100,prefix=4096,zipf=1.5,prompt=256,output=64"


def setup() -> EngineSetup:
    """One engine: first come first served in vLLM V1's design."""
    cost = CostModel(find_hardware("a100"), find_model("llama-3.1-70b"), TP)
    blocks = pool_blocks(cost, BLOCK)
    limits = Limits(num_blocks=blocks, block_size=BLOCK, max_num_seqs=256, max_num_batched_tokens=8192)
    return EngineSetup(build_policy("vllm-v1", {"max_waiting": None}), limits, cost)


def conversations() -> Workload:
    """Every fourth conversation of the trace. All begin with one block; the second tells conversations apart."""
    whole = load_workload("mooncake-conversation")
    return replace(whole, requests=tuple(r for r in whole if (r.hash_ids[1:2] or (0,))[0] % THIN == 0))


def row(load: Workload, name: str) -> dict[str, Any]:
    """What a route made of a load."""

    def build() -> Route:
        return build_route(name, random=Random(SEED))

    records: list[Record] = []
    simulate(load, setup(), records.extend, fleet=FleetSetup((("", ENGINES),), build, name))
    ttft = sorted(r.ttft_s for r in records if r.ttft_s is not None)
    tpot = [r.tpot_s for r in records if r.tpot_s is not None]
    warm = sorted(r.arrival_s for r in records)[len(records) // 4]
    there: Counter[str] = Counter()  # seconds that requests were there, by engine
    for r in records:
        there[r.replica] += r.finish_s - r.arrival_s if r.arrival_s >= warm else 0.0
    return {
        "route": name,
        "hit_rate": round(sum(r.cached_tokens or 0 for r in records) / sum(r.prompt_tokens for r in records), 4),
        "mean_ttft_s": round(fmean(ttft), 3),
        "p99_ttft_s": round(ttft[-(-99 * len(ttft) // 100) - 1], 3),
        "mean_tpot_ms": round(1e3 * fmean(tpot), 1),
        "most_load_to_mean": round(max(there.values()) * ENGINES / sum(there.values()), 3),
        "refused": len(records) - len(ttft),
    }


def checks(rows: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Whether `joint` has the least mean time to the first token, and spreads popular prefixes."""
    found = {}
    for load in dict.fromkeys(r["load"] for r in rows):
        of = {r["route"]: r for r in rows if r["load"] == load}
        best = min(r["mean_ttft_s"] for r in of.values())
        found[f"joint_best_mean_ttft_{load.replace(' ', '_')}"] = of["joint"]["mean_ttft_s"] == best
        if load == "zipf":
            found["joint_no_engine_above_1.3x_zipf"] = of["joint"]["most_load_to_mean"] <= MOST_ABOVE_MEAN
    return found


def measure(scales: Sequence[float] = SCALES, limit: int | None = None) -> dict[str, Any]:
    """The whole document; `limit` takes only the first requests."""
    trace, popular = conversations(), load_workload(ZIPF)
    if limit is not None:
        trace, popular = trace.limited(limit), popular.limited(limit)
    loads = {f"mooncake {scale:g}x": trace.rate_scaled(scale) for scale in scales} | {"zipf": popular}
    ideal = {name: prefix_hit(load) for name, load in (("mooncake", trace), ("zipf", popular))}
    rows = [{"load": load} | row(requests, name) for load, requests in loads.items() for name in ROUTES]
    return {
        "engines": ENGINES,
        "hardware": "a100",
        "tp": TP,
        "model": "llama-3.1-70b",
        "ideal_hit_rate": {name: None if hit is None else round(hit.tokens, 4) for name, hit in ideal.items()},
        "rows": rows,
        "checks": checks(rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--scale", type=float, action="append", help="divide arrival times by this; may be repeated")
    parser.add_argument("--limit", type=int, help="only the first N requests of each load")
    options = parser.parse_args()
    document = measure(options.scale or SCALES, options.limit)
    if options.json:
        print_json(document)
        return
    print_table(document["rows"], f"{ENGINES} engines; ideal caches hit {document['ideal_hit_rate']}")
    for name, passed in document["checks"].items():
        print(f"{'yes' if passed else 'NO '}  {name.replace('_', ' ')}")


if __name__ == "__main__":
    main()
