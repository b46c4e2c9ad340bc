"""An HTTP server on a socket whose pages a test sets: /metrics of an engine that is not there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Pages:
    """`answer(path, headers)` returns what is written back, head and all; None never answers."""

    def __init__(self, answer: Callable[[str, bytes], bytes | None]) -> None:
        self.answer = answer
        self.asked: list[str] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ", 2)[1].decode()
            self.asked.append(path)
            answer = self.answer(path, head)
            if answer is None:
                await reader.read()
            else:
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def page(body: str | bytes, status: str = "200 OK") -> bytes:
    data = body.encode() if isinstance(body, str) else body
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n".encode() + data


@asynccontextmanager
async def served(answer: Callable[[str, bytes], bytes | None]) -> AsyncIterator[Pages]:
    pages = Pages(answer)
    server = await asyncio.start_server(pages.serve, "127.0.0.1", 0)
    pages.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield pages
    finally:
        server.close()
