"""Filters: which engines a request may go to at all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tidegate.core.slo import NO_SLO, Slo, shortest
from tidegate.routing.view import ReplicaView, RouteView
from tidegate.routing.waits import first_token_s


@dataclass(frozen=True, slots=True)
class Pools:
    """Classes are served by pools of engines; a class without a pool of its own is served by all of them.

    borrow: None keeps pools apart. Else the part (above 0, at most 1) of a promised time to the first token that
            waiting may use up. A request overflows where every engine of its own pool would use up more of what its
            class was promised, and another pool's engine takes it while, with it, the wait there uses up less of
            what that pool's own classes were promised, and while outputs there come as fast as they were promised.
            A class without such a promise overflows whenever its own pool is not idle; a pool without promises lends
            freely.
    promises: of each class, for `borrow`

    Bad at: a borrowed engine's cache, which does not know the class.
    """

    of_class: Mapping[str, str] = field(default_factory=dict)
    borrow: float | None = None
    promises: Mapping[str, Slo] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.borrow is not None and not 0 < self.borrow <= 1:
            raise ValueError(f"borrow must be above 0 and at most 1, not {self.borrow}")

    def kept_to(self, slo_class: str, pools: Collection[str]) -> str | None:
        """The pool that alone serves a class, of the `pools` that have engines; None where others may as well."""
        pool = self.of_class.get(slo_class)
        return pool if self.borrow is None and pool in pools else None

    def allowed(
        self,
        r: RouteView,
        replicas: Sequence[ReplicaView],
        cached: Mapping[str, int],
        now: float,
        pools: Collection[str] = (),
    ) -> Sequence[ReplicaView]:
        """Those of `replicas` that may serve `r`, in their order; all where its pool has no engine at all.

        pools: those that have engines, of which `replicas` need not hold any: one that is down is still its class's
        """
        pool = self.of_class.get(r.slo_class)
        if pool is None:
            return replicas
        own = [c for c in replicas if c.pool == pool]
        if len(own) == len(replicas) or not (own or pool in pools):
            return replicas
        if self.borrow is None or self._has_room(r, own, cached, now):
            return own
        return [c for c in replicas if c.pool == pool or self._lends(r, c, cached, now)]

    def _has_room(self, r: RouteView, own: Sequence[ReplicaView], cached: Mapping[str, int], now: float) -> bool:
        promise = self.promises.get(r.slo_class, NO_SLO).ttft
        if promise is None:
            return any(not c.outstanding for c in own)
        return any(self._spared(r, c, cached, now, promise) for c in own)

    def _lends(self, r: RouteView, c: ReplicaView, cached: Mapping[str, int], now: float) -> bool:
        own = [self.promises.get(name, NO_SLO) for name, pool in self.of_class.items() if pool == c.pool]
        ttft = shortest(*(slo.ttft for slo in own))
        gap = shortest(*(slo.tpot for slo in own), *(slo.tbt for slo in own))
        if gap is not None and c.outstanding and c.speed.output_s > gap:
            return False
        return ttft is None or self._spared(r, c, cached, now, ttft)

    def _spared(self, r: RouteView, c: ReplicaView, cached: Mapping[str, int], now: float, promise: float) -> bool:
        """Whether `r` would leave enough of a promised time to the first token at `c`."""
        return first_token_s(r, c, cached.get(c.name, 0), now) <= (self.borrow or 0.0) * promise
