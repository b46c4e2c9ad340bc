"""An ASGI application that is called within its process, and answers as it goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, TypeAlias

from tidegate.integrations.ray.call import Call, Headers

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Scope

Part: TypeAlias = tuple[int, Headers] | bytes
"""Status and headers, once and first; then pieces of the body."""


async def answer(app: ASGIApp, call: Call) -> AsyncGenerator[Part, None]:
    """The answer of `app`. Closing the generator is to the application a client that left.

    What the application raises is raised here. What it sends faster than it is read is joined.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    requests: asyncio.Queue[Message] = asyncio.Queue()
    requests.put_nowait({"type": "http.request", "body": call.body, "more_body": False})

    async def run() -> None:
        await app(_scope(call), requests.get, sent.put)

    task = asyncio.create_task(run())
    task.add_done_callback(lambda _: sent.put_nowait(None))
    try:
        while (message := await sent.get()) is not None:
            if message["type"] == "http.response.start":
                yield message["status"], list(message["headers"])
                continue
            body, ended = message.get("body", b""), False
            while not sent.empty() and not ended:
                following = sent.get_nowait()
                ended = following is None
                body += b"" if following is None else following.get("body", b"")
            if body:
                yield body
            if ended:
                break
        await task
    finally:
        requests.put_nowait({"type": "http.disconnect"})
        await asyncio.wait({task})


def _scope(call: Call) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query,
        "root_path": "",
        "headers": call.headers,
        "client": None,
        "server": None,
    }
