"""Chunked prefill against prefill first (Agrawal et al., Sarathi-Serve, OSDI 2024): load under a P99 between tokens.

    python bench/validation/sarathi.py [--json] [--requests N] [--budget TOKENS …]

Prefill first is the preset `vllm-v0`: a prompt is computed whole, while all decodes stand still. Chunked is the preset
`sarathi` with several token budgets a step. Capacity is the largest rate at which the 99th percentile of all times
between two tokens is within the promise and the median wait for a seat at most 2 s, as in the paper; so are the two
promises, 5 ("strict") and 25 times ("relaxed") a step that decodes 32 requests behind 4,096 tokens each.

Llama-3.1-8B on one A100, 128 seats, lengths of the Azure conversation trace, Poisson arrivals from a fixed seed. The
paper's figure, 2.6 times the load, is of Mistral-7B on one A100 and other conversations. Nothing is fitted.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from tidegate.cli.output import print_json, print_table
from tidegate.core.events import Event, Finished
from tidegate.core.limits import Limits
from tidegate.core.presets import PRESETS, build_policy
from tidegate.executors.sim.cost import CostModel
from tidegate.executors.sim.hardware import find_hardware
from tidegate.executors.sim.models import find_model
from tidegate.observe.records import Record
from tidegate.simulate.run import EngineSetup, simulate
from tidegate.simulate.sizing import pool_blocks
from tidegate.simulate.traces import load_workload
from tidegate.simulate.workload import Workload

BUDGETS = (128, 256, 512, 1024, 2048)
PREFILL_FIRST = "prefill first"
PROMISES = {"strict": 5.0, "relaxed": 25.0}
MOST_WAIT_S = 2.0
LOWEST, RATIO, RATES = 0.25, 1.08, 60
"""Rates are LOWEST * RATIO^k requests a second, k < RATES."""
SHAPE_RATE = 24
"""The k of the rate at which P99 is shown for all budgets."""
PUBLISHED_GAIN = 2.6
SEED = 0

COST = CostModel(find_hardware("a100"), find_model("llama-3.1-8b"))


def promise_s(name: str) -> float:
    """Seconds between two tokens."""
    return PROMISES[name] * COST.decode_seconds(32, 4096)


def rate(k: int) -> float:
    return LOWEST * RATIO**k


@dataclass(frozen=True, slots=True)
class Outcome:
    """P99 of the times between tokens, and the median wait for a seat, seconds."""

    p99_tbt_s: float
    median_wait_s: float

    def keeps(self, promise: str) -> bool:
        return self.p99_tbt_s <= promise_s(promise) and self.median_wait_s <= MOST_WAIT_S


@dataclass
class Engine:
    """One way to compute prompts, and what came of each rate that was tried."""

    name: str
    preset: str
    budget: int
    lengths: Workload
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    def at(self, k: int) -> Outcome:
        """The outcome at the k-th rate."""
        if k not in self.outcomes:
            self.outcomes[k] = self._run(rate(k))
        return self.outcomes[k]

    def capacity(self, promise: str) -> float:
        """The largest rate that keeps the promise, by bisection, which takes rates above one that fails to fail too."""
        low, high = -1, RATES
        while high - low > 1:
            middle = (low + high) // 2
            if self.at(middle).keeps(promise):
                low = middle
            else:
                high = middle
        return rate(low) if low >= 0 else 0.0

    def _run(self, requests_s: float) -> Outcome:
        own = {**PRESETS[self.preset].limits, "max_num_batched_tokens": self.budget}
        limits = Limits(num_blocks=pool_blocks(COST, 16), max_num_seqs=128, **own)
        gaps: list[float] = []
        records: list[Record] = []

        def collect(events: Sequence[Event], replica: str) -> None:
            for event in events:
                if isinstance(event, Finished):
                    gaps.extend(event.timing.gaps)

        simulate(
            poisson(self.lengths, requests_s),
            EngineSetup(build_policy(self.preset, {"max_waiting": None}), limits, COST),
            records.extend,
            observers=[collect],
        )
        waits = [r.admitted_s - r.arrival_s for r in records if r.admitted_s is not None]
        return Outcome(float(np.quantile(gaps, 0.99)), median(waits))


def poisson(lengths: Workload, requests_s: float) -> Workload:
    """The same requests as a Poisson process; rates differ by their scale alone."""
    arrivals = np.cumsum(np.random.default_rng(SEED).exponential(1 / requests_s, len(lengths))).tolist()
    moved = (replace(r, arrival_s=at) for r, at in zip(lengths, arrivals, strict=True))
    return replace(lengths, requests=tuple(moved))


def engines(lengths: Workload, budgets: Sequence[int]) -> list[Engine]:
    """Prefill first, whose steps hold any prompt of the trace whole, and chunked with each budget."""
    longest = max(r.prompt_tokens for r in lengths)
    chunked = [Engine(f"chunked, {budget}", "sarathi", budget, lengths) for budget in budgets]
    return [Engine(PREFILL_FIRST, "vllm-v0", max(8192, longest), lengths), *chunked]


def rows(ways: Sequence[Engine]) -> list[dict[str, Any]]:
    """One row an engine: capacities, their gains over prefill first, and P99 at one rate."""
    base = {promise: ways[0].capacity(promise) for promise in PROMISES}
    table = []
    for way in ways:
        row: dict[str, Any] = {"engine": way.name, "budget": way.budget}
        for promise in PROMISES:
            carried = way.capacity(promise)
            row[f"{promise}_rate_s"] = round(carried, 3)
            row[f"{promise}_gain"] = round(carried / base[promise], 2) if base[promise] else None
        shape = way.at(SHAPE_RATE)
        table.append(row | {"p99_tbt_s": round(shape.p99_tbt_s, 4), "median_wait_s": round(shape.median_wait_s, 3)})
    return table


def checks(table: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """What the paper shows, and whether it came out."""
    first, chunked = table[0], sorted(table[1:], key=lambda row: row["budget"])
    best = {promise: max(chunked, key=lambda row: row[f"{promise}_rate_s"]) for promise in PROMISES}
    p99 = [row["p99_tbt_s"] for row in chunked]
    strict, relaxed = best["strict"]["strict_rate_s"], best["relaxed"]["relaxed_rate_s"]
    return {
        "chunked_carries_more_under_the_strict_promise": strict > first["strict_rate_s"],
        "gain_under_the_strict_promise_at_least_2": strict >= 2 * first["strict_rate_s"],
        "p99_grows_with_the_budget": p99 == sorted(p99),
        "too_large_a_budget_carries_less_under_the_strict_promise": chunked[-1]["strict_rate_s"] < strict,
        "too_small_a_budget_carries_less_under_either": chunked[0]["strict_rate_s"] < strict
        and chunked[0]["relaxed_rate_s"] < relaxed,
        "a_large_budget_is_as_good_as_any_under_the_relaxed_promise": chunked[-1]["relaxed_rate_s"] == relaxed,
        "the_gain_is_smaller_under_the_relaxed_promise": relaxed / first["relaxed_rate_s"]
        < strict / first["strict_rate_s"]
        if first["relaxed_rate_s"] and first["strict_rate_s"]
        else False,
    }


def measure(requests: int = 2_000, budgets: Sequence[int] = BUDGETS) -> dict[str, Any]:
    """The whole document, on the lengths of the trace's first `requests`."""
    lengths = load_workload("azure-conv").limited(requests)
    table = rows(engines(lengths, budgets))
    return {
        "requests": requests,
        "promises_s": {name: round(promise_s(name), 4) for name in PROMISES},
        "shape_rate_s": round(rate(SHAPE_RATE), 3),
        "published_gain": PUBLISHED_GAIN,
        "rows": table,
        "checks": checks(table),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--requests", type=int, default=2_000, help="requests of each run")
    parser.add_argument("--budget", type=int, action="append", help="tokens of a chunked step; may be repeated")
    options = parser.parse_args()
    document = measure(options.requests, options.budget or BUDGETS)
    if options.json:
        print_json(document)
        return
    promises = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in document["promises_s"].items())
    print_table(document["rows"], f"P99 between tokens: {promises}; shown at {document['shape_rate_s']:g} requests/s")
    for name, passed in document["checks"].items():
        print(f"{'yes' if passed else 'NO '}  {name.replace('_', ' ')}")


if __name__ == "__main__":
    main()
