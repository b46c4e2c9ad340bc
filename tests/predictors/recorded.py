"""Records from which something can be learned, made up."""

from __future__ import annotations

import random
from typing import Any

from tidegate.observe.records import Record

TYPICAL = {"tags": 8, "mail": 120, "report": 900}


def record(name: str, tenant: str, arrival: float, prompt: int, outputs: int, **other: Any) -> Record:
    took = 0.1 + 0.02 * outputs
    row = Record(
        name, tenant, "interactive", 0, arrival, arrival, arrival + 0.1, arrival + took, prompt, outputs,
        0, 0, 0, 0, 0.02, 0.02, 0.1, 0.02, took, True, "stop", "0",
    )  # fmt: skip
    return row._replace(**other)


def records(count: int, seed: int = 0) -> list[Record]:
    """Requests whose tenant decides how long the answer is, give or take."""
    rng = random.Random(seed)
    return [
        record(
            f"r{n}",
            tenant := rng.choice(sorted(TYPICAL)),
            float(n),
            int(rng.lognormvariate(6, 1)) + 1,
            max(1, round(TYPICAL[tenant] * rng.lognormvariate(0, 0.3))),
        )
        for n in range(count)
    ]
