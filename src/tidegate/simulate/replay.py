"""Sends a workload to a real OpenAI-compatible server, on time, and records what the client sees.

The load is open: a request is sent when it is due, whether or not earlier ones were answered, and its
latencies count from the moment at which it was due, so that a client that falls behind cannot flatter
the server. A cap on concurrency makes the load closed; a request is then due when a place is free. The
clients of a workload's closed loops ask again when they had their answer and have thought.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from tidegate.core.request import UNSERVED, FinishReason
from tidegate.core.slo import NO_SLO, SloClass
from tidegate.errors import InputError, MissingExtra
from tidegate.observe.records import COMPLETED, Record
from tidegate.simulate.closed_loop import Clients
from tidegate.simulate.workload import Workload, WorkloadRequest

if TYPE_CHECKING:
    import aiohttp

MAX_EVENT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """Where a workload is sent, and how its prompts are made.

    url:      the server, without /v1
    model:    None asks the server and takes the first it serves
    api_key:  sent as a bearer token
    seed:     prompts are random token ids drawn from it
    token_ids: prompts hold ids in this half-open range; keep clear of the special tokens, which most
              vocabularies put first, and of the vocabulary's end
    concurrency: at most this many requests at a time; None sends on time whatever is outstanding
    timeout_s: seconds without a byte from the server after which a request has failed
    classes:  the promises against which `slo_met` is judged, and each class's priority
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    seed: int = 0
    token_ids: tuple[int, int] = (1_000, 30_000)
    concurrency: int | None = None
    timeout_s: float = 600.0
    classes: Mapping[str, SloClass] = field(default_factory=dict)


def prompt_ids(request: WorkloadRequest, index: int, seed: int, token_ids: tuple[int, int]) -> list[int]:
    """The prompt of request number `index`: exactly `prompt_tokens` ids, the same for the same seed.

    Prompts share their ids as far as their `hash_ids` agree; what no hash id covers is the request's own.
    """
    low, high = token_ids
    block = request.hash_block_tokens
    parts = [
        np.random.default_rng((seed, 1, block, identity)).integers(low, high, block) for identity in request.hash_ids
    ]
    own = request.prompt_tokens - len(parts) * block
    if own > 0:
        parts.append(np.random.default_rng((seed, 0, index)).integers(low, high, own))
    ids: list[int] = np.concatenate(parts)[: request.prompt_tokens].tolist()
    return ids


@dataclass(slots=True)
class _Stream:
    """What the client saw of one answer; moments are seconds on the event loop's clock."""

    arrivals: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int = 0

    def take(self, event: dict[str, Any], now: float) -> None:
        """Take one event. An event with text is a token's arrival, as is one without text and end."""
        for choice in event.get("choices") or ():
            reason = choice.get("finish_reason")
            if choice.get("text") or reason is None:
                self.arrivals.append(now)
            if reason is not None:
                self.finish_reason = reason
        usage = event.get("usage")
        if usage:
            self.output_tokens = usage.get("completion_tokens")
            self.prompt_tokens = usage.get("prompt_tokens")
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class _Failed(Exception):
    """A request failed; the text says how and `reason` is the record's finish reason."""

    def __init__(self, reason: FinishReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Replay:
    """One replay of a workload. `records` holds what has ended so far, also after an interruption.

    failures:   messages of failed requests and how often each came
    send_delay_s: the largest delay, in seconds, with which this client sent a request that was due
    on_record:  called after every record
    """

    def __init__(self, workload: Workload, target: Target, on_record: Callable[[], None] = lambda: None) -> None:
        self.workload = workload
        self.target = target
        self.model = target.model
        self.records: list[Record] = []
        self.failures: Counter[str] = Counter()
        self.send_delay_s = 0.0
        self.on_record = on_record
        self._start = self._place_free = 0.0
        self._asked = count(len(workload))  # closed loops' requests are numbered after the others, as they are asked
        self._places = asyncio.Semaphore()

    async def run(self) -> None:
        """Send everything and wait for every answer. Cancelling it records what is in flight as cancelled.

        Raises InputError where no server answers at the URL or where it lists models but not the wanted
        one, and MissingExtra without aiohttp.
        """
        async with _session(self.target) as session:
            self.model = await self._serving_model(session)
            self._places = asyncio.Semaphore(self.target.concurrency or self.workload.total or 1)
            loops = [loop.start() for loop in self.workload.loops]
            askers = [(clients, request) for clients in loops for request in clients.first()]
            arrivals = [r.arrival_s for r in (*self.workload.requests[:1], *(request for _, request in askers))]
            self._start = self._place_free = asyncio.get_running_loop().time() - min(arrivals, default=0.0)
            async with asyncio.TaskGroup() as tasks:
                for clients, request in askers:
                    tasks.create_task(self._ask(session, clients, request))
                for index, request in enumerate(self.workload):
                    prompt = prompt_ids(request, index, self.target.seed, self.target.token_ids)
                    due = await self._place(request)
                    sending = tasks.create_task(self._one(session, index, request, prompt, due))
                    sending.add_done_callback(lambda _: self._places.release())

    async def _ask(self, session: aiohttp.ClientSession, clients: Clients, first: WorkloadRequest) -> None:
        """Be one client of a closed loop: ask, wait for the answer, think, until there is no more to ask."""
        request: WorkloadRequest | None = first
        while request is not None:
            index = next(self._asked)
            prompt = prompt_ids(request, index, self.target.seed, self.target.token_ids)
            due = await self._place(request)
            try:
                await self._one(session, index, request, prompt, due)
            finally:
                self._places.release()
            request = clients.after(request, asyncio.get_running_loop().time() - self._start)

    async def _place(self, request: WorkloadRequest) -> float:
        """Wait until a request is due and a place is free; when it was due, or had its place if that was later."""
        loop = asyncio.get_running_loop()
        due = self._start + request.arrival_s
        await asyncio.sleep(max(0.0, due - loop.time()))
        full = self._places.locked()
        await self._places.acquire()
        self._place_free = loop.time() if full else self._place_free
        due = max(due, self._place_free)
        self.send_delay_s = max(self.send_delay_s, loop.time() - due)
        return due

    async def _serving_model(self, session: aiohttp.ClientSession) -> str:
        import aiohttp

        try:
            async with session.get("/v1/models") as answer:
                if answer.status in (401, 403):
                    raise InputError(f"{self.target.url} wants an API key: set TIDEGATE_API_KEY")
                body = await answer.json(content_type=None) if answer.status == 200 else None
        except (aiohttp.InvalidURL, ValueError) as e:
            raise InputError(f"{self.target.url} does not answer /v1/models as an OpenAI-compatible server: {e}") from e
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise InputError(f"no server answers at {self.target.url} ({e}); start one or mend --url") from e
        names = [str(m["id"]) for m in body.get("data", ())] if isinstance(body, dict) else []
        if self.target.model is not None:
            if names and self.target.model not in names:
                raise InputError(f"{self.target.url} has no model {self.target.model!r}; it has {', '.join(names)}")
            return self.target.model
        if not names:
            raise InputError(f"{self.target.url} names no model at /v1/models; give --model")
        return names[0]

    async def _one(
        self, session: aiohttp.ClientSession, index: int, request: WorkloadRequest, prompt: list[int], due: float
    ) -> None:
        loop = asyncio.get_running_loop()
        stream = _Stream()
        reason = FinishReason.CANCELLED.value
        try:
            await self._converse(session, self._body(request, prompt), stream)
            reason = _finish_reason(stream.finish_reason)
        except _Failed as e:
            self.failures[str(e)] += 1
            reason = e.reason.value
        finally:
            self.records.append(self._record(index, request, stream, reason, due, loop.time()))
            self.on_record()

    def _body(self, request: WorkloadRequest, prompt: list[int]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "user": request.tenant,
            "metadata": {"slo_class": request.slo_class},
        }
        if request.priority is not None:
            body["priority"] = request.priority
        return body

    async def _converse(self, session: aiohttp.ClientSession, body: dict[str, Any], stream: _Stream) -> None:
        import aiohttp

        loop = asyncio.get_running_loop()
        try:
            async with session.post("/v1/completions", json=body) as answer:
                if answer.status != 200:
                    refused = answer.status == 429 or 400 <= answer.status < 500
                    raise _Failed(
                        FinishReason.REFUSED if refused else FinishReason.ERROR,
                        f"HTTP {answer.status}: {_message(await answer.text())}",
                    )
                async for line in answer.content:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        break
                    event = json.loads(data)
                    if event.get("error"):
                        raise _Failed(_end_of(event["error"]), f"in the stream: {_message(data.decode())}")
                    stream.take(event, loop.time())
        except TimeoutError as e:
            raise _Failed(FinishReason.ERROR, f"nothing came for {self.target.timeout_s:g} s") from e
        except (aiohttp.ClientError, OSError) as e:
            raise _Failed(FinishReason.ERROR, f"{type(e).__name__}: {e}") from e
        except (ValueError, TypeError, AttributeError) as e:
            raise _Failed(FinishReason.ERROR, f"an event of the stream has not OpenAI's shape: {e}") from e
        if stream.finish_reason is None:
            raise _Failed(FinishReason.ERROR, "the stream ended before the answer did")

    def _record(
        self, index: int, request: WorkloadRequest, stream: _Stream, reason: str, due: float, end: float
    ) -> Record:
        promised = self.target.classes.get(request.slo_class)
        times = stream.arrivals
        outputs = len(times) if stream.output_tokens is None else stream.output_tokens
        finish = times[-1] if times and reason in COMPLETED else end
        ttft = times[0] - due if times else None
        tpot = (times[-1] - times[0]) / (outputs - 1) if times and outputs > 1 else None
        gaps = sorted(later - earlier for earlier, later in pairwise(times))
        p99 = gaps[ceil(0.99 * len(gaps)) - 1] if gaps else None
        missed = (promised.slo if promised else NO_SLO).missed(ttft, tpot, p99, finish - due)
        return Record(
            request_id=f"{self.workload.name}-{index}",
            tenant=request.tenant,
            slo_class=request.slo_class,
            priority=request.priority if request.priority is not None else (promised.priority if promised else 0),
            arrival_s=due - self._start,
            admitted_s=None,
            first_token_s=times[0] - self._start if times else None,
            finish_s=finish - self._start,
            prompt_tokens=request.prompt_tokens if stream.prompt_tokens is None else stream.prompt_tokens,
            output_tokens=outputs,
            cached_tokens=stream.cached_tokens,
            recomputed_tokens=None,
            swapped_blocks=None,
            preemptions=None,
            max_gap_s=gaps[-1] if gaps else None,
            p99_gap_s=p99,
            ttft_s=ttft,
            tpot_s=tpot,
            e2e_s=finish - due,
            slo_met=reason in COMPLETED and not missed,
            finish_reason=reason,
            replica=self.target.url,
        )


@asynccontextmanager
async def _session(target: Target) -> AsyncIterator[aiohttp.ClientSession]:
    try:
        import aiohttp
    except ImportError as e:
        raise MissingExtra("replaying needs aiohttp: pip install 'tidegate[replay]'") from e
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    try:
        session = aiohttp.ClientSession(
            base_url=target.url,
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=target.timeout_s, sock_read=target.timeout_s),
            read_bufsize=MAX_EVENT_BYTES,
        )
    except ValueError as e:
        raise InputError(f"{target.url} is no http:// address of a server") from e
    async with session:
        yield session


def _end_of(error: Any) -> FinishReason:
    """What an error in a stream says of the request: ended in the queue, or a fault."""
    code = error.get("code") if isinstance(error, dict) else None
    return next((reason for reason in UNSERVED if reason.value == code), FinishReason.ERROR)


def _finish_reason(said: str | None) -> str:
    known = {r.value for r in FinishReason}
    return said if said in known else FinishReason.STOP.value


def _message(body: str) -> str:
    """What an OpenAI-shaped error body says, in one line; the start of any other body."""
    try:
        error = json.loads(body)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        text = body
    return " ".join(text.split())[:200]
