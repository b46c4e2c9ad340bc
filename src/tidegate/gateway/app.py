"""What the gateway answers: pages of its own, and everything else under /v1 by an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from os import urandom
from random import Random
from urllib.parse import unquote

from tidegate.api.errors import ApiError
from tidegate.config import GatewayConfig
from tidegate.gateway.attempt import How
from tidegate.gateway.door import Door
from tidegate.gateway.front import Reply, Request
from tidegate.gateway.http1 import end_to_end
from tidegate.gateway.job import Job
from tidegate.gateway.lookin import NOTHING, Body, all_text, look_in
from tidegate.gateway.proxy import End, Proxy
from tidegate.gateway.trace import traced
from tidegate.routing.text_blocks import BytesPerToken, text_blocks
from tidegate.routing.view import RouteView

_METHODS = ("GET", "POST", "DELETE")
_GENERATION = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})
# The client's key is for the gateway, and its name for a request stands beside the gateway's own.
_NOT_PASSED_ON = frozenset({b"authorization", b"x-api-key", b"cookie", b"x-request-id"})
# Nor are compressed streams asked for: their tokens could not be counted.
_NOT_OF_GENERATIONS = _NOT_PASSED_ON | {b"accept-encoding"}
_MODELS = 64  # whose bytes a token are learned
_NOTHING_DONE = frozenset({How.REFUSED, How.TURNED_AWAY, How.UNREACHABLE, How.RESET, How.NO_FIRST_TOKEN})
_TYPICAL_OUTPUTS = 256  # tokens counted against a rate where the client does not bound them


@dataclass(frozen=True, slots=True)
class Page:
    """A small answer of the gateway's own."""

    status: int
    content_type: str
    body: bytes


class Asked:
    """A request for a page. `rest` is what follows the page's name in the path."""

    __slots__ = ("fields", "rest")

    def __init__(self, rest: str, fields: Mapping[str, str]) -> None:
        self.rest = rest
        self.fields = fields


Pages = Mapping[str, Callable[[Asked], Awaitable[Page]]]
"""By path; one that ends in "/" also answers what is below it."""


class Gateway:
    """The front's handler. `config` and `door` may be exchanged at any time; `draining`: nothing new is taken."""

    def __init__(self, config: GatewayConfig, door: Door, proxy: Proxy, pages: Pages) -> None:
        self.config = config
        self.door = door
        self.draining = False
        self._proxy = proxy
        self._pages = pages
        self._loop = asyncio.get_running_loop()
        self._bytes_per_token: dict[str, BytesPerToken] = {}
        self._in_flight = 0
        self._random = Random()

    @property
    def max_body_bytes(self) -> int:
        return self.config.max_body_bytes

    @property
    def max_connections(self) -> int:
        return self.config.max_connections

    @property
    def stall_seconds(self) -> float:
        return self.config.body_seconds

    @property
    def in_flight(self) -> int:
        """Jobs that have not ended."""
        return self._in_flight

    def admit(self, request: Request) -> None:
        """Refuse what no body could make right: 401, 404, 405, and 503 when shutting down."""
        if request.method not in _METHODS:
            raise ApiError(405, f"{request.method} is not answered here", headers={"Allow": ", ".join(_METHODS)})
        path = request.path
        if self._page(path) is not None:
            return
        if not path.startswith("/v1/") or _climbs(path):
            raise ApiError(404, f"there is nothing at {path[:200]!r}; engines answer below /v1/")
        if self.draining:
            retry = {"Retry-After": "5", "Connection": "close"}
            raise ApiError(503, "the gateway is shutting down", code="draining", headers=retry)
        self.door.key_of(request.fields)

    async def answer(self, request: Request, reply: Reply) -> None:
        """Answer a request that was read whole."""
        found = self._page(request.path)
        if found is not None:
            page, rest = found
            answer = await page(Asked(rest, request.fields))
            reply.whole(answer.status, [(b"content-type", answer.content_type.encode())], answer.body)
            return
        id = f"req-{urandom(12).hex()}"
        reply.headers.append((b"x-request-id", id.encode()))
        self._in_flight += 1
        try:
            await self._serve(id, request, reply)
        finally:
            self._in_flight -= 1

    async def _serve(self, id: str, request: Request, reply: Reply) -> None:
        generates = _generates(request.path)
        body = _says(request, generates)
        key = self.door.key_of(request.fields)
        claim = self.door.claim(request.fields, body, key)
        text = body.text
        text_bytes = sum(map(len, text))
        model = body.model or ""
        without = _NOT_OF_GENERATIONS if generates else _NOT_PASSED_ON
        per_token = self._bytes_per_token_of(model)
        begin = self._random if self.config.traces == "create" else None
        view = RouteView(
            id,
            claim.slo_class,
            per_token.tokens(text_bytes),
            text_blocks(text, model, claim.tenant, body.cache_salt or ""),
            per_token.block_tokens,
            claim.tenant,
            request.fields.get("x-session-id", ""),
            bool(body.stream),
        )
        job = Job(
            id,
            claim,
            view,
            self._loop.time(),
            request.method,
            request.target,
            traced(end_to_end(request.headers, without), begin),
            request.body,
            view.streams,
            body.outputs,
        )
        outputs = _TYPICAL_OUTPUTS if job.max_tokens is None else job.max_tokens
        charge = self.door.charge(key, claim, view.prompt_tokens + outputs, job.arrival)

        def ended(end: End) -> None:
            charge.settle(_used(end, job, charge.tokens), self._loop.time())
            if end.prompt_tokens is not None and all_text(text):
                per_token.observe(text_bytes, end.prompt_tokens)

        await self._proxy.serve(job, reply, ended)

    def _page(self, path: str) -> tuple[Callable[[Asked], Awaitable[Page]], str] | None:
        if path in _GENERATION:
            return None
        page = self._pages.get(path)
        if page is not None:
            return page, ""
        for name, below in self._pages.items():
            if name.endswith("/") and path.startswith(name):
                return below, unquote(path[len(name) :])
        return None

    def _bytes_per_token_of(self, model: str) -> BytesPerToken:
        known = self._bytes_per_token.get(model)
        if known is None:
            if len(self._bytes_per_token) >= _MODELS:  # names are the clients': they may not fill the memory
                model = ""
            known = self._bytes_per_token.setdefault(model, BytesPerToken())
        return known


def _generates(path: str) -> bool:
    """Whether tokens are asked for, in a path as engines read it."""
    return path in _GENERATION or unquote(path).rstrip("/") in _GENERATION


def _says(request: Request, generates: bool) -> Body:
    """What the body says; nothing where it is not for us to understand."""
    if generates and request.method == "POST":
        return look_in(request.body)
    if not request.body:
        return NOTHING
    try:
        return look_in(request.body)
    except ApiError:
        return NOTHING


def _climbs(path: str) -> bool:
    """Whether a server might take the path for one outside of what it begins with."""
    return ("/." in path or "%" in path) and not {".", ".."}.isdisjoint(unquote(path).split("/"))


def _used(end: End, job: Job, estimate: int) -> int:
    """Tokens that a job used. A client that left pays for what was done until then."""
    if end.replica is None or end.how in _NOTHING_DONE:
        return 0
    if end.how is How.CLIENT_LEFT and not job.streams:  # how far the engine was, nobody has seen
        return estimate
    return (end.prompt_tokens or job.view.prompt_tokens) + end.outputs
