"""Clients that read slowly or not at all, and that ask faster than they read."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from tests.gateway.backends import backends
from tests.gateway.gateways import Running, gateway
from tidegate.gateway.app import Asked, Page
from tidegate.gateway.front import ClientConnection

HEALTH = b"GET /health HTTP/1.1\r\n\r\n"
BIG = b"GET /big HTTP/1.1\r\n\r\n"
SIZE = 8_000_000  # bytes of /big: more than systems take


def post(body: bytes, extra: bytes = b"") -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\n" + extra + b"content-length: %d\r\n\r\n" % len(body) + body


STREAM = post(b'{"prompt": "x", "stream": true, "marker": "m"}')


class Client:
    """A socket that reads when it is told to, and whose system takes little by itself."""

    def __init__(self, running: Running) -> None:
        self._loop = asyncio.get_running_loop()
        self._port = int(running.url.rpartition(":")[2])
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    async def say(self, data: bytes) -> None:
        if self.socket.getsockname()[1] == 0:
            await self._loop.sock_connect(self.socket, ("127.0.0.1", self._port))
        await self._loop.sock_sendall(self.socket, data)

    async def read(self, at_most: int = 2**20) -> bytes:
        async with asyncio.timeout(20):
            return await self._loop.sock_recv(self.socket, at_most)

    async def read_until(self, end: bytes) -> bytes:
        came = bytearray()
        while not came.endswith(end):
            part = await self.read()
            assert part, bytes(came[-200:])
            came += part
        return bytes(came)

    async def read_all(self) -> bytes:
        came = bytearray()
        while part := await self.read():
            came += part
        return bytes(came)


@asynccontextmanager
async def slow(running: Running) -> AsyncIterator[Client]:
    """A client of a gateway that has a large page as well."""
    app = running.service.app

    async def big(asked: Asked) -> Page:
        return Page(200, "text/plain", b"x" * SIZE)

    app._pages = {**app._pages, "/big": big}
    client = Client(running)
    try:
        yield client
    finally:
        client.socket.close()


async def until(so: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not so():
            await asyncio.sleep(0.005)


async def connected(running: Running) -> ClientConnection:
    await until(lambda: running.service.connections)
    (connection,) = running.service.connections
    return connection


async def test_requests_that_come_together_wait_as_bytes() -> None:
    async with backends(1) as behind, gateway(behind) as running, slow(running) as client:
        await client.say(HEALTH * 5_000)
        connection = await connected(running)
        most, answers = 0, 0
        while answers < 5_000:
            answers += (await client.read()).count(b"HTTP/1.1 200")
            most = max(most, len(connection._waiting))
        assert answers == 5_000
        assert most < 1_000


async def test_what_comes_behind_a_request_that_waits_is_bounded() -> None:
    async with backends(1, mode="hang") as behind, gateway(behind) as running, slow(running) as client:
        await client.say(post(b"{}") + post(b"{}"))
        connection = await connected(running)
        saying = asyncio.create_task(client.say(HEALTH * 1_000_000))
        await until(lambda: not connection.transport.is_reading())
        assert len(connection._held) < 2**20
        saying.cancel()


async def test_no_answer_begins_before_those_before_it_were_read() -> None:
    async with backends(1) as behind, gateway(behind) as running, slow(running) as client:
        await client.say(BIG * 3 + STREAM)
        connection = await connected(running)
        await until(lambda: connection.paused)
        for _ in range(10):
            await asyncio.sleep(0.01)
            assert connection.transport.get_write_buffer_size() < 2 * SIZE
        assert not behind[0].requests
        came = await client.read_until(b"0\r\n\r\n")
        assert came.count(b"HTTP/1.1 200") == 4


async def test_a_refusal_does_not_overtake_the_answers_before_it() -> None:
    async with backends(1) as behind, gateway(behind) as running, slow(running) as client:
        await client.say(BIG)
        connection = await connected(running)
        await until(lambda: connection.paused)
        await client.say(HEALTH + b"\x00no request\r\n\r\n")
        await until(lambda: connection._closing)
        came = await client.read_all()
        assert len(came) > SIZE
        assert b" 400 " not in came


async def test_who_reads_nothing_of_what_came_before_is_given_up_with_all_that_waits() -> None:
    async with backends(1) as behind, gateway(behind, body_seconds=0.2) as running, slow(running) as client:
        await client.say(BIG + STREAM)
        await connected(running)
        await until(lambda: not running.service.connections)
        assert not behind[0].requests


async def test_a_client_is_seen_to_leave_behind_a_request_that_waits() -> None:
    async with backends(1, mode="hang") as behind, gateway(behind) as running, slow(running) as client:
        await client.say(post(b"{}") * 3)
        await until(lambda: behind[0].requests)
        client.socket.close()
        await until(lambda: behind[0].left)
        assert [end.how for end in running.ends.ends] == ["client_left"]


async def test_a_connection_that_was_paused_is_idle_no_longer_than_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.gateway.front.KEEP_ALIVE_SECONDS", 0.1)
    async with backends(1) as behind, gateway(behind) as running, slow(running) as client:
        await client.say(BIG)
        connection = await connected(running)
        await until(lambda: connection.paused)
        assert len(await client.read_all()) > SIZE


async def test_a_body_is_waited_for_no_longer_behind_an_answer_that_was_read_late() -> None:
    async with backends(1) as behind, gateway(behind, body_seconds=0.8) as running, slow(running) as client:
        await client.say(BIG + STREAM[:-1])
        connection = await connected(running)
        await until(lambda: connection.paused)
        assert b'"body_stalled"' in await client.read_all()


async def test_a_connection_that_ends_waits_for_its_client_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.gateway.front._LAST_WORDS_SECONDS", 0.1)
    async with backends(1) as behind, gateway(behind) as running, slow(running) as client:
        await client.say(BIG.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        connection = await connected(running)
        await until(lambda: connection.paused)
        await asyncio.sleep(0.3)  # several times as long as last words may take
        assert len(await client.read_all()) > SIZE
        await until(lambda: not running.service.connections)  # though the client does not close its side


async def test_who_sends_no_more_and_does_not_read_is_given_up() -> None:
    async with backends(1) as behind, gateway(behind, body_seconds=0.2) as running, slow(running) as client:
        await client.say(BIG)
        connection = await connected(running)
        await until(lambda: connection.paused)
        client.socket.shutdown(socket.SHUT_WR)
        await until(lambda: not running.service.connections)


async def test_a_client_that_reads_slowly_and_steadily_is_not_given_up() -> None:
    async with (
        backends(1, events=1024, padding=64 * 1024) as behind,
        gateway(behind, body_seconds=0.8) as running,
        slow(running) as client,
    ):
        await client.say(STREAM)
        connection = await connected(running)
        await until(lambda: connection.paused)
        loop = asyncio.get_running_loop()
        end = loop.time() + 2.0  # more than twice as long as one may read nothing
        while loop.time() < end:
            assert await client.read(1000)
            await asyncio.sleep(0.02)
        assert connection.paused
        assert not running.ends.ends


async def test_a_shutdown_waits_for_what_clients_have_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.gateway.run._LAST_WORDS_SECONDS", 0.02)
    async with backends(1) as behind, gateway(behind, drain_seconds=20.0) as running, slow(running) as client:
        await client.say(BIG)
        connection = await connected(running)
        await until(lambda: connection.paused)
        drained = asyncio.create_task(running.service.drain(asyncio.Event()))
        await asyncio.sleep(0.1)
        assert not drained.done()
        assert len(await client.read_all()) > SIZE
        await drained
