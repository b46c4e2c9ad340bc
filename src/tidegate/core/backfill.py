"""Back-fill: who may pass a blocked head without delaying it (EASY back-fill; Lifka, JSSPP 1995).

The head's earliest start is computed from the declared ends of what runs, everybody counted at the
peak of their footprint. A candidate may pass if it ends before that start, or if it fits beside the
head from then on. Declared ends are upper bounds: where requests end earlier, the head could have
started earlier, by at most the `bypass_bound` that a passing request may last.
"""

from __future__ import annotations

from tidegate.core.blocks import Match
from tidegate.core.kv import KvCache
from tidegate.core.limits import Limits
from tidegate.core.queue import WaitingQueue
from tidegate.core.request import Request
from tidegate.core.running import Running


class Backfill:
    """Verdicts are remembered until somebody comes, goes, or the front of the queue changes."""

    def __init__(self, limits: Limits, kv: KvCache, queue: WaitingQueue, running: Running) -> None:
        self._limits = limits
        self._kv = kv
        self._queue = queue
        self._running = running
        self._start: tuple[tuple[Request, int], int, int] | None = None
        self._tried: tuple[int, int] | None = None

    def candidates(self, head: Request) -> list[Request]:
        """Who may be tried; nobody while nothing has changed since all were tried in vain."""
        state = (self._queue.epoch, self._running.version)
        if self._tried == state:
            return []
        self._tried = state
        return [r for r in self._queue.front() if r is not head]

    def harmless(self, r: Request, match: Match, head: Request, tokens_per_step: int) -> bool:
        """Whether `r` may start now although `head` waits for memory."""
        running, kv = self._running, self._kv
        peak = r.footprint
        to_compute = r.known_tokens - match.blocks * self._limits.block_size
        steps = -(-to_compute // max(1, tokens_per_step)) + r.target - r.emitted - 1
        grown = kv.blocks_for(steps)
        others = sum(min(running.growth_left(m), grown) for m in running.members)
        if peak - match.blocks + match.idle + others > kv.available:
            return False
        start, spare = self._earliest_start(head)
        if peak <= spare:
            return True
        return steps <= min(start, self._limits.bypass_bound)

    def _earliest_start(self, head: Request) -> tuple[int, int]:
        """(decode steps until `head` fits at its peak, blocks to spare beside it then)."""
        state = (head, self._running.version)
        if self._start is None or self._start[0] != state:
            running = self._running
            ends = sorted((self._steps_left(m), m.footprint) for m in running.members)
            room = self._kv.num_blocks - sum(peak for _, peak in ends) - head.footprint
            at = 0
            for steps, peak in ends:
                if room >= 0:
                    break
                room += peak
                at = steps
            self._start = (state, running.decodes.clock + at, room)
        _, clock, room = self._start
        return clock - self._running.decodes.clock, room

    def _steps_left(self, r: Request) -> int:
        """Steps until `r` ends at the latest, by what it declared. The step that ends a prompt also emits."""
        prompt_steps = -(-(r.known_tokens - r.planned) // self._limits.max_num_batched_tokens)
        return max(0, prompt_steps - 1) + r.target - r.sampled
