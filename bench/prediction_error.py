"""How much each policy loses when output lengths are predicted wrong. Simulated steps: the same everywhere.

    python bench/prediction_error.py [--json] [--requests 600]

The first requests of the shipped azure-conv trace arrive four times as fast, at a server of 16 seats whose step
takes 10 ms, 0.5 ms a decode and 0.05 ms a prompt token. The oracle's lengths are multiplied by `exp(error * z)`, z
standard normal and fixed for each request; `history` is what a server would really have. Half of the requests are
promised an end within 60 s.

Of the policies that ship only `sjf`, `sla` and `joint` ask for predicted lengths (`tests/core/test_predict.py` holds
the others to it); `fcfs` and `mlfq` stand for those that do not, whatever the error.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from tidegate.core.events import Finished
from tidegate.core.limits import Limits
from tidegate.core.plan import StepResult
from tidegate.core.policy import PolicyContext
from tidegate.core.predict import HistoryPredictor, NoisyPredictor, OraclePredictor, Predictor, StepTime
from tidegate.core.presets import build_policy
from tidegate.core.request import Request
from tidegate.core.scheduler import Scheduler
from tidegate.core.slo import Slo
from tidegate.simulate.traces import load_workload

POLICIES = ("fcfs", "sjf", "mlfq", "sla", "joint")
ERRORS = (0.0, 0.5, 1.0, 2.0, 4.0)
SPEED_UP = 4.0


def requests(count: int) -> list[Request]:
    """The workload, anew for every run."""
    return [
        Request(
            f"r{n}",
            prompt_tokens=call.prompt_tokens,
            max_tokens=call.output_tokens,
            arrival=call.arrival_s / SPEED_UP,
            oracle_tokens=call.output_tokens,
            slo=Slo(e2e=60.0) if n % 2 else Slo(),
        )
        for n, call in enumerate(load_workload("azure-conv").requests[:count])
    ]


def run(policy: str, predictor: Predictor, count: int) -> dict[str, Any]:
    """Mean and 99th percentile seconds from arrival to end, and the share of promises kept."""
    limits = Limits(num_blocks=4000, max_num_seqs=16, max_num_batched_tokens=1024)
    scheduler = Scheduler(build_policy(policy), limits, PolicyContext(predictor, StepTime(5e-5, 0.018)))
    coming = requests(count)[::-1]
    now, ended = 0.0, []
    while coming or scheduler.has_work:
        while coming and coming[-1].arrival <= now:
            r = coming.pop()
            scheduler.add(r, now)
        plan = scheduler.plan(now)
        if not plan:
            now = coming[-1].arrival if coming else now + 0.01
            continue
        now += 0.010 + 0.0005 * len(plan.decodes) + 0.00005 * sum(c.length for c in plan.chunks)
        scheduler.apply(plan, StepResult([7] * len(plan.emitting())), now)
        ended += [e for e in scheduler.take_events() if isinstance(e, Finished)]
    e2e = sorted(e.timing.e2e for e in ended)
    promised = [e for e in ended if e.request.slo.e2e is not None]
    return {
        "mean_e2e_s": round(statistics.mean(e2e), 1),
        "p99_e2e_s": round(e2e[int(0.99 * len(e2e))], 1),
        "kept": round(sum(not e.missed for e in promised) / len(promised), 3),
    }


def _predictor(error: float | None) -> Predictor:
    return HistoryPredictor() if error is None else NoisyPredictor(OraclePredictor(), error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--requests", type=int, default=600)
    args = parser.parse_args()
    cases = [(policy, error) for policy in POLICIES for error in (*ERRORS, None)]
    rows = [
        {
            "policy": policy,
            "error": "history" if error is None else error,
            **run(policy, _predictor(error), args.requests),
        }
        for policy, error in cases
    ]
    if args.json:
        print(json.dumps({"rows": rows}))
        return
    print("| " + " | ".join(rows[0]) + " |")
    print("|---" * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")


if __name__ == "__main__":
    main()
