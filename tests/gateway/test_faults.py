"""Whatever an engine does, every client gets one end, and no byte twice."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from typing import Any

import pytest

from tests.gateway.backends import BUSY, backends, whole
from tests.gateway.gateways import Running, gateway
from tidegate.gateway.budget import MEMORY_SECONDS, RetryBudget

QUICK = {"first_token_seconds": 0.3, "stall_seconds": 0.3, "connect_seconds": 1.0}


def hows(running: Running) -> list[str]:
    return [end.how for end in running.ends.ends]


async def test_a_stream_that_is_cut_ends_with_an_error_in_openais_shape() -> None:
    async with backends(1, mode="cut") as behind, gateway(behind) as running:
        answer = await running.stream()
        assert answer.status == 200
        assert answer.events == [0, 1]
        assert answer.begins()
        assert b"[DONE]" not in answer.body
        assert answer.error is not None
        assert answer.error["code"] == "cut"
        assert set(answer.error) == {"message", "type", "param", "code"}
        assert hows(running) == ["cut"]
        assert len(running.service.connections) == 1  # the connection to the client goes on


async def test_a_cut_within_an_event_closes_the_event_first() -> None:
    async with backends(1, mode="cut_within") as behind, gateway(behind) as running:
        answer = await running.stream()
        assert answer.error is not None
        assert answer.body.split(b"\n\n")[-2].startswith(b'data: {"error"')


@pytest.mark.parametrize("first", [0.3, 600.0])
async def test_a_stream_that_stalls_ends_with_an_error(first: float) -> None:
    """In the time of a stall, however long the first token may take."""
    quick = {**QUICK, "first_token_seconds": first}
    async with backends(1, mode="stall") as behind, gateway(behind, **quick) as running:
        async with asyncio.timeout(30):
            answer = await running.stream()
        assert answer.events == [0, 1]
        assert answer.error is not None
        assert answer.error["code"] == "stalled"
        while not behind[0].left:
            await asyncio.sleep(0.005)


async def test_an_answer_that_is_cut_and_no_stream_of_events_is_seen_to_be_broken() -> None:
    async with backends(1, mode="half") as behind, gateway(behind) as running:
        with pytest.raises(Exception, match=r"payload|closed|disconnected"):
            async with running.http.post(f"{running.url}/v1/completions", json={"prompt": "x"}) as answer:
                await answer.read()
        assert hows(running) == ["cut"]


@pytest.mark.parametrize("mode", ["reset", "503", "429", "502", "hang", "gone"])
async def test_a_request_of_which_nothing_was_answered_goes_to_another_engine(mode: str) -> None:
    async with backends(2) as behind, gateway(behind, **QUICK) as running:
        behind[0].mode = mode
        if mode == "gone":
            behind[0].kill()
        answers = await asyncio.gather(*(running.stream() for _ in range(6)))
        assert all(answer.body == whole(answer.marker, 5) for answer in answers)
        assert hows(running) == ["done"] * 6
        assert any(end.attempts == 2 for end in running.ends.ends)


async def test_a_request_that_is_wrong_is_told_so_once_and_counts_for_nobody() -> None:
    async with backends(2, mode="400") as behind, gateway(behind) as running:
        for _ in range(12):
            answer = await running.stream()
            assert (answer.status, answer.body) == (400, BUSY)
        assert hows(running) == ["rejected"] * 12
        assert sum(len(b.requests) for b in behind) == 12
        assert len(running.service.fleet.candidates(asyncio.get_running_loop().time())) == 2


async def test_a_fault_of_the_engine_is_passed_on_and_not_repeated() -> None:
    """What broke one engine might break the next."""
    async with backends(2, mode="500") as behind, gateway(behind) as running:
        answer = await running.stream()
        assert (answer.status, answer.body) == (500, BUSY)
        assert sum(len(b.requests) for b in behind) == 1
        assert hows(running) == ["error"]


async def test_an_engine_that_asks_to_come_back_later_gets_nothing_until_then() -> None:
    async with backends(2) as behind, gateway(behind) as running:
        behind[0].mode, behind[0].retry_after = "429", 60
        answers = [await running.stream() for _ in range(10)]
        assert all(answer.complete for answer in answers)
        assert len(behind[0].requests) == 1


async def test_what_all_engines_say_is_passed_on() -> None:
    async with backends(2, mode="429", retry_after=1) as behind, gateway(behind) as running:
        answer = await running.stream()
        assert (answer.status, answer.body) == (429, BUSY)
        assert answer.headers["retry-after"] == "1"
        assert len(behind[0].requests) == len(behind[1].requests) == 1  # at once: neither was asked again


async def test_engines_that_ask_to_come_back_later_are_up_and_others_wait_for_them() -> None:
    async with backends(1, mode="429", retry_after=1) as behind, gateway(behind, hold_seconds=0.05) as running:
        assert (await running.stream()).status == 429
        async with running.http.get(f"{running.url}/health") as health:
            assert (health.status, await health.json()) == (200, {"status": "ok"})
        behind[0].mode = "ok"
        assert (await running.stream()).complete


async def test_without_a_breaker_that_is_closed_the_gateway_is_not_well() -> None:
    async with backends(1, mode="502") as behind, gateway(behind, hold_seconds=0.05) as running:
        assert (await running.stream()).status == 502
        async with running.http.get(f"{running.url}/health") as health:
            assert (health.status, await health.json()) == (503, {"status": "no_engine"})


async def test_a_second_try_does_not_leave_an_isolated_pool() -> None:
    async with backends(2, mode="502") as behind:
        behind[1].mode = "ok"
        replicas = [{"name": b.name, "url": b.url, "pool": b.name} for b in behind]
        pools = {"mode": "isolated", "classes": {"interactive": "backend-0", "batch": "backend-1"}}
        async with gateway([], replicas=replicas, pools=pools, hold_seconds=0.05) as running:
            assert (await running.stream()).status == 502
            assert behind[1].requests == []


async def test_without_an_engine_that_answers_the_client_is_told_so() -> None:
    async with backends(2, mode="reset") as behind, gateway(behind, hold_seconds=0.1) as running:
        answer = await running.stream()
        assert answer.status in (502, 503)
        assert answer.error is not None
        for backend in behind:
            backend.mode = "hang"


async def test_a_silent_engine_is_left_once_and_not_twice() -> None:
    async with backends(3, mode="hang") as behind, gateway(behind, **QUICK) as running:
        answer = await running.stream()
        assert answer.status == 504
        assert sum(len(b.requests) for b in behind) == 2
        assert hows(running) == ["no_first_token"]
        assert running.ends.ends[0].attempts == 2


async def test_second_tries_are_bounded_by_a_budget() -> None:
    async with backends(2, mode="502") as behind, gateway(behind, hold_seconds=0.1) as running:
        running.service.proxy.budget = RetryBudget(share=0.0, reserve=1.0)
        first, second = await running.stream(), await running.stream()
        assert (first.status, second.status) == (502, 502)
        assert [end.attempts for end in running.ends.ends] == [2, 1]


def test_the_budget_is_a_share_of_traffic_that_is_forgotten() -> None:
    budget = RetryBudget(share=0.1, reserve=2.0)
    assert [budget.take(0.0) for _ in range(3)] == [True, True, False]
    for _ in range(30):
        budget.sent(0.0)
    assert [budget.take(0.0) for _ in range(4)] == [True, True, True, False]
    assert budget.take(10 * MEMORY_SECONDS)


async def test_a_hung_engine_loses_its_prefixes() -> None:
    prompt = "All tides come from the moon and the sun. " * 100
    async with backends(2) as behind, gateway(behind, route="prefix", **QUICK) as running:

        async def cached_at(name: str) -> int:
            assert (await running.stream(prompt=prompt)).complete
            return next(c.cached_tokens for c in running.ends.choices[-1].candidates if c.name == name)

        assert (await running.stream(prompt=prompt)).complete
        (holder,) = [b for b in behind if b.requests]
        assert await cached_at(holder.name) > 0
        holder.mode = "hang"
        assert (await running.stream(prompt=prompt)).complete
        holder.mode = "ok"
        assert await cached_at(holder.name) == 0


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL])
async def test_who_has_no_connection_left_to_make_does_not_blame_the_engine(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with backends(1) as behind, gateway(behind) as running:
        loop = asyncio.get_running_loop()
        connect: Any = loop.create_connection

        async def none_left(made: Any, host: Any = None, port: Any = None, **given: Any) -> Any:
            if port == behind[0].port:
                raise OSError(number, os.strerror(number))
            return await connect(made, host, port, **given)

        monkeypatch.setattr(loop, "create_connection", none_left)
        answer = await running.stream()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.error is not None
        assert answer.error["code"] == "no_connection"
        assert not running.ends.failures
        (replica,) = running.service.fleet
        assert (replica.view.health.recent_failures(loop.time()), replica.view.outstanding) == (0.0, 0)


async def test_a_kept_connection_that_is_closed_under_a_request_is_no_fault() -> None:
    async with backends(1, mode="stale") as behind, gateway(behind) as running:
        for _ in range(5):
            assert (await running.stream()).complete
        assert len(behind[0].requests) == 9  # all but the first came twice
        assert hows(running) == ["done"] * 5
        assert all(end.attempts == 1 for end in running.ends.ends)
        assert not running.ends.failures


async def test_a_kept_connection_that_is_reset_after_the_head_of_an_answer_is_a_fault() -> None:
    async with backends(1) as behind, gateway(behind, hold_seconds=0.1) as running:
        assert (await running.stream()).complete
        behind[0].mode = "reset_after_head"
        answer = await running.stream()
        assert answer.status in (502, 503)
        assert len(behind[0].requests) == len(running.ends.choices)  # none was repeated without a word
        assert set(running.ends.failures["backend-0"]) == {"reset"}


async def test_an_engine_that_is_taken_away_finishes_its_streams() -> None:
    async with backends(2, gap=0.02, events=10) as behind, gateway(behind) as running:
        wanted = {replica.name: replica.wanted for replica in running.service.fleet}
        tasks = [asyncio.create_task(running.stream()) for _ in range(6)]
        while sum(len(b.requests) for b in behind) < 6:
            await asyncio.sleep(0.005)
        running.service.fleet.update([wanted["backend-1"]])
        assert [r.draining for r in running.service.fleet] == [False, True]
        assert all(answer.complete for answer in await asyncio.gather(*tasks))
        assert [r.name for r in running.service.fleet] == ["backend-1"]
        assert (await running.stream()).complete
        assert Counter(running.ends.sent_to) == {"backend-0": 3, "backend-1": 4}


async def test_the_gateway_drains() -> None:
    async with backends(1, gap=0.02, events=10) as behind, gateway(behind, drain_seconds=10.0) as running:
        task = asyncio.create_task(running.stream())
        while not behind[0].requests:
            await asyncio.sleep(0.005)
        drained = asyncio.create_task(running.service.drain(asyncio.Event()))
        await asyncio.sleep(0)
        refused = await running.stream()
        assert refused.status == 503
        assert refused.error is not None
        assert refused.error["code"] == "draining"
        assert (await task).complete
        await drained
        assert not running.service.connections


async def test_draining_is_bounded_and_ends_streams_with_an_error() -> None:
    async with backends(1, mode="stall") as behind, gateway(behind, drain_seconds=0.1) as running:
        streamed = asyncio.create_task(running.stream())
        while not running.ends.first_tokens:
            await asyncio.sleep(0.005)
        behind[0].mode = "hang"
        waiting = asyncio.create_task(running.stream())
        while len(behind[0].requests) < 2:
            await asyncio.sleep(0.005)
        await running.service.drain(asyncio.Event())
        broken, refused = await asyncio.gather(streamed, waiting)
        assert broken.events == [0, 1]
        assert broken.error is not None
        assert (refused.status, refused.terminal) == (503, True)
        assert broken.error["code"] == "cut"
        assert hows(running) == ["shut_down", "shut_down"]
        assert not running.ends.failures


async def test_a_request_that_is_half_read_is_told_of_the_shutdown() -> None:
    async with backends(1) as behind, gateway(behind, drain_seconds=10.0) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 14\r\n\r\n{")
        async with asyncio.timeout(10):
            while not any(connection._head_read for connection in running.service.connections):
                await asyncio.sleep(0.005)
            drained = asyncio.create_task(running.service.drain(asyncio.Event()))
            came = await reader.read()
            writer.close()
            await drained
        assert came.startswith(b"HTTP/1.1 503")
        assert b'"draining"' in came
