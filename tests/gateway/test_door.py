"""The door: keys, whose requests they are, what they may claim, and how much may come with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tidegate.api.errors import ApiError
from tidegate.api.identity import Claim
from tidegate.config import resolve
from tidegate.gateway.door import Door

KEYS = [
    {"key": "sk-acme", "tenant": "acme", "classes": ["offline", "batch"], "requests_per_minute": 2},
    {"key": "sk-root", "tokens_per_minute": 600},
]


@dataclass
class Body:
    metadata: Mapping[str, str] = field(default_factory=dict)
    service_tier: str | None = None
    priority: int | None = None
    user: str | None = None


def door(**gateway: Any) -> Door:
    return Door(resolve({"gateway": {"api_keys": KEYS, **gateway}}))


def bearer(key: str, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **headers}


def claim_of(asked: Door, headers: Mapping[str, str], body: Body) -> Claim:
    return asked.claim(headers, body, asked.key_of(headers))


def refusal(asked: Door, headers: Mapping[str, str], body: Body) -> tuple[int, str | None]:
    with pytest.raises(ApiError) as found:
        claim_of(asked, headers, body)
    return found.value.status, found.value.code


def test_a_key_is_asked_for_before_the_body() -> None:
    asked = door()
    with pytest.raises(ApiError) as found:
        asked.key_of({})
    assert (found.value.status, found.value.code) == (401, "invalid_api_key")
    assert asked.key_of(bearer("sk-root")) is not None
    assert Door(resolve({})).key_of({}) is None


def test_keys_of_the_server_are_not_those_of_the_gateway() -> None:
    asked = Door(resolve({"server": {"api_keys": ["sk-server"]}}))
    assert asked.key_of({}) is None


def test_a_key_binds_tenant_and_classes() -> None:
    asked = door()
    claim = claim_of(asked, bearer("sk-acme"), Body(user="else"))
    assert (claim.tenant, claim.slo_class) == ("acme", "offline")
    assert refusal(asked, bearer("sk-acme"), Body(service_tier="priority")) == (403, "class_not_allowed")
    assert refusal(asked, bearer("sk-acme", **{"x-slo-class": "interactive"}), Body()) == (403, "class_not_allowed")
    assert refusal(asked, bearer("sk-acme", **{"x-tenant": "other"}), Body()) == (403, "tenant_not_allowed")
    assert refusal(asked, bearer("sk-acme", **{"x-slo-ttft-ms": "5"}), Body()) == (403, "promise_not_allowed")
    assert refusal(asked, bearer("sk-root"), Body(metadata={"slo_class": "vip"})) == (400, "unknown_class")
    assert claim_of(asked, bearer("sk-root", **{"x-tenant": "any"}), Body()).tenant == "any"
    assert asked.refused["class_not_allowed"] == 2


def test_a_request_rate_of_a_key_is_told_with_the_time_to_come_back() -> None:
    asked = door()
    key, claim = asked.key_of(bearer("sk-acme")), Claim("acme", "batch", 10, resolve({}).slo_classes["batch"].slo, None)
    for _ in range(2):
        asked.charge(key, claim, 10, 0.0)
    with pytest.raises(ApiError) as found:
        asked.charge(key, claim, 10, 12.5)
    error = found.value
    assert (error.status, error.code, error.headers) == (429, "rate_limit_exceeded", {"Retry-After": "18"})
    assert str(error) == "this API key may send 2 requests a minute; come back in 18 s"
    assert "sk-acme" not in str(error)
    asked.charge(key, claim, 10, 30.0)
    assert asked.refused["rate_limit_exceeded"] == 1


def test_a_token_rate_counts_what_was_used() -> None:
    asked = door()
    key, claim = asked.key_of(bearer("sk-root")), claim_of(asked, bearer("sk-root"), Body())
    charge = asked.charge(key, claim, 600, 0.0)
    with pytest.raises(ApiError):
        asked.charge(key, claim, 1, 0.0)
    charge.settle(200, 0.0)
    asked.charge(key, claim, 400, 0.0)


def test_a_rate_of_a_class_is_each_tenants() -> None:
    asked = door(rates={"interactive": {"requests_per_minute": 1}}, api_keys=[])
    for tenant in ("x", "y"):
        asked.charge(None, claim_of(asked, {"x-tenant": tenant}, Body()), 1, 0.0)
        asked.charge(None, claim_of(asked, {"x-tenant": tenant}, Body(service_tier="flex")), 1, 0.0)
    with pytest.raises(ApiError) as found:
        asked.charge(None, claim_of(asked, {"x-tenant": "x"}, Body()), 1, 0.0)
    assert str(found.value) == "a tenant may send 1 requests a minute of class 'interactive'; come back in 60 s"


def test_a_new_configuration_keeps_what_was_used() -> None:
    asked = door(rates={"interactive": {"requests_per_minute": 1}}, api_keys=[])
    claim = claim_of(asked, {}, Body())
    asked.charge(None, claim, 1, 0.0)
    asked.reload(resolve({"gateway": {"api_keys": KEYS, "rates": {"interactive": {"requests_per_minute": 2}}}}))
    with pytest.raises(ApiError):
        asked.charge(None, claim, 1, 1.0)
    asked.charge(None, claim, 1, 30.0)
    with pytest.raises(ApiError):
        asked.key_of({})


def test_who_may_see_whose_requests() -> None:
    asked = door()
    acme, root = asked.key_of(bearer("sk-acme")), asked.key_of(bearer("sk-root"))
    assert asked.may_see(acme, "acme")
    assert not asked.may_see(acme, "other")
    assert asked.may_see(root, "other")
    assert asked.may_see(None, "other")
