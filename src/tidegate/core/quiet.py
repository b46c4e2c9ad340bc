"""Quiet steps: those in which nothing but decoding can happen, so that a host may take many at once. Ends by length
come with the last of them.

For simulations: where nobody keeps token ids and the time of a step is given, a span of steps needs no plan and no
result. What it leaves behind, events included, is what planning and applying each step would have left.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from math import inf
from typing import NamedTuple

from tidegate.core.affinity import Affinity
from tidegate.core.events import Emitted, Event
from tidegate.core.groups import GroupedQueue
from tidegate.core.lanes import Lanes
from tidegate.core.planner import Planner
from tidegate.core.policy import PolicyContext
from tidegate.core.queue import WaitingQueue
from tidegate.core.rekeys import RunningKeys
from tidegate.core.running import Running


class QuietSteps(NamedTuple):
    """How many steps of decodes alone may be taken at once, if nobody arrives or leaves meanwhile.

    steps:   so many at most
    ends:    whether somebody's last token comes with the last of them
    until:   each must be planned before this time (seconds)
    decodes: requests that decode in each
    context: KV tokens that they read in the first step, as `StepPlan.context`; in each later one `decodes` more
    """

    steps: int
    ends: bool
    until: float
    decodes: int
    context: int


LOUD = QuietSteps(0, False, -inf, 0, 0)


class Quiet:
    """Finds and takes quiet steps. Everything asked here is known already: nothing is planned to find out."""

    def __init__(
        self,
        ctx: PolicyContext,
        queue: WaitingQueue,
        running: Running,
        planner: Planner,
        keys: RunningKeys,
        affinity: Affinity,
    ) -> None:
        self._ctx = ctx
        self._queue = queue
        self._running = running
        self._planner = planner
        self._keys = keys
        self._affinity = affinity
        self._in_lanes, self._in_groups = isinstance(queue, Lanes), isinstance(queue, GroupedQueue)

    def most(self, waiting: int) -> int:
        """In how many steps somebody ends, all of them quiet as far as requests go, whatever the time and the blocks
        they take; 0 if none is. `waiting` requests wait.
        """
        running = self._running
        decodes = running.decodes
        if running.prefilling or not decodes.members or decodes.keeping or self._ctx.step_time.learns:
            return 0
        return decodes.next_end - decodes.clock if self._at_rest(waiting) else 0

    def ahead(self, most: int, until: float, blocks: int) -> QuietSteps:
        """The quiet ones of the `most` next steps, before `until` (seconds), which may take `blocks` blocks."""
        running = self._running
        decodes = running.decodes
        steps = decodes.covered(blocks, int(min(most, self._keys.quiet_plans)))
        if running.cohorts is not None and steps > 0:
            steps = running.cohorts.quiet_steps(steps)
        if steps < 1:
            return LOUD
        n = len(decodes.members)
        return QuietSteps(steps, steps == most, until, n, decodes.context + n)

    def take(self, times: Sequence[float], tokens: Sequence[int] | None) -> list[Event]:
        """Take as many quiet steps as there are `times` at which they end; what happened in them, with `tokens`."""
        running, steps = self._running, len(times)
        decodes = running.decodes
        if running.cohorts is not None:
            running.cohorts.pass_steps(steps)
        running.advance(steps)
        decodes.apply_all(times)
        self._keys.pass_plans(steps)
        self._ctx.now = times[-1]
        first = self._planner.take_numbers(steps)
        if tokens is None:
            return []
        numbers = range(first, first + steps)
        emitted = map(Emitted, times, numbers, repeat(decodes.members), repeat(tokens), repeat(len(tokens)), repeat([]))
        return list(emitted)

    def _at_rest(self, waiting: int) -> bool:
        """Whether nobody who waits can start, and nothing is left to be asked again."""
        if waiting and self._in_lanes:  # time gives a lane its turn
            return False
        if waiting and self._in_groups and self._running.free_seats:  # decoding moves the groups
            return False
        return not self._affinity.waits_to_tell and self._planner.at_rest(waiting)
