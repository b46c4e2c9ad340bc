"""The engines of a simulated run, and the route before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from tidegate.core.events import Emitted, Event, Finished, Rejected
from tidegate.core.request import Request
from tidegate.routing.ledger import Ledger
from tidegate.routing.route import Route
from tidegate.routing.view import ReplicaView, RouteView
from tidegate.simulate.instance import Instance, Observer


class Fleet:
    """Sends each request where `route` says. The route sees what a gateway sees, never into a scheduler.

    replicas: what is known of each engine beforehand
    build:    makes the engine of a view; the observer is to be told its events
    """

    def __init__(
        self,
        replicas: Sequence[ReplicaView],
        route: Route | None,
        build: Callable[[ReplicaView, Sequence[Observer]], Instance],
    ) -> None:
        self._ledger = Ledger()
        self._route = route
        self._views = list(replicas)
        told = [] if route is None else [self._watch]
        self.instances = [build(view, told) for view in replicas]
        self._of_name = {instance.name: instance for instance in self.instances}

    def add(self, r: Request, view: RouteView) -> None:
        """`r` arrives. Whoever serves it has done all that is due by then, and so has everybody whom the route sees."""
        now = r.arrival
        for instance in self.instances:
            instance.run_until(now)
        if self._route is None:
            self.instances[0].add(r, now)
            return
        chosen, cached = self._route.choose(view, self._views)
        self._ledger.sent(view, chosen, cached)
        self._of_name[chosen.name].add(r, now)

    def drain(self) -> None:
        """Nobody comes any more: run to the last result."""
        for instance in self.instances:
            instance.run_until(inf)

    @property
    def steps(self) -> int:
        """Steps of all engines."""
        return sum(instance.steps for instance in self.instances)

    def _watch(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Emitted):
                for r in event.first:
                    self._ledger.first_token(r.id, event.now)
            elif isinstance(event, Finished | Rejected):
                self._ledger.ended(event.request.id, event.now)
