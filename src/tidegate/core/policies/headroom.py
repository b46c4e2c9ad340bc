"""How long a running request may pause before a promise to it breaks."""

from __future__ import annotations

from math import inf

from tidegate.core.policy import PolicyContext
from tidegate.core.view import RequestView


def headroom(r: RequestView, ctx: PolicyContext) -> float:
    """Seconds from now that `r` may stand still and yet keep every promise; negative where one is broken.

    Infinite where nothing was promised. A mean TPOT is kept as long as the next token is not later than a stream
    at exactly that pace would bring it; a TBT allows a pause of its own length; TTFT and E2E count what is still to
    be computed, at the step-time model's pace and to the predicted end.
    """
    slo, now, first = r.slo, ctx.now, r.first_token_at
    rooms = [inf]
    if first is None:
        to_compute = r.prompt_tokens - r.computed
        if slo.ttft is not None:
            rooms.append(r.arrival + slo.ttft - now - ctx.step_time.prefill(max(0, to_compute)))
    else:
        if slo.tpot is not None:
            rooms.append(first + slo.tpot * r.emitted - now)
        if slo.tbt is not None:
            rooms.append(slo.tbt)
    if slo.e2e is not None:
        outputs = max(1.0, ctx.predictor.output_tokens(r) - r.emitted)
        prompt = max(0, r.prompt_tokens + r.emitted - r.computed - 1)
        rooms.append(r.arrival + slo.e2e - now - ctx.step_time.service(prompt, outputs))
    return min(rooms)
