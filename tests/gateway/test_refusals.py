"""What a client may not do, and what it is told."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.gateway.backends import backends
from tests.gateway.gateways import Running, gateway

SHORT = {"body_seconds": 0.2, "max_body_bytes": 1000}
KEYS = [{"key": "right", "tenant": "acme"}]
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
START = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


async def say(running: Running, *parts: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and body of the answer to bytes, after which the connection is closed by the gateway."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
    for part in parts:
        writer.write(part)
        await writer.drain()
    async with asyncio.timeout(10):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split(" ")[1]), headers, json.loads(body)


@pytest.mark.parametrize(
    ("parts", "status", "says"),
    [
        ((START + b"content-length: 1001\r\n\r\n",), 413, "larger than 1000 bytes"),
        ((START + b"transfer-encoding: chunked\r\n\r\n", b"3e9\r\n" + b"x" * 1001), 413, "larger than 1000 bytes"),
        ((START + b"content-length: 10\r\n\r\n{",), 408, "nothing of the body"),
        ((START,), 408, "head of the request"),
        ((START + b"x-long: " + b"x" * 70_000,), 431, "headers are larger"),
        ((b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",), 400, "not HTTP/1.1"),
        ((START + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",), 400, "not HTTP/1.1"),
        ((START + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 0\r\n\r\n",), 400, "Upgrade"),
        ((CHUNKED, b"0\r\n", *[b"x-long: " + b"x" * 9_000 + b"\r\n"] * 50), 431, "headers are larger"),
        ((START + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",), 501, "transfer encoding"),
        ((START.replace(b"v1/", b"v1/../") + b"\r\n",), 404, "nothing at"),
        ((START.replace(b"v1/", b"v1/x/%2E%2e/") + b"\r\n",), 404, "nothing at"),
        ((START.replace(b"POST", b"PATCH") + b"\r\n",), 405, "PATCH"),
        ((b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n",), 405, "CONNECT"),
        ((START.replace(b"/v1/completions", b"/else") + b"\r\n",), 404, "/else"),
    ],
)
async def test_what_is_not_read_is_refused_and_the_connection_closed(
    parts: tuple[bytes, ...], status: int, says: str
) -> None:
    async with backends(1) as behind, gateway(behind, **SHORT) as running:
        told, headers, body = await say(running, *parts)
        assert told == status
        assert says in body["error"]["message"]
        assert headers["connection"] == "close"
        assert not behind[0].requests


async def test_whoever_asks_in_another_way_is_told_the_ways_there_are() -> None:
    async with backends(1) as behind, gateway(behind) as running:
        _, headers, _ = await say(running, START.replace(b"POST", b"PATCH") + b"\r\n")
        assert headers["allow"] == "get, post, delete"  # in this order in every process


async def test_a_refusal_of_head_has_no_body() -> None:
    async with backends(1) as behind, gateway(behind) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
        writer.write(b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(10):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 405")
        assert body == b""


@pytest.mark.parametrize("key", [None, "Bearer wrong", "right"])
async def test_strangers_are_refused_before_their_body_is_read(key: str | None) -> None:
    async with backends(1) as behind, gateway(behind, api_keys=KEYS) as running:
        header = b"" if key is None else b"authorization: " + key.encode() + b"\r\n"
        status, headers, body = await say(running, START + header + b"content-length: 1000000\r\n\r\n")
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert headers["www-authenticate"] == "bearer"
        assert not behind[0].requests


async def test_a_key_is_let_in_and_goes_no_further() -> None:
    async with backends(1) as behind, gateway(behind, api_keys=KEYS) as running:
        headers = {"authorization": "Bearer right"}
        async with running.http.post(f"{running.url}/v1/completions", json={"prompt": "x"}, headers=headers) as answer:
            assert answer.status == 200
        assert "right" not in str(behind[0].requests)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (b"{", None, "not JSON"),
        (b"[]", None, "object"),
        (b'{"stream": "yes"}', "stream", "bool"),
        (b'{"metadata": {"slo_class": 1}}', "metadata[...]", "str"),
        (b'{"metadata": {"slo_class": "no such"}}', "metadata.slo_class", "unknown class"),
        (b'{"a": ' + b"[" * 100_000, None, "not JSON"),
        (b"", None, "not JSON"),
        (b'{"priority": 1%b}' % (b"0" * 400), "priority", "int"),
        (b'{"max_tokens": 1%b}' % (b"0" * 400), "max_tokens", "int"),
        (b'{"n": -1%b}' % (b"0" * 30), "n", "int"),
        (b'{"user": "%b"}' % (b"x" * 257), "user", "256"),
        (b'{"model": "%b"}' % (b"x" * 1025), "model", "1024"),
    ],
)
async def test_a_body_that_says_nothing_is_refused(body: bytes, param: str | None, says: str) -> None:
    async with backends(1) as behind, gateway(behind) as running:
        async with running.http.post(f"{running.url}/v1/completions", data=body) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["param"]) == (400, param)
            assert says in error["message"]
        assert not behind[0].requests
        assert (await running.stream()).complete  # on the same connection


async def test_a_client_that_waits_to_be_asked_for_its_body_is_asked() -> None:
    async with backends(1) as behind, gateway(behind) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
        writer.write(START + b"expect: 100-continue\r\ncontent-length: 15\r\n\r\n")
        async with asyncio.timeout(10):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b'{"prompt": "x"}')
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        assert "expect" not in behind[0].requests[0].headers
        writer.close()


async def test_a_client_that_does_not_read_is_given_up() -> None:
    async with (
        backends(1, events=1024, padding=64 * 1024) as behind,
        gateway(behind, body_seconds=0.3, stall_seconds=60.0) as running,
    ):
        _, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
        body = b'{"prompt": "x", "stream": true}'
        writer.write(START + b"content-length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(30):
            while not behind[0].left:
                await asyncio.sleep(0.02)
        assert [end.how for end in running.ends.ends] == ["client_left"]
        writer.close()


async def test_an_idle_connection_is_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.gateway.front.KEEP_ALIVE_SECONDS", 0.1)
    async with backends(1) as behind, gateway(behind) as running:
        assert (await running.stream()).complete
        async with asyncio.timeout(10):
            while running.service.connections:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(("stream", "seen", "used"), [(True, 2, 1 + 2), (False, 0, 1 + 300)])
async def test_leaving_early_makes_nothing_free(stream: bool, seen: int, used: int) -> None:
    """A stream's tokens are counted as they come; of an answer that is not streamed the estimate stands."""
    keys = [{"key": "right", "tokens_per_minute": 1}]  # so few that none come back meanwhile
    async with backends(1, mode="stall" if stream else "hang") as behind, gateway(behind, api_keys=keys) as running:
        body = json.dumps({"prompt": "x", "stream": stream, "max_tokens": 300}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
        writer.write(START + b"authorization: Bearer right\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(10):
            for _ in range(seen):
                await reader.readuntil(b'"choices"')
            while not behind[0].requests:
                await asyncio.sleep(0.005)
            writer.close()
            while not running.ends.ends:
                await asyncio.sleep(0.005)
        (end,) = running.ends.ends
        assert (end.how, end.outputs) == ("client_left", seen)
        (bucket,) = running.service.door._rates._buckets.values()
        assert round(bucket._level) == 1 - used


@pytest.mark.parametrize("path", ["/v1/%63ompletions", "/v1/completions/"])
async def test_another_spelling_of_a_path_is_no_way_around_the_door(path: str) -> None:
    async with backends(1) as behind, gateway(behind) as running:
        status, _, _ = await say(
            running, START.replace(b"/v1/completions", path.encode()), b"connection: close\r\n\r\n"
        )
        assert status == 400
        assert not behind[0].requests


async def test_one_client_too_many_is_told_so_and_harms_nobody() -> None:
    async with backends(1) as behind, gateway(behind, max_connections=2) as running:
        port = int(running.url.rpartition(":")[2])
        first, second = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        status, headers, body = await say(running, START + b"content-length: 0\r\n\r\n")
        assert (status, body["error"]["code"]) == (503, "too_many_connections")
        assert int(headers["retry-after"]) > 0
        first[1].close()
        async with asyncio.timeout(10):
            while len(running.service.connections) == 2:
                await asyncio.sleep(0.005)
        assert (await running.stream()).complete
        second[1].close()


async def test_of_those_who_are_too_many_not_too_many_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.gateway.front._MAX_REFUSED", 2)
    async with backends(1) as behind, gateway(behind, max_connections=1) as running:
        port = int(running.url.rpartition(":")[2])
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
        async with asyncio.timeout(10):
            told = await asyncio.gather(*(reader.read() for reader, _ in clients[1:]), return_exceptions=True)
        assert sum(came.startswith(b"HTTP/1.1 503") for came in told if isinstance(came, bytes)) == 2
        for _, writer in clients:
            writer.close()


async def test_who_is_still_sending_learns_why_it_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.gateway.front._LAST_WORDS_SECONDS", 0.3)
    async with backends(1) as behind, gateway(behind, max_body_bytes=1000) as running:
        pieces = [b"x" * 100_000] * 40
        reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
        writer.write(START + b"content-length: 4000000\r\n\r\n")
        for piece in pieces:  # more than twice as long as last words take
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)
        async with asyncio.timeout(10):
            assert (await reader.read()).startswith(b"HTTP/1.1 413")
        writer.close()


async def test_what_comes_for_a_client_that_has_just_left_goes_nowhere() -> None:
    loop, wrong = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, context: wrong.append(context))
    async with backends(1, mode="stall") as behind, gateway(behind) as running:
        streamed = asyncio.create_task(running.stream())
        while not running.ends.first_tokens:
            await asyncio.sleep(0.005)
        (connection,) = running.service.connections
        reply = connection._reply
        assert reply is not None
        assert reply.write_chunk is not None
        connection.transport.abort()
        loop.call_soon(reply.write, b"more")  # after the connection is lost, and before its task hears of it
        loop.call_soon(lambda: reply.write_chunk and reply.write_chunk(b"4\r\nmore\r\n"))
        with pytest.raises(Exception, match=r"payload|closed|disconnected"):
            await streamed
        assert [end.how for end in running.ends.ends] == ["client_left"]
    assert not wrong
