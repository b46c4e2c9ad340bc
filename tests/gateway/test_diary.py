"""Why a request went where it went: `/v1/gateway/explain/{id}`."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.gateway.backends import backends
from tests.gateway.engines import job
from tests.gateway.gateways import Running, gateway
from tidegate.gateway.attempt import How
from tidegate.gateway.diary import CANDIDATES, Diary
from tidegate.gateway.proxy import End
from tidegate.routing.choice import Choice
from tidegate.routing.view import ReplicaView


async def explained(running: Running, id: str, status: int = 200, **headers: str) -> dict[str, Any]:
    async with running.http.get(f"{running.url}/v1/gateway/explain/{id}", headers=headers) as answer:
        assert answer.status == status, await answer.text()
        told: dict[str, Any] = await answer.json()
        return told


async def test_costs_of_all_candidates_and_the_prediction_beside_what_came() -> None:
    async with backends(3) as behind, gateway(behind, route="joint") as running:
        for _ in range(4):
            answer = await running.stream()
        told = await explained(running, answer.headers["x-request-id"])
    (attempt,) = told["attempts"]
    assert {c["name"] for c in attempt["candidates"]} == {"backend-0", "backend-1", "backend-2"}
    assert attempt["candidates"][0]["name"] == attempt["replica"] == running.ends.sent_to[-1]
    for candidate in attempt["candidates"]:
        assert candidate["cost"] == sum(candidate["parts"].values())
        assert candidate["known"] == "estimated"
    assert told["ttft"]["predicted_s"] > 0
    assert told["ttft"]["actual_s"] >= 0  # the loop counts milliseconds
    assert told["held_s"] >= 0
    assert told["end"].pop("at_s") >= 0
    assert told["end"].pop("outputs") >= 5  # events, where the engine counts no tokens
    assert told["end"] == {"how": "done", "status": 200, "reason": ""}
    assert (told["class"], told["tenant"], told["waiting"]) == ("interactive", "default", None)
    assert "tides" not in str(told)


async def test_a_second_try_is_told_with_what_went_wrong() -> None:
    async with backends(2) as behind, gateway(behind) as running:
        behind[0].mode = behind[1].mode = "reset"
        asked = asyncio.create_task(running.stream())
        while not running.ends.choices:
            await asyncio.sleep(0)
        for one in behind:
            if one.name != running.ends.sent_to[0]:
                one.mode = "ok"
        answer = await asked
        told = await explained(running, answer.headers["x-request-id"])
    first, second = told["attempts"]
    assert first["failure"]
    assert "failure" not in second
    assert [first["replica"], second["replica"]] == running.ends.sent_to
    assert told["end"]["how"] == "done"


async def test_who_waits_is_told_why() -> None:
    async with backends(1, first=0.3) as behind, gateway(behind, in_flight=1) as running:
        first, second = asyncio.create_task(running.stream()), None
        while not running.ends.choices:
            await asyncio.sleep(0.005)
        second = asyncio.create_task(running.stream())
        while not running.service.dispatch.waiting:
            await asyncio.sleep(0.005)
        (id,) = running.service.dispatch._held
        told = await explained(running, id)
        assert told["waiting"]["engines"] == {"backend-0": {"outstanding": 1, "bound": 1}}
        assert told["waiting"]["ahead"] == 0
        await asyncio.gather(first, second)
        told = await explained(running, id)
    assert told["waiting"] is None
    assert told["held_s"] > 0


async def test_tenants_see_only_their_own() -> None:
    keys = [{"key": "sk-a", "tenant": "a"}, {"key": "sk-b", "tenant": "b"}, "sk-root"]
    async with backends(1) as behind, gateway(behind, api_keys=keys) as running:
        running.http.headers["authorization"] = "Bearer sk-a"
        answer = await running.stream()
        id = answer.headers["x-request-id"]
        assert (await explained(running, id))["tenant"] == "a"
        assert (await explained(running, id, Authorization="Bearer sk-root"))["tenant"] == "a"
        other = await explained(running, id, 404, Authorization="Bearer sk-b")
        assert other["error"]["code"] == "request_not_found"
        assert other == await explained(running, id, 404, Authorization="Bearer sk-b")
        await explained(running, "req-none", 404)
        await explained(running, id, 401, Authorization="Bearer none")


def test_memory_is_bounded() -> None:
    diary = Diary(3)
    many = [ReplicaView(f"r{i}") for i in range(40)]
    choice = Choice(many[39], 0, many, ["cost"], [[float(i)] for i in range(40)])
    for i in range(10):
        one = job(f"{i}")
        diary.sent(one, choice, 1, 0.0)
        diary.ended(one, End(200, How.DONE, "r39", 1, None, None, 0, ""), 1.0)
    assert len(diary) == 3
    assert diary.tell("6") is None
    told = diary.tell("9")
    assert told is not None
    (attempt,) = told["attempts"]
    kept = [c["name"] for c in attempt["candidates"]]
    assert kept == ["r39", *(f"r{i}" for i in range(CANDIDATES - 1))]
    assert attempt["candidates_left_out"] == 40 - CANDIDATES
