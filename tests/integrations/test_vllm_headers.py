"""The middleware puts claims where vLLM's scheduler sees them, and touches nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tidegate.config import resolve
from tidegate.core.slo import NO_SLO, Slo
from tidegate.integrations.vllm import headers
from tidegate.integrations.vllm.identity import BadClaim, Claims


async def send(body, sent_headers=(), path="/v1/completions", method="POST", parts=1):
    """What the server behind the middleware got: (scope, body), or the answer of the middleware itself."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = -(-len(raw) // parts)
    messages = [
        {"type": "http.request", "body": raw[i * size : (i + 1) * size], "more_body": i + 1 < parts}
        for i in range(parts)
    ]
    messages.append({"type": "http.disconnect"})
    got, answer = {}, []

    async def receive():
        return messages.pop(0)

    async def app(scope, receive, send):
        whole, more = b"", True
        while more:
            message = await receive()
            whole, more = whole + message["body"], message["more_body"]
        got.update(scope=scope, body=whole, after=(await receive())["type"])

    async def reply(message):
        answer.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(b"content-length", str(len(raw)).encode()), *sent_headers],
    }
    await headers(app)(scope, receive, reply)
    return got, answer


async def test_claims_become_extra_arguments():
    sent = [(b"x-tenant", b"acme"), (b"x-slo-ttft-ms", b"200"), (b"x-slo-class", b"completion")]
    body = {"prompt": "x", "service_tier": "flex", "user": "ann", "vllm_xargs": {"mine": 1, "tenant": "other"}}
    got, _ = await send(body, sent, parts=3)
    told = json.loads(got["body"])
    assert told["vllm_xargs"] == {
        "service_tier": "flex", "tenant": "acme", "slo_ttft_ms": 200.0, "slo_class": "completion", "mine": 1,
    }  # fmt: skip
    assert told["prompt"] == "x"
    assert dict(got["scope"]["headers"])[b"content-length"] == str(len(got["body"])).encode()
    assert got["after"] == "http.disconnect"


async def test_metadata_names_the_class_and_user_the_tenant():
    got, _ = await send({"prompt": "x", "metadata": {"slo_class": "batch"}, "user": "ann"})
    assert json.loads(got["body"])["vllm_xargs"] == {"slo_class": "batch", "tenant": "ann"}


async def test_a_client_does_not_outbid_the_class_that_a_gateway_set():
    body = {"prompt": "x", "priority": -5, "vllm_xargs": {"slo_class": "interactive"}}
    got, _ = await send(body, [(b"x-slo-class", b"batch")])
    assert json.loads(got["body"]) == {"prompt": "x", "vllm_xargs": {"slo_class": "batch"}}
    got, _ = await send(body)
    assert got["body"] == json.dumps(body).encode()


async def test_beside_a_class_that_a_gateway_set_a_client_claims_nothing():
    """What the gateway judged it may not have, it does not get by another way."""
    claims = {"slo_ttft_ms": 1, "slo_tpot_ms": 1, "slo_e2e_ms": 5, "queue_ttl_ms": 9e9, "service_tier": "fast"}
    body = {"prompt": "x", "vllm_xargs": {**claims, "slo_class": "interactive", "tenant": "other", "mine": 1}}
    got, _ = await send(body, [(b"x-slo-class", b"batch"), (b"x-tenant", b"acme"), (b"x-slo-ttft-ms", b"900")])
    assert json.loads(got["body"])["vllm_xargs"] == {
        "slo_class": "batch", "tenant": "acme", "slo_ttft_ms": 900.0, "mine": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        b"no json",
        pytest.param(b"[" * 100_000, id="deep"),
        b"[1]",
        b'{"prompt": "x"}',
        b'{"vllm_xargs": 3, "user": "ann"}',
    ],
)
async def test_what_claims_nothing_passes_as_it_is(body):
    got, _ = await send(body)
    assert got["body"] == body


async def test_other_paths_are_not_read():
    got, _ = await send({"user": "ann"}, path="/v1/embeddings")
    assert json.loads(got["body"]) == {"user": "ann"}


@pytest.mark.parametrize("value", [b"soon", b"-1", b"0", b"nan", b"inf", b"1e-323", b"1_0"])
async def test_a_promise_that_is_no_time_is_refused(value):
    got, answer = await send({"prompt": "x"}, [(b"x-slo-e2e-ms", value)])
    assert not got
    assert answer[0]["status"] == 400
    assert "x-slo-e2e-ms must be a number of milliseconds above 0" in json.loads(answer[1]["body"])["error"]["message"]


async def test_a_tenant_has_a_name():
    _, answer = await send({"prompt": "x"}, [(b"x-tenant", b"t" * 257)])
    assert json.loads(answer[1]["body"])["error"]["message"] == "x-tenant must have 1 to 256 characters"


# What the scheduler makes of it

CLAIMS = Claims(resolve({}))


@pytest.mark.parametrize(
    ("xargs", "priority", "expected"),
    [
        ({}, 0, ("interactive", 0, Slo(ttft=0.5, tpot=0.05))),
        ({"slo_class": "offline"}, 0, ("offline", 5, Slo(e2e=30.0))),
        ({"slo_class": "offline"}, 3, ("offline", 3, Slo(e2e=30.0))),
        ({"service_tier": "flex"}, 0, ("batch", 10, NO_SLO)),
        ({"service_tier": "auto"}, 0, ("interactive", 0, Slo(ttft=0.5, tpot=0.05))),
        ({}, 10, ("batch", 10, NO_SLO)),
        ({}, 7, ("interactive", 7, NO_SLO)),
        ({"slo_class": "batch", "slo_e2e_ms": 500}, 0, ("batch", 10, Slo(e2e=0.5))),
    ],
)
def test_class_priority_and_promises(xargs, priority, expected):
    claim = CLAIMS.of(xargs, priority, None)
    assert (claim.slo_class, claim.priority, claim.slo) == expected


def test_tenants():
    assert CLAIMS.of({}, 0, None).tenant == "default"
    assert CLAIMS.of({"tenant": "acme"}, 0, "salt").tenant == "acme"
    salted = CLAIMS.of({}, 0, "secret").tenant
    assert salted == CLAIMS.of({}, 0, "secret").tenant != CLAIMS.of({}, 0, "other").tenant
    assert "secret" not in salted


@pytest.mark.parametrize(
    "xargs",
    [
        {"service_tier": "gold"},
        {"service_tier": ["flex"]},
        {"slo_class": ["batch"]},
        {"slo_class": 3},
        {"tenant": ""},
        {"tenant": 3},
        {"queue_ttl_ms": "x"},
        {"slo_ttft_ms": 10**400},
        {"slo_ttft_ms": 1e-323},
        {"slo_ttft_ms": [1.0]},
    ],
)
def test_a_claim_that_cannot_be_read(xargs):
    with pytest.raises(BadClaim):
        CLAIMS.of(xargs, 0, None)


def test_the_package_is_there_without_vllm():
    """Only asking for a scheduler imports vLLM; unknown names are told."""
    script = (
        "import sys; sys.modules['vllm'] = None\n"
        "import tidegate.integrations.vllm as ours\n"
        "assert ours.headers.__name__ == 'Headers'\n"
        "try: ours.TidegateScheduler\n"
        "except ImportError: print('needs vllm')\n"
        "try: ours.TidegateSchedular\n"
        "except AttributeError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "needs vllm",
        "module 'tidegate.integrations.vllm' has no attribute 'TidegateSchedular'",
    ]
