"""Cache events in vLLM's wire format over real ZeroMQ sockets, into the real index."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from tidegate.gateway.discovery import Wanted
from tidegate.gateway.kv_events import KvEvents, Replica, batch_of
from tidegate.routing.prefix_index import PrefixIndex
from tidegate.routing.text_blocks import BLOCK_BYTES
from tidegate.routing.view import RouteView

SIZE = 4
TOKENS = list(range(64))
VIEW = RouteView("r", "interactive", 64, [11, 22, 33, 44], 16)
TEXT_BYTES = 4 * BLOCK_BYTES


class Stored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    """The fields of vLLM 0.32, in its order."""

    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[Any]
    medium: str | None = "GPU"


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class OldStored(msgspec.Struct, tag="BlockStored", array_like=True, omit_defaults=True):
    """As a list, as older versions and SGLang write it; hashes are numbers there."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


def names(n: int, tokens: list[int] = TOKENS) -> list[bytes]:
    """The engine's own hashes, of which nobody else knows anything."""
    return [f"engine-{i}-{tokens[0]}".encode() for i in range(n)]


def prompt(n: int = 16, **more: Any) -> Stored:
    return Stored(names(n), None, TOKENS[: n * SIZE], SIZE, **more)


class Publisher:
    """An engine's side: PUB, and ROUTER for what was missed. `silent` messages are numbered and never sent."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.pub, self.replays = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self.address = self._bind(self.pub)
        self.replay_address = self._bind(self.replays)
        self.restart()
        self.asked: list[int] = []
        self._time = 0.0
        self._task = asyncio.create_task(self._replay())

    @staticmethod
    def _bind(socket: zmq.asyncio.Socket) -> str:
        socket.linger = 0
        return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"

    def restart(self) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self._numbers = count()

    async def subscribed(self) -> None:
        async with asyncio.timeout(20):
            await self.pub.recv()

    async def publish(self, *events: Any, silent: bool = False) -> None:
        self._time += 1.0
        seq, payload = next(self._numbers), msgspec.msgpack.encode(Batch(self._time, list(events), 0))
        self.sent.append((seq, payload))
        if not silent:
            await self.pub.send_multipart((b"kv", seq.to_bytes(8, "big"), payload))

    async def _replay(self) -> None:
        while True:
            client, _, start = await self.replays.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            for seq, payload in self.sent:
                if seq >= self.asked[-1]:
                    await self.replays.send_multipart((client, b"", b"kv", seq.to_bytes(8, "big"), payload))
            await self.replays.send_multipart((client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""))

    def close(self) -> None:
        self._task.cancel()
        self.pub.close()
        self.replays.close()


@asynccontextmanager
async def following(replay: bool = True) -> AsyncIterator[tuple[Publisher, PrefixIndex]]:
    context = zmq.asyncio.Context()
    publisher, index = Publisher(context), PrefixIndex(1000)
    events = KvEvents(index)
    kv_replay = publisher.replay_address if replay else None
    events.watch(
        [Wanted("a", "http://a:1", kv_events=publisher.address, kv_replay=kv_replay), Wanted("b", "http://b:1")]
    )
    try:
        await publisher.subscribed()
        yield publisher, index
    finally:
        await events.close()
        publisher.close()
        context.term()


def held(index: PrefixIndex) -> int:
    """Tokens of the prompt that the engine is known to hold, once its text is translated."""
    index.tokenised(VIEW, TOKENS, TEXT_BYTES)
    return index.held(VIEW).tokens.get("a", 0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_what_an_engine_stores_and_drops_is_known() -> None:
    async with following() as (engine, index):
        await engine.publish(prompt(8))
        await until(lambda: held(index) == 32)
        assert index.mode("a") == "exact"
        await engine.publish(Stored(names(16)[8:], names(16)[7], TOKENS[32:], SIZE))
        await until(lambda: held(index) == 64)
        await engine.publish(Removed(names(16)[12:]))
        await until(lambda: held(index) == 48)
        await engine.publish(Cleared())
        await until(lambda: held(index) == 0)
        assert index.mode("a") == "exact"


async def test_the_list_form_and_numbers_as_hashes_are_read() -> None:
    async with following() as (engine, index):
        await engine.publish(OldStored([7, 8], None, TOKENS[:8], SIZE, None))
        await until(lambda: held(index) == 8)


async def test_what_was_told_before_we_came_is_replayed() -> None:
    context = zmq.asyncio.Context()
    engine, index = Publisher(context), PrefixIndex(1000)
    for _ in range(3):
        await engine.publish(prompt(4))
    await engine.publish(prompt(16))
    events = KvEvents(index)
    events.watch([Wanted("a", "http://a:1", kv_events=engine.address, kv_replay=engine.replay_address)])
    await until(lambda: held(index) == 64)
    assert engine.asked == [0]
    await events.close()
    engine.close()
    context.term()


async def test_a_gap_is_replayed() -> None:
    async with following() as (engine, index):
        await engine.publish(prompt(4))
        await until(lambda: held(index) == 16)
        await engine.publish(Removed(names(16)[2:4]), silent=True)
        await engine.publish(Removed([b"x"]))
        await until(lambda: held(index) == 8)
        assert engine.asked == [0, 1]


async def test_a_gap_that_nobody_can_fill_makes_the_engine_estimated(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with following(replay=False) as (engine, index):
        await engine.publish(prompt(16))
        await until(lambda: held(index) == 64)
        await engine.publish(Removed(names(16)), silent=True)
        await engine.publish(Removed([b"other"]))
        await until(lambda: index.mode("a") == "estimated")
        assert held(index) == 0
        assert "cache events before 2 are lost" in caplog.text


async def test_a_replay_that_reaches_not_far_enough_is_a_loss() -> None:
    async with following() as (engine, index):
        await engine.publish(prompt(16))
        await until(lambda: held(index) == 64)
        for _ in range(3):
            await engine.publish(Removed(names(16)), silent=True)
        engine.sent = engine.sent[-1:]
        await engine.publish(Removed([b"other"]))
        await until(lambda: index.mode("a") == "estimated")


async def test_an_engine_that_began_anew_holds_nothing() -> None:
    async with following() as (engine, index):
        for _ in range(3):
            await engine.publish(prompt(16))
        await until(lambda: held(index) == 64)
        engine.restart()
        await engine.publish(prompt(2))
        await until(lambda: held(index) == 8)


async def test_an_engine_that_began_anew_with_larger_blocks_is_exact_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async with following() as (engine, index):
        await engine.publish(prompt(16))
        await engine.publish(prompt(16))
        await until(lambda: held(index) == 64)
        engine.restart()
        await engine.publish(Stored(names(4), None, TOKENS[: 8 * SIZE], 2 * SIZE))
        await until(lambda: held(index) == 8 * SIZE)
        assert index.mode("a") == "exact"
        assert not caplog.records


async def test_what_cannot_be_read_is_a_loss_and_no_end(caplog: pytest.LogCaptureFixture) -> None:
    async with following(replay=False) as (engine, index):
        await engine.publish(prompt(16))
        await until(lambda: held(index) == 64)
        await engine.pub.send_multipart((b"kv", b"short", b"payload"))
        await until(lambda: index.mode("a") == "estimated")
        for payload in (b"\xc1", msgspec.msgpack.encode({"ts": 1}), msgspec.msgpack.encode([1.0, [3]])):
            await engine.pub.send_multipart((b"kv", (1).to_bytes(8, "big"), payload))
        await engine.publish(Stored([b"odd"], None, [1, 2, 3], SIZE))  # fewer tokens than its block has
        await engine.publish(prompt(2))
        await until(lambda: held(index) == 8)
    assert "sk-" not in caplog.text


@pytest.mark.parametrize(
    "odd",
    [
        {"block_hashes": [["a"]], "token_ids": [1, 2, 3, 4], "block_size": SIZE},
        {"block_hashes": [b"a"], "token_ids": ["x"] * 4, "block_size": SIZE},
        {"block_hashes": [b"a"], "token_ids": [2**63] * 4, "block_size": SIZE},
        {"block_hashes": [b"a", b"b"], "token_ids": [1] * 8, "block_size": SIZE, "extra_keys": 3},
        {"block_hashes": [b"a", b"b"], "token_ids": [1] * 8, "block_size": SIZE, "lora_name": 3},
        {"block_hashes": [b"a", b"b"], "token_ids": [1] * 8, "block_size": -1},
    ],
)
async def test_an_event_of_odd_values_ends_nothing(odd: dict[str, Any]) -> None:
    async with following(replay=False) as (engine, index):
        await engine.publish(prompt(16))
        await until(lambda: held(index) == 64)
        await engine.publish({"type": "BlockStored", **odd})
        await engine.publish(Cleared(), prompt(2))
        await until(lambda: held(index) == 8)


async def test_an_engine_is_followed_while_it_is_wanted_whatever_its_pool_and_seats() -> None:
    context = zmq.asyncio.Context()
    engine, index = Publisher(context), PrefixIndex(1000)
    events = KvEvents(index)
    events.watch([Wanted("a", "http://a:1", kv_events=engine.address)])
    await engine.subscribed()
    await engine.publish(prompt(16))
    await until(lambda: held(index) == 64)
    events.watch([Wanted("a", "http://a:1", "chat", 9, kv_events=engine.address)])
    assert (index.mode("a"), held(index)) == ("exact", 64)
    events.watch([Wanted("a", "http://a:1")])
    assert index.mode("a") == "estimated"
    await events.close()
    engine.close()
    context.term()


def told(*events: Any) -> PrefixIndex:
    """What the index knows after a batch, without sockets."""
    index = PrefixIndex(1000)
    replica = Replica("a", index)
    replica.told(0, batch_of(msgspec.msgpack.encode(Batch(1.0, list(events)))))
    return index


def test_blocks_of_other_memories_and_other_attention_do_not_count() -> None:
    assert held(told(prompt(16, medium="CPU"))) == 0
    assert held(told(prompt(16, kv_cache_spec_kind="sliding_window"))) == 0
    assert held(told(prompt(16, kv_cache_spec_kind="full_attention"))) == 64
    assert held(told(prompt(16), Removed(names(16), medium="CPU"))) == 64


def test_a_salt_keeps_prefixes_apart() -> None:
    salted = told(prompt(16, extra_keys=[["pepper"], *[None] * 15]))
    assert held(salted) == 0
    salted.tokenised(VIEW, TOKENS, TEXT_BYTES, "pepper")
    assert salted.held(VIEW).tokens == {"a": 64}
    assert held(told(prompt(16, extra_keys=[[["image", 3]], *[None] * 15]))) == 0


def test_unfinished_ends_of_prompts_are_no_blocks() -> None:
    end = Stored([b"end"], names(16)[-1], [1, 2], 2)
    assert held(told(prompt(16), end)) == 64
    assert held(told(end, prompt(16))) == 64
