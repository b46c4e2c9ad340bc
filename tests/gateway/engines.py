"""Engines without sockets: the real books and views of `routing`, and a hand that ends requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from typing import Any

from tidegate.api.identity import Claim
from tidegate.config import Config, resolve
from tidegate.core.slo import Slo
from tidegate.gateway.job import Job
from tidegate.routing.choice import Choice
from tidegate.routing.ledger import Ledger
from tidegate.routing.view import ReplicaView, RouteView


class ByHand:
    """An `Engines` whose requests end when a test says so. `log` holds who went where, in order."""

    def __init__(self, *replicas: ReplicaView) -> None:
        self.replicas = list(replicas)
        self.down: set[str] = set()
        self.busy: set[str] = set()
        self.log: list[tuple[str, str]] = []
        self.asked = 0
        self.ledger = Ledger()
        self._callbacks: list[Callable[[], None]] = []

    def candidates(self, now: float, avoid: Collection[str] = ()) -> Sequence[ReplicaView]:
        self.asked += 1
        return [c for c in self.up(now) if c.name not in self.busy and c.name not in avoid]

    def up(self, now: float) -> Sequence[ReplicaView]:
        return [c for c in self.replicas if c.name not in self.down]

    @property
    def pools(self) -> Set[str]:
        return {c.pool for c in self.replicas}

    def on_room(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def sent(self, job: Job, choice: Choice, now: float) -> None:
        self.ledger.sent(job.view, choice, now)
        self.log.append((job.id, choice.replica.name))

    def ended(self, request_id: str, now: float, complete: bool = True) -> None:
        self.ledger.ended(request_id, now, complete)
        self.room()

    def room(self) -> None:
        """Something changed for the better."""
        for callback in self._callbacks:
            callback()

    def revive(self, name: str) -> None:
        self.down.discard(name)
        self.room()


def job(
    id: str, slo_class: str = "interactive", tenant: str = "acme", *, config: Config | None = None, **given: Any
) -> Job:
    """A request with `tokens` of prompt, of a class of `config` (the default classes)."""
    known = (config or resolve({})).slo_classes.get(slo_class)
    slo = given.get("slo", Slo() if known is None else known.slo)
    priority = given.get("priority", 0 if known is None else known.priority)
    view = RouteView(id, slo_class, given.get("tokens", 100), given.get("blocks", ()), tenant=tenant)
    claim = Claim(tenant, slo_class, priority, slo, None)
    return Job(
        id=id,
        claim=claim,
        view=view,
        arrival=given.get("arrival", 0.0),
        method="POST",
        path="/v1/completions",
        headers=(),
        body=given.get("body", b"{}"),
        max_tokens=given.get("max_tokens"),
    )
