"""A gateway on a loopback port, in this event loop."""

from __future__ import annotations

import asyncio
import json
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import aiohttp

from tests.gateway.backends import DONE, Backend, event
from tests.gateway.real_engines import Engine
from tidegate.config import resolve
from tidegate.gateway.attempt import How
from tidegate.gateway.job import Job
from tidegate.gateway.proxy import End
from tidegate.gateway.run import Service
from tidegate.routing.choice import Choice

_markers = count()


@dataclass
class Ends:
    """How jobs ended, as an observer is told."""

    ends: list[End] = field(default_factory=list)
    by_job: dict[str, int] = field(default_factory=dict)
    failures: defaultdict[str, list[How]] = field(default_factory=lambda: defaultdict(list))
    first_tokens: list[str] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)

    @property
    def sent_to(self) -> list[str]:
        return [choice.replica.name for choice in self.choices]

    def sent(self, job: Job, choice: Choice, attempt: int, now: float) -> None:
        self.choices.append(choice)

    def first_token(self, job: Job, now: float) -> None:
        self.first_tokens.append(job.id)

    def failed(self, job: Job, replica: str, how: How, reason: str, now: float) -> None:
        self.failures[replica].append(how)

    def ended(self, job: Job, end: End, now: float) -> None:
        self.ends.append(end)
        self.by_job[job.id] = self.by_job.get(job.id, 0) + 1


@dataclass
class Answer:
    """What a client got. `events` are the numbers of those that came, in order."""

    marker: str
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def events(self) -> list[int]:
        parts = [part[6:] for part in self.body.split(b"\n\n") if part.startswith(b'data: {"id"')]
        return [json.loads(part)["n"] for part in parts]

    @property
    def error(self) -> dict[str, Any] | None:
        """The error of an answer or the last event of a stream."""
        last = self.body.strip().split(b"\n\n")[-1].removeprefix(b"data: ")
        return json.loads(last)["error"] if b'"error"' in last else None

    @property
    def complete(self) -> bool:
        return self.status == 200 and self.body.endswith(DONE)

    @property
    def terminal(self) -> bool:
        """Whether it ended as answers may: whole, or with an error that says so."""
        return self.complete or self.error is not None

    def begins(self) -> bool:
        """Whether everything that came of the stream is its beginning, once."""
        n = len(self.events)
        return self.body.startswith(b"".join(event(self.marker, i) for i in range(n))) and self.events == [*range(n)]


@dataclass
class Running:
    url: str
    service: Service
    ends: Ends
    http: aiohttp.ClientSession

    async def stream(self, **body: Any) -> Answer:
        marker = f"m{next(_markers)}"
        asked = {"prompt": "Why do tides come?", "stream": True, "marker": marker, **body}
        async with self.http.post(f"{self.url}/v1/completions", json=asked) as answer:
            return Answer(marker, answer.status, answer.headers, await answer.read())


@asynccontextmanager
async def gateway(behind: Sequence[Backend | Engine], **options: Any) -> AsyncIterator[Running]:
    """A gateway before `behind`, whose names are those of the replicas; `options` of `[gateway]`."""
    replicas = [{"name": b.name, "url": b.url} for b in behind]
    config = resolve({"gateway": {"route": "least-loaded", "replicas": replicas, **options}})
    ends = Ends()
    service = Service(config, os.environ, [ends])
    server = await asyncio.get_running_loop().create_server(service.client, "127.0.0.1", 0, backlog=512)
    port = server.sockets[0].getsockname()[1]
    # No limit, and no certificates: nothing here is encrypted.
    connector = aiohttp.TCPConnector(limit=0, ssl=False)
    service.beside.start()
    try:
        async with aiohttp.ClientSession(connector=connector) as http:
            yield Running(f"http://127.0.0.1:{port}", service, ends, http)
    finally:
        server.close()
        for connection in list(service.connections):
            connection.transport.abort()
        await service.close()
