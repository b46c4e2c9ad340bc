"""Who asks and how urgently: classes, tiers, tenants, promises, keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.scripted_model import ScriptedModel, says
from tests.server.serving import Served, serving

KEYS = [
    {"key": "sk-acme", "tenant": "acme", "classes": ["offline", "batch"]},
    {"key": "sk-root"},
    {"key": "sk-late", "tenant": "late", "classes": ["batch"]},
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    classes = {"nightly": {"priority": 20, "e2e": 3600.0}}
    tiers = {"flex": "batch", "priority": "interactive", "scale": "nightly"}
    with serving(ScriptedModel(says("fine")), {"classes": classes, "server": {"service_tiers": tiers}}) as server:
        yield server


@pytest.fixture(scope="module")
def guarded() -> Iterator[Served]:
    with serving(ScriptedModel(says("fine")), {"server": {"api_keys": KEYS}}) as server:
        yield server


def placed(served: Served, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
    """What the scheduler says of the request that this became."""
    answer = served.http.post("/v1/completions", json={"prompt": "x", **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    id = answer.headers["x-request-id"]
    told: dict[str, Any] = served.http.get(f"/v1/scheduler/explain/{id}", headers=headers).json()
    return told


@pytest.mark.parametrize(
    ("body", "slo_class", "priority"),
    [
        ({}, "interactive", 0),
        ({"service_tier": "auto"}, "interactive", 0),
        ({"service_tier": "default"}, "interactive", 0),
        ({"service_tier": "flex"}, "batch", 10),
        ({"service_tier": "scale"}, "nightly", 20),
        ({"metadata": {"slo_class": "offline", "note": "mine"}}, "offline", 5),
        ({"metadata": {"slo_class": "batch"}, "service_tier": "flex"}, "batch", 10),
        ({"priority": -7}, "interactive", -7),
        ({"priority": 3, "service_tier": "flex"}, "batch", 3),
    ],
)
def test_class_and_priority(served: Served, body: dict[str, Any], slo_class: str, priority: int) -> None:
    told = placed(served, body)
    assert (told["class"], told["priority"]) == (slo_class, priority)


def test_a_header_names_the_class_before_the_body_and_within_what_the_key_may_claim(
    served: Served, guarded: Served
) -> None:
    body = {"metadata": {"slo_class": "offline"}, "service_tier": "flex"}
    assert placed(served, body | {"service_tier": None}, {"x-slo-class": "nightly"})["class"] == "nightly"
    unknown = served.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-slo-class": "vip"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "x-slo-class")
    key = {"authorization": "Bearer sk-late", "x-slo-class": "interactive"}
    assert guarded.http.post("/v1/completions", json={"prompt": "x"}, headers=key).status_code == 403


@pytest.mark.parametrize(
    ("body", "headers", "tenant"),
    [({}, {}, "default"), ({"user": "ann"}, {}, "ann"), ({"user": "ann"}, {"x-tenant": "acme"}, "acme")],
)
def test_tenant(served: Served, body: dict[str, Any], headers: dict[str, str], tenant: str) -> None:
    assert placed(served, body, headers)["tenant"] == tenant


def test_a_tier_is_echoed(served: Served) -> None:
    def echoed(body: dict[str, Any]) -> Any:
        return served.http.post("/v1/completions", json={"prompt": "x", **body}).json().get("service_tier")

    assert [echoed({"service_tier": tier}) for tier in ("auto", "flex", "priority")] == ["default", "flex", "priority"]
    assert echoed({}) is None


def test_promises_in_headers_take_the_place_of_the_class_promise(served: Served) -> None:
    def missed() -> float:
        lines = served.http.get("/metrics").text.splitlines()
        name = 'tidegate_slo_missed_total{class="batch",promise="ttft"}'
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    before = missed()
    placed(served, {"service_tier": "flex"}, {"x-slo-ttft-ms": "60000"})
    assert missed() == before
    placed(served, {"service_tier": "flex"}, {"x-slo-ttft-ms": "0.001"})
    assert missed() == before + 1


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer sk-wrong"}, {"authorization": "Basic sk-acme"}])
def test_without_a_known_key_there_is_nothing(guarded: Served, headers: dict[str, str]) -> None:
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/scheduler/explain/x")):
        answer = guarded.http.request(method, path, headers=headers, json={} if method == "POST" else None)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert guarded.http.get("/health").status_code == 200


def test_a_key_speaks_for_its_tenant(guarded: Served) -> None:
    acme = {"authorization": "Bearer sk-acme"}
    told = placed(guarded, {"user": "ann"}, acme)
    assert (told["tenant"], told["class"]) == ("acme", "offline")
    answer = guarded.http.post("/v1/completions", json={"prompt": "x"}, headers={**acme, "x-tenant": "late"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "tenant_not_allowed")
    assert placed(guarded, {}, {"authorization": "Bearer sk-root", "x-tenant": "anyone"})["tenant"] == "anyone"


@pytest.mark.parametrize(
    "body",
    [
        {"service_tier": "priority"},
        {"metadata": {"slo_class": "interactive"}},
        {"priority": 4},
        {"priority": -1, "service_tier": "flex"},
    ],
)
def test_nobody_promotes_himself(guarded: Served, body: dict[str, Any]) -> None:
    headers = {"authorization": "Bearer sk-acme"}
    answer = guarded.http.post("/v1/completions", json={"prompt": "x", **body}, headers=headers)
    assert answer.status_code == 403
    assert answer.json()["error"]["type"] == "permission_error"


def test_within_what_a_key_may_claim_priority_is_free(guarded: Served) -> None:
    told = placed(guarded, {"priority": 5, "service_tier": "flex"}, {"authorization": "Bearer sk-acme"})
    assert (told["class"], told["priority"]) == ("batch", 5)


def test_a_key_sees_its_own_tenant_only(guarded: Served) -> None:
    mine = {"authorization": "Bearer sk-acme"}
    id = guarded.http.post("/v1/completions", json={"prompt": "x"}, headers=mine).headers["x-request-id"]
    url = f"/v1/scheduler/explain/{id}"
    assert guarded.http.get(url, headers=mine).status_code == 200
    assert guarded.http.get(url, headers={"authorization": "Bearer sk-late"}).status_code == 404
    assert guarded.http.get(url, headers={"authorization": "Bearer sk-root"}).status_code == 200


SLOW = {"authorization": "Bearer sk-slow"}


@pytest.fixture(scope="module")
def promised() -> Iterator[Served]:
    classes = {"slow": {"ttft": 2.0, "e2e": 60.0}}
    keys = [{"key": "sk-slow", "classes": ["slow"]}, {"key": "sk-root"}]
    with serving(ScriptedModel(says("fine")), {"classes": classes, "server": {"api_keys": keys}}) as server:
        yield server


@pytest.mark.parametrize("header", [{"x-slo-ttft-ms": "2000"}, {"x-slo-ttft-ms": "9000", "x-slo-e2e-ms": "60000"}])
def test_a_bound_key_may_loosen_its_promise(promised: Served, header: dict[str, str]) -> None:
    assert placed(promised, {}, {**SLOW, **header})["class"] == "slow"


@pytest.mark.parametrize("header", [{"x-slo-ttft-ms": "1999"}, {"x-slo-e2e-ms": "1"}, {"x-slo-tpot-ms": "5000"}])
def test_a_bound_key_gives_itself_no_better_promise(promised: Served, header: dict[str, str]) -> None:
    answer = promised.http.post("/v1/completions", json={"prompt": "x"}, headers={**SLOW, **header})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "promise_not_allowed")
    assert answer.json()["error"]["param"] in header
    unbound = {"authorization": "Bearer sk-root", **header}
    assert promised.http.post("/v1/completions", json={"prompt": "x"}, headers=unbound).status_code == 200


def test_strangers_are_told_nothing_about_their_body(guarded: Served) -> None:
    json_type = {"content-type": "application/json"}
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert guarded.http.post(path, content=b"{", headers=json_type).status_code == 401
        known = {**json_type, "authorization": "Bearer sk-root"}
        assert guarded.http.post(path, content=b"{", headers=known).status_code == 400
