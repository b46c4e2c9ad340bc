"""The gateway on its socket, from ready to drained."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from types import MappingProxyType

import uvloop

from tidegate.api.listening import allow_open_files
from tidegate.config import Config
from tidegate.config.resolve import Overrides
from tidegate.gateway.app import Gateway
from tidegate.gateway.beside import Beside
from tidegate.gateway.diary import Diary
from tidegate.gateway.dispatch import Dispatch, pools_of
from tidegate.gateway.door import Door
from tidegate.gateway.fleet import Fleet
from tidegate.gateway.front import ClientConnection
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.gateway.pages import OwnPages
from tidegate.gateway.proxy import Observer, Proxy
from tidegate.gateway.reload import Reload
from tidegate.gateway.settings import load
from tidegate.predictors.choice import build_predictor
from tidegate.routing.pools import Pools
from tidegate.routing.route import Route, build_route
from tidegate.routing.speed import Speed

_BACKLOG = 1024
_GARBAGE = 10_000  # objects made before the young ones are looked through: requests leave few cycles behind
_LAST_WORDS_SECONDS = 2.0  # for streams that were ended with an error to reach their clients

NO_KEYS: Mapping[str, str] = MappingProxyType({})


class Service:
    """Everything of one gateway, on the running event loop. Raises ConfigError for what cannot be had.

    Its parts outlive a change of configuration: they are told of it, and no stream notices.
    """

    def __init__(
        self, config: Config, environ: Mapping[str, str] = NO_KEYS, observers: Sequence[Observer] = ()
    ) -> None:
        gateway, pools = config.gateway, pools_of(config)
        self.config = config
        self.connections: set[ClientConnection] = set()
        self._refused: set[ClientConnection] = set()
        self.route = _route(config, pools)
        typical = Speed()
        self.fleet = Fleet(self._forget, typical, gateway.connect_seconds)
        self.beside = Beside(gateway, self.fleet, self.route.prefixes, environ)
        clock = asyncio.get_running_loop().time
        predictor = build_predictor(config.predictor)
        self.dispatch = Dispatch(config, self.fleet, self.route, pools, typical, predictor, clock)
        self.door, self.metrics, self.diary = Door(config), GatewayMetrics(config), Diary(gateway.explained)
        everybody: list[Observer] = [self.metrics, self.diary, self.beside.tokenising, *observers]
        self.proxy = Proxy(gateway, self.fleet, self.dispatch, everybody)
        self.app = Gateway(gateway, self.door, self.proxy, OwnPages(self).pages())

    def client(self) -> ClientConnection:
        """The protocol of a client that has just connected."""
        return ClientConnection(self.app, self.connections, self._refused)

    def apply(self, config: Config) -> None:
        """Another configuration holds from now on, for those who wait as well; streams go on.

        Raises ConfigError, and then nothing has changed.
        """
        gateway, pools = config.gateway, pools_of(config)
        route = _route(config, pools)
        route.prefixes = self.route.prefixes
        with self.dispatch.paused():
            self.beside.reload(gateway)
            self.config, self.route = config, route
            self.door.reload(config)
            self.proxy.config = self.app.config = gateway
            self.proxy.budget.share = gateway.retry_share
            self.dispatch.reload(config, route, pools)

    async def run(self, path: Path | None = None, overrides: Overrides | None = None) -> None:
        """What happens beside requests, until cancelled, and the file at `path` read again when that is asked for.

        overrides: what the command line said, which wins over the file then as well
        """
        self.beside.start()
        if path is None:
            await asyncio.Event().wait()
        else:
            await Reload(path, self.config, partial(load, overrides=overrides), self.apply).run()

    def _forget(self, replica: str) -> None:
        self.route.forget(replica)

    async def drain(self, at_once: asyncio.Event) -> None:
        """Take nothing new, and let what there is finish and be sent, for as long as it may or until `at_once`."""
        self.app.draining = True
        await _until(self._finished, self.config.gateway.drain_seconds, at_once)
        for connection in list(self.connections):
            connection.close()
            connection.give_up()
        await _until(lambda: not self.connections, _LAST_WORDS_SECONDS, at_once)

    def _finished(self) -> bool:
        return not self.app.in_flight and not any(connection.unsent for connection in self.connections)

    async def close(self) -> None:
        """Give back what is held beside requests."""
        self.fleet.close()
        await self.beside.stop()


def run(
    config: Config,
    path: Path | None,
    environ: Mapping[str, str],
    sock: socket.socket,
    ready: Callable[[Service], None],
    overrides: Overrides | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT has drained the gateway; a second one does not wait. In the main thread.

    path:    of the configuration, to read it again; None where there is none
    environ: the environment variables with the keys of engines
    ready:   called once connections are accepted
    overrides: what the command line said
    """
    uvloop.run(_serve(config, path, environ, sock, ready, overrides))


async def _serve(
    config: Config,
    path: Path | None,
    environ: Mapping[str, str],
    sock: socket.socket,
    ready: Callable[[Service], None],
    overrides: Overrides | None = None,
) -> None:
    loop = asyncio.get_running_loop()
    asked, at_once = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (at_once if asked.is_set() else asked).set())
    service = Service(config, environ)
    background = loop.create_task(service.run(path, overrides))
    await asyncio.sleep(0)  # until it takes SIGHUP, which would end the process before
    allow_open_files(2 * config.gateway.max_connections)  # each has one to its engine
    server = await loop.create_server(service.client, sock=sock, backlog=_BACKLOG)
    gc.collect()
    gc.freeze()  # what lives as long as the process is not looked through again and again
    gc.set_threshold(_GARBAGE)
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


def _route(config: Config, pools: Pools) -> Route:
    gateway = config.gateway
    return build_route(gateway.route, random=Random(), pools=pools, remembered=gateway.remembered_tokens)
