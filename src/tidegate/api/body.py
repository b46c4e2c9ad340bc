"""A bound on what a client may send, kept while it sends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tidegate.api.errors import ApiError

if TYPE_CHECKING:  # the types of ASGI alone; nothing of starlette runs
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

STALL_SECONDS = 30.0


class BodyLimit:
    """ASGI middleware: a body over `limit` bytes is refused with 413 as soon as that is known, and one of
    which nothing comes for `stall` seconds with 408.

    A declared length is believed; otherwise the bytes are counted as they come. Either way nothing over
    the limit is ever held. Whoever reads the body gets the ApiError.
    """

    def __init__(self, app: ASGIApp, limit: int, stall: float) -> None:
        self._app = app
        self._limit = limit
        self._stall = stall

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        declared = int(length) if length.isdigit() else 0
        received, complete = 0, False

        async def bounded() -> Message:
            nonlocal received, complete
            if complete:  # from here on only the client's leaving can come, whenever it likes
                return await receive()
            if declared <= self._limit:
                message = await self._within_time(receive)
                complete = not message.get("more_body", False)
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

    async def _within_time(self, receive: Receive) -> Message:
        try:
            async with asyncio.timeout(self._stall):
                return await receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"nothing of the body came for {self._stall:g} s; send it whole",
                code="body_stalled",
                headers={"Connection": "close"},
            ) from None
