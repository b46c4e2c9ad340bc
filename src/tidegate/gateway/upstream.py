"""HTTP/1.1 to one replica: pooled connections, nothing held back, cancellation by closing."""

from __future__ import annotations

import asyncio
import errno
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from tidegate.api.errors import ApiError
from tidegate.errors import ConfigError, TidegateError
from tidegate.gateway.deadline import Deadline
from tidegate.gateway.http1 import WITHOUT_BODY, Headers, request_head, send_at_once

MAX_IDLE = 256
"""Connections that wait for a request, at most."""

_OUR_OWN = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL})
"""No file or port left here for a connection: that says nothing of the replica."""


class Unreachable(TidegateError):
    """No connection to a replica could be had."""


class Receiver(Protocol):
    """Who takes an answer. `head` comes first; `ended` or `lost` last, once."""

    def head(self, status: int, headers: Headers, length: int | None) -> None:
        """Status, headers in lower case, and the body's bytes where they were declared."""
        ...

    def data(self, data: bytes) -> None:
        """A part of the body, not empty: all that one read brought."""
        ...

    def chunk(self, data: bytes) -> bool:
        """Take what begins where a chunk does if it is exactly one, framing and all, as most reads of a stream are.
        False: it is not, or not wanted so, and nothing was done; what it carries comes as `data` then."""
        ...

    def ended(self, data: bytes = b"") -> None:
        """The answer is whole, with the last of its body."""
        ...

    def lost(self, reason: str) -> None:
        """The connection ended before the answer did."""
        ...

    def overdue(self) -> None:
        """The connection's deadline has passed before its answer was whole."""
        ...


class Connection(asyncio.Protocol):
    """One connection to a replica, for one request after another.

    used:      it had a request before
    answering: something of the answer to the last request came
    deadline:  of the answer under way, for its receiver to set: one timer for all answers, which cost more to make
    """

    def __init__(self, idle: list[Connection], loop: asyncio.AbstractEventLoop) -> None:
        self._idle = idle
        self.deadline = Deadline(loop, self._overdue)
        self._receiver: Receiver | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._chunks: list[bytes] = []
        self.on_body = self._chunks.append  # the parser calls it
        self._complete = False
        self._keep = False
        self._until_closed = False
        self._chunk_is_complete = False
        self._between_chunks = False  # of an answer: the parser waits for the size of the next
        self.used = False
        self.answering = False

    @property
    def open(self) -> bool:
        return not self.transport.is_closing()

    def send(self, head: bytes, body: bytes, receiver: Receiver) -> None:
        """Send a request; `receiver` gets its answer."""
        self._receiver = receiver
        self._complete = self._until_closed = self._between_chunks = self.answering = False
        self.transport.write(head + body)

    def pause(self) -> None:
        """Read no further until `resume`."""
        self.transport.pause_reading()

    def resume(self) -> None:
        self.transport.resume_reading()

    def abort(self) -> None:
        """Close at once: the replica is to stop what it does for this request. The receiver hears nothing more."""
        self._receiver = None
        self.deadline.end()
        self.transport.abort()

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        send_at_once(transport)
        self._parser = httptools.HttpResponseParser(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._parser = None  # it holds this object, which holds it
        self.deadline.end()
        if self in self._idle:
            self._idle.remove(self)
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        if self._until_closed and exc is None:
            receiver.ended()
        else:
            receiver.lost("it was reset" if exc is not None else "it was closed")

    def data_received(self, data: bytes) -> None:
        receiver = self._receiver
        if receiver is None or self._parser is None:
            self.transport.abort()  # an answer to nothing
            return
        if self._between_chunks and receiver.chunk(data):
            return  # the parser need not know: it is left where it was
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # no HttpParserError
            self.abort()
            receiver.lost("it changes to a protocol that nobody asked for")
            return
        except httptools.HttpParserError as error:
            if not self._complete:
                self.abort()
                receiver.lost(f"its answer is not HTTP: {error}")
                return
            self._keep = False  # more came than the answer: it is nobody's, and neither is what follows
        self._between_chunks = self._chunk_is_complete and data.endswith(b"\r\n")  # else the next has begun
        if self._receiver is not receiver:  # it let go of this connection when it saw the head
            return
        body = b""
        if self._chunks:
            body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
            self._chunks.clear()
        if self._complete:
            self._receiver = None
            receiver.ended(body)
            self._release()  # only now: the last of the answer may have paused it
        elif body:
            receiver.data(body)

    def _overdue(self) -> None:
        if self._receiver is not None:
            self._receiver.overdue()

    def _release(self) -> None:
        self.used = True
        if not self.transport.is_reading():  # paused by the last of its bytes
            self.transport.resume_reading()
        if self._keep and self.open and len(self._idle) < MAX_IDLE:
            self._idle.append(self)
        else:
            self.transport.close()

    # The parser's side.

    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("a second answer")
        self.answering = True
        self._headers: list[tuple[bytes, bytes]] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 100:
            raise ValueError("no status")
        if status < 200 or self._receiver is None:  # 100 Continue and its like announce the answer
            return
        self._keep = self._parser.should_keep_alive()
        length = None
        framed = status in WITHOUT_BODY
        for name, value in self._headers:
            if name == b"content-length":
                length, framed = int(value), True
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                framed = True
            elif name == b"transfer-encoding" and value.lower() != b"identity":
                raise ValueError("a transfer encoding that nobody asked for")
        self._until_closed = not framed
        self._receiver.head(status, self._headers, length)

    def on_chunk_header(self) -> None:
        self._chunk_is_complete = False

    def on_chunk_complete(self) -> None:
        self._chunk_is_complete = True

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self._chunk_is_complete = False
        self._complete = self._parser.get_status_code() >= 200


class Upstream:
    """The way to one replica.

    url:             "http://HOST[:PORT][/BASE]"; ConfigError for any other
    connect_seconds: for a connection to be made
    """

    def __init__(self, url: str, connect_seconds: float) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"a replica's url is http://HOST[:PORT][/BASE], not {url!r}")
        self._host = parts.hostname
        self._port = parts.port or 80
        self._name = parts.netloc.rpartition("@")[2].encode("latin-1")
        self._base = parts.path.rstrip("/")
        self._connect_seconds = connect_seconds
        self._idle: list[Connection] = []

    async def connection(self, *, fresh: bool = False) -> Connection:
        """An idle connection, or a new one; always a new one if `fresh`.

        Raises Unreachable, and ApiError where the gateway itself has no connection left to make.
        """
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.open:
                return connection
        try:
            async with asyncio.timeout(self._connect_seconds):
                loop = asyncio.get_running_loop()
                _, made = await loop.create_connection(lambda: Connection(self._idle, loop), self._host, self._port)
        except TimeoutError:
            raise Unreachable(f"no connection within {self._connect_seconds:g} s") from None
        except OSError as error:
            if error.errno in _OUR_OWN:
                raise _none_left(error) from None
            raise Unreachable(f"no connection: {error.strerror or error}") from None
        return made

    def head(self, method: str, path: str, headers: Headers, length: int | None) -> bytes:
        """The head of a request to this replica."""
        return request_head(method, self._base + path, self._name, headers, length)

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.transport.close()


def _none_left(error: OSError) -> ApiError:
    return ApiError(
        503,
        f"the gateway can make no further connection to an engine ({error.strerror}); try again later",
        code="no_connection",
        headers={"Retry-After": "1"},
    )
