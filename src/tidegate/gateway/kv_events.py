"""What engines publish of their prefix caches: vLLM's events over ZeroMQ, which SGLang publishes as well.

A message has three frames: topic, sequence number (8 bytes, big-endian), and msgpack of `[time, [event, ...], ...]`.
An event is a map with its name as "type", or, of older versions, a list that begins with its name. Missed messages
are asked for at a second address, where each comes behind an empty frame and the last has the sequence number -1.
Source: `vllm/distributed/kv_events.py` of vLLM 0.32, read; nothing of it is imported.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from tidegate.errors import MissingExtra
from tidegate.gateway.discovery import Wanted
from tidegate.gateway.fleet import is_another

try:
    import zmq
    import zmq.asyncio
except ImportError as e:
    raise MissingExtra("kv_events needs pyzmq: pip install 'tidegate[kv-events]'") from e

MAX_MESSAGES = 10_000
"""Messages that wait to be read; more are dropped by ZeroMQ, which shows as a gap."""

MAX_BYTES = 64 * 2**20
"""Of one message; a larger one closes the connection."""

REPLAY_S = 5.0
"""Seconds without a message after which a replay is over."""

_FIELDS: Mapping[str, Sequence[str]] = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
"""The order of an event's fields where it comes as a list."""

_END = (-1).to_bytes(8, "big", signed=True)
_log = logging.getLogger(__name__)


class Index(Protocol):
    """Who is told: `routing.prefix_index.PrefixIndex`, whose docstrings say what each means."""

    def stored(
        self,
        replica: str,
        hashes: Sequence[Hashable],
        parent: Hashable | None,
        token_ids: Sequence[int],
        block_size: int,
        salt: str = "",
    ) -> None: ...

    def removed(self, replica: str, hashes: Sequence[Hashable]) -> None: ...
    def cleared(self, replica: str) -> None: ...
    def lost(self, replica: str) -> None: ...


class Batch(NamedTuple):
    """One message: when it was made (seconds, on the engine's clock), and its events as maps."""

    time: float
    events: Sequence[Mapping[str, Any]]


def batch_of(payload: bytes) -> Batch:
    """Raises ValueError for what is no batch of events."""
    try:
        whole = msgspec.msgpack.decode(payload)
    except msgspec.DecodeError as e:
        raise ValueError(f"not msgpack: {e}") from e
    match whole:
        case [float() | int() as time, list() as events, *_]:
            return Batch(float(time), [_as_map(event) for event in events])
    raise ValueError("not [time, events, ...]")


def _as_map(event: Any) -> Mapping[str, Any]:
    match event:
        case {"type": str()}:
            return dict(event)
        case [str() as name, *values]:
            return {"type": name, **dict(zip(_FIELDS.get(name, ()), values, strict=False))}
    raise ValueError("an event without a name")


class Replica:
    """One engine's messages, in order, into the index. Knows nothing of sockets.

    Only blocks in the engine's own memory count, of full attention and of the common size; those of images and such,
    which no text names, are left out.
    """

    def __init__(self, name: str, index: Index) -> None:
        self.name = name
        self.next: int | None = None  # the sequence number that follows; None until the first is known
        self._index = index
        self._time = float("-inf")
        self._size = 0

    def gap(self, seq: int) -> bool:
        """Whether messages before this one are missing."""
        return seq > (self.next or 0)

    def told(self, seq: int, batch: Batch) -> None:
        """A message came. One that came before is ignored; where the engine began anew, so does what it holds."""
        if self.next is not None and seq < self.next:
            if batch.time <= self._time:
                return
            self._index.cleared(self.name)  # its clock went on, and its numbers begin anew
        self.next, self._time = seq + 1, batch.time
        for event in batch.events:
            self._event(event)

    def lose(self) -> None:
        """Messages are missing for good: what is held is unknown until the engine tells again."""
        self._index.lost(self.name)
        self._size = 0

    def _event(self, event: Mapping[str, Any]) -> None:
        if event.get("medium") not in (None, "GPU"):
            return
        match event:
            case {"type": "BlockStored", "block_hashes": list() as hashes, "token_ids": list() as ids, **rest}:
                if rest.get("kv_cache_spec_kind") in (None, "full_attention"):
                    self._stored(hashes, ids, rest)
            case {"type": "BlockRemoved", "block_hashes": list() as hashes}:
                self._index.removed(self.name, hashes)
            case {"type": "AllBlocksCleared"}:
                self._index.cleared(self.name)

    def _stored(self, hashes: list[Hashable], token_ids: list[int], rest: Mapping[str, Any]) -> None:
        size, salt = rest.get("block_size"), _salt(rest)
        if len(hashes) > 1 and isinstance(size, int):  # an unfinished end comes alone, and is smaller
            self._size = size
        if size != self._size or salt is None:
            return
        self._index.stored(self.name, hashes, rest.get("parent_block_hash"), token_ids, size, salt)


def _salt(rest: Mapping[str, Any]) -> str | None:
    """What the hash of the first block was made of beside its tokens; None where that is no text."""
    keys = (rest.get("extra_keys") or [None])[0] or ()
    if not all(isinstance(key, str) for key in keys):
        return None
    own = [rest["lora_name"]] if rest.get("lora_name") and rest["lora_name"] not in keys else []
    return "\0".join([*own, *keys])


class KvEvents:
    """Follows every engine that publishes its cache, until it is no longer wanted."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._context = zmq.asyncio.Context()
        self._followed: dict[str, tuple[Wanted, asyncio.Task[None]]] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def watch(self, engines: Iterable[Wanted]) -> None:
        """From now on follow these and no others, as far as they publish anything."""
        coming = {wanted.name: wanted for wanted in engines if wanted.kv_events is not None}
        for name, (known, _) in list(self._followed.items()):
            if name not in coming or is_another(known, coming[name]):
                self._let_go(name)
        for name, wanted in coming.items():
            if name not in self._followed:
                self._followed[name] = wanted, asyncio.create_task(self._follow(wanted))

    async def close(self) -> None:
        """Follow nobody any more."""
        self.watch(())
        await asyncio.gather(*self._leaving, return_exceptions=True)
        self._context.term()

    def _let_go(self, name: str) -> None:
        task = self._followed.pop(name)[1]
        task.cancel()
        self._leaving.add(task)  # until it has closed its sockets
        task.add_done_callback(self._leaving.discard)
        self._index.lost(name)

    async def _follow(self, wanted: Wanted) -> None:
        replica = Replica(wanted.name, self._index)
        with self._socket(zmq.SUB, wanted.kv_events) as events:
            events.subscribe(b"")
            await self._replay(wanted, replica)
            while True:
                frames = await events.recv_multipart()
                try:
                    await self._read(wanted, replica, frames)
                except Exception as e:  # noqa: BLE001 - whatever an engine publishes, the next message is read
                    _log.warning("engine %s: a cache event cannot be read: %s", wanted.name, e)
                    replica.lose()

    async def _read(self, wanted: Wanted, replica: Replica, frames: Sequence[bytes]) -> None:
        if len(frames) < 2 or len(frames[-2]) != 8:
            raise ValueError(f"{len(frames)} frames without a sequence number")
        seq, batch = int.from_bytes(frames[-2], "big"), batch_of(frames[-1])
        if replica.gap(seq):
            await self._replay(wanted, replica)
            if replica.gap(seq):
                if replica.next is not None:
                    _log.warning("engine %s: cache events before %d are lost", wanted.name, seq)
                replica.lose()
        replica.told(seq, batch)

    async def _replay(self, wanted: Wanted, replica: Replica) -> None:
        """Ask for what is missing, as far back as the engine remembers it."""
        if wanted.kv_replay is None:
            return
        with self._socket(zmq.DEALER, wanted.kv_replay) as asked:
            try:
                async with asyncio.timeout(REPLAY_S) as bound:
                    await asked.send_multipart((b"", (replica.next or 0).to_bytes(8, "big")))
                    while (frames := await asked.recv_multipart())[-2] != _END:
                        seq, batch = int.from_bytes(frames[-2], "big"), batch_of(frames[-1])
                        if replica.gap(seq):
                            replica.lose()
                        replica.told(seq, batch)
                        bound.reschedule(asyncio.get_running_loop().time() + REPLAY_S)
            except Exception as e:  # noqa: BLE001 - as above
                _log.warning("engine %s: no replay of cache events: %s", wanted.name, str(e) or "it does not answer")

    def _socket(self, kind: int, address: str | None) -> zmq.asyncio.Socket:
        assert address is not None
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.rcvhwm = MAX_MESSAGES
        socket.maxmsgsize = MAX_BYTES
        socket.connect(address)
        return socket
