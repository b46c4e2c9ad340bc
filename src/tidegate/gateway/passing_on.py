"""What an engine is told of a request's class, tenant and promises, in the form that it reads. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final
from urllib.parse import quote

import msgspec

from tidegate.api.identity import Claim
from tidegate.config.gateway import Kind, PassClass
from tidegate.core.slo import Slo

Headers = Sequence[tuple[bytes, bytes]]

OURS: Final = frozenset({b"x-tenant", b"x-slo-class", b"x-slo-ttft-ms", b"x-slo-tpot-ms", b"x-slo-e2e-ms"})
"""Headers that the gateway sets: a client's own were judged at the door, and do not pass beside its verdict."""

CLAIMS: Final = frozenset(
    {"slo_class", "service_tier", "tenant", "slo_ttft_ms", "slo_tpot_ms", "slo_e2e_ms", "queue_ttl_ms"}
)
"""Of `vllm_xargs`, what Tidegate inside vLLM believes: the gateway's alone to say."""

_HELD: Final = 1024  # tenants and classes whose headers are at hand; names may be the clients', so no long ones
_LONGEST: Final = 256  # characters of a name that engines take
_NOT_BARE: Final = re.compile(r"[^ -~]|%|^ | $")
_BY_KIND: Final[dict[Kind, PassClass]] = {"sglang": "nothing", "llama-server": "nothing"}
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


def pass_on(
    kind: Kind, claim: Claim, headers: Headers, body: bytes, said: PassClass | None = None
) -> tuple[Headers, bytes]:
    """Headers and body for an engine of `kind`; `said` is what the configuration says of it, None leaves it to that.

    The body passes byte for byte unless something has to be written into it ("priority", "xargs"); even then only its
    outermost fields are looked at, and one that is no JSON object passes as it is.
    """
    how = said or _BY_KIND.get(kind, "headers")
    kept = [header for header in headers if header[0] not in OURS]
    if how == "headers":
        told = _remembered if len(claim.tenant) <= _LONGEST else _headers
        return [*kept, *told(claim.slo_class, claim.tenant, claim.slo)], body
    if how == "nothing":
        return kept, body
    try:
        fields = _object.decode(body)
    except msgspec.DecodeError:
        return kept, body
    return kept, _with_priority(fields, claim, body) if how == "priority" else _with_xargs(fields, claim, body)


def _headers(slo_class: str, tenant: str, slo: Slo) -> Headers:
    told = [(b"x-slo-class", slo_class), (b"x-tenant", tenant)]
    told += [(f"x-{name.replace('_', '-')}".encode(), f"{value:g}") for name, value in _promises(slo).items()]
    return tuple((name, _sendable(value)) for name, value in told)


_remembered = lru_cache(_HELD)(_headers)  # of many requests few differ


def _promises(slo: Slo) -> dict[str, float]:
    """In milliseconds, under the names that engines know."""
    promises = {"slo_ttft_ms": slo.ttft, "slo_tpot_ms": slo.tpot, "slo_e2e_ms": slo.e2e}
    return {name: value * 1000 for name, value in promises.items() if value is not None}


def _sendable(name: str) -> bytes:
    """A name as a header can carry it, of two names never the same: whatever is no printable ASCII is percent-encoded,
    and what is too long for engines then ends in its digest."""
    sent = _NOT_BARE.sub(lambda found: quote(found[0].encode("utf-8", "surrogatepass"), safe=""), name)
    if len(sent) > _LONGEST:
        sent = f"{sent[:200]}%{blake2b(name.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"
    return sent.encode("ascii")


def _with_priority(fields: dict[str, msgspec.Raw], claim: Claim, body: bytes) -> bytes:
    wanted = msgspec.Raw(str(claim.priority).encode())
    if fields.get("priority", msgspec.Raw(b"0")) == wanted:
        return body
    return msgspec.json.encode({**fields, "priority": wanted})


def _with_xargs(fields: dict[str, msgspec.Raw], claim: Claim, body: bytes) -> bytes:
    try:
        own = _object.decode(fields.get("vllm_xargs", msgspec.Raw(b"{}")))
    except msgspec.DecodeError:
        return body  # the engine's to refuse
    kept = {name: value for name, value in own.items() if name not in CLAIMS}
    told = {**kept, "slo_class": claim.slo_class, "tenant": claim.tenant, **_promises(claim.slo)}
    return msgspec.json.encode({**fields, "vllm_xargs": told})
