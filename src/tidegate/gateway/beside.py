"""What runs beside the requests: looking for engines, asking them for facts, following their caches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tidegate.config import GatewayConfig
from tidegate.gateway.discovery import Discovery, Wanted
from tidegate.gateway.facts import Scraper
from tidegate.gateway.fleet import Fleet
from tidegate.gateway.tokenising import Tokenising
from tidegate.routing.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from tidegate.gateway.kv_events import KvEvents

_log = logging.getLogger(__name__)


class Beside:
    """Nothing of it before `start`, but for the engines of the list, which the fleet has at once.

    Raises ConfigError where the environment lacks a key, and MissingExtra where cache events want a package.
    """

    def __init__(self, gateway: GatewayConfig, fleet: Fleet, index: PrefixIndex, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.tokenising = Tokenising(index, self._engine)
        self._fleet = fleet
        self._index = index
        self._seconds = gateway.facts_seconds
        self._wanted: dict[str, Wanted] = {}
        self._scraper: Scraper | None = None
        self._events: KvEvents | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._discovery = Discovery(gateway, self._found, environ)
        self._discovery.tell()

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._scraper = Scraper(self._fleet.told, self._seconds)
        self._watch()
        self._tasks = [_followed(self._discovery.run()), _followed(self.tokenising.run())]

    def reload(self, gateway: GatewayConfig) -> None:
        """Look for the engines of another configuration. Raises ConfigError, and then nothing has changed."""
        discovery = Discovery(gateway, self._found, self._environ)
        discovery.keep(self._discovery)
        discovery.tell()
        self._discovery = discovery
        if self._tasks:
            self._tasks[0].cancel()
            self._tasks[0] = _followed(discovery.run())

    async def stop(self) -> None:
        """Cease."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        for watching in (self._scraper, self._events):
            if watching is not None:
                await watching.close()

    def _engine(self, name: str) -> Wanted | None:
        return self._wanted.get(name)

    def _found(self, engines: Sequence[Wanted]) -> None:
        """These are the engines from now on."""
        if any(one.kv_events is not None for one in engines):
            from tidegate.gateway import kv_events  # only whoever uses it needs its package

            self._events = self._events or kv_events.KvEvents(self._index)
        self._fleet.update(engines)
        self._wanted = {one.name: one for one in engines}
        self._watch()

    def _watch(self) -> None:
        if self._scraper is None:
            return
        self._scraper.watch(self._wanted.values())
        if self._events is not None:
            self._events.watch(self._wanted.values())


def _followed(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.create_task(work)
    task.add_done_callback(_tell_end)
    return task


def _tell_end(task: asyncio.Task[None]) -> None:
    """What ends although it should not is told: nobody waits for it."""
    if not task.cancelled() and task.exception() is not None:
        _log.error("what runs beside the requests has ended", exc_info=task.exception())
