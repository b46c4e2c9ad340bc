"""The waiting requests, in policy order. Adding and removing cost O(log n); nothing is ever sorted whole.

Lower keys come first, ties by arrival. One rule on top: a request that was preempted comes before
every request of its own class (the order's tier, ageing left out) that was never admitted.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterator
from math import inf
from typing import TypeAlias

from tidegate.core.policy import Key
from tidegate.core.request import Request

# (tier, score, arrival sequence, version, request): the sequence is unique, so requests are never compared.
Entry: TypeAlias = tuple[int, float, int, int, Request]


class WaitingQueue:
    """A lazy heap of those never admitted, and one short sorted list a class of those preempted.

    `order(request) -> Key` is asked when a request is added and when its key's `until` has come.
    `epoch` grows whenever the first `window` requests may have changed.
    """

    def __init__(self, order: Callable[[Request], Key], window: int = 8) -> None:
        self.window = window
        self.epoch = 0
        self._order = order
        self._fresh: list[Entry] = []
        self._returning: dict[int, list[Entry]] = {}
        self._live: dict[Request, Entry] = {}
        self._due: list[tuple[float, int, int, Request]] = []
        self._front: list[Request] | None = None
        self._front_end: Entry | None = None

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, r: Request) -> bool:
        return r in self._live

    def __iter__(self) -> Iterator[Request]:
        """In no particular order."""
        return iter(self._live)

    @property
    def fresh(self) -> int:
        """How many wait that were never admitted."""
        return len(self._live) - sum(len(entries) for entries in self._returning.values())

    def add(self, r: Request) -> None:
        """Queue `r` in its place; among those that return if it was preempted before."""
        key = self._order(r)
        r.key = key
        entry = (key.tier, key.score, r.seq, r.version, r)
        self._live[r] = entry
        if r.preemptions:
            insort(self._returning.setdefault(r.tier, []), entry)
        else:
            heapq.heappush(self._fresh, entry)
        if key.until != inf:
            heapq.heappush(self._due, (key.until, r.seq, r.version, r))
        if self._front is None or self._front_end is None or entry < self._front_end or r.preemptions:
            self._changed()

    def remove(self, r: Request) -> None:
        """Take `r` out. Raises KeyError if it does not wait."""
        entry = self._live.pop(r)
        r.version += 1
        if r.preemptions:
            returning = self._returning[r.tier]
            returning.remove(entry)
            if not returning:
                del self._returning[r.tier]
        elif len(self._fresh) > 2 * len(self._live) + 64:
            self._fresh = [e for e in self._fresh if self._alive(e)]
            heapq.heapify(self._fresh)
        if self._front_end is None or not entry > self._front_end or r.preemptions:
            self._changed()

    def peek(self) -> Request | None:
        """Who comes first; None if nobody waits."""
        while self._fresh and not self._alive(self._fresh[0]):
            heapq.heappop(self._fresh)
        if not self._returning:
            return self._fresh[0][-1] if self._fresh else None
        first = min(entries[0] for entries in self._returning.values())
        if self._fresh and self._fresh[0] < first:
            fresh = self._fresh[0][-1]
            own_class = self._returning.get(fresh.tier)
            return own_class[0][-1] if own_class else fresh
        return first[-1]

    def front(self) -> list[Request]:
        """The first `window` requests, in order."""
        if self._front is None:
            self._front = self._gather()
        return self._front

    def rekey_due(self, now: float) -> None:
        """Ask again for the keys that the passing of time has changed by `now` (seconds)."""
        while self._due and self._due[0][0] <= now:
            _, _, version, r = heapq.heappop(self._due)
            if r in self._live and r.version == version:
                self.rekey(r)

    def next_due(self) -> float | None:
        """When the passing of time next changes a key (seconds), at the earliest; None if it never does."""
        return self._due[0][0] if self._due else None

    def ahead_of(self, r: Request) -> int:
        """How many come before `r`. Costs as much as waits: for a person who asks, not for a step."""
        own = self._live[r]
        if r.preemptions:
            return sum(e < own for e in self._live.values() if e[-1].tier != r.tier or e[-1].preemptions)
        return sum(e < own or (e[-1].tier == r.tier and e[-1].preemptions > 0) for e in self._live.values())

    def rekey(self, r: Request) -> None:
        """Ask again for the key of `r`, because an event changed it."""
        self.remove(r)
        self.add(r)

    def _gather(self) -> list[Request]:
        front: list[Request] = []
        taken = dict.fromkeys(self._returning, 0)
        fresh = self._in_order()
        candidate = next(fresh, None)
        while len(front) < self.window:
            heads = [e[taken[t]] for t, e in self._returning.items() if taken[t] < len(e)]
            first = min(heads, default=None)
            if candidate is None and first is None:
                break
            if first is None or (candidate is not None and candidate < first):
                assert candidate is not None
                tier = candidate[-1].tier
                own_class = self._returning.get(tier, [])
                if taken.get(tier, 0) < len(own_class):
                    first = own_class[taken[tier]]
                else:
                    front.append(candidate[-1])
                    candidate = next(fresh, None)
                    continue
            front.append(first[-1])
            taken[first[-1].tier] += 1
        self._front_end = self._live[front[-1]] if len(front) == self.window else None
        return front

    def _in_order(self) -> Iterator[Entry]:
        """Live fresh entries in order, by walking the heap from its root without popping."""
        heap = self._fresh
        todo = [(heap[0], 0)] if heap else []
        while todo:
            entry, at = heapq.heappop(todo)
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(heap):
                    heapq.heappush(todo, (heap[child], child))
            if self._alive(entry):
                yield entry

    def _alive(self, entry: Entry) -> bool:
        return self._live.get(entry[-1]) is entry

    def _changed(self) -> None:
        self._front = None
        self._front_end = None
        self.epoch += 1
