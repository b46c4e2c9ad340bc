"""Which tokens a prompt has, asked of an engine beside the prompt's way: so its cache events can be told of text.

Nobody waits for it. What does not fit the queue, or fails, is left out: its prefixes stay estimated.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import aiohttp
import msgspec

from tidegate.gateway.attempt import How
from tidegate.gateway.bounded import read_whole
from tidegate.gateway.discovery import Wanted
from tidegate.gateway.job import Job
from tidegate.gateway.lookin import look_in
from tidegate.gateway.proxy import End
from tidegate.routing.choice import Choice
from tidegate.routing.prefix_index import PrefixIndex

WAITING = 64
"""Prompts that wait to be asked about; more are left out."""

AT_ONCE = 2
TIMEOUT_S = 5.0
MAX_BYTES = 16 * 2**20
_log = logging.getLogger(__name__)
_CHAT = ("model", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
_TEXT = ("model", "prompt", "add_special_tokens")


class Asked(NamedTuple):
    engine: Wanted
    job: Job


class Answer(msgspec.Struct, gc=False):
    """What is read of an answer of /tokenize."""

    tokens: list[int]


_answer = msgspec.json.Decoder(Answer)  # a long prompt's are megabytes, and streams wait meanwhile


def question(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The body for an engine's /tokenize (vLLM's form) about a request's body; None where there is no one text."""
    fields = _CHAT if "messages" in body else _TEXT
    if fields is _TEXT and not isinstance(body.get("prompt"), str):
        return None
    return {name: body[name] for name in fields if body.get(name) is not None}


class Tokenising:
    """An `Observer` of the proxy that has prompts tokenised by engines that publish their cache."""

    def __init__(self, index: PrefixIndex, engine: Callable[[str], Wanted | None]) -> None:
        self._index = index
        self._engine = engine
        self._queue: asyncio.Queue[Asked] = asyncio.Queue(WAITING)

    def sent(self, job: Job, choice: Choice, attempt: int, now: float) -> None:
        if attempt > 1 or not self._index.untranslated(job.view):
            return
        engine = self._engine(choice.replica.name)
        if engine is not None and engine.kv_events is not None and not self._queue.full():
            self._queue.put_nowait(Asked(engine, job))

    def first_token(self, job: Job, now: float) -> None: ...
    def failed(self, job: Job, replica: str, how: How, reason: str, now: float) -> None: ...
    def ended(self, job: Job, end: End, now: float) -> None: ...

    async def run(self) -> None:
        """Ask, until cancelled."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._work(http))

    async def _work(self, http: aiohttp.ClientSession) -> None:
        while True:
            asked = await self._queue.get()
            if self._index.untranslated(asked.job.view):  # nobody asked about the like meanwhile
                try:
                    await self._ask(http, asked)
                except Exception as e:  # noqa: BLE001 - whatever a client or an engine says, the next one is asked about
                    _log.debug("engine %s: no tokens of a prompt: %s", asked.engine.name, e)

    async def _ask(self, http: aiohttp.ClientSession, asked: Asked) -> None:
        engine, job = asked
        body = question(json.loads(job.body))
        if body is None:
            return
        headers = {} if engine.api_key is None else {"Authorization": f"Bearer {engine.api_key}"}
        async with http.post(f"{engine.url}/tokenize", json=body, headers=headers, allow_redirects=False) as answer:
            answer.raise_for_status()
            tokens = _answer.decode(await read_whole(answer, MAX_BYTES)).tokens
        said = look_in(job.body)
        self._index.tokenised(job.view, tokens, sum(map(len, said.text)), said.cache_salt or "")
