"""How a class reaches an engine."""

from __future__ import annotations

from tidegate.api.identity import Claim
from tidegate.gateway.http1 import Headers


def pass_on(kind: str, claim: Claim, headers: Headers, body: bytes) -> tuple[Headers, bytes]:
    """Headers and body as the engine gets them."""
    return headers, body
