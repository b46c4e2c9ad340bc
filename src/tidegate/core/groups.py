"""The waiting requests of an order that moves whole groups at once (core/policy.py, `Grouping`).

Each group has a queue of its own in the order's own keys; the groups lie in a heap by the score each had
when it was last looked at. Scores only rise, so a group whose score has not changed when it comes first
is the first: O(log groups) a look, however many wait in a group. Requests that were preempted come before
all who were never admitted, whatever their group, as everywhere.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable
from itertools import chain, zip_longest
from math import inf

from tidegate.core.policy import Grouping, Key, PolicyContext
from tidegate.core.queue import WaitingQueue
from tidegate.core.request import Request


class GroupedQueue(WaitingQueue):
    """A `WaitingQueue` by groups. The key of whoever is handed out bears its group's score."""

    def __init__(
        self, order: Callable[[Request], Key], grouping: Grouping, ctx: PolicyContext, window: int = 8
    ) -> None:
        super().__init__(order, window)
        self._grouping = grouping
        self._ctx = ctx
        self._groups: dict[str, WaitingQueue] = {}
        self._heads: list[tuple[float, int, str]] = []  # (score, arrival sequence of its first, group)
        self._head: Request | None = None

    def add(self, r: Request) -> None:
        group = self._grouping.group(r)
        if r.preemptions:
            key = self._order(r)
            r.key = Key(key.tier, self._grouping.group_score(group, self._ctx))
            entry = (r.key.tier, r.key.score, r.seq, r.version, r)
            self._live[r] = entry
            insort(self._returning.setdefault(r.tier, []), entry)
        else:
            queue = self._groups.get(group)
            if queue is None:
                queue = self._begin(group)
            queue.add(r)
            self._note(r, group)
            if queue.peek() is r:
                self._stand_first(r, group)
        self._changed()

    def remove(self, r: Request) -> None:
        entry = self._live.pop(r)
        if r.preemptions:
            r.version += 1
            returning = self._returning[r.tier]
            returning.remove(entry)
            if not returning:
                del self._returning[r.tier]
        else:
            group = self._grouping.group(r)
            queue = self._groups[group]
            queue.remove(r)
            if not len(queue):
                del self._groups[group]
                self._grouping.leave(group, self._ctx)
            self._compact()
        self._changed()

    def rekey(self, r: Request) -> None:
        if r.preemptions:
            super().rekey(r)
        else:  # its group waits all the while
            group = self._grouping.group(r)
            queue = self._groups[group]
            queue.rekey(r)
            self._note(r, group)
            head = queue.peek()
            assert head is not None
            self._stand_first(head, group)
            self._changed()

    def peek(self) -> Request | None:
        if self._returning:
            return min(entries[0] for entries in self._returning.values())[-1]
        first = self._first_group()
        head = None
        if first is not None:
            head = self._groups[first].peek()
            assert head is not None
            self._stand(head, first)
        if head is not self._head:  # counters moved: another comes first
            self._head = head
            self._changed()
        return head

    def front(self) -> list[Request]:
        """Those who return, then the groups in turn: whoever starts is charged for, and the next group's first follows.

        So a group with many requests does not hide the others' from back-fill behind its blocked first one.
        """
        returning = sorted(chain.from_iterable(self._returning.values()))[: self.window]
        found = [entry[-1] for entry in returning]
        first = self._first_group()
        kept: list[tuple[float, int, str]] = []
        fronts: list[list[Request]] = []
        while first is not None and len(found) + len(fronts) < self.window:
            kept.append(heapq.heappop(self._heads))
            members = self._groups[first].front()[: self.window - len(found)]
            for r in members:
                self._stand(r, first)
            fronts.append(members)
            self._drop_copies(first)
            first = self._first_group()
        for head in kept:
            heapq.heappush(self._heads, head)
        found += [r for turn in zip_longest(*fronts) for r in turn if r is not None]
        return found[: self.window]

    def ahead_of(self, r: Request) -> int:
        if r.preemptions:
            return sum(e < self._live[r] for entries in self._returning.values() for e in entries)
        own = self._grouping.group(r)
        score = self._grouping.group_score(own, self._ctx)
        others = sum(
            len(queue)
            for group, queue in self._groups.items()
            if group != own and self._grouping.group_score(group, self._ctx) <= score
        )
        back = sum(len(entries) for entries in self._returning.values())
        return back + others + self._groups[own].ahead_of(r)

    def _compact(self) -> None:
        """Drop entries of groups that are gone or came anew, before they outnumber the groups."""
        super()._compact()
        if len(self._heads) > 2 * len(self._groups) + 64:
            score = self._grouping.group_score
            heads = [(score(group, self._ctx), queue.peek(), group) for group, queue in self._groups.items()]
            self._heads = [(at, head.seq, group) for at, head, group in heads if head is not None]
            heapq.heapify(self._heads)

    def _begin(self, group: str) -> WaitingQueue:
        """`group` waits from now on."""
        first = self._first_group()
        least = None if first is None else self._grouping.group_score(first, self._ctx)
        self._grouping.enter(group, least, self._ctx)
        queue = self._groups[group] = WaitingQueue(self._order, self.window)
        return queue

    def _note(self, r: Request, group: str) -> None:
        """`r` has got its place in its group's queue, and a key."""
        assert r.key is not None
        if r.key.until != inf:
            heapq.heappush(self._due, (r.key.until, r.seq, r.version, r))
        key = self._stand(r, group)
        self._live[r] = (key.tier, key.score, r.seq, r.version, r)

    def _stand_first(self, head: Request, group: str) -> None:
        """`head` comes first in its group from now on."""
        heapq.heappush(self._heads, (self._stand(head, group).score, head.seq, group))
        self._compact()

    def _stand(self, r: Request, group: str) -> Key:
        """Give `r` the key of its group as it is now."""
        assert r.key is not None
        r.key = Key(r.key.tier, self._grouping.group_score(group, self._ctx))
        return r.key

    def _first_group(self) -> str | None:
        """The group with the least score now; its entry lies on top of the heap."""
        heads = self._heads
        while heads:
            score, seq, group = heads[0]
            queue = self._groups.get(group)
            head = queue.peek() if queue is not None else None
            if head is None:
                heapq.heappop(heads)
                continue
            now = (self._grouping.group_score(group, self._ctx), head.seq)
            if now > (score, seq):
                heapq.heapreplace(heads, (*now, group))
                continue
            return group
        return None

    def _drop_copies(self, group: str) -> None:
        """Take further entries of `group` off the top of the heap."""
        while self._heads and self._heads[0][2] == group:
            heapq.heappop(self._heads)
