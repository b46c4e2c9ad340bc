"""One client's connection: requests read whole, within bounds; answers written as they come."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol, cast

import httptools

from tidegate.api.errors import ApiError
from tidegate.gateway.deadline import Deadline
from tidegate.gateway.http1 import (
    LAST_CHUNK,
    WITHOUT_BODY,
    Headers,
    chunk,
    response_head,
    send_at_once,
    unread,
)

_log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75.0  # longer than clients pool a connection, so that none is closed under a request
_LAST_WORDS_SECONDS = 2.0  # for a client to read why it was refused, once it sends nothing more
_MAX_LAST_WORDS_SECONDS = 30.0  # the same for one that does not cease to send
_MAX_REFUSED = 64  # connections beyond the most that are told so at once
_MAX_HEAD = 64 * 1024  # bytes
_MAX_HELD = 64 * 1024  # bytes behind a request that waits; one read may bring a few more
_PIECE = 16 * 1024  # bytes
_JSON = (b"content-type", b"application/json")


class Request:
    """A request as it came.

    target:  path and query
    headers: names in lower case
    fields:  the headers as text, the last of those of one name
    """

    __slots__ = ("body", "fields", "headers", "method", "path", "target")

    def __init__(self, method: str, target: str, headers: Headers) -> None:
        self.method = method
        self.target = target
        self.path = target.partition("?")[0]
        self.headers = headers
        self.fields: Mapping[str, str] = {n.decode("latin-1"): v.decode("latin-1") for n, v in headers}
        self.body = b""


class Handler(Protocol):
    """Who answers."""

    @property
    def max_body_bytes(self) -> int: ...
    @property
    def max_connections(self) -> int: ...
    @property
    def stall_seconds(self) -> float:
        """For the head of a request to come, for each further part of its body, and for a client to read on."""
        ...

    def admit(self, request: Request) -> None:
        """Look at a request before its body is read. ApiError refuses it."""
        ...

    async def answer(self, request: Request, reply: Reply) -> None:
        """Answer a request that was read whole. Cancelled when the client leaves; ApiError is an answer as well."""
        ...


class Reply:
    """The answer to one request. Its head goes out with the first bytes of its body.

    write_chunk: writes a further part of the body as one whole chunk, framing and all; None where the client gets none
    paused:   the client does not read as fast as it is written to
    on_pause, on_resume: told when that changes
    given_up: the gateway is shut down before it is complete; one that is cancelled otherwise has lost its client
    """

    __slots__ = (
        "_bodiless",
        "_close",
        "_connection",
        "_framed",
        "_head",
        "_write",
        "ended",
        "given_up",
        "headers",
        "on_pause",
        "on_resume",
        "started",
        "write_chunk",
    )

    def __init__(self, connection: ClientConnection, close: bool, framed: bool, bodiless: bool = False) -> None:
        self._bodiless = bodiless  # to HEAD, which is told of a body and not given it
        self._connection = connection
        self._close = close
        self._framed = framed  # HTTP/1.0 knows no chunks: there the end of the connection is that of the body
        self._head = b""
        self._write = connection.transport.write
        self.write_chunk: Callable[[bytes], object] | None = None
        self.headers: list[tuple[bytes, bytes]] = []  # in every answer
        self.started = False
        self.ended = False
        self.given_up = False
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None

    @property
    def paused(self) -> bool:
        return self._connection.paused

    def start(self, status: int, headers: Headers, length: int | None = None) -> None:
        """Begin an answer; its length in bytes where that is known."""
        self.started = True
        if status in WITHOUT_BODY:
            self._framed, framing = False, b""
        elif length is not None:
            self._framed, framing = False, b"content-length: %d\r\n" % length
        elif self._framed:
            framing = b"transfer-encoding: chunked\r\n"
        else:
            self._close, framing = True, b""
        if self._close:
            framing += b"connection: close\r\n"
        self._head = response_head(status, [*headers, *self.headers], framing)

    def write(self, data: bytes) -> None:
        """A part of the body; not empty."""
        if self._framed:
            data = chunk(data)
        if self._head:
            data, self._head = self._head + data, b""
            if self._framed:
                self.write_chunk = self._write
        self._write(data)

    def end(self, data: bytes = b"") -> None:
        """The end of the answer, with the last of its body."""
        self.ended = True
        last = data
        if self._framed:
            last = (chunk(data) if data else b"") + LAST_CHUNK
        if self._head or last:
            self._write(self._head + last)
        self._connection.answered(self._close)

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """An answer in one piece."""
        self.start(status, headers, len(body))
        self.end(b"" if self._bodiless else body)

    def refuse(self, error: ApiError) -> None:
        """An error as the whole answer."""
        own = [(name.lower().encode(), value.encode("latin-1")) for name, value in error.headers.items()]
        headers = [(name, value) for name, value in own if name != b"connection"]
        self._close = self._close or len(headers) < len(own)
        self.whole(error.status, [_JSON, *headers], json.dumps(error.body).encode())

    def abandon(self) -> None:
        """Nobody reads it. An engine may send more before its request is cancelled."""
        self._write = self.write_chunk = _nowhere

    def break_off(self) -> None:
        """End an answer that cannot be finished so that the client notices."""
        self.ended = True
        self._connection.abort()


class ClientConnection(asyncio.Protocol):
    """HTTP/1.1 with one client. One request is answered at a time; one more may be read meanwhile.

    What comes after that one is held as it came, for the end of the connection to be noticed behind it, and no more of
    it than a bound. No answer begins before the client has read what was written before.
    """

    def __init__(self, handler: Handler, connections: set[ClientConnection], refused: set[ClientConnection]) -> None:
        self._handler = handler
        self._connections = connections  # those of all clients
        self._refused = refused  # those that were too many, and are told so
        self._loop = asyncio.get_running_loop()
        self._parser: httptools.HttpRequestParser | None = None
        self._to_come = Deadline(self._loop, self._nothing_came)
        self._to_be_read = Deadline(self._loop, self._look_whether_read)
        self._unread_then = 0  # bytes of answers that the client had not read when that was looked at last
        self._reading = False  # a request has begun and is not whole
        self._unread_bytes = 0  # that came since the last of a body: of heads, trailers and what is around chunks
        self._head_read = False
        self._closing = False
        self._last_words_end = 0.0
        self._waiting: deque[tuple[Request, Reply]] = deque()
        self._held = bytearray()  # what came after those that wait
        self._reply: Reply | None = None
        self._task: asyncio.Task[None] | None = None
        self.paused = False

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        send_at_once(transport)
        if len(self._connections) >= self._handler.max_connections:
            self._turn_away()
            return
        self._parser = httptools.HttpRequestParser(self)
        self._connections.add(self)
        self._to_come.within(self._handler.stall_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._refused.discard(self)
        self._parser = None  # it holds this object, which holds it
        self._closing = True
        self._to_come.end()
        self._to_be_read.end()
        self._abandon()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            self._wait_for_last_words()
            return
        if self._waiting:
            self._held += data
        else:
            self._read_on(data)
        if len(self._held) > _MAX_HELD:
            self.transport.pause_reading()

    def eof_received(self) -> None:
        """The client has left, or reads only: what was written so far is still sent to it."""
        self._closing = True
        self._to_be_read_from_now()
        self._abandon()

    def pause_writing(self) -> None:
        self.paused = True
        self._to_be_read_from_now()
        if self._reply is not None and self._reply.on_pause is not None:
            self._reply.on_pause()

    def resume_writing(self) -> None:
        self.paused = False
        if self._reply is None and self._closing:  # then all of it has to be read
            return
        self._to_be_read.drop()
        if self._reply is None:
            self._go_on()
        elif self._reply.on_resume is not None:
            self._reply.on_resume()

    # The parser's side.

    def on_message_begin(self) -> None:
        if not self._reading and self._is_next():
            self._to_come.within(self._handler.stall_seconds)
        self._reading = True
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = bytearray()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_read:  # else it is a trailer, which comes too late to be looked at
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._head_read, self._unread_bytes = True, 0
        method = self._parser.get_method().decode()
        self._request = request = Request(method, self._url.decode("latin-1"), self._headers)
        if self._parser.should_upgrade() and method != "CONNECT":  # the parser takes the rest for another protocol
            raise ApiError(400, "this server changes to no other protocol; leave the header 'Upgrade' out")
        self._framed = self._parser.get_http_version() == "1.1"
        self._close = not (self._framed and self._parser.should_keep_alive())  # 1.0 would have to be told of more
        for name, value in self._headers:
            if name == b"transfer-encoding" and value.lower() != b"chunked":
                raise ApiError(501, "a body may come in chunks, and in no other transfer encoding")
        self._handler.admit(request)
        length = request.fields.get("content-length")
        if length is not None and int(length) > self._handler.max_body_bytes:
            raise self._too_large()
        if self._framed and request.fields.get("expect", "").lower() == "100-continue" and self._is_next():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._unread_bytes = 0
        self._body += data
        if len(self._body) > self._handler.max_body_bytes:
            raise self._too_large()

    def on_message_complete(self) -> None:
        self._reading = self._head_read = False
        self._unread_bytes = 0
        self._request.body = bytes(self._body)
        self._body.clear()
        self._waiting.append((self._request, Reply(self, self._close, self._framed)))
        self._answer_next()

    # The reply's side.

    def answered(self, close: bool) -> None:
        """The answer under way is complete."""
        self._reply = self._task = None
        if close or self._closing:
            self._close_soon()
        else:
            self._go_on()

    def abort(self) -> None:
        """Close at once; what was not sent yet is lost, and the client sees that."""
        self._reply = self._task = None
        self._closing = True
        self.transport.abort()

    # Shutting down.

    @property
    def unsent(self) -> int:
        """Bytes of answers that the system has not taken."""
        return self.transport.get_write_buffer_size()

    def close(self) -> None:
        """Take no further request: one that is half read is refused. The answer under way is the last."""
        if self._reply is not None:
            self._closing = True
        elif self._reading:
            self._refuse_unread(_shut_down())
        else:
            self._leave()

    def give_up(self) -> None:
        """End the answer under way with an error."""
        if self._task is not None and self._reply is not None:
            self._reply.given_up = True
            self._task.cancel()

    # What happens between.

    def _turn_away(self) -> None:
        """Tell a client that there are too many. When there are too many of those as well, close at once."""
        self._closing = True
        if len(self._refused) >= _MAX_REFUSED:
            self.transport.abort()
        else:
            self._refused.add(self)
            self._refuse_unread(_too_many(self._handler.max_connections))

    def _abandon(self) -> None:
        """The client has left the answer under way."""
        if self._reply is not None:
            self._reply.abandon()
        if self._task is not None:
            self._task.cancel()
        self._reply = self._task = None

    def _read_on(self, data: bytes) -> None:
        """Read requests until one waits. A piece at a time: one read may bring thousands."""
        assert self._parser is not None
        at = 0
        try:
            while at < len(data) and not self._waiting and self._unread_bytes <= _MAX_HEAD:
                piece = data[at : at + _PIECE]
                at += len(piece)
                self._unread_bytes += len(piece)
                self._parser.feed_data(piece)
        except httptools.HttpParserError as error:
            refused = error.__context__ if isinstance(error.__context__, ApiError) else None
            self._refuse_unread(refused or ApiError(400, f"the request is not HTTP/1.1: {error}"))
        else:
            self._held += data[at:]
            self._bound_what_is_unread()

    def _go_on(self) -> None:
        """Answer the next request; read on if none waits."""
        self._to_come.within(self._handler.stall_seconds if self._reading else KEEP_ALIVE_SECONDS)
        self._answer_next()
        if self._held and not self._waiting:
            held, self._held = bytes(self._held), bytearray()
            self._read_on(held)
        if len(self._held) <= _MAX_HELD:
            self.transport.resume_reading()

    def _is_next(self) -> bool:
        """Whether the request that is being read is the next to be answered."""
        return self._reply is None and not self._waiting

    def _answer_next(self) -> None:
        if self._reply is not None or self.paused or not self._waiting:
            return
        request, self._reply = self._waiting.popleft()
        self._to_come.drop()
        self._task = self._loop.create_task(self._answer(request, self._reply))

    async def _answer(self, request: Request, reply: Reply) -> None:
        try:
            await self._handler.answer(request, reply)
        except ApiError as error:
            reply.refuse(error)
        except asyncio.CancelledError:
            if reply.given_up and not reply.ended:
                reply.refuse(_shut_down())
            raise
        except Exception:  # noqa: BLE001 - a mistake of ours is one request's end, not the connection's
            _log.exception("a request could not be answered")
            if reply.started:
                reply.break_off()
            else:
                reply.refuse(ApiError(500, "the gateway made a mistake; its log says more", code="internal_error"))

    def _refuse_unread(self, error: ApiError) -> None:
        """Refuse a request that was not read whole. What still comes of it is thrown away."""
        self._reading, self._closing = False, True
        if self._reply is not None:  # its answer is the last
            return
        if self._waiting:  # their answers would have to come before this one
            self._close_soon()
        else:
            Reply(self, close=True, framed=True, bodiless=self._asks_for_head()).refuse(error)

    def _asks_for_head(self) -> bool:
        return self._parser is not None and self._parser.get_method() == b"HEAD"

    def _close_soon(self) -> None:
        """Close once the client has had time to read: closing under what it still sends would lose the answer."""
        self._closing = True
        if not self.transport.is_closing():
            self.transport.write_eof()
            self.transport.resume_reading()
            self._to_be_read_from_now()
            self._last_words_end = self._loop.time() + _MAX_LAST_WORDS_SECONDS
            self._wait_for_last_words()

    def _wait_for_last_words(self) -> None:
        """Whoever still sends reads later, and is waited for, up to a bound."""
        if self._reply is None:
            self._to_come.within(min(_LAST_WORDS_SECONDS, self._last_words_end - self._loop.time()))

    def _leave(self) -> None:
        """Close once what was written is sent."""
        self._closing = True
        self._to_be_read_from_now()
        self.transport.close()

    def _bound_what_is_unread(self) -> None:
        if self._unread_bytes > _MAX_HEAD:
            self._refuse_unread(ApiError(431, f"the headers are larger than {_MAX_HEAD} bytes; send fewer"))
        elif self._head_read and self._is_next():
            self._to_come.within(self._handler.stall_seconds)

    def _too_large(self) -> ApiError:
        limit = self._handler.max_body_bytes
        message = f"the body is larger than {limit} bytes; send less, or raise gateway.max_body_bytes"
        return ApiError(413, message, code="body_too_large")

    def _to_be_read_from_now(self) -> None:
        self._unread_then = unread(self.transport)
        self._to_be_read.within(self._handler.stall_seconds)

    def _look_whether_read(self) -> None:
        """Give a client up that has read nothing since the last look. Slowly is not too slowly."""
        before, self._unread_then = self._unread_then, unread(self.transport)
        if self._unread_then and self._unread_then == before:
            self.transport.abort()
        else:
            self._to_be_read.within(self._handler.stall_seconds)

    def _nothing_came(self) -> None:
        if self._closing:
            self._end_of_last_words()
        elif self.paused:
            return  # it is for the client to read first; then the time begins anew
        elif self._head_read:
            seconds = self._handler.stall_seconds
            message = f"nothing of the body came for {seconds:g} s; send it whole"
            self._refuse_unread(ApiError(408, message, code="body_stalled"))
        elif self._reading:
            self._refuse_unread(ApiError(408, "the head of the request did not come in time", code="head_stalled"))
        else:
            self._leave()

    def _end_of_last_words(self) -> None:
        if unread(self.transport):
            self._to_come.within(_LAST_WORDS_SECONDS)
        else:
            self.transport.abort()


def _nowhere(data: object) -> None: ...


def _too_many(limit: int) -> ApiError:
    message = f"{limit} clients are connected, which is the most; come back later, or raise gateway.max_connections"
    return ApiError(503, message, code="too_many_connections", headers={"Retry-After": "5"})


def _shut_down() -> ApiError:
    return ApiError(503, "the gateway was shut down", code="draining", headers={"Retry-After": "5"})
