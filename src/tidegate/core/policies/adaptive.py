"""The token budget that keeps promises between tokens: chunks that fit, and decodes that take turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from tidegate.core.decode_load import pace_of
from tidegate.core.policies.budgets import share_of
from tidegate.core.policy import PolicyContext
from tidegate.core.slo import NO_SLO
from tidegate.core.view import RequestView, StepView


@dataclass(frozen=True, slots=True)
class AdaptiveBudget:
    """As many prefill tokens as leave the step within the tightest promise of those who decode.

    The limit of a step is `(1 - margin) * p` seconds, where p is the tightest TPOT or TBT promise that a
    single decode would keep alone (a tighter one is hopeless and holds nobody back). Every step keeps it:
    slack of a mean is not spent, so TPOT and TBT are treated alike. Prompts get the largest n with
    `step(n, decodes, context) <= limit`, but at least `floor` tokens, so that they never stall for good; all
    of the budget where nobody who decodes was promised a pace (Sarathi-Serve, OSDI 2024, makes the chunk
    the handle on the time between tokens; there it is found offline).

    Where the decodes alone would break the limit, those who were promised no pace, and are of no better tier
    than whoever was, take turns: everybody decodes at least once in `max_stride` steps, and no more rarely
    than the limit asks for. `max_stride` 1 is no turns.

    Where the first who waits lacks memory, prompts that were promised nothing come one after the other, and fill a
    step up to that n at which a token costs the fewest token-seconds of memory:

        (crowd * step(n) + context * (step(n) - step(0))) / n

    with `crowd` tokens held for unfinished prompts and `context` by decodes, who all wait for the step. So chunks are
    small while decodes hold the memory, and large once prompts do, or where a step has no idle compute to fill: there
    step(n) is a straight line. Promised prompts count in n; beside large ones each of the others gets one token.

    Bad at throughput where promises are tight: small chunks use a GPU badly, and so do small batches.
    As right as the step model in the context. `max_chunk` is that of `FixedBudget`, and so is `share`, for prompts
    that were promised nothing: where a first token is due, two halves would both be late. A step ends early where a
    fuller one would be late for a first token in it (`StepView.due`).
    """

    share: float = 0.5
    max_chunk: int | None = None
    floor: int = 64
    margin: float = 0.05
    max_stride: int = 4

    def tokens(self, step: StepView, ctx: PolicyContext) -> int:
        most, limit = step.budget - step.decodes, self._limit(step, ctx)
        if step.due is not None:
            most = min(most, step.due)
        if limit is None or most <= 0:
            return most
        seconds, decodes, context = ctx.step_time.step, step.decodes, step.load.context
        if seconds(most, decodes, context) <= limit:
            return most
        return max(min(self.floor, most), largest(lambda n: seconds(n, decodes, context), limit, most))

    def chunk(
        self, r: RequestView, remaining: int, left: int, step: StepView, contended: bool, ctx: PolicyContext
    ) -> int:
        whole, share = remaining, 1.0
        if r.slo is NO_SLO and step.crowd is not None:
            most = max(1, self.tokens(step, ctx))
            left = max(1, left - most + self._sparing(most, max(step.crowd, remaining), step, ctx))
        elif r.slo is NO_SLO and contended:
            whole, share = self.tokens(step, ctx), self.share
        return share_of(remaining, left, whole, share, self.max_chunk)

    def _sparing(self, most: int, crowd: int, step: StepView, ctx: PolicyContext) -> int:
        """Prompt tokens of a step, `most` or halves of that, that cost the least memory each while others want it."""
        sizes, context = [most], step.load.context
        while sizes[-1] >= 2 * self.floor:
            sizes.append(sizes[-1] // 2)
        alone = ctx.step_time.step(0, step.decodes, context)

        def price(n: int) -> float:
            seconds = ctx.step_time.step(n, step.decodes, context)
            return (crowd * seconds + context * (seconds - alone)) / n

        return min(sizes, key=price)

    def decode_tokens(self, step: StepView, ctx: PolicyContext) -> int:
        limit = self._limit(step, ctx)
        if limit is None or not step.decodes:
            return step.decodes
        context = step.load.context_of_one
        if ctx.step_time.step(0, step.decodes, context * step.decodes) <= limit:  # as nearly always
            return step.decodes
        return max(1, largest(lambda n: ctx.step_time.step(0, n, context * n), limit, step.decodes))

    def stride(self, r: RequestView, step: StepView, ctx: PolicyContext) -> int:
        pace = step.load.tightest(ctx.step_time.single)
        yields = pace is not None and r.tier >= pace.tier and pace_of(r.slo) == inf
        return self.max_stride if yields else 1

    def _limit(self, step: StepView, ctx: PolicyContext) -> float | None:
        """Seconds that the step may take; None where nobody minds."""
        if not step.load.paces:
            return None
        pace = step.load.tightest(ctx.step_time.single)
        return None if pace is None else pace.seconds * (1.0 - self.margin)


def largest(seconds: Callable[[int], float], limit: float, most: int) -> int:
    """The largest n of 0 .. `most` with `seconds(n) <= limit`, for `seconds` that never falls; 0 if there is none.

    Where a straight line through what is known meets the limit, there it is asked next; an end of the interval that
    stays counts for half of its distance (the Illinois rule), so that a bent line is met soon as well.
    """
    above = seconds(most) - limit
    if above <= 0:
        return most
    below = limit - seconds(0)
    if below <= 0:
        return 0
    low, high, kept = 0, most, 0
    while high - low > 1:
        n = low + int((high - low) * below / (below + above))
        n = min(max(n, low + 1), high - 1)
        over = seconds(n) - limit
        if over <= 0:
            low, below = n, max(-over, 1e-12)
            above, kept = (above / 2 if kept > 0 else above), 1
        else:
            high, above = n, over
            below, kept = (below / 2 if kept < 0 else below), -1
    return low
