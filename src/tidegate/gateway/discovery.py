"""Which engines there are: a list in the configuration, the addresses behind a name, or a file that somebody writes."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tidegate.config import DiscoveryConfig, GatewayConfig, ReplicaConfig
from tidegate.config.gateway import Kind, PassClass
from tidegate.config.sentences import sentence
from tidegate.config.values import SECTION
from tidegate.errors import ConfigError, InputError

MAX_REPLICAS = 1000
"""Engines of one source; what is more is a mistake, or an attack on whoever answers for the name."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listed:
    """What a file holds."""

    __pydantic_config__ = SECTION

    replicas: tuple[ReplicaConfig, ...]


_listed = TypeAdapter(Listed)


@dataclass(frozen=True, slots=True)
class Wanted:
    """An engine that there should be, as `ReplicaConfig` says it; `api_key` is what its environment variable held."""

    name: str
    url: str
    pool: str = ""
    seats: int | None = None
    kind: Kind = "auto"
    pass_class: PassClass | None = None
    kv_events: str | None = None
    kv_replay: str | None = None
    api_key: str | None = field(default=None, repr=False)


def wanted(said: ReplicaConfig, environ: Mapping[str, str]) -> Wanted:
    """Raises ConfigError if the environment lacks its key, or holds one that no header can carry."""
    name = said.called
    key = None
    if said.api_key_env is not None:
        key = environ.get(said.api_key_env, "").strip()  # secrets from files end with a newline
        if not key:
            raise ConfigError(f"the engine {name} wants the key in {said.api_key_env}, which is not set")
        if not re.fullmatch(r"[!-~]+", key):
            raise ConfigError(
                f"the engine {name} wants the key in {said.api_key_env}, which must be visible ASCII without "
                "spaces: no header can carry another"
            )
    return Wanted(
        name,
        said.url,
        said.pool,
        said.seats,
        kind=said.kind,
        pass_class=said.pass_class,
        kv_events=said.kv_events,
        kv_replay=said.kv_replay,
        api_key=key,
    )


def listed(text: str, suffix: str) -> tuple[ReplicaConfig, ...]:
    """The engines in a file's text; `suffix` is ".toml" or ".json". Raises ConfigError in one sentence."""
    try:
        whole = tomllib.loads(text) if suffix == ".toml" else json.loads(text)
    except ValueError as e:
        raise ConfigError(f"not {suffix.lstrip('.').upper()}: {e}") from e
    if not isinstance(whole, dict):
        raise ConfigError('must hold "replicas", a list of engines')
    try:
        found = _listed.validate_python(whole).replicas
    except ValidationError as e:
        raise ConfigError(sentence(e, Listed)) from e
    if len(found) > MAX_REPLICAS:
        raise ConfigError(f"lists {len(found)} engines; {MAX_REPLICAS} are the most")
    names = [one.called for one in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"names {twice!r} twice")
    return found


class Discovery:
    """Keeps `update` told of all engines that are wanted, from whatever source. Their keys stand in `environ`.

    A source that cannot be read keeps what it said last, and so does everything where `update` refuses what was found;
    the log says so once for each reason until that is over.
    """

    def __init__(
        self,
        gateway: GatewayConfig,
        update: Callable[[Sequence[Wanted]], None],
        environ: Mapping[str, str],
    ) -> None:
        self._gateway = gateway
        self._update = update
        self._environ = environ
        self._found: dict[int, list[Wanted]] = {}
        self._told: list[Wanted] | None = None
        self._broken: dict[int, str] = {}
        self._refused = ""

    def keep(self, other: Discovery) -> None:
        """Until a source was read, believe what `other` read in the same place. Raises ConfigError as `wanted` does."""
        known = {
            _place(source): other._found[n] for n, source in enumerate(other._gateway.discovery) if n in other._found
        }
        for n, source in enumerate(self._gateway.discovery):
            if _place(source) in known:
                found = known[_place(source)]
                self._found[n] = found if source.source == "file" else self._named(source, map(_host, found))
        self._told = other._told

    async def run(self) -> None:
        """Look again and again, until cancelled. The first look at every source is over before anything is told."""
        sources = list(enumerate(self._gateway.discovery))
        await asyncio.gather(*(self.look(n, source) for n, source in sources))
        self._try_to_tell()
        async with asyncio.TaskGroup() as group:
            for n, source in sources:
                group.create_task(self._follow(n, source))

    async def _follow(self, n: int, source: DiscoveryConfig) -> None:
        while True:
            await asyncio.sleep(source.seconds)
            await self.look(n, source)
            self._try_to_tell()

    async def look(self, n: int, source: DiscoveryConfig) -> None:
        """Ask the `n`-th source once."""
        try:
            found = await (self._by_name(source) if source.source == "dns" else self._in_file(source))
            self._found[n] = found
        except (ConfigError, OSError, ValueError, RecursionError) as e:  # a name that none can be, a file of brackets
            if self._broken.get(n) != str(e):
                kept = len(self._found.get(n, ()))
                where = source.path or source.host
                _log.warning("discovery: %s: %s; the %d engines it named last are kept", where, e, kept)
            self._broken[n] = str(e)
        else:
            self._broken.pop(n, None)

    def tell(self) -> None:
        """Tell of all engines, if they are others than the last time. Raises InputError where they cannot be had."""
        names: dict[str, Wanted] = {}
        fixed = [wanted(said, self._environ) for said in self._gateway.replicas]
        for one in (*fixed, *(w for n in sorted(self._found) for w in self._found[n])):
            names.setdefault(one.name, one)
        found = list(names.values())
        if found != self._told:
            self._update(found)
            self._told = found

    def _try_to_tell(self) -> None:
        """What was found may want what is not there: those who look go on looking."""
        try:
            self.tell()
        except InputError as e:
            if self._refused != str(e):
                _log.warning("discovery: %s; the engines stay as they were", e)
            self._refused = str(e)
        else:
            self._refused = ""

    async def _by_name(self, source: DiscoveryConfig) -> list[Wanted]:
        """One engine for every address, v4 and v6, in a stable order."""
        assert source.host is not None
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(source.host, source.port, type=socket.SOCK_STREAM)
        addresses = sorted({str(address[0]) for _, _, _, _, address in found})[:MAX_REPLICAS]
        return self._named(source, (f"[{a}]" if ":" in a else a for a in addresses))

    def _named(self, source: DiscoveryConfig, hosts: Iterable[str]) -> list[Wanted]:
        return [wanted(_of_name(source, host), self._environ) for host in hosts]

    async def _in_file(self, source: DiscoveryConfig) -> list[Wanted]:
        path = Path(source.path or "")
        text = await asyncio.to_thread(_read, path)
        return [wanted(said, self._environ) for said in listed(text, path.suffix)]


def _place(source: DiscoveryConfig) -> tuple[str, str | None]:
    """Where it looks. All else that is said of it is how often, or how the engines found are treated."""
    return source.source, source.host if source.source == "dns" else source.path


def _host(engine: Wanted) -> str:
    """The address of one that was found by name."""
    return engine.url.removeprefix("http://").rpartition(":")[0]


def _of_name(source: DiscoveryConfig, host: str) -> ReplicaConfig:
    return ReplicaConfig(
        url=f"http://{host}:{source.port}",
        pool=source.pool,
        seats=source.seats,
        kind=source.kind,
        pass_class=source.pass_class,
        api_key_env=source.api_key_env,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ConfigError(f"not UTF-8 text (byte {e.start})") from e
