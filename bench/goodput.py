"""How much load each policy carries with every promise kept: the benchmark `tiermix`.

    python bench/goodput.py [--json] [--policy joint …] [--pool 28000 …] [--level A90 …] [--ablation] [--fleet mixed …]
                            [--load 1.05]

20 minutes of azure conv (interactive) and azure code (completion), offline requests and two bursts of batch ones, on
one simulated H100 with Llama-3.1-8B: 1 ms host overhead a step, 128 seats, 2,048 tokens a step. Load s divides all
arrival times. The capacity of a policy is the largest s at which *every* class with a promise keeps it for the
level's share of its requests: the last pass before the first failure on the grid 0.05 * 1.15^k, then bisected to 2 %.
`--load` looks at one s instead: what share of its promises each class kept there, and its longest first token.
`joint` has `margin`, found on other minutes of the trace, and `first_token_within`, a bound on the wait for first
tokens that are promised to nobody.

A90: the default promises (completion: first token in 0.2 s), 90 %. B99, B90: completion in 0.5 s, 99 and 90 %. TPOT
is the mean for both. No policy knows output lengths (each request declares 2,048) but sjf, which has an oracle.

bounds: no policy passes these. Of completion prompts that arrive and are due within one stretch of time no more can
be kept than fit in it, the smallest first, at the best speed of any step and with nothing else running; stretches
that do not overlap add up, and the choice of them that loses most is found by dynamic programming.
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from random import Random
from typing import Any, ClassVar, NamedTuple

from tidegate.core import triage
from tidegate.core.limits import Limits
from tidegate.core.policies.adaptive import AdaptiveBudget
from tidegate.core.policies.deadlines import Joint
from tidegate.core.policy import Policy, PolicyContext
from tidegate.core.predict import HistoryPredictor, OraclePredictor
from tidegate.core.presets import build_policy
from tidegate.core.slo import DEFAULT_CLASSES, Slo, SloClass
from tidegate.core.view import StepView
from tidegate.executors.sim.cost import CostModel
from tidegate.executors.sim.hardware import find_hardware
from tidegate.executors.sim.models import find_model
from tidegate.observe.records import Record
from tidegate.routing.pools import Pools
from tidegate.routing.route import build_route
from tidegate.simulate import capacity
from tidegate.simulate.run import EngineSetup, FleetSetup, simulate
from tidegate.simulate.traces import load_workload
from tidegate.simulate.workload import Workload

DECLARED = 2048
FIRST_TOKEN_WITHIN = 50.0  # seconds: who has waited that long for an output has ten left until 60
# Of joint; the margin as it was found on minutes 20 to 30 of the same traces: chunks far into a prompt cost more than
# predicted.
TUNED = {"margin": 0.1, "first_token_within": FIRST_TOKEN_WITHIN}
# The grid is entered at its seventh point, below every capacity seen, and walked downwards from there if need be.
search = partial(capacity.search, start=0.05 * 1.15**6, ratio=1.15, precision=0.02, least=0.05)
POLICIES = ("vllm-v1", "priority", "edf", "sjf", "sla", "joint")
POOLS = (28_000, 6_000)


class Level(NamedTuple):
    """What has to be kept: completion's first token in `ttft` seconds, and the share of each class's requests."""

    ttft: float
    share: float

    def classes(self) -> Mapping[str, SloClass]:
        own = {"completion": SloClass("completion", Slo(ttft=self.ttft, tpot=0.05), 0)}
        return {**DEFAULT_CLASSES, **own}


LEVELS = {"A90": Level(0.2, 0.9), "B99": Level(0.5, 0.99), "B90": Level(0.5, 0.9)}


# What an ingredient of `joint` is worth: the policy without it


class Untriaged(Joint):
    """Nobody is given up for others."""

    triages: ClassVar[bool] = False


class Whole(AdaptiveBudget):
    """Steps are as full as paces allow, whatever is due."""

    def tokens(self, step: StepView, ctx: PolicyContext) -> int:
        return super().tokens(step._replace(due=None), ctx)


ABLATIONS: Mapping[str, Callable[[Policy], Policy]] = {
    "joint without triage": lambda p: replace(p, order=Untriaged(first_token_within=FIRST_TOKEN_WITHIN)),
    "joint without steps that end when first tokens are due": lambda p: replace(p, budget=Whole(margin=0.1)),
    "joint without a cap on steps": lambda p: replace(p, budget=build_policy("joint", {"budget": "fixed"}).budget),
    "joint without balance between classes": lambda p: p,
    "joint without a bound on first tokens": lambda p: replace(p, order=Joint()),
}


def policy_of(name: str) -> Policy:
    """A preset, or `joint` without one of its ingredients."""
    triage.BALANCE = 0.0 if name == "joint without balance between classes" else BALANCE
    if name in ABLATIONS:
        return replace(ABLATIONS[name](build_policy("joint", TUNED)), name=name)
    return build_policy(name, TUNED if name == "joint" else None)


BALANCE = triage.BALANCE


class Missed(Exception):
    """A class has lost more than the level allows."""


class Tally:
    """Counts what was kept as records come; raises `Missed` as soon as the level is out of reach."""

    def __init__(self, workload: Workload, level: Level, stop: bool) -> None:
        promised = [name for name, c in level.classes().items() if c.slo != Slo()]
        self.counts = {name: sum(r.slo_class == name for r in workload) for name in promised}
        self.most = {name: int(count * (1 - level.share) + 1e-9) for name, count in self.counts.items()}
        self.missed = dict.fromkeys(promised, 0)
        self.max_ttft: dict[str, float] = {}
        self.batch_tokens = 0
        self.batch_e2e: list[float] = []
        self._stop = stop

    def __call__(self, records: list[Record]) -> None:
        for r in records:
            if r.ttft_s is not None and r.ttft_s > self.max_ttft.get(r.slo_class, 0.0):
                self.max_ttft[r.slo_class] = r.ttft_s
            if r.slo_class == "batch":
                self.batch_tokens += r.output_tokens
                self.batch_e2e.append(r.e2e_s)
            elif not r.slo_met:
                self.missed[r.slo_class] += 1
                if self._stop and self.missed[r.slo_class] > self.most[r.slo_class]:
                    raise Missed

    @property
    def passed(self) -> bool:
        return all(self.missed[name] <= most for name, most in self.most.items())

    @property
    def kept(self) -> Mapping[str, float]:
        """The share of each class's promises that was kept."""
        return {name: 1 - self.missed[name] / count for name, count in self.counts.items()}


@cache
def tiermix() -> Workload:
    return load_workload("tiermix")


@cache
def cost() -> CostModel:
    return CostModel(find_hardware("h100"), find_model("llama-3.1-8b"), host_overhead=0.001)


@dataclass(frozen=True, slots=True)
class Case:
    """One capacity to be found, or one `load` to be looked at. `fleet`: "" one engine, "isolated" or "mixed" two."""

    policy: str
    pool: int
    level: str
    fleet: str = ""
    load: float | None = None

    def run(self, load: float, stop: bool = True) -> tuple[Tally, float]:
        """What became of the workload at `load`, and the seconds that it took."""
        level = LEVELS[self.level]
        workload = tiermix().rate_scaled(load)
        limits = Limits(num_blocks=self.pool, max_num_seqs=128, max_model_len=16_384, prefix_caching=False)
        predictor = OraclePredictor if self.policy == "sjf" else HistoryPredictor
        setup = EngineSetup(policy_of(self.policy), limits, cost(), predictor)
        tally = Tally(workload, level, stop)
        totals = simulate(workload, setup, tally, fleet=_fleet(self.fleet), classes=level.classes(), declared=DECLARED)
        return tally, totals.seconds

    def passes(self, load: float) -> bool:
        try:
            return self.run(load)[0].passed
        except Missed:
            return False

    def row(self) -> dict[str, Any]:
        """The capacity, or the load that was named, and what else is seen there."""
        load = search(self.passes) if self.load is None else self.load
        tally, seconds = self.run(load, stop=False)
        named = {} if self.load is None else _at(tally)
        return {
            "pool_blocks": self.pool,
            "policy": self.policy,
            **({"fleet": self.fleet} if self.fleet else {}),
            "level": self.level,
            "capacity" if self.load is None else "load": round(load, 3),
            "batch_tok_s": round(tally.batch_tokens / seconds, 1),
            "batch_e2e_s": round(sum(tally.batch_e2e) / len(tally.batch_e2e), 1),
            "max_ttft_s": round(max(tally.max_ttft.values()), 1),
            **named,
        }


def _at(tally: Tally) -> dict[str, Any]:
    """What is told of a load that was named: by class, the share that was kept and the longest wait."""
    kept = {f"{name}_kept": round(share, 4) for name, share in tally.kept.items()}
    return {**kept, **{f"{name}_max_ttft_s": round(ttft, 1) for name, ttft in sorted(tally.max_ttft.items())}}


def _fleet(kind: str) -> FleetSetup:
    """Two engines behind the joint route: apart, interactive and completion on one of them, or both for all."""
    if not kind:
        return FleetSetup()
    if kind == "mixed":
        return FleetSetup((("", 2),), lambda: build_route("joint", random=Random(0)), "joint")
    apart = Pools({"interactive": "tight", "completion": "tight", "offline": "loose", "batch": "loose"})
    return FleetSetup(
        (("tight", 1), ("loose", 1)),
        lambda: build_route("joint", random=Random(0), pools=apart),
        "joint",
    )


# What no policy passes


def bound(level: Level) -> float:
    """The largest load at which the bound on completion's kept promises is still the level's share."""
    prompts = [(r.arrival_s, r.prompt_tokens) for r in tiermix() if r.slo_class == "completion"]
    token = min(cost().step_seconds([(0, n)]) / n for n in range(64, 2049, 64))

    def passes(load: float) -> bool:
        lost = least_lost([(t / load, n * token) for t, n in prompts], level.ttft)
        return 1 - lost / len(prompts) >= level.share

    return search(passes)


def least_lost(jobs: Sequence[tuple[float, float]], promise: float, most: int = 96) -> int:
    """At least so many of `jobs` (arrival, seconds of work; by arrival) end later than `promise` seconds after it."""
    hopeless = sum(work > promise for _, work in jobs)
    jobs = [(t, work) for t, work in jobs if work <= promise]
    starts = [t for t, _ in jobs]
    best = [0] * (len(jobs) + 1)
    for i in range(len(jobs) - 1, -1, -1):
        best[i] = best[i + 1]
        works: list[float] = []
        for j in range(i, min(len(jobs), i + most)):
            insort(works, jobs[j][1])
            end = starts[j] + promise
            lost = len(works) - fitting(works, end - starts[i])
            if lost:
                best[i] = max(best[i], lost + best[bisect_left(starts, end)])
    return hopeless + best[0]


def fitting(works: Sequence[float], seconds: float) -> int:
    """How many of `works`, ascending, fit into so many seconds."""
    for count, work in enumerate(works):
        seconds -= work
        if seconds < 0:
            return count
    return len(works)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--policy", action="append")
    parser.add_argument("--pool", type=int, action="append")
    parser.add_argument("--level", action="append", choices=list(LEVELS))
    parser.add_argument("--ablation", action="store_true", help="joint without each of its ingredients")
    parser.add_argument("--fleet", action="append", choices=["mixed", "isolated"])
    parser.add_argument("--load", type=float, help="look at this one instead of searching for the capacity")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args()
    policies = args.policy or ([*ABLATIONS] if args.ablation else POLICIES)
    cases = [
        Case(policy, pool, level, fleet, args.load)
        for policy in policies
        for pool in args.pool or POOLS
        for level in args.level or LEVELS
        for fleet in args.fleet or ("",)
    ]
    with ProcessPoolExecutor(args.jobs) as pool:
        bounded = (args.level or LEVELS) if args.load is None else ()
        bounds = {name: pool.submit(bound, LEVELS[name]) for name in bounded}
        rows = []
        for row in pool.map(Case.row, cases):
            rows.append(row)
            if not args.json:
                print("| " + " | ".join(str(v) for v in row.values()) + " |", flush=True)
        told = {name: round(b.result(), 3) for name, b in bounds.items()}
    if args.json:
        print(json.dumps({"rows": rows, "bounds": told}))
    elif told:
        print("bounds:", told)


if __name__ == "__main__":
    main()
