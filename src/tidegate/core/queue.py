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

# (seconds, arrival sequence, version, request): when a key's `until` comes.
Due: TypeAlias = tuple[float, int, int, Request]


class WaitingQueue:
    """Those never admitted in a lazy heap, whose first few lie sorted beside it; those preempted in one short
    sorted list a class.

    `order(request) -> Key` is asked when a request is added and when its key's `until` has come; it may set
    the request's tier. `forget` is told of each that is taken out.
    `epoch` grows whenever the first `window` requests may have changed.
    """

    def __init__(
        self, order: Callable[[Request], Key], window: int = 8, forget: Callable[[Request], None] | None = None
    ) -> None:
        self.window = window
        self.epoch = 0
        self._forget = forget
        self._order = order
        self._first: list[Entry] = []  # sorted, and all before everything in the heap
        self._rest: list[Entry] = []
        self._returning: dict[int, list[Entry]] = {}
        self._live: dict[Request, Entry] = {}
        self._due: list[Due] = []
        self._front: list[Request] | None = None

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
        if key.until != inf:
            heapq.heappush(self._due, (key.until, r.seq, r.version, r))
        if r.preemptions:
            insort(self._returning.setdefault(r.tier, []), entry)
            self._changed()
        elif self._first and entry < self._first[-1]:
            insort(self._first, entry)
            if len(self._first) > 2 * self.window:
                heapq.heappush(self._rest, self._first.pop())
            self._changed()
        else:
            heapq.heappush(self._rest, entry)
            if len(self._first) < self.window:
                self._changed()

    def remove(self, r: Request) -> None:
        """Take `r` out. Raises KeyError if it does not wait."""
        entry = self._live.pop(r)
        r.version += 1
        if self._forget is not None:
            self._forget(r)
        if r.preemptions:
            returning = self._returning[r.tier]
            returning.remove(entry)
            if not returning:
                del self._returning[r.tier]
            self._changed()
        elif self._first and entry <= self._first[-1]:
            self._first.remove(entry)
            self._changed()
        self._compact()

    def peek(self) -> Request | None:
        """Who comes first; None if nobody waits."""
        if not self._first and self._rest:
            self._fill(1)
        if not self._returning:
            return self._first[0][-1] if self._first else None
        first = min(entries[0] for entries in self._returning.values())
        if self._first and self._first[0] < first:
            fresh = self._first[0][-1]
            own_class = self._returning.get(fresh.tier)
            return own_class[0][-1] if own_class else fresh
        return first[-1]

    def front(self) -> list[Request]:
        """The first `window` requests, in order."""
        if self._front is None:
            self._fill(self.window)
            self._front = self._merged()
        return self._front

    def rekey_due(self, now: float, limit: int = 1_000_000) -> list[Request]:
        """Ask again for the keys that the passing of time has changed by `now` (seconds); returns whose.

        At most `limit` of them; the others follow in later calls.
        """
        asked: list[Request] = []
        while self._due and self._due[0][0] <= now and len(asked) < limit:
            due = heapq.heappop(self._due)
            if self._still(due):
                self.rekey(due[3])
                asked.append(due[3])
        return asked

    def next_due(self) -> float | None:
        """When the passing of time next changes a key (seconds); None if it never does."""
        while self._due and not self._still(self._due[0]):
            heapq.heappop(self._due)
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

    def _fill(self, wanted: int) -> None:
        """Move entries from the heap until `wanted` lie sorted; dead ones are met once and dropped."""
        while len(self._first) < wanted and self._rest:
            entry = heapq.heappop(self._rest)
            if self._alive(entry):
                self._first.append(entry)

    def _merged(self) -> list[Request]:
        """The first `window` of both kinds: a fresh one yields to those of its class that return."""
        front: list[Request] = []
        returning = {tier: iter(entries) for tier, entries in self._returning.items()}
        heads = {tier: next(entries) for tier, entries in returning.items()}
        fresh = iter(self._first)
        candidate = next(fresh, None)
        while len(front) < self.window and (candidate or heads):
            first = min(heads.values(), default=None)
            if candidate is not None and (first is None or candidate < first):
                first = heads.get(candidate[-1].tier)
                if first is None:
                    front.append(candidate[-1])
                    candidate = next(fresh, None)
                    continue
            assert first is not None
            front.append(first[-1])
            tier = first[-1].tier
            following = next(returning[tier], None)
            if following is None:
                del heads[tier]
            else:
                heads[tier] = following
        return front

    def _compact(self) -> None:
        """Drop what was left behind by removals, before it outnumbers those who wait."""
        bound = 2 * len(self._live) + 64
        if len(self._rest) > bound:
            self._rest = [e for e in self._rest if self._alive(e)]
            heapq.heapify(self._rest)
        if len(self._due) > bound:
            self._due = [due for due in self._due if self._still(due)]
            heapq.heapify(self._due)

    def _alive(self, entry: Entry) -> bool:
        return self._live.get(entry[-1]) is entry

    def _still(self, due: Due) -> bool:
        """Whether it concerns one who waits, with the key of which it was noted."""
        r = due[3]
        return r in self._live and r.version == due[2]

    def _changed(self) -> None:
        self._front = None
        self.epoch += 1
