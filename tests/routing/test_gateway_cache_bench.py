"""What `bench/gateway_cache.py --json` prints, on a handful of requests; and what it must show, on more."""

from __future__ import annotations

import json

from bench import gateway_cache
from tidegate.routing.route import ROUTES
from tidegate.simulate.traces import load_workload


def test_it_has_the_documented_fields() -> None:
    document = json.loads(json.dumps(gateway_cache.measure([2.0], 30)))
    assert list(document) == ["engines", "hardware", "tp", "model", "ideal_hit_rate", "rows", "checks"]
    assert [(row["load"], row["route"]) for row in document["rows"]] == [
        *(("mooncake 2x", name) for name in ROUTES),
        *(("zipf", name) for name in ROUTES),
    ]
    assert list(document["rows"][0]) == [
        *("load", "route", "hit_rate", "mean_ttft_s", "p99_ttft_s", "mean_tpot_ms", "most_load_to_mean", "refused"),
    ]
    assert list(document["checks"]) == [
        *("joint_best_mean_ttft_mooncake_2x", "joint_best_mean_ttft_zipf", "joint_no_engine_above_1.3x_zipf"),
    ]


def test_joint_follows_popular_prefixes_without_a_hot_engine() -> None:
    """At half the load of the benchmark, whose caches take a while to become warm."""
    load = load_workload("families:rate=40,count=700,families=50,prefix=2048,zipf=1.5,prompt=256,output=64")
    blind, prefix, joint = (gateway_cache.row(load, name) for name in ("least-loaded", "prefix", "joint"))
    assert joint["most_load_to_mean"] <= gateway_cache.MOST_ABOVE_MEAN
    assert prefix["most_load_to_mean"] > gateway_cache.MOST_ABOVE_MEAN  # else the load shows nothing
    assert joint["mean_ttft_s"] < min(blind["mean_ttft_s"], prefix["mean_ttft_s"])
    assert joint["hit_rate"] > blind["hit_rate"] + 0.02
