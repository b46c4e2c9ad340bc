"""The gateway's own pages: how it is, what Prometheus scrapes, and what became of a request."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Protocol

from prometheus_client import CONTENT_TYPE_LATEST

from tidegate.api.errors import ApiError
from tidegate.gateway.app import Asked, Page, Pages
from tidegate.gateway.diary import Diary
from tidegate.gateway.dispatch import Dispatch
from tidegate.gateway.door import Door
from tidegate.gateway.fleet import Fleet
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.routing.route import Route

EXPLAIN = "/v1/gateway/explain/"


class Draining(Protocol):
    @property
    def draining(self) -> bool: ...


class Gatewayed(Protocol):
    """What they are made from: the gateway's `Service`, of which parts may be exchanged."""

    door: Door
    fleet: Fleet
    dispatch: Dispatch
    metrics: GatewayMetrics
    diary: Diary
    route: Route

    @property
    def app(self) -> Draining: ...


class OwnPages:
    """Answers by path."""

    def __init__(self, of: Gatewayed) -> None:
        self._of = of

    def pages(self) -> Pages:
        """By path."""
        return {"/health": self.health, "/metrics": self.metrics, EXPLAIN: self.explain}

    async def health(self, asked: Asked) -> Page:
        """200 while requests can be served, now or soon; 503 if `draining`, or if the breakers of all are open.

        An engine that asks to come back later lives, and so do those that wait for it: no reason to send them away.
        """
        now = _now()
        up = any(not one.draining and one.view.health.state(now) != "open" for one in self._of.fleet)
        state = "draining" if self._of.app.draining else "ok" if up else "no_engine"
        return _json({"status": state}, 200 if state == "ok" else 503)

    async def metrics(self, asked: Asked) -> Page:
        """What Prometheus scrapes."""
        of = self._of
        text = of.metrics.render(of.fleet, of.dispatch, of.route.prefixes, of.door.refused, _now())
        return Page(200, CONTENT_TYPE_LATEST, text)

    async def explain(self, asked: Asked) -> Page:
        """What became of a request and why, for whoever has its tenant's key."""
        key = self._of.door.key_of(asked.fields)
        waits, told = self._of.dispatch.explain(asked.rest), self._of.diary.tell(asked.rest)
        tenant = waits["tenant"] if waits is not None else None if told is None else told["tenant"]
        if tenant is None or not self._of.door.may_see(key, tenant):
            raise ApiError(
                404,
                f"the gateway knows no request {asked.rest[:100]!r} (any more); the id is the answer's x-request-id",
                code="request_not_found",
            )
        return _json({**(told or {"request_id": asked.rest, "tenant": tenant}), "waiting": waits})


def _now() -> float:
    return asyncio.get_running_loop().time()


def _json(body: dict[str, Any], status: int = 200) -> Page:
    return Page(status, "application/json", json.dumps(body).encode())
