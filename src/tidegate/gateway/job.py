"""What the gateway knows of one client request on its way to an engine."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidegate.api.identity import Claim
from tidegate.routing.view import RouteView


class Job(msgspec.Struct, frozen=True):
    """One request, read whole. `view` is what routes may know of it.

    id:         the answer's `x-request-id`, and that of `/v1/gateway/explain`
    arrival:    seconds on the event loop's clock
    path:       path and query, as the client sent them
    headers:    those that go on to the engine; neither hop-by-hop ones nor the client's key are among them
    streams:    whether the client asked for server-sent events
    max_tokens: outputs that it asked for at most, of all its sequences together; None where it did not say
    """

    id: str
    claim: Claim
    view: RouteView
    arrival: float
    method: str
    path: str
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    streams: bool = False
    max_tokens: int | None = None
