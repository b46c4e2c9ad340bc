"""What an engine says that a request used is found wherever it stands, and counts against the rates."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.gateway import backends as engines
from tests.gateway.backends import DONE, HEAD, backends
from tests.gateway.gateways import gateway
from tidegate.gateway.attempt import Attempt, Deadlines
from tidegate.gateway.http1 import chunk

USED = b'data: {"choices":[],"usage":{"prompt_tokens":50000,"total_tokens":59000,"completion_tokens":9000}}\n\n'
TEXTS = [b'data: {"text": "data: \\n"}\n\n', b'data:{"text":"data:"}\n\n', b"data: x\r\n\r\n", b": a comment\n\n"]
SAID = [*TEXTS, USED, DONE]
ONE_BY_ONE = range(1, len(USED))


class Client:
    """A `Reply` and a `Progress`."""

    def __init__(self, chunks: bool) -> None:
        self.started = False
        self.got = b""
        self.events = self.chunks = 0
        self.told: list[int] = []
        self.write_chunk = self._write_chunk if chunks else None

    def start(self, *_: Any) -> None:
        self.started = True

    def write(self, data: bytes) -> None:
        self.got += data

    def _write_chunk(self, data: bytes) -> None:
        self.chunks += 1
        self.got += data[data.index(b"\n") + 1 : -2]

    def end(self, data: bytes) -> None:
        self.got += data

    def first_token(self, now: float) -> None: ...

    def tokens(self, now: float, n: int) -> None:
        self.events += n
        self.told.append(n)


def passed(body: bytes, cuts: Sequence[int], whole_chunks: bool, *, chunks: bool = True) -> tuple[Client, Attempt]:
    """A stream that comes cut there, to a client that takes `chunks` or none."""
    client = Client(chunks)
    with closing(asyncio.new_event_loop()) as loop:
        attempt = Attempt(client, client, Deadlines(1.0, 1.0), loop)  # type: ignore[arg-type] # as much of a Reply as it uses
        attempt.head(200, [(b"content-type", b"text/event-stream")], None)
        last = b""
        at = [0, *sorted({cut % len(body) for cut in cuts} - {0}), len(body)]
        for begin, end in pairwise(at):
            piece = body[begin:end]
            if whole_chunks:
                if not attempt.chunk(chunk(piece)):
                    attempt.data(piece)
            elif end < len(body):
                attempt.data(piece)
            else:
                last = piece
        attempt.ended(last)
    return client, attempt


@given(st.lists(st.sampled_from(SAID), min_size=1), st.lists(st.integers(0, 2000)), st.booleans())
@example([USED], ONE_BY_ONE, True)
@example([USED], ONE_BY_ONE, False)
@example(SAID, [], True)
def test_any_cut_of_a_stream_counts_the_same(said: list[bytes], cuts: Sequence[int], whole_chunks: bool) -> None:
    body = b"".join(said)
    client, attempt = passed(body, cuts, whole_chunks)
    assert client.got == body
    assert client.events == sum(event.startswith(b"data:") for event in said)
    assert attempt.usage == ({"prompt": 50000, "completion": 9000} if USED in said else {})
    assert attempt.how == "done"


def test_of_several_counts_the_last_holds() -> None:
    body = b"".join(b'data: {"usage":{"prompt_tokens":7,"completion_tokens":%d}}\n\n' % n for n in range(1, 13))
    for cut in range(len(body)):
        assert passed(body, [cut], False)[1].usage == {"prompt": 7, "completion": 12}


@pytest.mark.parametrize("event", [b'data: {"error": {}}\n\n', b'data:{"error":{}}\n\n'])
def test_an_error_in_a_stream_is_seen_in_any_cut(event: bytes) -> None:
    first = TEXTS[0]
    for cut in range(len(event)):
        for whole_chunks in (False, True):
            assert passed(event, [cut], whole_chunks)[1].how == "error"
            later = passed(first + event + DONE, [len(first), len(first) + cut, len(first + event)], whole_chunks)
            assert later[1].how == "error"
    assert passed(b'data: {"text": "data: {\\"error\\""}\n\n', [], False)[1].how == "done"


def test_whole_events_are_passed_on_as_they_came_and_nothing_else() -> None:
    client, attempt = passed(TEXTS[0], [], True)
    one = b"data: x\n\n"
    for size in (b"0x9", b"+9", b" 9", b"9 ", b"0_9", b"-9", b"9;", b"", b"nine", b"8", b"a"):
        assert not attempt.chunk(size + b"\r\n" + one + b"\r\n")
    for piece in (b"data: x.\n", USED, b'data: {"error": {}}\n\n', b"data: " + b"x" * 5000 + b"\n\n"):
        assert not attempt.chunk(chunk(piece))
    assert not attempt.chunk(chunk(one)[:-2] + b"..")
    assert client.got == TEXTS[0]
    assert attempt.chunk(chunk(one))
    assert client.got == TEXTS[0] + one


@pytest.mark.parametrize("whole_chunks", [False, True])
def test_of_a_long_stream_is_told_while_it_lasts(whole_chunks: bool) -> None:
    body = TEXTS[0] * 200
    client, _ = passed(body, range(len(TEXTS[0]), len(body), len(TEXTS[0])), whole_chunks)
    assert (sum(client.told), max(client.told)) == (200, 16)


def test_no_chunk_is_passed_on_where_none_may_be_written() -> None:
    """To HTTP/1.0, which knows no chunks."""
    client, _ = passed(TEXTS[0] * 3, [len(TEXTS[0]), 2 * len(TEXTS[0])], True, chunks=False)
    assert (client.got, client.chunks) == (TEXTS[0] * 3, 0)
    assert passed(TEXTS[0] * 3, [len(TEXTS[0]), 2 * len(TEXTS[0])], True)[0].chunks == 2


async def test_what_a_stream_used_counts_where_it_comes_before_the_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM writes it: in a part of its own, and `[DONE]` after it in another."""

    async def stream(self: engines._Connection, marker: str, mode: str) -> None:
        self.transport.write(HEAD)
        for part in (b'data: {"choices":[{}]}\n\n', USED, DONE):
            self.transport.write(chunk(part))
            await asyncio.sleep(0.02)
        self.transport.write(b"0\r\n\r\n")

    monkeypatch.setattr(engines._Connection, "_stream", stream)
    keys = [{"key": "k", "tenant": "acme", "tokens_per_minute": 100_000}]
    async with backends(1) as behind, gateway(behind, api_keys=keys) as running:
        running.http.headers["authorization"] = "Bearer k"
        assert [(await running.stream()).status for _ in range(3)] == [200, 200, 429]
        assert [(end.prompt_tokens, end.outputs) for end in running.ends.ends[:2]] == [(50000, 9000)] * 2


@pytest.mark.parametrize(("path", "asked"), [("/v1/completions", None), ("/v1/embeddings", "gzip")])
async def test_no_compressed_stream_is_asked_for(path: str, asked: str | None) -> None:
    """Nobody could count it."""
    async with backends(1) as behind, gateway(behind) as running:
        sent = {"accept-encoding": "gzip"}
        async with running.http.post(running.url + path, json={"prompt": "x"}, headers=sent) as answer:
            assert answer.status == 200
        assert behind[0].requests[0].headers.get("accept-encoding") == asked
