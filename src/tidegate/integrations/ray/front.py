"""Where HTTP comes in: requests are read whole, routed to an engine replica, and answered byte for byte."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from tidegate.api.body import STALL_SECONDS, BodyLimit
from tidegate.api.errors import ApiError
from tidegate.api.identity import Identities
from tidegate.config import Config
from tidegate.gateway.lookin import NOTHING, look_in
from tidegate.integrations.ray.call import Call, Headers
from tidegate.integrations.ray.replica import REPLICA_HEADER
from tidegate.routing.health import Failure
from tidegate.routing.text_blocks import BytesPerToken, text_blocks
from tidegate.routing.view import RouteView
from tidegate.server import faults

_log = logging.getLogger(__name__)
_EACH_ITS_OWN = ("/metrics", "/v1/scheduler/explain/")
LOST = (RayError, RayServeException)
"""What a handle raises when its replica died, cannot be reached, or failed in the middle of a call."""


class Front:
    """Passes requests on to engines. It is stateless but for what its router learns: several side by side are alike."""

    def __init__(self, engines: DeploymentHandle, config: Config) -> None:
        self._answer = engines.options(stream=True, method_name="answer")
        self._identities = Identities(config, config.server.api_keys)
        self._density = BytesPerToken()
        self._app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        faults.install(self._app)
        self._app.add_middleware(BodyLimit, limit=config.server.max_body_bytes, stall=STALL_SECONDS)
        self._app.add_api_route("/{path:path}", self._pass_on, methods=["GET", "POST"])

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def _pass_on(self, request: Request) -> Response:
        call = await self._read(request)
        try:
            exchange = await self._begin(call)
        except ApiError:
            call.over = True
            raise
        if call.replica and exchange.replica != call.replica:
            await exchange.close()
            raise ApiError(404, f"there is no replica {call.replica[:100]!r} (any more), or it is full")
        response = StreamingResponse(exchange.body(), exchange.status)
        response.raw_headers = list(exchange.headers)
        return response

    async def _read(self, request: Request) -> Call:
        """The request as a call. ApiError where the engine would refuse it for the same reason."""
        path, headers = request.url.path, request.headers
        key = self._identities.key_of(headers) if path.startswith("/v1/") else None
        body = await request.body()
        asked = look_in(body) if body else NOTHING
        claim = self._identities.claim(asked, headers, key)
        text = asked.text
        view = RouteView(
            uuid4().hex,
            claim.slo_class,
            self._density.tokens(sum(map(len, text))),
            text_blocks(text, claim.tenant, asked.model or "", asked.cache_salt or ""),
            self._density.block_tokens,
            claim.tenant,
            sticky=asked.user or "",
            streams=bool(asked.stream),
        )
        replica = headers.get(REPLICA_HEADER.decode(), "") if request.method == "GET" else ""
        if path.startswith(_EACH_ITS_OWN) and not replica:
            name = REPLICA_HEADER.decode()
            raise ApiError(400, f"each replica has its own: name one in the header {name}, as answers do", param=name)
        query = request.url.query.encode("latin-1", "replace")
        return Call(view, request.method, path, query, request.headers.raw, body, replica)

    async def _begin(self, call: Call) -> Exchange:
        """Send a call; once more, to whoever is left, where a replica was lost before it answered."""
        for last in (False, True):
            exchange = Exchange(call, self._answer.remote(call))
            try:
                await exchange.begin()
            except LOST as error:
                _log.warning("a replica was lost before it answered: %s", type(error).__name__)
                exchange.lost(Failure.RESET)
                if last:
                    raise lost() from error
            except BaseException:
                await exchange.close()
                raise
            else:
                return exchange
        raise AssertionError("the second attempt returns or raises")


class Exchange:
    """One attempt at a call, and what the router is told of it."""

    def __init__(self, call: Call, parts: DeploymentResponseGenerator[Any]) -> None:
        self.status = 0
        self.headers: Headers = ()
        self._call = call
        self._parts = parts
        self._over = False

    @property
    def replica(self) -> str:
        """Who answers."""
        return dict(self.headers).get(REPLICA_HEADER, b"").decode()

    async def begin(self) -> None:
        """Wait for the status. Raises what the handle raises."""
        self.status, self.headers = await anext(self._parts)

    async def body(self) -> AsyncGenerator[bytes, None]:
        """The rest. A stream that breaks ends with an error event; any other answer breaks off, as it must."""
        events = dict(self.headers).get(b"content-type", b"").startswith(b"text/event-stream")
        try:
            async for part in self._parts:
                if events and self._call.told is not None:
                    self._call.told.tokens(part.count(b"data: "))
                yield part
            self._end()
        except LOST as error:
            self.lost(Failure.CUT)
            if not events:
                raise
            _log.warning("a replica was lost while it answered: %s", type(error).__name__)
            yield faults.as_event(lost())
        finally:
            await self.close()

    def lost(self, kind: Failure) -> None:
        """The replica failed the call."""
        self._over = True
        if self._call.told is not None:
            self._call.told.failed(kind)

    async def close(self) -> None:
        """Nobody waits for it (any more): its requests are given up. Idempotent."""
        if self._over:
            return
        self._over = self._call.over = True
        self._parts.cancel()
        if self._call.told is not None:
            self._call.told.ended(complete=False)

    def _end(self) -> None:
        """The answer is complete; what it says of its replica is in its status."""
        self._over = True
        told = self._call.told
        if told is None:
            return
        if self.status in (429, 503):
            after = dict(self.headers).get(b"retry-after", b"").decode()
            told.turned_away(float(after) if after.isdecimal() else None)
        elif self.status >= 500:
            told.failed(Failure.ERROR)
        else:
            told.ended(complete=self.status < 400)


def lost() -> ApiError:
    message = "the engine that had this request was lost; try again"
    return ApiError(503, message, code="engine_lost", headers={"Retry-After": "1"})
