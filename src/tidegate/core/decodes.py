"""The set of requests that decode, and the clock that counts for all of them.

One advance of `clock` is one planned decode of every member, so nothing is counted per member and
step. Two calendars say who needs attention at which clock: a wheel for members that cross into a new
KV block, and a dict of ends for members whose last token is due.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator

from tidegate.core.request import Request
from tidegate.core.timing import StepTimes

# Where token ids are not kept, what a member "appends" its token to.
_DISCARD: Callable[[int], None] = deque[int](maxlen=0).append


class DecodeSet:
    """Members decode once per advance of the clock.

    `members`, `slots` and `sinks` are parallel lists. They are handed out with plans and are replaced,
    never changed, once handed out: a plan's view stays what it was.
    """

    __slots__ = (
        "_by_end",
        "_ends",
        "_handed_out",
        "_index",
        "_wheel",
        "applied",
        "clock",
        "members",
        "sinks",
        "slots",
        "times",
    )

    # Times are forgotten in batches of this many, once every member joined later.
    FORGET_EVERY = 8192

    def __init__(self, block_size: int) -> None:
        self.clock = 0
        self.applied = 0
        self.times = StepTimes()
        self.members: list[Request] = []
        self.slots: list[int] = []
        self.sinks: list[Callable[[int], None]] = []
        self._handed_out = False
        self._index: dict[Request, int] = {}
        self._wheel: list[dict[Request, list[int]]] = [{} for _ in range(block_size)]
        self._ends: dict[int, dict[Request, None]] = {}
        self._by_end: list[tuple[int, int, int]] = []  # (end, arrival sequence, footprint), sorted

    def __len__(self) -> int:
        return len(self.members)

    def join(self, r: Request) -> None:
        """`r` decodes from the next advance on."""
        self._own_lists()
        self._index[r] = len(self.members)
        self.members.append(r)
        self.slots.append(r.slot)
        self.sinks.append(_DISCARD if r.token_ids is None else r.token_ids.append)
        r.enter(self)
        assert r.lease is not None
        self._wheel[self._spoke(r)][r] = r.lease.table
        end = self._end(r)
        self._ends.setdefault(end, {})[r] = None
        insort(self._by_end, (end, r.seq, r.footprint))

    def leave(self, r: Request) -> None:
        """`r` decodes no more; its derived counters are frozen as they stand."""
        self._own_lists()
        at = self._index.pop(r)
        last = self.members.pop()
        slot, sink = self.slots.pop(), self.sinks.pop()
        if last is not r:
            self.members[at], self.slots[at], self.sinks[at] = last, slot, sink
            self._index[last] = at
        del self._wheel[self._spoke(r)][r]
        end = self._end(r)
        del self._ends[end][r]
        if not self._ends[end]:
            del self._ends[end]
        del self._by_end[bisect_left(self._by_end, (end, r.seq))]
        self._fold_gaps(r)
        r.freeze()

    def crossing(self) -> list[Request]:
        """Members whose next decode writes the first position of a block they do not hold yet."""
        clock, size = self.clock, len(self._wheel)
        return [
            r
            for r, table in self._wheel[clock % size].items()
            if len(table) * size <= r._planned + clock - r.joined_clock
        ]

    def ending(self, clock: int) -> list[Request]:
        """Members whose last token is the one of advance number `clock`."""
        return list(self._ends.get(clock, ()))

    def ends(self) -> Iterator[tuple[int, int]]:
        """(clock of the last token, blocks at the peak) of every member, by clock."""
        return ((end, blocks) for end, _, blocks in self._by_end)

    def advance(self) -> None:
        """Plan one decode of every member."""
        self.clock += 1
        self._handed_out = True

    def apply(self, now: float) -> None:
        """The oldest advance that was not applied yet has been computed, at `now` (seconds)."""
        self.applied += 1
        self.times.record(now)
        if not self.applied % self.FORGET_EVERY:
            self.times.forget(min((r.joined_clock for r in self.members), default=self.applied))

    def _fold_gaps(self, r: Request) -> None:
        """Write the gaps between `r`'s tokens since it joined into `r`."""
        first = r.joined_clock + 1
        if self.applied < first:
            return
        if r.last_token_at is not None:
            r.gaps.append(self.times.at(first) - r.last_token_at)
        r.gaps += self.times.gaps(first, self.applied)
        r.last_token_at = self.times.at(self.applied)

    def _own_lists(self) -> None:
        if self._handed_out:
            self.members, self.slots, self.sinks = self.members.copy(), self.slots.copy(), self.sinks.copy()
            self._handed_out = False

    def _spoke(self, r: Request) -> int:
        """The clock, modulo the block size, at which `r` crosses. Constant while `r` is a member."""
        return (self.clock - r.planned) % len(self._wheel)

    def _end(self, r: Request) -> int:
        """The clock of `r`'s last token. Constant while `r` is a member."""
        return self.clock + r.target - r.sampled
