"""Who asks, how urgently, and with what promise: from what reaches vLLM's scheduler of a request.

`vllm_xargs`, which the middleware fills in from headers, may hold `slo_class`, `service_tier`, `tenant`,
`slo_ttft_ms`, `slo_tpot_ms`, `slo_e2e_ms` and `queue_ttl_ms`; `priority` and `cache_salt` are vLLM's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from math import isfinite
from typing import Any, NamedTuple

from tidegate.config import Config
from tidegate.core.slo import NO_SLO, Slo, SloClass, shortest

DEFAULT_TENANT = "default"
MAX_TENANT = 256
PROMISES = {"slo_ttft_ms": "ttft", "slo_tpot_ms": "tpot", "slo_e2e_ms": "e2e"}
"""Extra arguments in milliseconds, and the promises they are."""

TTL = "queue_ttl_ms"
"""The extra argument that says how long a request may wait to begin."""

CLAIMS = frozenset({"slo_class", "service_tier", "tenant", *PROMISES, TTL})
"""All extra arguments that are claims."""

_AUTO = ("auto", "default")


class BadClaim(ValueError):
    """A request asks for something that there is not; the message is for its client."""


class Claim(NamedTuple):
    """What a request may count on."""

    tenant: str
    slo_class: str
    priority: int
    slo: Slo
    queue_ttl: float | None


class Claims:
    """Reads claims by a configuration's classes and tiers."""

    def __init__(self, config: Config) -> None:
        self._classes = config.slo_classes
        self._default = self._classes[config.server.default_class]
        self._tiers = config.server.service_tiers

    def of(self, xargs: Mapping[str, Any], priority: int, salt: str | None) -> Claim:
        """Raises BadClaim for an unknown class or tier, and for a promise that is no time."""
        named = self._named(xargs)
        kind = named or self._by_priority(priority)
        slo = kind.slo
        own = {promise: milliseconds(xargs[arg], arg) / 1000 for arg, promise in PROMISES.items() if arg in xargs}
        if own:
            slo = replace(slo, **own)
        rank = kind.priority if priority == 0 else priority
        ttl = milliseconds(xargs[TTL], TTL) / 1000 if TTL in xargs else None
        slo = NO_SLO if slo == NO_SLO else slo
        return Claim(_tenant(xargs.get("tenant"), salt), kind.name, rank, slo, shortest(ttl, kind.queue_ttl))

    def _named(self, xargs: Mapping[str, Any]) -> SloClass | None:
        name, tier = xargs.get("slo_class"), xargs.get("service_tier")
        if name is not None:
            if not isinstance(name, str) or name not in self._classes:
                raise BadClaim(f"unknown slo_class {name!r}; known classes are {', '.join(self._classes)}")
            return self._classes[name]
        if tier is None or tier in _AUTO:
            return None
        if not isinstance(tier, str) or tier not in self._tiers:
            raise BadClaim(f"unknown service_tier {tier!r}; known tiers are {', '.join((*_AUTO, *self._tiers))}")
        return self._classes[self._tiers[tier]]

    def _by_priority(self, priority: int) -> SloClass:
        """The default class; or for a priority of one's own the class that has it, and else no promise."""
        if priority in (0, self._default.priority):
            return self._default
        own = next((c for c in self._classes.values() if c.priority == priority), None)
        return own or replace(self._default, slo=NO_SLO)


def milliseconds(value: Any, name: str) -> float:
    """`value` as a time. Raises BadClaim where it is none."""
    try:
        time = float(value)
    except (TypeError, ValueError, OverflowError):
        time = 0.0
    written_so = not isinstance(value, str) or (value.isascii() and "_" not in value)  # Python reads more
    if not (written_so and isfinite(time) and time / 1000 > 0):
        raise BadClaim(f"{name} must be a number of milliseconds above 0, not {value!r}")
    return time


def _tenant(named: Any, salt: str | None) -> str:
    """Whoever salts its cache without a name is a tenant of its own; the salt itself is told to nobody."""
    if named is not None:
        if not isinstance(named, str) or not 0 < len(named) <= MAX_TENANT:
            raise BadClaim(f"tenant must have 1 to {MAX_TENANT} characters")
        return named
    return DEFAULT_TENANT if not salt else f"salt-{blake2b(salt.encode(), digest_size=6).hexdigest()}"
