"""What clients notice of engines that cut, hang, slow down, reset, refuse and restart, one at a time and all at once.

The engines are fakes that stream (tests/gateway), on real sockets, in the process of the gateway. Exits with 1 where
a bound is broken.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.gateway.fault_load import FAULTS, Outcome, fault_load

FAILED_SHARE = {"cut": 0.02, "hang": 0.01, "mixed": 0.02}
"""Of all requests, at most; of other faults nobody may notice anything."""
TO_BAD_SHARE = 0.05


def row(outcome: Outcome) -> dict[str, Any]:
    """What is printed of one fault, and the bounds that it broke."""
    n = len(outcome.answers) + len(outcome.lost)
    failed = Counter(str(a.error and a.error["code"]) for a in outcome.failed)
    share = len(outcome.failed) / n
    to_bad = outcome.to_bad / max(1, outcome.settled)
    broken = [
        name
        for name, wrong in {
            "a request without an end": outcome.unended > 0,
            "a byte twice": outcome.repeated > 0,
            "failed": share > FAILED_SHARE.get(outcome.fault, 0.0),
            "failed otherwise": outcome.fault == "cut" and set(failed) - {"cut"} != set(),
            "to the bad engine": to_bad > TO_BAD_SHARE,
            "more than one deadline": outcome.fault == "hang" and outcome.attempts > 2,
        }.items()
        if wrong
    ]
    return {
        "fault": outcome.fault,
        "requests": n,
        "unended": outcome.unended,
        "repeated": outcome.repeated,
        "failed": dict(failed),
        "failed_share": round(share, 5),
        "to_bad_share": round(to_bad, 4),
        "attempts_at_most": outcome.attempts,
        "seconds_at_most": round(max(outcome.seconds), 3),
        "broken": broken,
    }


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for fault in args.faults:
        outcome = await fault_load(
            fault, rate=args.rate, seconds=args.seconds, first_token_seconds=args.first_token_seconds
        )
        rows.append(row(outcome))
        if not args.json:
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each fault; it is on for the middle half")
    parser.add_argument("--first-token-seconds", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("faults", nargs="*", default=[*FAULTS, "mixed"])
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    rows = uvloop.run(measure(args))
    if args.json:
        print(json.dumps({"rate": args.rate, "seconds": args.seconds, "faults": rows}, indent=1))
    return int(any(r["broken"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
