"""Filters: which engines a request may go to at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidegate.routing.view import ReplicaView, RouteView


@dataclass(frozen=True, slots=True)
class Pools:
    """Classes are served by pools of engines; a class without a pool of its own is served by all of them.

    `borrow` lets a class also use engines of other pools that have at least so many outstanding requests fewer than
    the least busy engine of its own; None keeps pools apart. Bad at: a borrowed engine's cache, which does not know
    the class, and at long prompts, which count like short ones.
    """

    of_class: Mapping[str, str] = field(default_factory=dict)
    borrow: int | None = None

    def allowed(self, r: RouteView, replicas: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
        """Those of `replicas` that may serve `r`, in their order; all where its pool has none."""
        pool = self.of_class.get(r.slo_class)
        own = replicas if pool is None else [c for c in replicas if c.pool == pool]
        if len(own) == len(replicas) or not own:
            return replicas
        if self.borrow is None:
            return own
        bound = min(c.outstanding for c in own) - self.borrow
        return [c for c in replicas if c.pool == pool or c.outstanding <= bound]
