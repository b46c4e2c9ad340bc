"""A real server on a loopback port, in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from tests.server.scripted_model import ScriptedModel
from tidegate.api.listening import bind, url_of
from tidegate.config import Config, resolve
from tidegate.core.scheduler import Scheduler
from tidegate.engine.loop import Engine
from tidegate.observe.metrics import Metrics
from tidegate.server.app import create_app
from tidegate.server.service import Service


@dataclass
class Served:
    url: str
    http: httpx.Client
    engine: Engine
    scheduler: Scheduler
    model: ScriptedModel
    app: Any
    server: uvicorn.Server

    def transports(self) -> list[asyncio.Transport]:
        """The connections that are open now, as the server sees them."""
        return [connection.transport for connection in self.server.server_state.connections]  # type: ignore[union-attr,misc]


def assemble(model: Any, raw: Mapping[str, Any], depth: int = 2) -> tuple[Any, Engine, Scheduler]:
    """An application, its engine (not started) and its scheduler, over any executor."""
    config: Config = resolve(raw)
    limits = config.limits(model.num_blocks, model.max_model_len)
    scheduler = Scheduler(config.build_policy(), limits)
    metrics = Metrics(list(config.classes))
    engine = Engine(scheduler, model, depth=depth, observers=[metrics])
    service = Service(engine, model, **config.service_limits)
    return create_app(service, metrics, config), engine, scheduler


@contextmanager
def serving(model: Any, raw: Mapping[str, Any] | None = None, depth: int = 2) -> Iterator[Served]:
    """The server over `model`, up until the block ends."""
    raw = {"scheduler": {"max_num_seqs": model.max_num_seqs}, **(raw or {})}
    app, engine, scheduler = assemble(model, raw, depth)
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off", timeout_graceful_shutdown=2)
    )
    engine.start()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), name="server")
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.005)
    try:
        # No certificates: loading them is most of what a request in a test would cost.
        with httpx.Client(base_url=url_of(sock), verify=False, timeout=60) as http:  # noqa: S501 - no TLS at all
            yield Served(url_of(sock), http, engine, scheduler, model, app, server)
    finally:
        server.should_exit = True
        thread.join()
        engine.stop()
