"""Back-fill: who may pass a blocked head without delaying it (EASY back-fill; Lifka, JSSPP 1995).

The head's earliest start is computed from the declared ends of what runs, everybody counted at the
peak of their footprint. A candidate may pass if it ends before that start, or if it fits beside the
head from then on. Declared ends are upper bounds: where requests end earlier the head could have
started earlier, so nobody passes that may last longer than `bypass_bound`.
"""

from __future__ import annotations

from heapq import merge
from math import inf

from tidegate.core.blocks import Match
from tidegate.core.decode_load import pace_of
from tidegate.core.kv import KvCache
from tidegate.core.limits import Limits
from tidegate.core.policy import Policy, PolicyContext
from tidegate.core.queue import WaitingQueue
from tidegate.core.reasons import PastBlocked
from tidegate.core.request import Request
from tidegate.core.running import Running
from tidegate.core.view import StepView


class Backfill:
    """Verdicts are remembered until somebody comes, goes, or the front of the queue changes."""

    def __init__(
        self, policy: Policy, limits: Limits, ctx: PolicyContext, kv: KvCache, queue: WaitingQueue, running: Running
    ) -> None:
        self._policy = policy
        self._limits = limits
        self._ctx = ctx
        self._kv = kv
        self._queue = queue
        self._running = running
        self._start: tuple[tuple[Request, int], int, int] | None = None
        self._tried: tuple[int, int] | None = None

    def candidates(self, head: Request) -> list[Request]:
        """Who may be tried; nobody while nothing has changed since all were tried in vain."""
        if self.exhausted:
            return []
        self._tried = (self._queue.epoch, self._running.version)
        return [r for r in self._queue.front() if r is not head]

    @property
    def exhausted(self) -> bool:
        """Whether nothing has changed since all were tried in vain."""
        return self._tried == (self._queue.epoch, self._running.version)

    def try_again(self) -> None:
        """Somebody was refused for a reason that passes by itself."""
        self._tried = None

    def harmless(self, r: Request, match: Match, head: Request, held_by: str, step: StepView) -> PastBlocked | None:
        """By which bound `r` may start now although `head` waits for memory (`held_by`); None if it may not.

        Its own growth must be covered, and so must that of the others meanwhile (counted from above, in constant time).
        """
        running, kv = self._running, self._kv
        to_compute = r.known_tokens - max(match.blocks * self._limits.block_size, r.host_tokens)
        outputs = r.target - r.emitted - 1
        if running.load.paces and pace_of(r.slo) == inf:
            outputs *= self._policy.budget.max_stride
        steps = 1 + self._prompt_steps(r, to_compute, step, contended=True) + outputs
        if steps > self._limits.bypass_bound:
            return None
        others = min(running.outstanding, len(running) * kv.blocks_for(steps))
        if r.footprint - match.blocks + match.idle + others > kv.available:
            return None
        start, spare = self._earliest_start(head, step)
        if steps > start and r.footprint > spare:
            return None
        return PastBlocked(head.id, held_by, steps, start, r.footprint, spare)

    def _earliest_start(self, head: Request, step: StepView) -> tuple[int, int]:
        """(steps until `head` fits at its peak, blocks to spare beside it then)."""
        clock = self._running.decodes.clock
        state = (head, self._running.version)
        if self._start is None or self._start[0] != state:
            self._start = (state, *self._fits_at(head, step))
        return self._start[1] - clock, self._start[2]

    def _fits_at(self, head: Request, step: StepView) -> tuple[int, int]:
        """(clock at which `head` fits at its peak, blocks to spare then)."""
        running = self._running
        clock = running.decodes.clock
        room = self._kv.num_blocks - running.peak_blocks - head.footprint
        if room >= 0:
            return clock, room
        others = [*running.prefilling, *running.stalled]
        ends = sorted((clock + self._steps_left(m, step), m.footprint) for m in others)
        at = clock
        for end, blocks in merge(running.ends(), ends):
            room += blocks
            at = end
            if room >= 0:
                break
        return at, room

    def _steps_left(self, r: Request, step: StepView) -> int:
        """Steps until `r` ends by what it declared, at the fastest. The step that ends a prompt also emits."""
        to_compute, alone = r.known_tokens - r.planned, step._replace(crowd=None)
        prompt = self._prompt_steps(r, to_compute, alone, contended=False) - 1 if to_compute else 0
        return prompt + r.target - r.sampled

    def _prompt_steps(self, r: Request, tokens: int, step: StepView, contended: bool) -> int:
        """Steps that `tokens` of a prompt take at the budget of this one."""
        budget = self._policy.budget
        left = max(1, budget.tokens(step, self._ctx))
        chunk = budget.chunk(r, tokens, left, step, contended, self._ctx)
        return -(-tokens // max(1, chunk))
