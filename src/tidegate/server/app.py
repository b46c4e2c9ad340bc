"""The endpoints: each reads as what it answers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST

from tidegate import __version__
from tidegate.api.body import STALL_SECONDS, BodyLimit
from tidegate.api.errors import ApiError
from tidegate.api.identity import Identities
from tidegate.config import ApiKey, Config
from tidegate.engine.loop import Engine
from tidegate.errors import EngineDead
from tidegate.observe.metrics import Metrics
from tidegate.server import faults
from tidegate.server.schema import ChatRequest, CompletionRequest, Generation
from tidegate.server.service import Answering, Service
from tidegate.server.shapes import ChatAnswer, ChatShape, CompletionAnswer, CompletionShape, Model, Models
from tidegate.server.sse import ClientLeft, EventStream, while_connected

_CLIENT_LEFT = 499  # nobody sees it but the access log
_EVENT = {
    "type": "object",
    "description": "One event: its data is a chunk as JSON, an error, or [DONE] at the end.",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
_STREAM = {"text/event-stream": {"schema": _EVENT}}
_GENERATION_FAULTS = (400, 401, 403, 404, 408, 413, 429, 500, 503, 504)


def _key(request: Request) -> ApiKey | None:
    identities: Identities = request.app.state.identities
    return identities.key_of(request.headers)


# What every endpoint under /v1 asks for first.
Key = Annotated[ApiKey | None, Depends(_key)]


class KeyFirst(APIRoute):
    """A route that asks for its key before the body is read: strangers are told nothing about theirs."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        if all(dependency.call is not _key for dependency in self.dependant.dependencies):
            return handler

        async def keyed(request: Request) -> Response:
            _key(request)
            return await handler(request)

        return keyed


def create_app(service: Service, metrics: Metrics, config: Config) -> FastAPI:
    """The HTTP application of one engine. It starts and stops nothing: the engine is its caller's."""
    app = FastAPI(
        title="Tidegate",
        version=__version__,
        docs_url=None,
        redoc_url=None,
    )
    faults.install(app)
    app.add_middleware(BodyLimit, limit=config.server.max_body_bytes, stall=STALL_SECONDS)
    app.router.route_class = KeyFirst
    app.state.identities = Identities(config, config.server.api_keys)
    _add_generation(app, service, app.state.identities)
    _add_scheduler(app, service.engine)
    _add_models(app, service)
    _add_state(app, service.engine, metrics, config)
    return app


def _add_generation(app: FastAPI, service: Service, identities: Identities) -> None:
    table = service.vocabulary.table

    def check_model(body: Generation) -> None:
        if body.model not in (None, service.model):
            raise ApiError(
                404,
                f"there is no model {body.model!r} here; this server has {service.model!r}",
                param="model",
                code="model_not_found",
            )

    @app.post("/v1/completions", responses=_answers(CompletionAnswer))
    async def completions(body: CompletionRequest, request: Request, key: Key) -> Response:
        """Continue a prompt, or several."""
        arrival = service.engine.clock.now()
        check_model(body)
        claim = identities.claim(body, request.headers, key)
        id, stream = await service.complete(body, claim, arrival)
        shape = CompletionShape(table, len(stream.request_ids), body.logprobs)
        return await _reply(request, body, service.answering(id, stream, shape, body, claim))

    @app.post("/v1/chat/completions", responses=_answers(ChatAnswer))
    async def chat_completions(body: ChatRequest, request: Request, key: Key) -> Response:
        """Answer the last message of a conversation."""
        arrival = service.engine.clock.now()
        check_model(body)
        claim = identities.claim(body, request.headers, key)
        id, stream = await service.chat(body, claim, arrival)
        shape = ChatShape(table, len(stream.request_ids), body.logprobs)
        return await _reply(request, body, service.answering(id, stream, shape, body, claim))


def _answers(whole: Any) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": whole, "content": _STREAM}, **faults.responses(*_GENERATION_FAULTS)}


async def _reply(request: Request, body: Generation, answering: Answering) -> Response:
    """The answer as it was asked for. A client that leaves frees what its requests held."""
    headers = {"x-request-id": answering.id}
    if body.stream:
        return EventStream(answering.events(), headers)
    try:
        return JSONResponse(await while_connected(request.receive, answering.whole()), headers=headers)
    except ClientLeft:
        return Response(status_code=_CLIENT_LEFT)


def _add_scheduler(app: FastAPI, engine: Engine) -> None:
    @app.get("/v1/scheduler/explain/{request_id}", responses=faults.responses(400, 401, 404, 500, 503))
    async def explain(request_id: str, key: Key) -> dict[str, Any]:
        """What the scheduler did with a request, and why. The id is the answer's `x-request-id`."""
        found = await engine.explain(request_id)
        if found is None:
            found = await _explain_parts(engine, request_id)
        if found is None or (key is not None and key.tenant is not None and found.get("tenant") != key.tenant):
            raise ApiError(
                404,
                f"the scheduler knows no request {request_id!r} (any more); the id is the answer's x-request-id",
                param="request_id",
                code="request_not_found",
            )
        return found


async def _explain_parts(engine: Engine, id: str) -> dict[str, Any] | None:
    """A request that became several is explained sequence by sequence."""
    parts: list[dict[str, Any]] = []
    while (part := await engine.explain(f"{id}-{len(parts)}")) is not None:
        parts.append(part)
    return {"id": id, "tenant": parts[0].get("tenant"), "sequences": parts} if parts else None


def _add_models(app: FastAPI, service: Service) -> None:
    model: Model = {
        "id": service.model,
        "object": "model",
        "created": 0,
        "owned_by": "tidegate",
        "max_model_len": service.vocabulary.max_model_len,
    }

    @app.get("/v1/models", responses=faults.responses(401))
    async def models(key: Key) -> Models:
        """The one model that this server has."""
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{model_id:path}", responses=faults.responses(401, 404))
    async def model_by_id(model_id: str, key: Key) -> Model:
        """Whether this server has a model."""
        if model_id != service.model:
            raise ApiError(
                404,
                f"there is no model {model_id[:200]!r} here; this server has {service.model!r}",
                code="model_not_found",
            )
        return model


def _add_state(app: FastAPI, engine: Engine, metrics: Metrics, config: Config) -> None:
    @app.get("/health", responses=faults.responses(503))
    async def health() -> JSONResponse:
        """200 while requests can be served: `ok`, or `busy` if the queue is full. 503 if `draining` or `dead`."""
        state = engine.health
        if state == "ok":
            snapshot = await engine.snapshot()
            if snapshot.waiting >= config.scheduler.max_waiting:
                state = "busy"
        if state in ("ok", "busy"):
            return JSONResponse({"status": state})
        reason = str(engine.death) if engine.death else "the server is shutting down"
        fault = ApiError(503, reason, code=state, headers={"Retry-After": "5"})
        return JSONResponse({"status": state, **fault.body}, fault.status, fault.headers)

    @app.get("/metrics", response_class=Response)
    async def read_metrics() -> Response:
        """What Prometheus scrapes."""
        try:
            snapshot = await engine.snapshot()
        except EngineDead:
            snapshot = None
        return Response(metrics.render(snapshot), media_type=CONTENT_TYPE_LATEST)
