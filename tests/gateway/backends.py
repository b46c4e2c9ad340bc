"""Engines that stream and fail as they are told to, on real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httptools

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
BUSY = b'{"error": {"message": "no room", "type": "server_error", "param": null, "code": "busy"}}'


def event(marker: str, n: int) -> bytes:
    """The n-th event of the answer to the request that carries `marker`."""
    return b"data: " + json.dumps({"id": marker, "n": n, "choices": [{"index": 0, "text": f" {n}"}]}).encode() + b"\n\n"


def whole(marker: str, events: int) -> bytes:
    """Everything that a client must get."""
    return b"".join(event(marker, n) for n in range(events)) + DONE


@dataclass(slots=True)
class Received:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        """The body, if it is a JSON object."""
        return json.loads(self.body) if self.body.startswith(b"{") else {}

    @property
    def marker(self) -> str:
        return str(self.json.get("marker", ""))


@dataclass(eq=False)
class Backend:
    """One engine. `mode` may change at any time and holds for answers that begin then.

    ok     events, `first` seconds to the first and `gap` between two
    slow   the same, ten times as long to the first
    cut    the connection ends after `cut_after` events
    cut_within  the same, in the middle of an event
    until_closed  an answer without a length, which is what was asked; the connection ends with it
    half   an answer that is no stream ends after half of it
    stall  nothing more comes after `cut_after` events
    hang   the request is read and never answered
    reset  the connection is reset before a byte of the answer
    reset_after_head  the same, with the head sent
    stale  as reset, but only where it had a request before
    503, 429, 500, 400: that status; with `retry_after` where it is set
    """

    name: str = "backend"
    mode: str = "ok"
    events: int = 5
    first: float = 0.0
    gap: float = 0.0
    cut_after: int = 2
    retry_after: int | None = None
    padding: int = 0
    port: int = 0
    requests: list[Received] = field(default_factory=list)
    finished: int = 0
    left: int = 0
    connections: set[_Connection] = field(default_factory=set)
    _server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", self.port, backlog=512)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Let streams finish and take nothing new, as a server that is told to end does."""
        assert self._server is not None
        self._server.close()
        for connection in list(self.connections):
            connection.close_when_idle()
        while self.connections:
            await asyncio.sleep(0.005)

    def kill(self) -> None:
        """Everything ends at once."""
        assert self._server is not None
        self._server.close()
        for connection in list(self.connections):
            connection.reset()


class _Connection(asyncio.Protocol):
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._requests = 0
        self._drained = asyncio.Event()
        self._drained.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self._parser = httptools.HttpRequestParser(self)
        self._backend.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._backend.connections.discard(self)
        self._drained.set()
        if self._task is not None and not self._task.done():
            self._backend.left += 1
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def pause_writing(self) -> None:
        self._drained.clear()

    def resume_writing(self) -> None:
        self._drained.set()

    def close_when_idle(self) -> None:
        self._closing = True
        if self._task is None or self._task.done():
            self.transport.close()

    def reset(self) -> None:
        sock = self.transport.get_extra_info("socket")
        if sock is not None and not self.transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def on_message_begin(self) -> None:
        self._url, self._headers, self._body = b"", dict[str, str](), b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._url == b"/metrics":  # they have none
            self.transport.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()
            return
        method = self._parser.get_method().decode()
        received = Received(method, self._url.decode(), self._headers, self._body)
        self._backend.requests.append(received)
        self._task = asyncio.get_running_loop().create_task(self._answer(received))

    async def _answer(self, received: Received) -> None:
        backend, mode = self._backend, self._backend.mode
        if mode == "hang":
            await asyncio.Event().wait()
        self._requests += 1
        if mode == "reset" or (mode == "stale" and self._requests > 1):
            self._task = None
            self.reset()
            return
        if mode == "reset_after_head":
            self._task = None
            self.transport.write(HEAD)
            asyncio.get_running_loop().call_later(0.02, self.reset)
            return
        if mode.isdigit():
            self._refuse(int(mode))
        elif mode == "until_closed":
            self.transport.write(b"HTTP/1.1 200 OK\r\n\r\n" + received.body)
            self._closing = True
        elif mode == "half":
            self._task = None
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
            self.transport.close()
            return
        elif received.json.get("stream"):
            await self._stream(received.marker, mode)
        else:
            self._whole(received)
        backend.finished += 1
        if self._closing:
            self.transport.close()

    async def _stream(self, marker: str, mode: str) -> None:
        backend = self._backend
        await asyncio.sleep(backend.first * (10 if mode == "slow" else 1))
        for n in range(backend.events):
            if n == backend.cut_after and mode == "cut":
                self._task = None
                self.transport.abort()
                return
            if n == backend.cut_after and mode == "cut_within":
                self._task = None
                self.transport.write(b"5\r\ndata:\r\n")
                self.transport.close()
                return
            if n == backend.cut_after and mode == "stall":
                await asyncio.Event().wait()
            if n and backend.gap:
                await asyncio.sleep(backend.gap)
            data = event(marker, n) + b": " + b"x" * backend.padding + b"\n\n" if backend.padding else event(marker, n)
            self.transport.write((b"" if n else HEAD) + b"%x\r\n%b\r\n" % (len(data), data))
            await self._drained.wait()
        self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE))

    def _whole(self, received: Received) -> None:
        body = json.dumps({"id": received.marker, "path": received.target, "usage": {"prompt_tokens": 7}}).encode()
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-request-id: engine-1\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )

    def _refuse(self, status: int) -> None:
        after = self._backend.retry_after
        retry = b"" if after is None else b"retry-after: %d\r\n" % after
        self.transport.write(
            b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b"
            % (status, retry, len(BUSY), BUSY)
        )


@asynccontextmanager
async def backends(n: int, **options: Any) -> AsyncIterator[list[Backend]]:
    """So many engines, up until the block ends."""
    made = [Backend(f"backend-{i}", **options) for i in range(n)]
    for backend in made:
        await backend.start()
    try:
        yield made
    finally:
        for backend in made:
            backend.kill()
