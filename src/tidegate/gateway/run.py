"""The gateway on its socket, from ready to drained."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import socket
from collections.abc import Callable, Sequence
from random import Random

import uvloop

from tidegate.config import Config
from tidegate.gateway.app import Asked, Gateway, Page, Pages
from tidegate.gateway.discovery import Wanted
from tidegate.gateway.dispatch import Dispatch
from tidegate.gateway.door import Door
from tidegate.gateway.fleet import Fleet
from tidegate.gateway.front import ClientConnection
from tidegate.gateway.proxy import Observer, Proxy
from tidegate.predictors.choice import build_predictor
from tidegate.routing.pools import Pools
from tidegate.routing.route import build_route
from tidegate.routing.speed import Speed

_BACKLOG = 1024
_LAST_WORDS_SECONDS = 2.0  # for streams that were ended with an error to reach their clients


class Service:
    """Everything of one gateway, on the running event loop."""

    def __init__(self, config: Config, observers: Sequence[Observer] = ()) -> None:
        gateway = config.gateway
        self.config = config
        self.route = route = build_route(gateway.route, random=Random(), remembered=gateway.remembered_tokens)
        typical = Speed()
        self.fleet = Fleet(route.forget, typical, gateway.connect_seconds)
        predictor = build_predictor(config.predictor)
        clock = asyncio.get_running_loop().time
        self.dispatch = Dispatch(config, self.fleet, route, Pools(), typical, predictor, clock)
        self.proxy = proxy = Proxy(gateway, self.fleet, self.dispatch, observers)
        self.app = Gateway(gateway, Door(config), proxy, self._pages())
        self.fleet.update([Wanted(r.name or r.url, r.url, r.pool, r.seats, kind=r.kind) for r in gateway.replicas])
        self.connections: set[ClientConnection] = set()

    def _pages(self) -> Pages:
        return {"/health": self._health}

    async def _health(self, asked: Asked) -> Page:
        now = asyncio.get_running_loop().time()
        state = "draining" if self.app.draining else "ok" if self.fleet.candidates(now) else "no_engine"
        return Page(200 if state == "ok" else 503, "application/json", json.dumps({"status": state}).encode())

    def client(self) -> ClientConnection:
        """The protocol of a client that has just connected."""
        return ClientConnection(self.app, self.connections)

    async def drain(self, stop: asyncio.Event) -> None:
        """Take nothing new, and let what there is finish, for as long as it may or until `stop`."""
        self.app.draining = True
        try:
            async with asyncio.timeout(self.config.gateway.drain_seconds):
                while self.app.in_flight and not stop.is_set():
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pass
        for connection in list(self.connections):
            connection.close()
            connection.give_up()
        try:
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                while self.connections and not stop.is_set():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pass
        self.fleet.close()


def run(config: Config, sock: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGTERM or SIGINT has drained the gateway; a second one does not wait. In the main thread.

    `ready` is called once connections are accepted.
    """
    uvloop.run(_serve(config, sock, ready))


async def _serve(config: Config, sock: socket.socket, ready: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    asked, at_once = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (at_once if asked.is_set() else asked).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    service = Service(config)
    server = await loop.create_server(service.client, sock=sock, backlog=_BACKLOG)
    gc.collect()
    gc.freeze()  # what lives as long as the process is not looked through again and again
    try:
        ready()
        await asked.wait()
        await service.drain(at_once)
    finally:
        server.close()
