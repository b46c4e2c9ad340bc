"""`--middleware tidegate.integrations.vllm.headers`: what a request claims, put where vLLM's scheduler sees it.

Headers `x-tenant`, `x-slo-ttft-ms`, `x-slo-tpot-ms`, `x-slo-e2e-ms` and `x-slo-class`, and of the body `service_tier`,
`metadata.slo_class` and `user` (as tenant) become entries of the body's `vllm_xargs`. A header goes before the body: it
is what a gateway sets, the body what a client sends; where it says the class, the client's own extra arguments claim
nothing beside it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from tidegate.integrations.vllm.identity import CLAIMS, MAX_TENANT, PROMISES, BadClaim, milliseconds

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

_HEADERS = {
    b"x-tenant": "tenant",
    b"x-slo-class": "slo_class",
    b"x-slo-ttft-ms": "slo_ttft_ms",
    b"x-slo-tpot-ms": "slo_tpot_ms",
    b"x-slo-e2e-ms": "slo_e2e_ms",
}
_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class Headers:
    """The ASGI middleware. Whatever is no request for a generation passes untouched."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(_PATHS):
            await self._app(scope, receive, send)
            return
        whole = await _body(receive)
        if whole is None:  # the client is gone
            return
        try:
            body = with_claims(whole, scope["headers"])
        except BadClaim as bad:
            await _refuse(send, str(bad))
            return
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        scope = {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
        await self._app(scope, _once(body, receive), send)


headers = Headers


def with_claims(body: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """`body` with its claims in `vllm_xargs`; as it is where there are none, or where it is vLLM's to refuse.

    Raises BadClaim for a header that says nothing.
    """
    named = {_HEADERS[name]: value.decode("latin-1") for name, value in headers if name in _HEADERS}
    sent = {name: _checked(name, value) for name, value in named.items()}
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(request, dict) or not isinstance(request.get("vllm_xargs") or {}, dict):
        return body
    metadata = request.get("metadata")
    said = {
        "service_tier": request.get("service_tier"),
        "slo_class": metadata.get("slo_class") if isinstance(metadata, dict) else None,
        "tenant": request.get("user"),
    }
    fields = {name: value for name, value in said.items() if isinstance(value, str) and value}
    if not fields and not sent:
        return body
    own = request.get("vllm_xargs") or {}
    if "slo_class" in sent:  # it says how urgent this is, and what was promised: a client does not outbid a gateway
        request.pop("priority", None)
        own = {name: value for name, value in own.items() if name not in CLAIMS}
    request["vllm_xargs"] = {**fields, **own, **sent}
    return json.dumps(request).encode()


def _checked(name: str, value: str) -> str | float:
    if name in PROMISES:
        return milliseconds(value, f"x-{name.replace('_', '-')}")
    if not 0 < len(value) <= MAX_TENANT:
        raise BadClaim(f"x-{name.replace('_', '-')} must have 1 to {MAX_TENANT} characters")
    return value


async def _body(receive: Receive) -> bytes | None:
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _once(body: bytes, receive: Receive) -> Receive:
    """`body` in one message, and after it whatever else comes."""
    left = [body]

    async def again() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return again


async def _refuse(send: Send, message: str) -> None:
    """A 400 in vLLM's form."""
    told = json.dumps({"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(told)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": told})
