"""Chunks of an engine's answer, however they are spelled and cut: what is passed on as it came is what was meant."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidegate.gateway.http1 import CHUNK_BEGINNINGS, Headers, chunk
from tidegate.gateway.upstream import Connection

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
parts = st.binary(min_size=1, max_size=40) | st.sampled_from(
    [b"\r\n", b"0\r\n\r\n", b"5\r\nhello\r\n", b"x" * 700, b"y" * 5000]
)
sizes = st.sampled_from(["%x\r\n", "%X\r\n", "0%x\r\n", "000%X\r\n", "%x;name=value\r\n"])
ends = st.sampled_from([b"0\r\n\r\n", b"000\r\n\r\n", b"0\r\nx-trailer: 1\r\n\r\n", b""])


NO_LOOP: Any = None  # no deadline is set


def is_one_chunk(data: bytes) -> bool:
    return data.startswith(CHUNK_BEGINNINGS.get(len(data), ())) and data.endswith(b"\r\n")


class Wire(asyncio.Transport):
    """Nothing on it."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return None

    def is_closing(self) -> bool:
        return False

    def is_reading(self) -> bool:
        return True

    def write(self, data: Any) -> None: ...
    def abort(self) -> None: ...


class Seen:
    """The body as a client would put it together, and what came whole."""

    def __init__(self) -> None:
        self.body = b""
        self.passed = 0
        self.last, self.end = b"", ""

    def head(self, status: int, headers: Headers, length: int | None) -> None: ...

    def data(self, data: bytes) -> None:
        self.body += data

    def chunk(self, data: bytes) -> bool:
        if not is_one_chunk(data):
            return False
        self.passed += 1
        self.body += data[data.index(b"\n") + 1 : -2]
        return True

    def ended(self, data: bytes = b"") -> None:
        self.body += data
        self.last = data
        self.end = "whole"

    def lost(self, reason: str) -> None:
        self.end = reason

    def overdue(self) -> None: ...


def read(pieces: list[bytes]) -> Seen:
    seen, connection = Seen(), Connection([], NO_LOOP)
    connection.connection_made(Wire())
    connection.send(b"", b"", seen)
    for piece in pieces:
        connection.data_received(piece)
    return seen


@given(st.lists(st.tuples(parts, sizes)), ends, st.lists(st.integers(1, 60), max_size=8), st.booleans())
@example([(b"a\r\n", "%x\r\n"), (b"b", "%x\r\n")], b"0\r\n\r\n", [], True)
def test_any_cut_of_any_chunks_is_the_same_body(
    written: list[tuple[bytes, str]], end: bytes, cuts: list[int], by_chunk: bool
) -> None:
    """As a server that writes chunk by chunk is read, with some reads that end elsewhere."""
    framed = [(size % len(part)).encode() + part + b"\r\n" for part, size in written] + [end]
    pieces = [HEAD, *framed] if by_chunk else [HEAD + b"".join(framed)]
    for cut in cuts:
        at = cut % len(pieces)
        one = pieces[at]
        pieces[at : at + 1] = [one[: cut % (len(one) + 1)], one[cut % (len(one) + 1) :]]
    seen = read([piece for piece in pieces if piece])
    assert seen.body == b"".join(part for part, _ in written)
    assert seen.end == ("whole" if end else "")


def test_chunks_that_come_one_by_one_are_not_taken_apart() -> None:
    events = [b"data: %d\n\n" % n for n in range(20)]
    seen = read([HEAD + chunk(events[0]), *(chunk(event) for event in events[1:]), b"0\r\n\r\n"])
    assert (seen.passed, seen.body, seen.end) == (19, b"".join(events), "whole")


def test_the_last_of_a_body_comes_with_its_end() -> None:
    """So that a client is written to once, and not twice."""
    seen = read([HEAD + chunk(b"first"), chunk(b"last") + b"0\r\n\r\n"])
    assert (seen.body, seen.last, seen.end) == (b"firstlast", b"last", "whole")


def test_a_chunk_ends_with_a_newline() -> None:
    assert is_one_chunk(b"5\r\nhello\r\n")
    assert not is_one_chunk(b"5\r\nhello..")


@pytest.mark.parametrize("size", [b"0x5", b"+5", b" 5", b"5 ", b"0_5", b"-5", b"5;", b"", b"five"])
def test_what_is_no_plain_size_is_left_to_the_parser(size: bytes) -> None:
    """Passed on, it might mean something else to whoever reads it next."""
    assert not is_one_chunk(size + b"\r\nhello\r\n")
    assert read([HEAD + chunk(b"first"), size + b"\r\nhello\r\n"]).passed == 0


@pytest.mark.parametrize(
    "pieces",
    [
        [b"d\r\nabc", b"5\r\nhello\r\n", b"\r\n"],  # within another chunk
        [b"1", b"5\r\nhello\r\n", b"and fourteen..\r\n"],  # within a size
        [b"a\r\n", b"5\r\nhello\r\n", b"\r\n"],  # behind a size
    ],
)
def test_what_looks_like_a_chunk_and_is_none(pieces: list[bytes]) -> None:
    whole, cut = (read([HEAD, chunk(b"first"), *rest, b"0\r\n\r\n"]) for rest in ([b"".join(pieces)], pieces))
    assert (cut.passed, cut.body, cut.end) == (0, whole.body, "whole")
    glued = read([HEAD, chunk(b"first") + pieces[0], *pieces[1:], b"0\r\n\r\n"])
    assert (glued.passed, glued.body, glued.end) == (0, whole.body, "whole")
