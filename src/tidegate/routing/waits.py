"""How long a request would wait at an engine for its first token, in seconds, from what is known outside of it."""

from __future__ import annotations

from tidegate.routing.view import Facts, ReplicaView, RouteView


def tokens_ahead(c: ReplicaView, facts: Facts | None) -> float:
    """Prompt tokens that wait or are computed at `c`, which said `facts` lately.

    Those of others are taken to be as long as ours.
    """
    if facts is None:
        return c.pending_tokens
    return c.pending_tokens + c.others_waiting * c.prompt_tokens


def excess(r: RouteView, c: ReplicaView, facts: Facts | None) -> float:
    """By which share `c`, which said `facts` lately, would hold more than it has seats or memory for, if `r` came.

    Of all that is held, this share must end first, which takes `service_s` for a whole turnover. 0 if all has room.
    """
    share = 0.0
    if c.seats is not None:
        load = c.outstanding if facts is None else c.outstanding + c.others
        share = (load + 1) / c.seats - 1.0
    if c.kv_tokens is not None:
        held: float = c.held_tokens
        if facts is not None and facts.kv_usage is not None:
            held = max(held, facts.kv_usage * c.kv_tokens)
        of_memory = (held + r.prompt_tokens) / c.kv_tokens - 1.0
        if of_memory > share:
            share = of_memory
    return share if share > 0.0 else 0.0


def first_token_s(r: RouteView, c: ReplicaView, cached_tokens: int, now: float) -> float:
    """Predicted seconds to the first token of `r` at `c`, which is believed to hold so many of its tokens."""
    first, facts = c.speed.first, c.fresh(now)
    tokens = tokens_ahead(c, facts) + r.prompt_tokens - cached_tokens
    return first.a + first.b * tokens + c.service_s * excess(r, c, facts)
