"""Prompts are tokenised beside their way, so that an engine's cache events can be told of their text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

from tests.gateway.engine_pages import page, served
from tests.gateway.engines import job
from tidegate.gateway.discovery import Wanted
from tidegate.gateway.job import Job
from tidegate.gateway.lookin import look_in
from tidegate.gateway.tokenising import WAITING, Tokenising, question
from tidegate.routing.choice import Choice
from tidegate.routing.prefix_index import PrefixIndex
from tidegate.routing.text_blocks import text_blocks
from tidegate.routing.view import ReplicaView

TOKENS = list(range(400))
DEEP = page("[" * 100_000)  # deeper than anybody reads
A = Choice(ReplicaView("a"), 0)


def asked(id: str = "1", **more: Any) -> Job:
    body = json.dumps({"model": "m", "prompt": "The tide comes and goes. " * 100, "n": 2, **more}).encode()
    text = look_in(body).text
    return job(id, tokens=400, blocks=text_blocks(text, "m"), body=body)


@contextmanager
def tokenising(index: PrefixIndex, engine: Wanted | None) -> Iterator[Tokenising]:
    found = Tokenising(index, lambda name: engine)
    task = asyncio.create_task(found.run())
    yield found
    task.cancel()


def told() -> PrefixIndex:
    """An index that knows of an engine's blocks, and of no text."""
    index = PrefixIndex(10_000)
    index.stored("a", [f"b{i}" for i in range(100)], None, TOKENS, 4)
    return index


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_the_text_of_a_prompt_is_found_in_what_the_engine_told() -> None:
    index, one = told(), asked()
    assert index.held(one.view).tokens == {}
    heads: list[bytes] = []

    def answer(path: str, head: bytes) -> bytes:
        heads.append(head)
        return page(json.dumps({"tokens": TOKENS, "count": 400}))

    async with served(answer) as engine:
        with tokenising(index, Wanted("a", engine.url, kv_events="tcp://a:1", api_key="sk-e")) as observer:
            observer.sent(one, A, 1, 0.0)
            await until(lambda: not index.untranslated(one.view))
            observer.sent(one, A, 1, 0.0)
            observer.sent(asked("2"), A, 1, 0.0)
            await asyncio.sleep(0.05)
    assert engine.asked == ["/tokenize"]  # once for all that begin alike
    assert b"Bearer sk-e" in heads[0]
    held = index.held(one.view)
    assert held.tokens["a"] > 300
    assert "a" in held.exact


async def test_the_tokens_of_a_long_prompt_come_in_many_parts() -> None:
    """More than one read brings, and no more than is read in all."""
    index, tokens = told(), list(range(100_000, 300_000))
    answers = [page(json.dumps({"tokens": tokens}) + " " * 16 * 2**20), page(json.dumps({"tokens": tokens}))]
    async with served(lambda path, head: answers.pop(0)) as engine:
        with tokenising(index, Wanted("a", engine.url, kv_events="tcp://a:1")) as observer:
            observer.sent(asked(), A, 1, 0.0)
            await until(lambda: len(engine.asked) == 1)
            await asyncio.sleep(0.05)
            assert index.untranslated(asked().view)
            observer.sent(asked(), A, 1, 0.0)
            await until(lambda: not index.untranslated(asked().view))


async def test_nobody_is_asked_where_it_does_not_help() -> None:
    async with served(lambda path, head: page("{}")) as engine:
        told_nothing, index = PrefixIndex(1000), told()
        with tokenising(told_nothing, Wanted("a", engine.url, kv_events="tcp://a:1")) as observer:
            observer.sent(asked(), A, 1, 0.0)
            await asyncio.sleep(0.02)
        with tokenising(index, Wanted("a", engine.url)) as observer:  # publishes nothing
            observer.sent(asked(), A, 1, 0.0)
            observer.sent(asked(), A, 2, 0.0)
            await asyncio.sleep(0.02)
        with tokenising(index, None) as observer:
            observer.sent(asked(), A, 1, 0.0)
            await asyncio.sleep(0.02)
        assert engine.asked == []


@pytest.mark.parametrize(
    "answer", [page("no", "404 Not Found"), page("{}"), page("[]"), b"", page('{"tokens": 3}'), DEEP]
)
async def test_an_engine_that_cannot_tokenise_harms_nobody(answer: bytes) -> None:
    index = told()
    async with served(lambda path, head: answer) as engine:
        with tokenising(index, Wanted("a", engine.url, kv_events="tcp://a:1")) as observer:
            for i in range(3):
                observer.sent(asked(f"{i}"), A, 1, 0.0)
            await until(lambda: len(engine.asked) == 3)
    assert index.untranslated(asked().view)


async def test_what_waits_is_bounded() -> None:
    index = told()
    observer = Tokenising(index, lambda name: Wanted("a", "http://a:1", kv_events="tcp://a:1"))
    for i in range(10 * WAITING):
        observer.sent(asked(f"{i}", user=f"{Random(i).random()}"), A, 1, 0.0)
    assert observer._queue.qsize() == WAITING


def test_what_is_asked() -> None:
    messages = [{"role": "user", "content": "hi"}]
    chat = {"model": "m", "messages": messages, "tools": [], "temperature": 1, "stream": True, "user": "u"}
    assert question(chat) == {"model": "m", "messages": messages, "tools": []}
    assert question({"model": "m", "prompt": "x", "max_tokens": 3}) == {"model": "m", "prompt": "x"}
    assert question({"prompt": [1, 2]}) is None
    assert question({"prompt": ["a", "b"]}) is None
    assert question({}) is None
