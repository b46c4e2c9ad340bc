"""One request at one replica: from sending it to how that ended."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import StrEnum
from time import time
from typing import Protocol

import msgspec

from tidegate.api.errors import ApiError
from tidegate.gateway.front import Reply
from tidegate.gateway.http1 import CHUNK_BEGINNINGS, Headers, end_to_end
from tidegate.gateway.upstream import Unreachable, Upstream

_ENGINES_ID = b"x-engine-request-id"
_MAX_REFUSAL = 64 * 1024  # bytes of a refusal that are kept
_TURNS_AWAY = frozenset({429, 503})
_BROKEN = frozenset({502, 504})  # a proxy before the engine found nobody
_TOLD_AT_ONCE = 16  # tokens: telling each alone would cost as much as passing it on
_USAGE = re.compile(rb'"(prompt|completion)_tokens"\s*:\s*(\d{1,9})')
_COUNTED = b'_tokens"'  # a cheap sign of it. Looked for by `find`: `in` takes bytes for a number first, and raises
_CUT = 64  # bytes: what of a count may lie before a cut
_EVENT = b"\ndata:"  # JSON has no bare newline, so this is never text
_ERROR = b'{"error":'  # found faster than without the colon
_ERROR_EVENT = re.compile(rb'\ndata: ?\{"error":')
_ENDS = (b"\n\n", b"\r\n\r\n")
_ENDS_IN_CHUNK = (b"\n\n\r\n", b"\r\n\r\n\r\n")


class How(StrEnum):
    """How a request ended."""

    DONE = "done"
    REJECTED = "rejected"
    """The engine said that the request is wrong (4xx)."""
    TURNED_AWAY = "turned_away"
    """It has no room (429, 503)."""
    ERROR = "error"
    """It failed and said so (5xx, or an error in the stream)."""
    UNREACHABLE = "unreachable"
    RESET = "reset"
    """The connection ended before anything of an answer."""
    NO_FIRST_TOKEN = "no_first_token"  # noqa: S105 - no password
    CUT = "cut"
    STALLED = "stalled"
    CLIENT_LEFT = "client_left"
    SHUT_DOWN = "shut_down"
    """The gateway was, before the answer was complete."""
    REFUSED = "refused"
    """The gateway did not send it."""


@dataclass(slots=True)
class Refusal:
    """An answer of an engine that is passed on only if no other engine takes the request."""

    status: int
    headers: Headers
    body: bytearray
    retry_after: float | None

    @property
    def how(self) -> How:
        return How.TURNED_AWAY if self.status == 429 or self.retry_after is not None else How.ERROR


class Deadlines(msgspec.Struct, frozen=True):
    """Seconds for the first part of an answer, and for each further one."""

    first: float
    stall: float


class Progress(Protocol):
    """Who is told of tokens, some at a time. Times are seconds on the event loop's clock."""

    def first_token(self, now: float) -> None: ...
    def tokens(self, now: float, n: int) -> None: ...


class Attempt:
    """Passes an answer on as it comes, and notices every way in which it may end.

    Nothing reaches the client before the first part of the body: until then another replica can take over.

    how:     how it ended; None before
    refusal: what the engine said where it turned the request away
    usage:   tokens that the engine counted, by "prompt" and "completion", as it said last
    """

    def __init__(self, reply: Reply, progress: Progress, deadlines: Deadlines, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._time = loop.time
        self._reply = reply
        self._progress = progress
        self._deadlines = deadlines
        self._ended: asyncio.Future[How] = loop.create_future()
        self._head: tuple[int, Headers, int | None] = (0, (), None)
        self._events = False
        self._plain = False
        self._error_seen = False
        self._untold = 0
        self._tail = b"\n"
        self._between = False  # events: one has just ended
        self._last = 0.0
        self.how: How | None = None
        self.reason = ""
        self.refusal: Refusal | None = None
        self.usage: dict[str, int] = {}

    @property
    def status(self) -> int:
        """The engine's, 0 before it said any."""
        return self._head[0]

    async def run(self, upstream: Upstream, head: bytes, body: bytes) -> How:
        """Send the request and pass its answer on. Cancelling closes the connection at once."""
        fresh = False
        while True:
            try:
                self._connection = await upstream.connection(fresh=fresh)
            except Unreachable as error:
                return self._now(How.UNREACHABLE, str(error))
            reused = self._connection.used
            self._send(head, body)
            try:
                await self._ended
            except asyncio.CancelledError:
                if self.how is None and self._reply.given_up:
                    self._shut_down()
                raise
            finally:
                self._stop()
            if self.how is not How.RESET or not reused or self._connection.answering:
                assert self.how is not None
                return self.how
            # It was closed for idleness while the request was on its way: no fault of anybody.
            fresh, self.how, self._ended = True, None, self._loop.create_future()

    def _send(self, head: bytes, body: bytes) -> None:
        self._last = self._time()
        self._reply.on_pause, self._reply.on_resume = self._connection.pause, self._resume
        self._connection.deadline.within(self._deadlines.first)
        self._connection.send(head, body, self)

    # The receiver's side.

    def head(self, status: int, headers: Headers, length: int | None) -> None:
        renamed = []
        # An event of ours fits neither into a declared length nor among compressed ones.
        self._plain = length is None
        for name, value in end_to_end(headers):
            if name == b"content-type":
                self._events = value.lower().startswith(b"text/event-stream")
            elif name == b"content-encoding":
                self._plain = False
            elif name == b"x-request-id":  # the answer carries the gateway's; this one is for who asks the engine why
                name = _ENGINES_ID
            renamed.append((name, value))
        self._head = (status, renamed, length)
        if status in _TURNS_AWAY or status in _BROKEN:
            self.refusal = Refusal(status, renamed, bytearray(), _retry_after(headers))

    def data(self, data: bytes) -> None:
        if self._look_at(data):
            self._reply.write(data)

    def chunk(self, data: bytes) -> bool:
        """Pass whole events on that tell nothing but tokens, as almost all of a stream: no cut of theirs has to be
        mended."""
        write = self._reply.write_chunk
        if write is None or not self._between or not data.startswith(CHUNK_BEGINNINGS.get(len(data), ())):
            return False
        if not data.endswith(_ENDS_IN_CHUNK) or data.find(_COUNTED) >= 0 or data.find(_ERROR) >= 0:
            return False
        self._last = self._time()
        self._untold += data.count(_EVENT)
        if self._untold >= _TOLD_AT_ONCE:
            self._tell_tokens()
        write(data)
        return True

    def ended(self, data: bytes = b"") -> None:
        if data:
            self._look_at(data)
        status = self._head[0]
        if self.refusal is not None:
            self._now(self.refusal.how, f"it answered {status}")
            return
        if not self._reply.started:
            self._reply.start(status, self._head[1], 0)
        self._reply.end(data)
        if self._error_seen or status >= 500:
            self._now(How.ERROR, "it told an error in the stream" if self._error_seen else f"it answered {status}")
        else:
            self._now(How.DONE if status < 400 else How.REJECTED)

    def lost(self, reason: str) -> None:
        if self.refusal is not None:
            self._now(self.refusal.how, f"it answered {self.refusal.status}")
        elif self._reply.started:
            self._break_off(How.CUT, f"the connection to the engine was lost: {reason}")
        else:
            self._now(How.RESET, reason)

    def overdue(self) -> None:
        limit = self._deadlines.stall if self._reply.started else self._deadlines.first
        left = self._last + limit - self._time()
        if self._reply.paused or left > 0:
            self._connection.deadline.within(max(left, 0.0) or limit)
            return
        self._connection.abort()
        if self._reply.started:
            self._break_off(How.STALLED, f"the engine sent nothing for {limit:g} s")
        else:
            self._now(How.NO_FIRST_TOKEN, f"nothing came within {limit:g} s")

    # What else may happen.

    def _look_at(self, data: bytes) -> bool:
        """Look at a part of the body, which any cut may begin and end. False if it is kept, as a refusal is."""
        now = self._last = self._time()
        if self.refusal is not None:
            self._keep_refusal(data)
            return False
        if not self._reply.started:
            self._reply.start(*self._head)
            if self._deadlines.stall < self._deadlines.first:
                self._connection.deadline.within(self._deadlines.stall)
            if self._events:
                self._progress.first_token(now)
        seen = self._tail + data
        if self._events:
            self._untold += seen.count(_EVENT) - self._tail.count(_EVENT)
            if self._untold >= _TOLD_AT_ONCE:
                self._tell_tokens()
            if seen.find(_ERROR) >= 0 and _ERROR_EVENT.search(seen):
                self._error_seen = True
        if seen.find(_COUNTED) >= 0:
            self.usage |= {kind.decode(): int(n) for kind, n in _USAGE.findall(seen)}
        self._tail = seen[-_CUT:]
        self._between = self._events and seen.endswith(_ENDS)
        return True

    def _resume(self) -> None:
        self._last = self._time()  # while the client did not read, nothing could come
        self._connection.resume()

    def _keep_refusal(self, data: bytes) -> None:
        assert self.refusal is not None
        self.refusal.body += data
        if len(self.refusal.body) > _MAX_REFUSAL:
            self.refusal.body.clear()
            self._connection.abort()
            self._now(self.refusal.how, f"it answered {self.refusal.status}")

    def _tell_tokens(self) -> None:
        self._progress.tokens(self._last, self._untold)
        self._untold = 0

    def _shut_down(self) -> None:
        reason = "the gateway was shut down"
        if self._reply.started:
            self._break_off(How.SHUT_DOWN, reason, code=How.CUT)
        else:
            self._now(How.SHUT_DOWN, reason)

    def _break_off(self, how: How, reason: str, code: str | None = None) -> None:
        """End an answer that has begun: with an error where it is a stream of plain events, else so that it shows."""
        if self._events and self._plain:
            error = ApiError(502, f"the answer was broken off: {reason}", code=code or how.value)
            separator = b"" if self._between else b"\n\n"
            self._reply.end(separator + b"data: " + json.dumps(error.body).encode() + b"\n\n")
        else:
            self._reply.break_off()
        self._now(how, reason)

    def _now(self, how: How, reason: str = "") -> How:
        """It has ended so."""
        if self._untold:
            self._tell_tokens()
        self.how, self.reason = how, reason
        if not self._ended.done():
            self._ended.set_result(how)
        return how

    def _stop(self) -> None:
        self._reply.on_pause = self._reply.on_resume = None
        if self._untold:  # the client left
            self._tell_tokens()
        if self.how in (None, How.CUT, How.SHUT_DOWN):
            self._connection.abort()


def _retry_after(headers: Headers) -> float | None:
    """Seconds of a Retry-After, which may be a date; None where there is none that anybody understands."""
    value = next((v for n, v in headers if n == b"retry-after"), b"")
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value.decode("latin-1")).timestamp() - time())
    except (ValueError, OverflowError):
        return None
