"""One engine behind one listening socket, from ready to drained."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from tidegate.api.listening import allow_open_files, unavailable
from tidegate.engine.loop import Engine

_KEEP_ALIVE_SECONDS = 60  # longer than clients pool a connection, so that none is closed under a request
_LAST_WORDS_SECONDS = 2  # for streams that were ended with an error to reach their clients


class _Server(uvicorn.Server):
    """Drains the engine on the first SIGTERM or SIGINT, while the door still answers; stops on the second."""

    def __init__(self, config: uvicorn.Config, engine: Engine, drain_seconds: float, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_seconds = drain_seconds
        self._ready = ready
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._drain is not None:
            self.force_exit = self.should_exit = True
        else:
            self._drain = asyncio.get_running_loop().create_task(self._drain_then_exit())

    async def _drain_then_exit(self) -> None:
        await self._engine.drain(self._drain_seconds)
        self.should_exit = True


def run(
    app: FastAPI,
    engine: Engine,
    sock: socket.socket,
    *,
    drain_seconds: float,
    max_connections: int,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal has drained the engine. Call it in the main thread; the engine must be started.

    `ready` is called once connections are accepted; one above `max_connections` is told 503.
    """
    allow_open_files(max_connections)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        limit_concurrency=max_connections + 1,  # it refuses the one that makes as many
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_LAST_WORDS_SECONDS,
        server_header=False,
    )
    server = _Server(config, engine, drain_seconds, ready)
    host, port = sock.getsockname()[:2]
    try:
        asyncio.run(server.serve(sockets=[sock]))
    except OSError as error:
        # Somebody else bound the address too and was the first to listen.
        raise unavailable(host, port, error) from None
    finally:
        engine.stop()
