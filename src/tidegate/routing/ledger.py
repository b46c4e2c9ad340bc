"""Keeps the `ReplicaView`s right from what was sent and what came back: all that a gateway sees."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.routing.view import ReplicaView, RouteView

RECENT = 0.05
"""Weight of one ended request in the mean of `service_s`."""


@dataclass(slots=True)
class _Sent:
    replica: ReplicaView
    prompt: int
    pending: int
    first_token_at: float | None = None


class Ledger:
    """Who is where. Times are seconds on one clock."""

    def __init__(self) -> None:
        self._sent: dict[str, _Sent] = {}

    def sent(self, r: RouteView, to: ReplicaView, cached_tokens: int) -> None:
        """`r` goes to `to`, which is believed to hold so many of its tokens."""
        sent = self._sent[r.id] = _Sent(to, r.prompt_tokens, r.prompt_tokens - cached_tokens)
        to.outstanding += 1
        to.sent += 1
        to.pending_tokens += sent.pending
        to.held_tokens += sent.prompt

    def first_token(self, request_id: str, now: float) -> None:
        """The first token of a request came."""
        sent = self._sent.get(request_id)
        if sent is not None and sent.first_token_at is None:
            sent.first_token_at = now
            self._computed(sent)

    def ended(self, request_id: str, now: float) -> None:
        """A request ended, however it did; once is enough."""
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return
        replica = sent.replica
        replica.outstanding -= 1
        replica.held_tokens -= sent.prompt
        self._computed(sent)
        if sent.first_token_at is not None:
            seconds = now - sent.first_token_at
            weight = RECENT if replica.service_s else 1.0
            replica.service_s += weight * (seconds - replica.service_s)

    @staticmethod
    def _computed(sent: _Sent) -> None:
        sent.replica.pending_tokens -= sent.pending
        sent.pending = 0
