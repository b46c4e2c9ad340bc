"""Who asks, how urgently, and with what promise: class, tenant, priority, SLO."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import NamedTuple, Protocol

from tidegate.api.errors import ApiError
from tidegate.config import ApiKey, Config
from tidegate.core.slo import Slo, SloClass

DEFAULT_TENANT = "default"
CLASS_HEADER = "x-slo-class"
_AUTO = ("auto", "default")
_MAX_TENANT = 256
_SLO_HEADERS = {"x-slo-ttft-ms": "ttft", "x-slo-tpot-ms": "tpot", "x-slo-e2e-ms": "e2e"}


class Asking(Protocol):
    """What a body says of who asks, and how urgently."""

    @property
    def metadata(self) -> Mapping[str, str]: ...
    @property
    def service_tier(self) -> str | None: ...
    @property
    def priority(self) -> int | None: ...
    @property
    def user(self) -> str | None: ...


class Claim(NamedTuple):
    """What a request may count on. `service_tier` is the tier to echo, None where none was named."""

    tenant: str
    slo_class: str
    priority: int
    slo: Slo
    service_tier: str | None


class Identities:
    """Turns headers and body into a `Claim`, and refuses claims that the key does not cover.

    With API keys configured nobody promotes himself: class and priority must be within what the key may
    claim, a key bound to classes may only loosen their promises, and the tenant is the key's. `keys` are those of the
    front that asks.
    """

    def __init__(self, config: Config, keys: Sequence[ApiKey]) -> None:
        self._classes = config.slo_classes
        self._default = config.server.default_class
        self._tiers = config.server.service_tiers
        self._keys = keys

    def key_of(self, headers: Mapping[str, str]) -> ApiKey | None:
        """The API key of a request; None where none are configured. 401 if it is missing or unknown."""
        if not self._keys:
            return None
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        given = secret.strip().encode() if scheme.lower() == "bearer" else b""
        found = [key for key in self._keys if hmac.compare_digest(key.key.encode(), given)]
        if not found:
            raise ApiError(
                401,
                "this server wants an API key: send the header 'Authorization: Bearer KEY' with one that it knows",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found[0]

    def claim(self, body: Asking, headers: Mapping[str, str], key: ApiKey | None) -> Claim:
        """The request's place. 400 for unknown names, 403 for what the key may not claim."""
        slo_class = self._class(body, headers, key)
        priority = slo_class.priority if body.priority is None else body.priority
        if key is not None:
            self._check_allowed(slo_class, priority, key)
        slo = _promise(slo_class.slo, headers)
        if key is not None and key.classes is not None:
            _check_no_tighter(slo, slo_class)
        tier = body.service_tier
        return Claim(
            tenant=self._tenant(body, headers, key),
            slo_class=slo_class.name,
            priority=priority,
            slo=slo,
            service_tier="default" if tier == "auto" else tier,
        )

    def _class(self, body: Asking, headers: Mapping[str, str], key: ApiKey | None) -> SloClass:
        """As the header says, which is what a gateway sets; else as the body does."""
        by_header = headers.get(CLASS_HEADER)
        where, named = "metadata.slo_class", body.metadata.get("slo_class")
        if by_header is not None:
            where, named = CLASS_HEADER, by_header
        if named is not None and named not in self._classes:
            raise ApiError(
                400,
                f"unknown class {named[:100]!r}; known classes are {', '.join(self._classes)}",
                param=where,
                code="unknown_class",
            )
        if by_header is not None:
            return self._classes[by_header]
        by_tier = self._class_of_tier(body.service_tier)
        if named is not None and by_tier is not None and named != by_tier:
            raise ApiError(
                400,
                f"service_tier {body.service_tier!r} is class {by_tier!r}, but metadata.slo_class says {named!r}",
                param="service_tier",
            )
        return self._classes[named or by_tier or self._default_for(key)]

    def _class_of_tier(self, tier: str | None) -> str | None:
        if tier is None or tier in _AUTO:
            return None
        if tier not in self._tiers:
            known = ", ".join((*_AUTO, *self._tiers))
            raise ApiError(
                400,
                f"unknown service_tier {tier!r}; known tiers are {known}",
                param="service_tier",
                code="unknown_tier",
            )
        return self._tiers[tier]

    def _default_for(self, key: ApiKey | None) -> str:
        """A key that may not claim the default class gets the first one it may."""
        if key is None or key.classes is None or self._default in key.classes or not key.classes:
            return self._default
        return key.classes[0]

    def _check_allowed(self, slo_class: SloClass, priority: int, key: ApiKey) -> None:
        if key.classes is None:
            return
        if slo_class.name not in key.classes:
            raise ApiError(
                403,
                f"this API key may not claim class {slo_class.name!r}; it may claim {', '.join(key.classes) or 'none'}",
                param="metadata.slo_class",
                code="class_not_allowed",
            )
        best = min(self._classes[name].priority for name in key.classes)
        if priority < best:
            raise ApiError(
                403,
                f"this API key may not claim priority {priority}; its most urgent is {best}",
                param="priority",
                code="priority_not_allowed",
            )

    def _tenant(self, body: Asking, headers: Mapping[str, str], key: ApiKey | None) -> str:
        named = headers.get("x-tenant")
        if named is not None and not 0 < len(named) <= _MAX_TENANT:
            raise ApiError(400, f"x-tenant must have 1 to {_MAX_TENANT} characters", param="x-tenant")
        if key is None or key.tenant is None:
            return named or body.user or DEFAULT_TENANT
        if named not in (None, key.tenant):
            raise ApiError(
                403,
                f"this API key speaks for tenant {key.tenant!r}, not for {named!r}",
                param="x-tenant",
                code="tenant_not_allowed",
            )
        return key.tenant


def _promise(slo: Slo, headers: Mapping[str, str]) -> Slo:
    """The class's promise, with what the request's headers (milliseconds) put in its place."""
    own: dict[str, float] = {}
    for header, name in _SLO_HEADERS.items():
        text = headers.get(header)
        if text is None:
            continue
        own[name] = _seconds(text)
        if own[name] <= 0:
            raise ApiError(400, f"{header} must be a number of milliseconds above 0, not {text!r}", param=header)
    return replace(slo, **own) if own else slo


def _seconds(text: str) -> float:
    """A number of milliseconds in seconds; 0 for what is none, or is too small to be one."""
    try:
        seconds = float(text) / 1000
    except ValueError:
        return 0.0
    written_so = text.isascii() and "_" not in text  # Python reads more than others would
    return seconds if written_so and isfinite(seconds) else 0.0


def _check_no_tighter(slo: Slo, slo_class: SloClass) -> None:
    """403 for a promise that the class does not make, or not as tightly."""
    for header, name in _SLO_HEADERS.items():
        asked, promised = getattr(slo, name), getattr(slo_class.slo, name)
        if asked is None or (promised is not None and asked >= promised):
            continue
        most = "promises nothing of the kind" if promised is None else f"promises {promised * 1000:g}"
        raise ApiError(
            403,
            f"this API key may not ask for {header} {asked * 1000:g}: its class {slo_class.name!r} {most}, and it may "
            "only ask for as much or looser",
            param=header,
            code="promise_not_allowed",
        )
