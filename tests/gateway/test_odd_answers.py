"""Answers that no engine should give: each client still gets one end, and what is not an answer's is nobody's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from tests.gateway.backends import Backend
from tests.gateway.engine_pages import page, served
from tests.gateway.gateways import Running, gateway

EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
HI = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


@asynccontextmanager
async def before(answer: bytes, **options: Any) -> AsyncIterator[Running]:
    """A gateway before an engine that answers everything with these bytes and closes."""
    async with served(lambda path, head: page("", "404 Not Found") if path == "/metrics" else answer) as engine:
        odd = Backend("odd", port=int(engine.url.rpartition(":")[2]))
        async with gateway([odd], **options) as running:
            yield running


async def ask(running: Running) -> tuple[bytes, bytes, bool]:
    """Head and body of what comes, and whether the gateway has closed the connection after it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(20):
        while not running.ends.ends:
            await asyncio.sleep(0.005)
    writer.write(b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n")  # is refused, and the last of its connection
    async with asyncio.timeout(20):
        came = await reader.read()
    writer.close()
    head, _, rest = came.partition(b"\r\n\r\n")
    body, _, refused = rest.partition(b"HTTP/1.1 405")
    return head, body, not refused


@pytest.mark.parametrize(
    "more", [b" world", b"HTTP/1.1 500 Evil\r\nx-evil: 1\r\ncontent-length: 3\r\n\r\nbad", b"\r\n\r\n\x00"]
)
async def test_what_follows_an_answer_is_no_part_of_it(more: bytes) -> None:
    async with before(HI + more) as running:
        head, body, closed = await ask(running)
        assert head.startswith(b"HTTP/1.1 200")
        assert b"evil" not in head
        assert (body, closed) == (b"hi", False)
        assert [end.how for end in running.ends.ends] == ["done"]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nxxx",
        HI.replace(b"200", b"000"),
        HI.replace(b"content-length: 2", b"content-length: 2\r\ncontent-length: 5"),
        HI.replace(b"content-length: 2", b"transfer-encoding: gzip"),
        b"\x00garbage\r\n\r\n",
        b"",
    ],
)
async def test_what_is_no_answer_is_a_failure_in_words(answer: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with before(answer) as running:
        head, body, _ = await ask(running)
        assert head.startswith(b"HTTP/1.1 502")
        assert b"no engine could answer" in body
        assert set(running.ends.failures["odd"]) == {"reset"}
        assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("said", "how"),
    [
        (format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True), "turned_away"),
        ("Wed, 21 Oct 2015 07:28:00 GMT", "turned_away"),
        ("Wed, 21 Oct 99999999 07:28:00 GMT", "error"),
        ("soon", "error"),
    ],
    ids=["to come", "past", "beyond", "no date"],
)
async def test_when_to_come_back_may_be_a_date(said: str, how: str) -> None:
    busy = f"HTTP/1.1 503 Busy\r\nretry-after: {said}\r\ncontent-length: 0\r\n\r\n".encode()
    async with before(busy, hold_seconds=0.1) as running:
        head, _, _ = await ask(running)
        assert head.startswith(b"HTTP/1.1 503")
        assert set(running.ends.failures["odd"]) == {how}


@pytest.mark.parametrize(
    "framing", [b"content-length: 999\r\n", b"content-encoding: gzip\r\ntransfer-encoding: chunked\r\n"]
)
async def test_a_cut_stream_that_no_event_fits_into_ends_with_its_connection(framing: bytes) -> None:
    """An error event would make up a part of the declared length, and the next answer the rest; among compressed
    bytes it would be noise."""
    async with before(EVENTS + framing + b"\r\n5\r\ndata:\r\n") as running:
        _, body, closed = await ask(running)
        assert b"error" not in body
        assert closed
        assert [end.how for end in running.ends.ends] == ["cut"]


async def test_an_answer_in_no_transfer_encoding_ends_with_the_engines_connection() -> None:
    async with before(b"HTTP/1.1 200 OK\r\ntransfer-encoding: identity\r\n\r\nhi") as running:
        _, body, closed = await ask(running)
        assert (body, closed) == (b"2\r\nhi\r\n0\r\n\r\n", False)
        assert [end.how for end in running.ends.ends] == ["done"]


async def test_a_content_type_is_known_in_any_case() -> None:
    async with before(
        EVENTS.replace(b"text/event", b"Text/Event") + b"transfer-encoding: chunked\r\n\r\n5\r\ndata:\r\n"
    ) as r:
        _, body, closed = await ask(r)
        assert b'"code": "cut"' in body
        assert not closed
