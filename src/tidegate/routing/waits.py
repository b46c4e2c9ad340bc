"""How long a request would wait at an engine for its first token, in seconds, from what is known outside of it."""

from __future__ import annotations

from tidegate.routing.view import ReplicaView, RouteView


def tokens_ahead(c: ReplicaView, now: float) -> float:
    """Prompt tokens that wait or are computed at `c`. Those of others are taken to be as long as ours."""
    if c.others_waiting and c.fresh(now) is not None:
        return c.pending_tokens + c.others_waiting * c.prompt_tokens
    return c.pending_tokens


def excess(r: RouteView, c: ReplicaView, now: float) -> float:
    """By which share `c` would hold more than it has seats or memory for, if `r` came; 0 where it would not.

    Of all that is held, this share must end first, which takes `service_s` for a whole turnover.
    """
    facts = c.fresh(now) if c.facts is not None else None
    share = 0.0
    if c.seats is not None:
        load = c.outstanding if facts is None else c.outstanding + c.others
        share = (load + 1 - c.seats) / c.seats
    if c.kv_tokens is not None:
        held: float = c.held_tokens
        if facts is not None and facts.kv_usage is not None:
            held = max(held, facts.kv_usage * c.kv_tokens)
        share = max(share, (held + r.prompt_tokens) / c.kv_tokens - 1.0)
    return max(share, 0.0)


def first_token_s(r: RouteView, c: ReplicaView, cached_tokens: int, now: float) -> float:
    """Predicted seconds to the first token of `r` at `c`, which is believed to hold so many of its tokens."""
    first = c.speed.first
    tokens = tokens_ahead(c, now) + r.prompt_tokens - cached_tokens
    return first.a + first.b * tokens + c.service_s * excess(r, c, now)
