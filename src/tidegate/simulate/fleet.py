"""The engines of a simulated run, and the route before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, nextafter

from tidegate.core.events import Emitted, Event, Finished, Rejected
from tidegate.core.request import Request
from tidegate.routing.ledger import Ledger
from tidegate.routing.route import Route
from tidegate.routing.view import ReplicaView, RouteView
from tidegate.simulate.incoming import Incoming
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

    def run(self, incoming: Incoming, on_arrival: Callable[[int], None] | None = None) -> None:
        """Serve all that comes, to the last result. `on_arrival` is told, now and then, how many have arrived."""
        while (arrival := incoming.next_arrival) < inf or incoming.loops:
            if incoming.loops and self._step_towards(arrival):
                continue  # whose ends may bring others
            if arrival == inf:
                break
            r, view = incoming.take()
            self._add(r, view)
            if on_arrival is not None and not incoming.taken % 256:
                on_arrival(incoming.taken)
        for instance in self.instances:
            instance.run_until(inf)
        if on_arrival is not None:
            on_arrival(incoming.taken)

    def _add(self, r: Request, view: RouteView) -> None:
        """`r` arrives. Whoever serves it has done all that is due by then, and so has everybody whom the route sees."""
        now = r.arrival
        for instance in self.instances:
            instance.run_until(now)
        if self._route is None:
            self.instances[0].add(r, now)
            return
        choice = self._route.choose(view, self._views, now)
        self._ledger.sent(view, choice, now)
        self._of_name[choice.replica.name].add(r, now)

    def _step_towards(self, arrival: float) -> bool:
        """Do the next thing that is due before `arrival`, and no more; False if there is none."""
        at, _, instance = min((i.next_event(arrival), n, i) for n, i in enumerate(self.instances))
        if at > arrival or at == inf:
            return False
        if instance.run_until(at):  # results that come at that time
            return True
        if at == arrival:
            return False
        instance.run_until(nextafter(at, inf))  # a plan, then
        return True

    @property
    def steps(self) -> int:
        """Steps of all engines."""
        return sum(instance.steps for instance in self.instances)

    def _watch(self, events: Sequence[Event], replica: str) -> None:
        for event in events:
            if isinstance(event, Emitted):
                for r in event.first:
                    self._ledger.first_token(r.id, event.now)
            elif isinstance(event, Finished):
                self._ledger.tokens(event.request.id, event.now, event.request.emitted)
                self._ledger.ended(event.request.id, event.now)
            elif isinstance(event, Rejected):
                self._ledger.ended(event.request.id, event.now, complete=False)
