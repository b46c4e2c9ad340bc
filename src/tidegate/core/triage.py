"""Which first tokens can be kept together: the largest number of them, so that the lost do not sink the next.

Among prompts that are promised a first token and would be computed one after the other, earliest promise first,
the largest set that keeps its promises is found by giving up the largest prompt whenever one would be late
(Moore 1968, "An n job, one machine sequencing algorithm", Management Science 15, with Hodgson's procedure). What is
left of a prompt counts, so that one in the middle of its computation is judged as those are that wait.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable
from typing import TypeAlias

from tidegate.core.policy import Budget, PolicyContext
from tidegate.core.request import FinishReason, Request, Status
from tidegate.core.running import Running
from tidegate.core.view import RequestView, Settled, StepView

HORIZON = 32
"""So many of the earliest promises are weighed against each other in one plan; those after them come later."""

MARGIN = 0.15
"""By how much longer than predicted prompts are taken to be: steps are whole, and others decode in them."""

MEMORY = 128
"""A class's share of kept promises is a mean over about so many of its last ones."""

BALANCE = 100.0
"""A prompt counts as so many times larger for each 100 % of promises that its class kept more than the worst class."""

CLASSES = 256
"""Of so many classes that share is known; others count as having kept all."""


# (deadline, request, prompt tokens to compute).
Promise: TypeAlias = tuple[float, Request, int]


class Triage:
    """Watches promised first tokens that have not come, and tells orders of them (`PolicyContext.triage`).

    `cached(r)` tokens of a waiting prompt need no computing; `rekey(r)` is told of whoever is given up or no more.
    A plan costs nothing while nobody waits for a promised first token, and at most `HORIZON` looks otherwise.
    """

    def __init__(
        self,
        running: Running,
        budget: Budget,
        ctx: PolicyContext,
        max_tokens: int,
        cached: Callable[[Request], int],
        rekey: Callable[[Request], None],
    ) -> None:
        self._given_up: set[Request] = set()
        self._running = running
        self._budget = budget
        self._ctx = ctx
        self._max_tokens = max_tokens
        self._cached = cached
        self._rekey = rekey
        self._promises: list[tuple[float, int, Request]] = []  # (deadline, arrival sequence, request), sorted
        self._compact_at = HORIZON
        self._kept: dict[str, float] = {}  # by class

    def gives_up(self, r: RequestView) -> bool:
        return r in self._given_up

    def watch(self, r: Request) -> None:
        """`r` waits for its first token from now on."""
        if r.slo.ttft is not None and not r.sampled:
            insort(self._promises, (r.arrival + r.slo.ttft, r.seq, r))
            if len(self._promises) > self._compact_at:  # those far ahead that ended long before
                self._promises = [p for p in self._promises if not p[2].sampled and p[2].status is not Status.FINISHED]
                self._given_up.intersection_update(p[2] for p in self._promises)
                self._compact_at = 2 * len(self._promises) + HORIZON

    def forget(self, r: Request) -> None:
        """`r` has ended."""
        self._given_up.discard(r)

    def pending(self, now: float) -> bool:
        """Whether anybody waits for a promised first token that is not late yet."""
        return bool(self._promises) and bool(self._due(now))

    def settle(self, now: float) -> Settled | None:
        """Decide who is given up in the plan to be made at `now` (seconds); None where nobody could be.

        The step is due early where a fuller one would be late for some of those whom it computes.
        """
        first = self._due(now) if self._promises else None
        if not first:
            return None
        running, step_time = self._running, self._ctx.step_time
        decodes, context = running.due_decodes, running.load.context
        most = self._budget.tokens(StepView(now, self._max_tokens, decodes, running.load), self._ctx)
        whole = step_time.step(most, decodes, context)
        token = whole / max(1, most) * (1 + MARGIN)
        kept = self._keep(first, now, token, step_time.step(0, decodes, context))
        due = in_time(kept, now, most, whole, lambda tokens: step_time.step(tokens, decodes, context))
        return Settled(due, most, decodes, context)

    def _keep(self, first: list[Promise], now: float, token: float, least: float) -> list[tuple[float, int]]:
        """(deadline, tokens) of those whose promises are kept; the others are given up from now on."""
        given_up: set[Request] = set()
        if not all_in_time(first, now, token, least):
            given_up = moore(first, now, token, least, self._weight())
        if given_up or self._given_up:
            for _, r, _ in first:
                if (r in given_up) != (r in self._given_up):
                    (self._given_up.add if r in given_up else self._given_up.discard)(r)
                    self._rekey(r)
        return [(deadline, tokens) for deadline, r, tokens in first if r not in given_up]

    def _due(self, now: float) -> list[Promise]:
        """The earliest promises; those that are over go."""
        first, kept = [], []
        for promise in self._promises[:HORIZON]:
            deadline, _, r = promise
            begun = r.sampled > 0
            still_open = not begun and r.status is not Status.FINISHED
            if still_open and now <= deadline:
                left = r.known_tokens - (self._cached(r) if r.lease is None else r.planned)
                first.append((deadline, r, max(1, left)))
                kept.append(promise)
                continue
            self._given_up.discard(r)
            if begun or r.finish_reason is not FinishReason.CANCELLED:
                self._count(r.slo_class, begun)
            if still_open:
                self._rekey(r)  # late: its key says so by itself from now on
        if len(kept) < min(len(self._promises), HORIZON):
            self._promises[:HORIZON] = kept
        return first

    def _weight(self) -> Callable[[Request], float]:
        """How much rather than one as large a request is given up: the more, the more of its class was kept lately."""
        kept = self._kept
        least = min(kept.values(), default=1.0)
        return lambda r: 1 + BALANCE * (kept.get(r.slo_class, 1.0) - least)

    def _count(self, slo_class: str, kept: bool) -> None:
        """One more promise to a class was kept, or not."""
        if slo_class in self._kept or len(self._kept) < CLASSES:
            share = self._kept.get(slo_class, 1.0)
            self._kept[slo_class] = share + (kept - share) / MEMORY


def all_in_time(first: list[Promise], now: float, token: float, least: float) -> bool:
    """Whether `moore` gives nobody up, as mostly; the same additions, so that they agree to the last bit."""
    end = now
    for deadline, _, tokens in first:
        end += tokens * token
        if end > deadline or now + least > deadline:
            return False
    return True


def moore(
    first: list[Promise], now: float, token: float, least: float, weight: Callable[[Request], float]
) -> set[Request]:
    """Who is given up among `first`, sorted by deadline.

    A prompt token takes `token` seconds, a step at least `least`. Whoever would be late alone is given up at once.
    The largest is given up first, its tokens times its `weight`.
    """
    given_up: set[Request] = set()
    largest: list[tuple[float, int, Request, int]] = []
    end = now
    for deadline, r, tokens in first:
        if now + max(tokens * token, least) > deadline:
            given_up.add(r)
            continue
        heapq.heappush(largest, (-tokens * weight(r), r.seq, r, tokens))
        end += tokens * token
        while end > deadline:
            _, _, lost, size = heapq.heappop(largest)
            end -= size * token
            given_up.add(lost)
    return given_up


def in_time(
    kept: list[tuple[float, int]], now: float, most: int, whole: float, seconds: Callable[[int], float]
) -> int | None:
    """Prompt tokens after which a step of at most `most`, which would take `whole` seconds, had better end; None where
    it may be full.

    `kept` are (deadline, tokens) in order. All that end in the step end when it does: it is cut behind the last
    prompt with which it is still in time for all before, if more would make it late for one of these.
    """
    if not kept or now + whole <= kept[0][0]:
        return None
    best, tokens, earliest = 0, 0, kept[0][0]
    for _, own in kept:
        tokens += own
        if tokens > most or now + seconds(tokens) > earliest:
            break
        best = tokens
    return best if 0 < best < most else None
