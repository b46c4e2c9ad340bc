"""What both sides of the gateway know of HTTP/1.1: whose a header is, and how heads and chunks look on the wire."""

from __future__ import annotations

import fcntl
import socket
import sys
import termios
from asyncio import BaseTransport, WriteTransport
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import TypeAlias

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]
"""Names in lower case."""

LAST_CHUNK = b"0\r\n\r\n"
WITHOUT_BODY = frozenset({204, 304})

_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"}
    | {b"trailer", b"transfer-encoding", b"upgrade"}
)
_OWN_FRAMING = _HOP_BY_HOP | {b"content-length", b"expect", b"host"}
CHUNK_BEGINNINGS = {len(b"%x" % n) + n + 4: (b"%x\r\n" % n, b"%X\r\n" % n) for n in range(1, 2048)}
"""How a chunk of so many bytes begins, framing and all, for what most events of a stream weigh: what begins so and
ends with CRLF is exactly one chunk, and not the last. Looked up, which is a fraction of what parsing costs."""
_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}


def end_to_end(headers: Iterable[tuple[bytes, bytes]], without: frozenset[bytes] = frozenset()) -> Headers:
    """Those of `headers` that are meant for the other end (RFC 9110, 7.6.1), less `without`.

    Each side frames its messages anew, so that the length is not among them.
    """
    kept, named = [], []
    for header in headers:
        name, value = header
        if name not in _OWN_FRAMING:
            if name not in without:
                kept.append(header)
        elif name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
            named.append(value)
    if not named:
        return kept
    hops = {token.strip().lower() for value in named for token in value.split(b",")}
    return [(n, v) for n, v in kept if n not in hops]


def request_head(method: str, target: str, host: bytes, headers: Headers, length: int | None) -> bytes:
    """The head of a request whose body has `length` bytes; None where it has none."""
    lines = [f"{method} {target} HTTP/1.1\r\nhost: ".encode("latin-1"), host, b"\r\n"]
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
    lines.append(b"\r\n" if length is None else b"content-length: %d\r\n\r\n" % length)
    return b"".join(lines)


def response_head(status: int, headers: Headers, framing: bytes) -> bytes:
    """The head of a response; `framing` is the lines that say how its body ends, b"" where it has none."""
    lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
    lines += (framing, b"\r\n")
    return b"".join(lines)


def chunk(data: bytes) -> bytes:
    """`data`, which is not empty, as one chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def send_at_once(transport: BaseTransport) -> None:
    """Turn Nagle's algorithm off: with it a token waits for the acknowledgement of the one before, up to 40 ms."""
    sock: socket.socket | None = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def unread(transport: WriteTransport) -> int:
    """Bytes that the other end has not taken yet: of ours, and of the system's, which may last a slow one minutes."""
    held = transport.get_write_buffer_size()
    sock: socket.socket | None = transport.get_extra_info("socket")
    if sock is None:
        return held
    try:
        return held + int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):  # it is closed already
        return held
