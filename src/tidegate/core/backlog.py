"""How much work waits: in all, by class, by tier, and ahead of a place in the order. Kept as requests come and go.

Work is tokens to compute: the prompt without what the prefix cache holds, and the predicted outputs but the
first (the step that ends a prompt emits it). It is estimated once, when a request begins to wait.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import TypeAlias, TypeVar

from tidegate.core.request import Request, Status
from tidegate.core.running import place
from tidegate.core.view import NOTHING, Work

Place: TypeAlias = tuple[int, float, int]
K = TypeVar("K", str, int)


class Backlog:
    """Those who wait, with their work. Preempted requests are ahead of others but count towards no limit.

    `weigh(request)` is asked once, when a request comes to the door or is preempted.
    """

    def __init__(self, weigh: Callable[[Request], Work]) -> None:
        self.total = NOTHING
        self._weigh = weigh
        self._at_the_door: tuple[Request, Work] | None = None
        self._work: dict[Request, Work] = {}
        self._tiers: dict[Request, int] = {}  # of each when it came: an order may change it meanwhile
        self._places: dict[Request, Place] = {}
        self._by_class: dict[str, Work] = {}
        self._by_tier: dict[int, Work] = {}
        self._ordered = WorkInOrder()
        self._worst: list[tuple[int, int, Request]] = []

    def enter(self, r: Request) -> None:
        """`r` waits: in its place in the order, or parked, before nobody."""
        known = r in self._work
        work, tier = self.work_of(r), self._tiers.get(r, r.tier)
        self.leave(r)
        self._work[r], self._tiers[r] = work, tier
        if r.status is not Status.PARKED:
            self._places[r] = place(r)
            self._ordered.add(self._places[r], work)
        if r.preemptions:
            return
        self._count(r, work, tier, 1)
        if not known:
            heapq.heappush(self._worst, (-tier, -r.seq, r))
        if len(self._worst) > 2 * len(self._work) + 64:
            self._worst = [(-t, -w.seq, w) for w, t in self._tiers.items() if not w.preemptions]
            heapq.heapify(self._worst)

    def leave(self, r: Request) -> None:
        """`r` waits no more, if it did: it was admitted, or it ended."""
        work = self._work.pop(r, None)
        if work is None:
            return
        stood = self._places.pop(r, None)
        if stood is not None:
            self._ordered.remove(stood)
        tier = self._tiers.pop(r)
        if not r.preemptions:
            self._count(r, work, tier, -1)

    def work_of(self, r: Request) -> Work:
        """What `r` needs, as estimated when it began to wait; of somebody at the door an estimate that is kept."""
        if r in self._work:
            return self._work[r]
        if self._at_the_door is None or self._at_the_door[0] is not r or r.preemptions:
            self._at_the_door = (r, self._weigh(r))
        return self._at_the_door[1]

    def of_class(self, name: str) -> Work:
        """What waits of one class."""
        return self._by_class.get(name, NOTHING)

    def worse_than(self, tier: int) -> Work:
        """What waits of tiers worse than `tier`. Costs as much as there are tiers."""
        worse = NOTHING
        for other, work in self._by_tier.items():
            if other > tier:
                worse = worse.plus(work)
        return worse

    def ahead_of(self, place: Place) -> Work:
        """What waits before `place` in the order, as it stood when each was queued."""
        return self._ordered.before(place)

    def worst_first(self, tier: int) -> Iterator[Request]:
        """Those never admitted of tiers worse than `tier`: the worst tier first, the newest of a tier first.

        Whoever is yielded must end: it is looked at once.
        """
        while self._worst:
            r = self._worst[0][2]
            if r in self._work and not r.preemptions:
                if self._tiers[r] <= tier:
                    return
                yield r
            heapq.heappop(self._worst)

    def _count(self, r: Request, work: Work, tier: int, sign: int) -> None:
        self.total = self.total.plus(work, sign)
        _count(self._by_class, r.slo_class, work, sign)
        _count(self._by_tier, tier, work, sign)


def _count(sums: dict[K, Work], key: K, work: Work, sign: int) -> None:
    left = sums.get(key, NOTHING).plus(work, sign)
    if left.requests:
        sums[key] = left
    else:
        del sums[key]


class WorkInOrder:
    """Work by place, in sorted runs of at most `2 * RUN` entries with a sum each.

    Adding and removing search by bisection; what lies before a place is a sum over the runs before its own and over
    part of that, a few hundred additions in C with a hundred thousand entries.
    """

    RUN = 128

    def __init__(self) -> None:
        self._lasts: list[Place] = []
        self._runs: list[_Run] = []

    def add(self, place: Place, work: Work) -> None:
        """`work` waits at `place`, which nobody else has."""
        if not self._runs:
            self._runs.append(_Run())
            self._lasts.append(place)
        at = min(bisect_left(self._lasts, place), len(self._runs) - 1)
        run = self._runs[at]
        run.insert(place, work)
        if len(run.places) > 2 * self.RUN:
            self._runs.insert(at + 1, run.split(self.RUN))
            self._lasts.insert(at + 1, self._runs[at + 1].places[-1])
        self._lasts[at] = run.places[-1]

    def remove(self, place: Place) -> None:
        """Nothing waits at `place` any more. Raises KeyError if nothing did."""
        at = bisect_left(self._lasts, place)
        if at == len(self._runs):
            raise KeyError(place)
        run = self._runs[at]
        run.delete(place)
        if run.places:
            self._lasts[at] = run.places[-1]
        else:
            del self._runs[at], self._lasts[at]

    def before(self, place: Place) -> Work:
        """What waits before `place`."""
        at = bisect_left(self._lasts, place)
        full = self._runs[:at]
        requests, prefill, outputs = (
            sum(len(run.places) for run in full),
            sum(run.prefill for run in full),
            sum(run.outputs for run in full),
        )
        if at < len(self._runs):
            run = self._runs[at]
            cut = bisect_left(run.places, place)
            requests += cut
            prefill += sum(run.prefills[:cut])
            outputs += sum(run.decodes[:cut])
        return Work(requests, prefill, outputs)


class _Run:
    """Parallel lists, sorted by place, and their sums."""

    __slots__ = ("decodes", "outputs", "places", "prefill", "prefills")

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.prefills: list[int] = []
        self.decodes: list[int] = []
        self.prefill = 0
        self.outputs = 0

    def insert(self, place: Place, work: Work) -> None:
        at = bisect_left(self.places, place)
        self.places.insert(at, place)
        self.prefills.insert(at, work.prefill)
        self.decodes.insert(at, work.outputs)
        self.prefill += work.prefill
        self.outputs += work.outputs

    def delete(self, place: Place) -> None:
        at = bisect_left(self.places, place)
        if at == len(self.places) or self.places[at] != place:
            raise KeyError(place)
        del self.places[at]
        self.prefill -= self.prefills.pop(at)
        self.outputs -= self.decodes.pop(at)

    def split(self, keep: int) -> _Run:
        """The entries from `keep` on, which leave this run."""
        rest = _Run()
        rest.places, rest.prefills, rest.decodes = self.places[keep:], self.prefills[keep:], self.decodes[keep:]
        del self.places[keep:], self.prefills[keep:], self.decodes[keep:]
        rest.prefill, rest.outputs = sum(rest.prefills), sum(rest.decodes)
        self.prefill -= rest.prefill
        self.outputs -= rest.outputs
        return rest
