"""A bound on what a client may send, kept while it sends."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidegate.server.faults import ApiError


class BodyLimit:
    """ASGI middleware: a body over `limit` bytes is refused with 413 as soon as that is known.

    A declared length is believed; otherwise the bytes are counted as they come. Either way nothing over
    the limit is ever held. Whoever reads the body gets the ApiError.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        declared = int(length) if length.isdigit() else 0
        received = 0

        async def bounded() -> Message:
            nonlocal received
            if declared <= self._limit:
                message = await receive()
                received += len(message.get("body", b""))
                if received <= self._limit:
                    return message
            raise ApiError(
                413,
                f"the body is larger than {self._limit} bytes; send less, or raise server.max_body_bytes",
                code="body_too_large",
                headers={"Connection": "close"},
            )

        await self._app(scope, bounded, send)
