"""Whose promised end would be missed if one more request started: a step is longer for everybody in it."""

from __future__ import annotations

from tidegate.core.policy import PolicyContext
from tidegate.core.request import Request
from tidegate.core.running import Running


def delayed(r: Request, running: Running, ctx: PolicyContext) -> Request | None:
    """A running request of the class of `r` that keeps its `e2e` promise without `r` and not beside it; None if none.

    All are taken to decode together until then. Only its own class counts: those who are better come first anyway, and
    as nobody of its class starts before `r`, it waits for the ends of those who run and no longer.
    """
    time, decodes, context = ctx.step_time, len(running), running.load.context
    step, beside = time.step(0, decodes, context), time.step(0, decodes + 1, context)
    prompt = time.prefill(r.known_tokens)
    for m in running.members:
        if m.tier != r.tier or m.slo.e2e is None:
            continue
        outputs = max(1.0, ctx.predictor.output_tokens(m) - m.emitted)
        room = m.arrival + m.slo.e2e - ctx.now - time.prefill(max(0, m.known_tokens - m.planned))
        if outputs * step <= room < prompt + outputs * beside:
            return m
    return None
