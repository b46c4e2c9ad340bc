"""A changed configuration takes effect without a restart; a broken one changes nothing."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tidegate.config import Config, PredictorConfig
from tidegate.errors import InputError

LOOK_S = 1.0
"""Seconds between two looks at the file."""

FIXED = (
    *("gateway.host", "gateway.port", "gateway.connect_seconds", "gateway.facts_seconds", "gateway.remembered_tokens"),
    *("gateway.explained", "server.tenant_labels"),
    *(f"predictor.{f.name}" for f in fields(PredictorConfig)),
)
"""What only a restart changes."""

_log = logging.getLogger(__name__)


def changed(old: Config, new: Config) -> list[str]:
    """The dotted places of the options in which two configurations differ, as deep as one table in another."""
    before, after = asdict(old), asdict(new)
    return [
        f"{section}.{option}" if option else section
        for section in before
        for option in _differing(before[section], after[section])
    ]


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return sorted(option for option in before.keys() | after.keys() if before.get(option) != after.get(option))


class Reload:
    """Reads the configuration again when SIGHUP asks for it, and where `watch_config` says so when its file changes.

    load:  reads it; raises InputError
    apply: makes it hold, whole or, with an InputError, not at all
    """

    def __init__(
        self, path: Path, now: Config, load: Callable[[Path], Config], apply: Callable[[Config], None]
    ) -> None:
        self._path = path
        self._now = now
        self._load = load
        self._apply = apply
        self._asked = asyncio.Event()
        self._seen = self._stamp()

    async def run(self) -> None:
        """Until cancelled. In the main thread: it takes SIGHUP."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._asked.set)
        try:
            while True:
                await self._until_asked()
                self._asked.clear()
                self.again()
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    def again(self) -> bool:
        """Read the file and let it hold. False, and a line in the log, where that cannot be."""
        self._seen = self._stamp()
        try:
            new = self._load(self._path)
            differing = changed(self._now, new)
            self._apply(new)
        except InputError as e:
            _log.error("the configuration stays as it was: %s", e)
            return False
        except Exception:  # noqa: BLE001 - a mistake of ours: whoever asks again is heard again
            _log.exception("the configuration could not be read again")
            return False
        self._now = new
        fixed = [place for place in differing if place in FIXED]
        if fixed:
            _log.warning("%s: takes effect only with a restart", ", ".join(fixed))
        live = [place for place in differing if place not in fixed]
        _log.info("the configuration was read again; changed: %s", ", ".join(live) or "nothing")
        return True

    async def _until_asked(self) -> None:
        while not self._asked.is_set():
            if not self._now.gateway.watch_config:
                await self._asked.wait()
                return
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._asked.wait()
            except TimeoutError:
                stamp = self._stamp()
                if stamp is not None and stamp != self._seen:
                    return

    def _stamp(self) -> tuple[int, int, int] | None:
        """What changes when the file does, or when another takes its place; None while there is none."""
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size
