"""Bytes go through as they came, as soon as they come, and no faster than the client reads."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.gateway.backends import backends, event, whole
from tests.gateway.gateways import gateway
from tidegate.gateway.http1 import Headers
from tidegate.gateway.upstream import Connection, Upstream

HOST = "127.0.0.1"


def no_delay(transport: asyncio.BaseTransport) -> bool:
    sock = transport.get_extra_info("socket")
    return bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))


async def raw(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(data)
    return reader, writer


def post(body: bytes, extra: bytes = b"") -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + extra + b"content-length: %d\r\n\r\n" % len(body) + body


async def test_a_stream_is_passed_on_byte_for_byte() -> None:
    async with backends(1) as behind, gateway(behind) as running:
        answer = await running.stream()
        assert answer.status == 200
        assert answer.body == whole(answer.marker, 5)
        assert answer.headers["content-type"] == "text/event-stream"
        assert [end.how for end in running.ends.ends] == ["done"]
        assert running.ends.ends[0].outputs == 6  # events, the last one included: nobody counted tokens


@pytest.mark.parametrize("path", ["/v1/models", "/v1/anything/else?a=1&b=%20"])
async def test_what_is_not_known_is_passed_on_as_it_is(path: str) -> None:
    async with backends(1) as behind, gateway(behind) as running:
        async with running.http.get(running.url + path) as answer:
            assert (await answer.json())["path"] == path
        async with running.http.post(running.url + "/v1/audio", data=b"\x00\xff{") as answer:
            assert answer.status == 200
        assert behind[0].requests[0].target == path
        assert behind[0].requests[-1].body == b"\x00\xff{"


async def test_headers_are_passed_on_but_for_those_of_one_connection_and_the_clients_key() -> None:
    sent = {
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "tracestate": "a=1",
        "authorization": "Bearer secret",
        "connection": "keep-alive, x-hop",
        "x-hop": "1",
        "x-request-id": "mine",
        "x-own": "kept",
    }
    async with backends(1) as behind, gateway(behind) as running:
        async with running.http.post(running.url + "/v1/embeddings", json={"input": "x"}, headers=sent) as answer:
            given = answer.headers
        got = behind[0].requests[0].headers
        assert {name: got.get(name) for name in sent} == {
            "traceparent": sent["traceparent"],
            "tracestate": "a=1",
            "authorization": None,
            "connection": None,
            "x-hop": None,
            "x-request-id": given["x-request-id"],
            "x-own": "kept",
        }
        assert got["host"] == f"{HOST}:{behind[0].port}"
        assert given["x-engine-request-id"] == "engine-1"


async def test_each_event_is_passed_on_when_it_comes() -> None:
    """The next event is made only when the client has read the one before: nothing may be collected on the way."""
    async with backends(1) as behind, gateway(behind) as running:
        behind[0].mode, behind[0].cut_after = "stall", 1
        body = b'{"prompt": "x", "stream": true, "marker": "m"}'
        reader, writer = await raw(int(running.url.rpartition(":")[2]), post(body))
        async with asyncio.timeout(10):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
            assert event("m", 0) in await reader.readuntil(b"\n\n\r\n")
        writer.close()


async def test_nagle_is_off_on_both_sides() -> None:
    async with backends(1) as behind, gateway(behind) as running:
        await running.stream()
        (client,) = running.service.connections
        (replica,) = running.service.fleet
        upstream = await replica.upstream.connection()
        assert no_delay(client.transport)
        assert no_delay(upstream.transport)
        assert upstream.used


async def test_connections_are_kept_on_both_sides() -> None:
    async with backends(1) as behind, gateway(behind) as running:
        for _ in range(5):
            assert (await running.stream()).complete
        assert len(running.service.connections) == 1
        assert len(behind[0].connections) == 1


async def test_a_client_that_leaves_closes_the_engines_connection() -> None:
    async with backends(1) as behind, gateway(behind) as running:
        behind[0].mode = "stall"
        body = b'{"prompt": "x", "stream": true, "marker": "m"}'
        reader, writer = await raw(int(running.url.rpartition(":")[2]), post(body))
        await reader.readuntil(event("m", 1))
        writer.close()
        async with asyncio.timeout(10):
            while not behind[0].left:
                await asyncio.sleep(0.005)
        assert [(end.how, end.status) for end in running.ends.ends] == [("client_left", 499)]
        assert len(running.service.fleet) == 0


async def test_a_client_that_leaves_before_an_answer_closes_it_as_well() -> None:
    async with backends(1) as behind, gateway(behind) as running:
        behind[0].mode = "hang"
        _, writer = await raw(int(running.url.rpartition(":")[2]), post(b'{"prompt": "x"}'))
        async with asyncio.timeout(10):
            while not behind[0].requests:
                await asyncio.sleep(0.005)
            writer.close()
            while not behind[0].left:
                await asyncio.sleep(0.005)
        assert [end.how for end in running.ends.ends] == ["client_left"]


async def test_a_slow_client_slows_the_engine() -> None:
    """64 MiB are on offer; what is under way stays within what sockets and two buffers hold."""
    async with backends(1, events=1024, padding=64 * 1024) as behind, gateway(behind) as running:
        body = b'{"prompt": "x", "stream": true, "marker": "m"}'
        reader, writer = await raw(int(running.url.rpartition(":")[2]), post(body))
        await reader.readuntil(b"\r\n\r\n")
        (client,) = running.service.connections
        async with asyncio.timeout(30):
            while not client.paused:
                await asyncio.sleep(0.005)
        assert client.transport.get_write_buffer_size() < 2**20
        assert behind[0].finished == 0
        async with asyncio.timeout(60):
            while await reader.read(2**20):
                if behind[0].finished:
                    break
        writer.close()


async def test_requests_that_come_at_once_are_answered_in_order() -> None:
    async with backends(1) as behind, gateway(behind) as running:
        first = post(b'{"prompt": "x", "stream": true, "marker": "a"}')
        second = post(b'{"prompt": "x", "marker": "b"}')
        reader, writer = await raw(int(running.url.rpartition(":")[2]), first + second)
        async with asyncio.timeout(10):
            assert b"event-stream" in await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"0\r\n\r\n")
            assert b"application/json" in await reader.readuntil(b"\r\n\r\n")
        assert [r.marker for r in behind[0].requests] == ["a", "b"]
        writer.close()


async def test_an_answer_without_a_length_ends_with_the_engines_connection() -> None:
    async with backends(1, mode="until_closed") as behind, gateway(behind) as running:
        async with running.http.post(f"{running.url}/v1/audio", data=b"sound") as answer:
            assert (answer.status, await answer.read()) == (200, b"sound")
        assert [end.how for end in running.ends.ends] == ["done"]


@pytest.mark.parametrize("gap", [0.0, 0.02])  # all at once, and each event as a chunk of its own
async def test_http_1_0_gets_a_body_that_ends_with_the_connection(gap: float) -> None:
    async with backends(1, gap=gap) as behind, gateway(behind) as running:
        body = b'{"prompt": "x", "stream": true, "marker": "m"}'
        request = post(body).replace(b"HTTP/1.1", b"HTTP/1.0")
        reader, writer = await raw(int(running.url.rpartition(":")[2]), request)
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert rest == whole("m", 5)
        writer.close()


async def test_http_1_0_is_not_kept_since_it_would_have_to_be_told() -> None:
    async with backends(1) as behind, gateway(behind) as running:
        request = post(b'{"prompt": "x"}', b"connection: keep-alive\r\n").replace(b"HTTP/1.1", b"HTTP/1.0")
        reader, writer = await raw(int(running.url.rpartition(":")[2]), request)
        async with asyncio.timeout(10):
            head = await reader.read()
        assert b"connection: close" in head
        writer.close()


async def test_a_body_in_chunks_passes_whole_and_its_trailers_do_not() -> None:
    body = b'{"prompt": "' + b"x" * 100 + b'"}'
    chunks = b"".join(b"2;x=y\r\n%b\r\n" % body[i : i + 2] for i in range(0, len(body), 2))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    async with backends(1) as behind, gateway(behind) as running:
        port = int(running.url.rpartition(":")[2])
        reader, writer = await raw(port, head + chunks + b"0\r\nx-late: 1\r\nx-tenant: evil\r\n\r\n")
        async with asyncio.timeout(10):
            assert b" 200 " in await reader.readuntil(b"\r\n")
        writer.close()
        (got,) = behind[0].requests
        assert got.body == body
        assert "x-late" not in got.headers
        assert got.headers["x-tenant"] == "default"


async def test_a_client_cannot_pile_up_requests() -> None:
    async with backends(1, mode="hang") as behind, gateway(behind) as running:
        _, writer = await raw(int(running.url.rpartition(":")[2]), post(b'{"prompt": "x"}'))
        async with asyncio.timeout(10):
            while not behind[0].requests:
                await asyncio.sleep(0.005)
            (client,) = running.service.connections
            while client.transport.is_reading():
                writer.write(post(b'{"prompt": "x"}'))
                await asyncio.sleep(0.005)
        assert len(behind[0].requests) == 1
        writer.close()


class Pausing:
    """Stops reading at whatever comes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.whole = asyncio.Event()

    def head(self, status: int, headers: Headers, length: int | None) -> None: ...
    def lost(self, reason: str) -> None: ...
    def overdue(self) -> None: ...

    def data(self, data: bytes) -> None:
        self._connection.pause()

    def ended(self, data: bytes = b"") -> None:
        self._connection.pause()
        self.whole.set()


async def test_a_connection_that_was_paused_by_the_end_of_an_answer_serves_the_next() -> None:
    async with backends(1) as behind:
        upstream = Upstream(behind[0].url, connect_seconds=5.0)
        connections = set()
        for _ in range(3):
            connection = await upstream.connection()
            connections.add(connection)
            receiver = Pausing(connection)
            connection.send(upstream.head("GET", "/v1/models", [], None), b"", receiver)
            async with asyncio.timeout(10):
                await receiver.whole.wait()
        assert len(connections) == 1
        upstream.close()
