"""The replicas: who may be sent requests, what was learned of each, and the way to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from tidegate.config.gateway import Kind
from tidegate.gateway.discovery import Wanted
from tidegate.gateway.facts import EngineFacts
from tidegate.gateway.job import Job
from tidegate.gateway.upstream import Upstream
from tidegate.routing.choice import Choice
from tidegate.routing.health import TOLERANCE, Failure
from tidegate.routing.ledger import Ledger
from tidegate.routing.speed import Speed
from tidegate.routing.view import FACTS_LAST_S, Facts, ReplicaView


@dataclass(slots=True, eq=False)
class Replica:
    """One engine. `kind` is what it was configured to be, or turned out to be; `draining`: it gets nothing new."""

    wanted: Wanted
    view: ReplicaView
    upstream: Upstream
    kind: Kind
    draining: bool = False

    @property
    def name(self) -> str:
        return self.wanted.name


class Fleet:
    """All replicas, on one event loop. Times are seconds on its clock.

    Requests are told by their ids, as to the `Ledger`; each that was `sent` ends once.

    forget:          called with the name of a replica whose cache is lost: `Route.forget`
    typical:         what their speeds have in common
    connect_seconds: for a connection to a replica to be made
    """

    def __init__(self, forget: Callable[[str], None], typical: Speed, connect_seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._forget = forget
        self._ledger = Ledger(self._lost)
        self._connect_seconds = connect_seconds
        self._typical = typical
        self._replicas: dict[str, Replica] = {}
        self._views: list[ReplicaView] = []  # of all `_replicas`
        self.pools: frozenset[str] = frozenset()
        """Those that have an engine, up or not."""
        self._leaving: set[Replica] = set()
        self._where: dict[str, Replica] = {}
        self._room: list[Callable[[], None]] = []

    def __len__(self) -> int:
        """Requests that are with replicas."""
        return len(self._where)

    def __iter__(self) -> Iterator[Replica]:
        """Those that are wanted, and those that drain."""
        yield from self._replicas.values()
        yield from self._leaving

    def candidates(self, now: float, avoid: Collection[str] = ()) -> list[ReplicaView]:
        """Who may be sent a request now: those whose breaker lets it through, less those named in `avoid`."""
        self._ledger.presume(now)
        return [view for view in self._views if view.health.allows(now) and view.name not in avoid]

    def up(self, now: float) -> list[ReplicaView]:
        """Those, and those that have asked for no requests for a while: they are busy, not down."""
        return [view for view in self._views if view.health.up(now)]

    def of(self, request_id: str) -> Replica:
        """Where a request is. Raises KeyError for one that is nowhere."""
        return self._where[request_id]

    def on_room(self, callback: Callable[[], None]) -> None:
        """`callback` is called whenever somebody may have become able to take a request."""
        self._room.append(callback)

    # Who is there.

    def update(self, wanted: Sequence[Wanted]) -> None:
        """From now on these are the replicas. Whoever is not among them finishes what it has and goes; one whose
        address or kind changed is another one. ConfigError for an address that is none: nothing changes then."""
        coming = {w.name: (w, Upstream(w.url, self._connect_seconds)) for w in wanted}
        for name, there in list(self._replicas.items()):
            if name not in coming or is_another(there.wanted, coming[name][0]):
                self._let_go(self._replicas.pop(name))
        for name, (want, upstream) in coming.items():
            known = self._replicas.get(name)
            if known is None:
                view = ReplicaView(name, want.pool, want.seats, speed=Speed(self._typical))
                self._replicas[name] = Replica(want, view, upstream, want.kind)
            else:
                known.wanted, known.view.pool = want, want.pool
                known.view.seats = want.seats
        self._views = [replica.view for replica in self._replicas.values()]
        self.pools = frozenset(view.pool for view in self._views)
        self._has_room()

    def told(self, name: str, facts: EngineFacts) -> None:
        """What a replica says of itself, read just now. What was configured counts for more."""
        replica = self._replicas.get(name)
        if replica is None:
            return
        view = replica.view
        if replica.wanted.kind == "auto":
            replica.kind = facts.kind
        view.kv_tokens = facts.kv_tokens or view.kv_tokens
        now = self._loop.time()
        view.told(Facts(now, facts.running, facts.waiting, facts.kv_used, facts.hit_rate))
        self._has_room()
        self._room_at(now + FACTS_LAST_S)  # when they are believed no more, whoever was full by them may have room

    def close(self) -> None:
        """Close the idle connections of all."""
        for replica in self:
            replica.upstream.close()

    # What happens to requests.

    def sent(self, job: Job, choice: Choice, now: float) -> None:
        """`job` goes where `choice` says."""
        self._ledger.sent(job.view, choice, now)
        self._where[job.id] = self._replicas[choice.replica.name]

    def first_token(self, request_id: str, now: float) -> None:
        """The first token of a request came."""
        self._ledger.first_token(request_id, now)
        health = self.of(request_id).view.health
        if health.state(now) != "closed":  # a probe that lasts lets others in
            self._room_at(now + TOLERANCE.steady)

    def tokens(self, request_id: str, now: float, n: int) -> None:
        """So many further tokens of a request came."""
        self._ledger.tokens(request_id, now, n)

    def ended(self, request_id: str, now: float, complete: bool = True) -> None:
        """A request ended well, or, if not `complete`, in a way that says nothing of its replica."""
        self._ledger.ended(request_id, now, complete)
        self._left(request_id, now)

    def failed(self, request_id: str, now: float, kind: Failure) -> None:
        """Its replica failed a request."""
        self._ledger.failed(request_id, now, kind)
        self._left(request_id, now)

    def turned_away(self, request_id: str, now: float, retry_after: float | None) -> None:
        """Its replica has no room for a request for so many seconds."""
        self._ledger.turned_away(request_id, now, retry_after)
        self._left(request_id, now)

    def _lost(self, view: ReplicaView) -> None:
        """A replica lost its cache: that of the present one of its name, unless it was replaced since."""
        present = self._replicas.get(view.name)
        if present is not None and present.view is view:
            self._forget(view.name)

    def _left(self, request_id: str, now: float) -> None:
        replica = self._where.pop(request_id, None)
        if replica is None:
            return
        if replica.draining:
            self._remove_if_idle(replica)
        retry_at = replica.view.health.retry_at(now)
        if retry_at > now:
            self._room_at(retry_at)
        self._has_room()

    def _let_go(self, replica: Replica) -> None:
        replica.draining = True
        self._forget(replica.name)
        self._leaving.add(replica)
        self._remove_if_idle(replica)

    def _remove_if_idle(self, replica: Replica) -> None:
        if replica.view.outstanding == 0:
            self._leaving.discard(replica)
            replica.upstream.close()

    def _room_at(self, when: float) -> None:
        self._loop.call_at(when + 0.001, self._has_room)

    def _has_room(self) -> None:
        for callback in self._room:
            callback()


def is_another(known: Wanted, wanted: Wanted) -> bool:
    """Whether what is wanted under a name is another engine than the known one, rather than counted otherwise."""
    return replace(known, pool=wanted.pool, seats=wanted.seats) != wanted
