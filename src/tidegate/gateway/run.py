"""The gateway on its socket, from ready to drained."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import uvloop

from tidegate.config import Config
from tidegate.gateway.app import Asked, Gateway, Page, Pages
from tidegate.gateway.discovery import Discovery, Wanted
from tidegate.gateway.dispatch import Dispatch
from tidegate.gateway.door import Door
from tidegate.gateway.facts import Scraper
from tidegate.gateway.fleet import Fleet
from tidegate.gateway.front import ClientConnection
from tidegate.gateway.proxy import Observer, Proxy
from tidegate.gateway.reload import Reload
from tidegate.gateway.settings import load
from tidegate.predictors.choice import build_predictor
from tidegate.routing.pools import Pools
from tidegate.routing.route import Route, build_route
from tidegate.routing.speed import Speed

_BACKLOG = 1024
_LAST_WORDS_SECONDS = 2.0  # for streams that were ended with an error to reach their clients


class Service:
    """Everything of one gateway, on the running event loop. Raises ConfigError for what cannot be had.

    Its parts outlive a change of configuration: they are told of it, and no stream notices.
    """

    def __init__(self, config: Config, observers: Sequence[Observer] = ()) -> None:
        gateway = config.gateway
        self.config = config
        self.connections: set[ClientConnection] = set()
        self.route = _route(config)
        typical = Speed()
        self.fleet = Fleet(self._forget, typical, gateway.connect_seconds)
        clock = asyncio.get_running_loop().time
        predictor = build_predictor(config.predictor)
        self.dispatch = Dispatch(config, self.fleet, self.route, Pools(), typical, predictor, clock)
        self.door = Door(config)
        self.proxy = Proxy(gateway, self.fleet, self.dispatch, observers)
        self.app = Gateway(gateway, self.door, self.proxy, self._pages())
        self._scraper = Scraper(self.fleet.told, gateway.facts_seconds)
        self._discovery = self._discover(config)
        self._changed = asyncio.Event()

    def client(self) -> ClientConnection:
        """The protocol of a client that has just connected."""
        return ClientConnection(self.app, self.connections)

    def apply(self, config: Config) -> None:
        """Another configuration holds from now on. Raises ConfigError, and then nothing has changed."""
        discovery = self._discover(config)
        old, self.config = self.config, config
        if _route_options(old) != _route_options(config):
            self.route = _route(config)
        self.dispatch.reload(config, self.route, Pools())
        self.door.reload(config)
        self.proxy.config = self.app.config = config.gateway
        self._discovery = discovery
        self._changed.set()

    async def run(self, path: Path | None = None) -> None:
        """What happens beside requests, until cancelled: discovery, facts, and the file at `path` read again."""
        async with asyncio.TaskGroup() as group:
            if path is not None:
                group.create_task(Reload(path, self.config, load, self.apply).run())
            group.create_task(self._look_for_engines())

    async def _look_for_engines(self) -> None:
        """With the discovery of each configuration in turn."""
        while True:
            self._changed.clear()
            looking = asyncio.create_task(self._discovery.run())
            try:
                await self._changed.wait()
            finally:
                looking.cancel()

    def _discover(self, config: Config) -> Discovery:
        discovery = Discovery(config.gateway, self._update, os.environ)
        discovery.tell()
        return discovery

    def _update(self, wanted: Sequence[Wanted]) -> None:
        self.fleet.update(wanted)
        self._scraper.watch(wanted)

    def _forget(self, replica: str) -> None:
        self.route.forget(replica)

    def _pages(self) -> Pages:
        return {"/health": self._health}

    async def _health(self, asked: Asked) -> Page:
        """200 while an engine can be sent requests: "ok". 503 when "draining", or when none can: "no_engine"."""
        now = asyncio.get_running_loop().time()
        state = "draining" if self.app.draining else "ok" if self.fleet.candidates(now) else "no_engine"
        return Page(200 if state == "ok" else 503, "application/json", json.dumps({"status": state}).encode())

    async def drain(self, at_once: asyncio.Event) -> None:
        """Take nothing new, and let what there is finish, for as long as it may or until `at_once`."""
        self.app.draining = True
        await _until(lambda: not self.app.in_flight, self.config.gateway.drain_seconds, at_once)
        for connection in list(self.connections):
            connection.close()
            connection.give_up()
        await _until(lambda: not self.connections, _LAST_WORDS_SECONDS, at_once)

    async def close(self) -> None:
        """Give back what is held beside requests."""
        self.fleet.close()
        await self._scraper.close()


def run(config: Config, path: Path | None, sock: socket.socket, ready: Callable[[Service], None]) -> None:
    """Serve until SIGTERM or SIGINT has drained the gateway; a second one does not wait. In the main thread.

    path:  of the configuration, to read it again; None where there is none
    ready: called once connections are accepted
    """
    uvloop.run(_serve(config, path, sock, ready))


async def _serve(config: Config, path: Path | None, sock: socket.socket, ready: Callable[[Service], None]) -> None:
    loop = asyncio.get_running_loop()
    asked, at_once = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (at_once if asked.is_set() else asked).set())
    service = Service(config)
    background = loop.create_task(service.run(path))
    server = await loop.create_server(service.client, sock=sock, backlog=_BACKLOG)
    gc.collect()
    gc.freeze()  # what lives as long as the process is not looked through again and again
    try:
        ready(service)
        await asked.wait()
        await service.drain(at_once)
    finally:
        server.close()
        background.cancel()
        await asyncio.gather(background, return_exceptions=True)
        await service.close()


async def _until(done: Callable[[], bool], seconds: float, at_once: asyncio.Event) -> None:
    """Wait until it is so, for at most so many seconds or until `at_once`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not (done() or at_once.is_set() or loop.time() >= end):
        await asyncio.sleep(0.02)


def _route(config: Config) -> Route:
    name, remembered = _route_options(config)
    return build_route(name, random=Random(), remembered=remembered)


def _route_options(config: Config) -> tuple[str, int]:
    return config.gateway.route, config.gateway.remembered_tokens
