"""One client request on its way from the front to an engine replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from tidegate.routing.health import Failure
from tidegate.routing.view import RouteView

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]


class Told(Protocol):
    """Whoever routed a call is told here what comes back; any thread may. The first of the last three ends it."""

    def tokens(self, n: int) -> None: ...
    def ended(self, complete: bool) -> None: ...
    def failed(self, kind: Failure) -> None: ...
    def turned_away(self, retry_after: float | None) -> None: ...


class Call:
    """A request, read whole. `view` is what routes may know of it.

    replica: the only replica that may answer it, by name; "" lets the route choose
    told:    set by the router. It stays in the process of the front, where the router is as well
    over:    the front does not wait for it any more
    """

    __slots__ = ("body", "headers", "method", "over", "path", "query", "replica", "told", "view")

    def __init__(
        self, view: RouteView, method: str, path: str, query: bytes, headers: Headers, body: bytes, replica: str = ""
    ) -> None:
        self.view = view
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.body = body
        self.replica = replica
        self.told: Told | None = None
        self.over = False

    def __reduce__(self) -> tuple[Any, ...]:
        """What an engine needs of it: the blocks of its view are the router's alone."""
        view = self.view._replace(blocks=())
        return Call, (view, self.method, self.path, self.query, self.headers, self.body, self.replica)
