"""Engines that fail under load: who notices. `bench/gateway_faults.py` is the same, larger."""

from __future__ import annotations

import asyncio

from tests.gateway.fault_load import FAULTS, Outcome, fault_load

CUT_AT_MOST = 10
"""Streams cut until the breaker opens (3 in a row, and those under way by then), and by its probes."""


def check(outcome: Outcome) -> None:
    assert len(outcome.answers) > 60
    assert (outcome.unended, outcome.repeated) == (0, 0)
    codes = [answer.error and answer.error["code"] for answer in outcome.failed]
    assert codes == ["cut"] * len(codes)
    assert len(codes) <= (CUT_AT_MOST if outcome.fault in ("cut", "mixed") else 0)
    assert outcome.attempts <= (4 if outcome.fault == "mixed" else 2)


async def test_clients_notice_only_what_was_cut() -> None:
    """Every fault by itself, each before a gateway and engines of its own, side by side."""
    loads = (fault_load(fault, rate=20, seconds=5.0, first_token_seconds=1.0) for fault in FAULTS)
    for outcome in await asyncio.gather(*loads):
        check(outcome)


async def test_all_faults_at_once() -> None:
    check(await fault_load("mixed", rate=50, seconds=5.0, first_token_seconds=1.0))
