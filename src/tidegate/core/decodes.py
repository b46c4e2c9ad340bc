"""The set of requests that decode, and the clock that counts for all of them.

One advance of `clock` is one planned decode of every member, so nothing is counted per member and
step. Two calendars say who needs attention at which clock: a wheel for members that cross into a new
KV block, and a sorted list of ends for members whose last token is due.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from tidegate.core.request import Request
from tidegate.core.timing import StepTimes


class Roster:
    """Requests, as parallel lists: `members`, their `slots`, and one list that belongs to each (`lists`)."""

    __slots__ = ("index", "lists", "members", "slots")

    def __init__(self) -> None:
        self.members: list[Request] = []
        self.slots: list[int] = []
        self.lists: list[list[int]] = []
        self.index: dict[Request, int] = {}

    def add(self, r: Request, own: list[int]) -> None:
        """`r` comes last."""
        self.index[r] = len(self.members)
        self.members.append(r)
        self.slots.append(r.slot)
        self.lists.append(own)

    def drop(self, r: Request) -> None:
        """`r` goes; the last takes its place."""
        at = self.index.pop(r)
        last, slot, own = self.members.pop(), self.slots.pop(), self.lists.pop()
        if last is not r:
            self.members[at], self.slots[at], self.lists[at] = last, slot, own
            self.index[last] = at

    def renew(self) -> None:
        """Go on with copies of the lists: those handed out stay what they were."""
        self.members, self.slots, self.lists = self.members.copy(), self.slots.copy(), self.lists.copy()


class DecodeSet(Roster):
    """Members decode once per advance of the clock.

    `members`, `slots` and `lists`, each of which takes the next tokens of its member, are handed out with plans and
    are replaced, never changed, once handed out: a plan's view stays what it was.
    """

    __slots__ = ("_ends", "_handed_out", "_nowhere", "_wheel", "applied", "clock", "context", "keeping", "times")

    # Times are forgotten in batches of this many, once every member joined later.
    FORGET_EVERY = 8192

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.clock = 0
        self.applied = 0
        self.context = 0  # KV tokens planned of all members together: what one decode of each reads
        self.keeping = 0  # members whose token ids are kept
        self.times = StepTimes()
        self._handed_out = False
        self._nowhere: list[int] = []  # takes the tokens of those whose token ids nobody keeps
        self._wheel = [Roster() for _ in range(block_size)]
        self._ends: list[tuple[int, int, Request]] = []  # (clock, arrival sequence, request), sorted

    def __len__(self) -> int:
        return len(self.members)

    def join(self, r: Request) -> None:
        """`r` decodes from the next advance on."""
        if self._handed_out:
            self._own_lists()
        planned = r.planned
        self.context += planned
        self.keeping += r.token_ids is not None
        self.add(r, self._nowhere if r.token_ids is None else r.token_ids)
        assert r.lease is not None
        table = r.lease.table
        if len(table) < r.footprint:
            self._wheel[(self.clock - planned) % len(self._wheel)].add(r, table)
        end = self.clock + r.target - r.sampled
        r.enter(self, self.clock, end)
        insort(self._ends, (end, r.seq, r))

    def leave(self, r: Request) -> None:
        """`r` decodes no more; its derived counters are frozen as they stand."""
        if self._handed_out:
            self._own_lists()
        planned = r.planned
        self.context -= planned
        self.keeping -= r.token_ids is not None
        self.drop(r)
        spoke = self._wheel[(self.clock - planned) % len(self._wheel)]
        if r in spoke.index:
            spoke.drop(r)
        del self._ends[bisect_left(self._ends, (r.last_clock, r.seq))]
        if self.applied > r.joined_clock:
            self._fold_gaps(r)
        r.freeze()

    def crossing(self) -> Roster:
        """Members whose next decode writes the first position of a block they do not hold, with their tables.

        Who holds all that it will ever need never crosses.
        """
        return self._wheel[self.clock % len(self._wheel)]

    def crossings(self) -> list[int]:
        """How many members cross into a new block at the next advance, at the one after it, ... until it repeats."""
        return [len(spoke.members) for spoke in self._spokes()]

    def covered(self, blocks: int, advances: int) -> int:
        """The most of `advances` whose crossings `blocks` blocks suffice for."""
        size = len(self._wheel)
        if len(self.members) * (advances // size + 1) <= blocks:  # whatever they are
            return advances
        crossings = self.crossings()
        a_round = sum(crossings)
        if not a_round:
            return advances
        rounds, left = divmod(blocks, a_round)
        covered = rounds * size
        for crossing in crossings:
            if covered >= advances or crossing > left:
                break
            left -= crossing
            covered += 1
        return min(covered, advances)

    def crossing_within(self, advances: int) -> list[list[int]]:
        """The tables of members that cross within so many advances, each as often as its member does."""
        size = len(self._wheel)
        tables: list[list[int]] = []
        for ahead, spoke in enumerate(self._spokes()[:advances]):
            if spoke.lists:
                tables += spoke.lists * ((advances - ahead - 1) // size + 1)
        return tables

    @property
    def next_end(self) -> int:
        """The clock of the first last token of a member; there must be one."""
        return self._ends[0][0]

    def ending(self, clock: int) -> list[Request]:
        """Members whose last token is the one of advance number `clock`."""
        ends = self._ends
        if not ends or ends[0][0] > clock:
            return []
        return [r for _, _, r in ends[bisect_left(ends, (clock,)) : bisect_left(ends, (clock + 1,))]]

    def ends(self) -> Iterator[tuple[int, int]]:
        """(clock of the last token, blocks at the peak) of every member, by clock."""
        return ((end, r.footprint) for end, _, r in self._ends)

    def advance(self, steps: int = 1) -> None:
        """Plan one decode of every member, or so many of each."""
        self.clock += steps
        self.context += steps * len(self.members)
        self._handed_out = True

    def apply(self, now: float) -> None:
        """The oldest advance that was not applied yet has been computed, at `now` (seconds)."""
        self.applied += 1
        self.times.record(now)
        self._nowhere.clear()
        if not self.applied % self.FORGET_EVERY:
            self.times.forget(min((r.joined_clock for r in self.members), default=self.applied))

    def apply_all(self, times: Sequence[float]) -> None:
        """As many advances, the oldest ones, have been computed at these times (seconds)."""
        rounds = self.applied // self.FORGET_EVERY
        self.applied += len(times)
        self.times.record_all(times)
        if self.applied // self.FORGET_EVERY > rounds:
            self.times.forget(min((r.joined_clock for r in self.members), default=self.applied))

    def _fold_gaps(self, r: Request) -> None:
        """Write the gaps between `r`'s tokens since it joined into `r`; at least one was applied."""
        first = r.joined_clock + 1
        if r.last_token_at is not None:
            r.gaps.append(self.times.at(first) - r.last_token_at)
        r.gaps += self.times.gaps(first, self.applied)
        r.last_token_at = self.times.at(self.applied)

    def _spokes(self) -> list[Roster]:
        """Those who cross at the next advance, at the one after it, ... until it repeats."""
        now = self.clock % len(self._wheel)
        return self._wheel[now:] + self._wheel[:now]

    def _own_lists(self) -> None:
        self.renew()
        self._handed_out = False
