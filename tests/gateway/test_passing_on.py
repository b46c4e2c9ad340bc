"""What an engine is told of a request's class, and that a body passes byte for byte where nothing has to change."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidegate.api.identity import Claim
from tidegate.core.slo import Slo
from tidegate.gateway import passing_on
from tidegate.gateway.passing_on import CLAIMS, pass_on
from tidegate.integrations.vllm import identity

CLAIM = Claim("acme", "batch", 10, Slo(ttft=0.25, e2e=30.0), None)
SENT = [(b"content-type", b"application/json"), (b"x-tenant", b"forged"), (b"x-slo-class", b"interactive")]
BODY = b'{ "model": "m",  "prompt" : "h\\u00e4\xc3\xa4", "temperature": 1e-1, "n":1 }'


@pytest.mark.parametrize("kind", ["vllm", "tidegate", "auto"])
def test_engines_that_read_headers_get_headers_and_the_body_as_it_came(kind: str) -> None:
    headers, body = pass_on(kind, CLAIM, SENT, BODY)  # type: ignore[arg-type]
    assert body is BODY
    assert headers == [
        (b"content-type", b"application/json"),
        (b"x-slo-class", b"batch"),
        (b"x-tenant", b"acme"),
        (b"x-slo-ttft-ms", b"250"),
        (b"x-slo-e2e-ms", b"30000"),
    ]


@pytest.mark.parametrize("kind", ["sglang", "llama-server"])
def test_engines_that_read_nothing_get_nothing_and_no_forged_claim_passes(kind: str) -> None:
    headers, body = pass_on(kind, CLAIM, SENT, BODY)  # type: ignore[arg-type]
    assert body is BODY
    assert headers == SENT[:1]


def test_a_priority_is_written_into_the_body_where_the_engine_orders_by_it() -> None:
    _, body = pass_on("vllm", CLAIM, SENT, BODY, "priority")
    assert json.loads(body) == {**json.loads(BODY), "priority": 10}
    assert b"1e-1" in body  # values pass as they were written
    forged = b'{"priority": -5, "prompt": "x"}'
    assert json.loads(pass_on("sglang", CLAIM, SENT, forged, "priority")[1])["priority"] == 10
    said = b'{"prompt":"x","priority":10 }'
    assert pass_on("vllm", CLAIM, SENT, said, "priority")[1] is said
    urgent = Claim("acme", "interactive", 0, Slo(), None)
    assert pass_on("vllm", urgent, SENT, BODY, "priority")[1] is BODY


def test_extra_arguments_of_vllm_keep_the_clients_own() -> None:
    _, body = pass_on("vllm", CLAIM, SENT, b'{"prompt":"x","vllm_xargs":{"mine":1,"tenant":"forged"}}', "xargs")
    told = {"mine": 1, "slo_class": "batch", "tenant": "acme", "slo_ttft_ms": 250.0, "slo_e2e_ms": 30000.0}
    assert json.loads(body)["vllm_xargs"] == told
    claims = dict.fromkeys(CLAIMS, 1)  # what a key may not ask for is not got by this way either
    forged = json.dumps({"prompt": "x", "vllm_xargs": {"mine": 1, **claims}}).encode()
    assert json.loads(pass_on("vllm", CLAIM, SENT, forged, "xargs")[1])["vllm_xargs"] == told
    odd = b'{"vllm_xargs": 3}'
    assert pass_on("vllm", CLAIM, SENT, odd, "xargs")[1] is odd


@pytest.mark.parametrize("body", [b"", b"[1]", b"\xff\xfe", b'{"a":', b"x" * 100])
def test_what_is_no_object_passes_as_it_is(body: bytes) -> None:
    for how in ("priority", "xargs"):
        assert pass_on("vllm", CLAIM, SENT, body, how)[1] is body  # type: ignore[arg-type]


@given(st.text(min_size=1, max_size=40))
def test_no_tenant_breaks_out_of_its_header(tenant: str) -> None:
    headers, _ = pass_on("vllm", Claim(tenant, "batch", 10, Slo(), None), [], b"")
    value = dict(headers)[b"x-tenant"]
    assert value.decode() == value.decode().strip()
    assert value.decode().isprintable()
    assert len(value) <= 256


@given(st.text(max_size=60), st.text(max_size=60))
@example("北京", "上海")
@example("é", "%C3%A9")
@example(" a", "a")
@example("北" * 60 + "京", "北" * 60 + "海")
def test_no_two_tenants_become_one(one: str, other: str) -> None:
    (first, second) = (dict(pass_on("vllm", Claim(t, "batch", 10, Slo(), None), [], b"")[0]) for t in (one, other))
    assert (first[b"x-tenant"] == second[b"x-tenant"]) == (one == other)


def test_headers_are_made_once_and_those_of_long_names_are_not_kept() -> None:
    """Names may be the clients', and must not fill the memory."""
    claim = CLAIM._replace(tenant="remembered")
    before = passing_on._remembered.cache_info()
    first, second = (pass_on("vllm", claim, SENT, BODY)[0] for _ in range(2))
    after = passing_on._remembered.cache_info()
    assert first == second
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 1)
    assert after.maxsize == 1024
    pass_on("vllm", CLAIM._replace(tenant="x" * 257), SENT, BODY)
    assert passing_on._remembered.cache_info() == after


def test_a_tenant_of_printable_ascii_is_called_what_it_is() -> None:
    headers, _ = pass_on("vllm", Claim("Acme & Sons, 7", "batch", 10, Slo(), None), [], b"")
    assert dict(headers)[b"x-tenant"] == b"Acme & Sons, 7"
    headers, _ = pass_on("vllm", Claim("北 1", "batch", 10, Slo(), None), [], b"")
    assert dict(headers)[b"x-tenant"] == b"%E5%8C%97 1"


def test_the_engines_own_list_of_claims_is_the_same() -> None:
    assert CLAIMS == identity.CLAIMS


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=8), st.none() | st.booleans() | st.integers() | st.text() | st.just([{}])))
def test_nothing_but_the_priority_changes(fields: dict[str, object]) -> None:
    body = json.dumps(fields).encode()
    assert json.loads(pass_on("vllm", CLAIM, [], body, "priority")[1]) == {**fields, "priority": 10}
