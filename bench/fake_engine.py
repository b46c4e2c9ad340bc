"""An engine that streams the same answer to everybody, as cheaply as it can: `python bench/fake_engine.py PORT NAME`.

The first event comes after 20 ms, 15 more follow 5 ms apart. Each carries the engine's name.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import httptools
import uvloop

FIRST_S, GAP_S, EVENTS = 0.020, 0.005, 16
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
# What routers ask of an engine before they use it.
_ABOUT = {"object": "list", "data": [{"id": "m", "object": "model"}], "status": "ok", "served_model_name": "m"}


def chunks(name: str) -> list[bytes]:
    """The events as they go over the wire."""
    made = []
    for n in range(EVENTS):
        choice = {"index": 0, "text": f" token{n}", "finish_reason": None, "logprobs": None}
        event = {"id": name, "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        made.append(b"%x\r\n%b\r\n" % (len(data), data))
    return made


class Client(asyncio.Protocol):
    def __init__(self, events: list[bytes]) -> None:
        self._events = events
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # a router that tries HTTP/2 first
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_message_complete(self) -> None:
        if self._url.startswith((b"/v1/completions", b"/v1/chat")):
            self._loop.call_later(FIRST_S, self._step, 0)
            return
        body = json.dumps(_ABOUT).encode()
        status = b"404 Not Found" if self._url == b"/metrics" else b"200 OK"
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        self._transport.write(head + body)

    def _step(self, n: int) -> None:
        if self._transport.is_closing():
            return
        if n == EVENTS:
            self._transport.write(_DONE)
            return
        self._transport.write(self._events[n] if n else _HEAD + self._events[0])
        self._loop.call_later(GAP_S if n + 1 < EVENTS else 0, self._step, n + 1)


async def main(port: int, name: str) -> None:
    events = chunks(name)
    server = await asyncio.get_running_loop().create_server(lambda: Client(events), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2]))
