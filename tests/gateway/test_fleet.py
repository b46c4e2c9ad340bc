"""The fleet: who is there, and what is known of each."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from tests.gateway.engines import job
from tidegate.gateway.discovery import Wanted
from tidegate.gateway.fleet import Fleet
from tidegate.gateway.job import Job
from tidegate.routing.choice import Choice
from tidegate.routing.health import Failure
from tidegate.routing.speed import Speed

FIRST, SECOND = (Wanted("a", f"http://127.0.0.1:{port}") for port in (1, 2))


def send(fleet: Fleet, one: Job) -> None:
    now = asyncio.get_running_loop().time()
    (there,) = fleet.candidates(now)
    fleet.sent(one, Choice(there, 0), now)


async def test_what_a_replaced_engine_fails_says_nothing_of_the_one_that_has_its_name() -> None:
    forgotten: list[str] = []
    fleet = Fleet(forgotten.append, Speed(), 1.0)
    fleet.update([FIRST])
    send(fleet, job("old"))
    fleet.update([SECOND])
    assert forgotten == ["a"]
    fleet.failed("old", 0.0, Failure.RESET)
    assert forgotten == ["a"]
    send(fleet, job("new"))
    fleet.failed("new", 0.0, Failure.RESET)
    assert forgotten == ["a", "a"]


async def test_whoever_chooses_sees_first_tokens_that_must_have_come_by_now() -> None:
    fleet = Fleet(lambda name: None, Speed(), 1.0)
    fleet.update([FIRST])
    whole = job("whole", tokens=5000)
    send(fleet, replace(whole, view=whole.view._replace(streams=False)))
    (there,) = fleet.candidates(asyncio.get_running_loop().time())
    assert (there.pending_tokens, there.decoding) == (5000, 0)
    (there,) = fleet.candidates(asyncio.get_running_loop().time() + 1e6)
    assert (there.pending_tokens, there.decoding) == (0, 1)
