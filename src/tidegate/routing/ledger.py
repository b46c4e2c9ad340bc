"""Keeps the `ReplicaView`s right from what was sent and what came back, and teaches them their speed and health."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from tidegate.routing.choice import Choice
from tidegate.routing.health import LOSES_CACHE, Failure
from tidegate.routing.view import ReplicaView, RouteView
from tidegate.routing.waits import excess, first_token_s

RECENT = 0.05
"""Weight of one ended request in the mean of `service_s`."""
RETRY_AFTER_S = 1.0
"""For an engine that is busy and does not say for how long."""

UNSEEN = 64
"""Presumptions about requests that have ended are swept out when there are so many of them."""


@dataclass(slots=True)
class _Sent:
    replica: ReplicaView
    at: float
    probe: int
    seen: bool
    """Whether its tokens are seen as they come."""
    held: int
    pending: int
    found: int | None
    """Prompt tokens to compute before its first token, its own included; None if that alone does not say how long."""
    first_token_at: float | None = None
    last_token_at: float = 0.0
    outputs: int = 0
    computed_before: int = 0


class Ledger:
    """Who is where. Times are seconds on one clock.

    Each request that was `sent` ends with exactly one of `ended`, `failed`, `turned_away`; what is told of a request
    that is not (or no longer) there is ignored.

    lost: called with an engine whose cache is not worth a detour any more: `Route.forget` is for that
    """

    def __init__(self, lost: Callable[[ReplicaView], None] | None = None) -> None:
        self._sent: dict[str, _Sent] = {}
        self._unseen: list[tuple[float, int, str, _Sent]] = []  # when a first token is presumed that nobody will see
        self._lost = lost

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._sent)

    def sent(self, r: RouteView, choice: Choice, now: float) -> None:
        """`r` goes where `choice` says. Raises ValueError for one that is out already."""
        if r.id in self._sent:
            raise ValueError(f"request {r.id} was sent before and has not ended")
        to = choice.replica
        pending = r.prompt_tokens - choice.cached_tokens
        found = to.pending_tokens + pending if r.streams and not excess(r, to, to.fresh(now)) else None
        sent = self._sent[r.id] = _Sent(to, now, to.health.sent(now), r.streams, r.prompt_tokens, pending, found)
        if not r.streams:
            due = now + first_token_s(r, to, choice.cached_tokens, now)
            heappush(self._unseen, (due, to.sent, r.id, sent))
            if len(self._unseen) > 2 * len(self._sent) + UNSEEN:
                self._unseen = [entry for entry in self._unseen if self._sent.get(entry[2]) is entry[3]]
                heapify(self._unseen)
        to.outstanding += 1
        to.sent += 1
        to.pending_tokens += pending
        to.held_tokens += r.prompt_tokens
        to.prompt_tokens += (RECENT if to.prompt_tokens else 1.0) * (r.prompt_tokens - to.prompt_tokens)

    def first_token(self, request_id: str, now: float) -> None:
        """The first token of a request came."""
        sent = self._sent.get(request_id)
        if sent is None or sent.first_token_at is not None:
            return
        if sent.found is not None:
            sent.replica.speed.first_token(sent.found, now - sent.at)
        sent.replica.health.answers(now, sent.probe)
        self._decodes(sent, now)

    def tokens(self, request_id: str, now: float, n: int) -> None:
        """`n` more outputs of a request came, its first one among them."""
        sent = self._sent.get(request_id)
        if sent is None:
            return
        if sent.first_token_at is None:
            self.first_token(request_id, now)
        sent.outputs += n
        sent.held += n
        sent.replica.held_tokens += n
        sent.last_token_at = now

    def ended(self, request_id: str, now: float, complete: bool = True) -> None:
        """A request ended. `complete` is False where that says nothing of the engine: its client left, or a 4xx."""
        sent = self._leave(request_id)
        if sent is None:
            return
        health = sent.replica.health
        if complete:
            health.succeeded(now, sent.probe)
            self._learn(sent, now)
        else:
            health.released(sent.probe)

    def failed(self, request_id: str, now: float, kind: Failure) -> None:
        """The engine failed a request."""
        sent = self._leave(request_id)
        if sent is None:
            return
        opened = sent.replica.health.failed(now, sent.probe)
        if self._lost is not None and (opened or kind in LOSES_CACHE):
            self._lost(sent.replica)

    def turned_away(self, request_id: str, now: float, retry_after: float | None = None) -> None:
        """The engine has no room (429, 503) for so many seconds: no failure, but nothing goes there until then."""
        sent = self._leave(request_id)
        if sent is not None:
            sent.replica.health.busy(now, RETRY_AFTER_S if retry_after is None else retry_after, sent.probe)

    def presume(self, now: float) -> None:
        """First tokens that nobody sees are taken to have come when they were predicted. Wanted before each choice."""
        while self._unseen and self._unseen[0][0] <= now:
            due, _, request_id, sent = heappop(self._unseen)
            if self._sent.get(request_id) is sent and sent.first_token_at is None:
                self._decodes(sent, due)

    @staticmethod
    def _decodes(sent: _Sent, now: float) -> None:
        """Its prompt is computed."""
        replica = sent.replica
        replica.pending_tokens -= sent.pending
        replica.computed_tokens += sent.pending
        replica.decoding += 1
        sent.pending = 0
        sent.first_token_at = sent.last_token_at = now
        sent.computed_before = replica.computed_tokens

    def _leave(self, request_id: str) -> _Sent | None:
        sent = self._sent.pop(request_id, None)
        if sent is not None:
            replica = sent.replica
            replica.outstanding -= 1
            replica.held_tokens -= sent.held
            replica.pending_tokens -= sent.pending
            if sent.first_token_at is not None:
                replica.decoding -= 1
        return sent

    @staticmethod
    def _learn(sent: _Sent, now: float) -> None:
        if sent.first_token_at is None:
            return
        replica, begin = sent.replica, sent.first_token_at
        replica.service_s += (RECENT if replica.service_s else 1.0) * (now - begin - replica.service_s)
        if sent.seen and sent.outputs > 1:
            others = replica.computed_tokens - sent.computed_before
            replica.speed.decoded(sent.outputs - 1, others, sent.last_token_at - begin)
