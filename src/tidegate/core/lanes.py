"""Requests that need more than a seat: at most so many different labels run at once (adapter slots and the like).

Requests of one label wait in a lane of their own, and only the first of a lane stands in the queue, and only while
its label could start. So whoever lacks a slot blocks nobody else, and costs nothing while it waits. It is
not passed for ever: once it was blocked for `patience` seconds, the label that fewest requests hold is given up for
it, and nobody behind it in the order starts on that label until it has started. With a patience of 0 the order is
strict. Urgent requests do not displace others for a slot; they wait for the label to be given up.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from math import inf

from tidegate.core.policy import Key
from tidegate.core.queue import WaitingQueue
from tidegate.core.request import Request
from tidegate.core.running import place


class Lanes(WaitingQueue):
    """A waiting queue with `slots` slots for labels (`Request.resource`).

    Requests without a label cost what they cost without lanes. With one, a change of what may start costs as much
    as different labels wait; nothing is done for a label in a step in which nothing happens to it.
    """

    def __init__(
        self,
        order: Callable[[Request], Key],
        slots: int,
        patience: float,
        window: int = 8,
        forget: Callable[[Request], None] | None = None,
    ) -> None:
        super().__init__(order, window, forget)
        self._slots = slots
        self._patience = patience
        self._now = 0.0
        self._lanes: dict[str, WaitingQueue] = {}
        self._shown: dict[str, Request] = {}  # who stands in the queue for its lane
        self._held: dict[str, int] = {}  # how many run with each label
        self._blocked: dict[str, float] = {}  # labels that lack a slot, and since when; the oldest first
        self._waiter: str | None = None  # the label for which another is given up,
        self._given_up: str | None = None  # and that other
        self._timed: list[tuple[float, str]] = []  # when time changes a key in a lane
        self._hidden = 0
        self._hidden_fresh = 0

    def __len__(self) -> int:
        return super().__len__() + self._hidden

    def __contains__(self, r: Request) -> bool:
        return super().__contains__(r) if r.resource is None else r in self._lanes.get(r.resource, ())

    def __iter__(self) -> Iterator[Request]:
        yield from (r for r in super().__iter__() if r.resource is None)
        for lane in self._lanes.values():
            yield from lane

    @property
    def fresh(self) -> int:
        return super().fresh + self._hidden_fresh

    def add(self, r: Request) -> None:
        if r.resource is None:
            super().add(r)
            return
        self._lanes.setdefault(r.resource, WaitingQueue(self._order, 1, self._forget)).add(r)
        self._hide(r, 1)
        self._note_time(r.resource)
        self._changed_lane(r.resource)

    def remove(self, r: Request) -> None:
        if r.resource is None:
            super().remove(r)
            return
        label = r.resource
        self._lanes[label].remove(r)
        if self._shown.get(label) is r:
            del self._shown[label]
            super().remove(r)
        else:
            self._hide(r, -1)
        if not self._lanes[label]:
            del self._lanes[label]
        self._changed_lane(label)

    def rekey_due(self, now: float, limit: int = 1_000_000) -> list[Request]:
        self._now = now
        asked = super().rekey_due(now, limit)
        due = False
        while self._timed and self._timed[0][0] <= now:
            label = heapq.heappop(self._timed)[1]
            if label in self._lanes:
                asked += self._lanes[label].rekey_due(now, limit)
                self._note_time(label)
                due = True
        impatient = self._waiter is None and now >= next(iter(self._blocked.values()), inf) + self._patience
        if due or impatient:
            self._arrange()
        return asked

    def next_due(self) -> float | None:
        due = super().next_due()
        if not self._timed:
            return due
        return self._timed[0][0] if due is None else min(due, self._timed[0][0])

    def ahead_of(self, r: Request) -> int:
        return sum(place(other) < place(r) for other in self)

    def started(self, r: Request) -> None:
        """`r` runs, and holds a slot for its label."""
        if r.resource is not None:
            self._held[r.resource] = self._held.get(r.resource, 0) + 1
            if self._held[r.resource] == 1:
                self._arrange()

    def left(self, r: Request) -> None:
        """`r` runs no more; the last of its label leaves a slot."""
        if r.resource is not None:
            self._held[r.resource] -= 1
            if not self._held[r.resource]:
                del self._held[r.resource]
                self._arrange()

    def _changed_lane(self, label: str) -> None:
        """Somebody came into a lane or left it."""
        if label in self._held and label != self._given_up:
            self._show(label, True)
        else:
            self._arrange()

    def _arrange(self) -> None:
        """Decide whose first may start, from who holds slots and who has waited too long."""
        free = max(0, self._slots - len(self._held))
        closed = [label for label in self._lanes if label not in self._held]
        opened = set(heapq.nsmallest(free, closed, key=self._place)) if free else set()
        lacking = [label for label in closed if label not in opened]
        still = {label: since for label, since in self._blocked.items() if label in lacking}
        self._blocked = still | {label: self._now for label in lacking if label not in still}
        self._give_up(free)
        for label in [*self._lanes]:
            self._show(label, label in opened or (label in self._held and not self._barred(label)))

    def _barred(self, label: str) -> bool:
        """Whether the first of this lane is behind somebody for whom its label is given up."""
        return self._waiter is not None and label == self._given_up and self._place(label) > self._place(self._waiter)

    def _give_up(self, free: int) -> None:
        """Choose for whom a label is given up, and which; one at a time."""
        if self._waiter is not None and (self._waiter in self._held or self._waiter not in self._lanes):
            self._waiter = self._given_up = None
        if self._waiter is None and not free:
            impatient = [label for label, since in self._blocked.items() if since + self._patience <= self._now]
            self._waiter = min(impatient, key=self._place, default=None)
        if self._waiter is not None and not free and self._given_up not in self._held:
            self._given_up = min(self._held, key=lambda label: self._held[label])

    def _show(self, label: str, may: bool) -> None:
        """Let the first of a lane stand in the queue, if it may, and nobody else of that lane."""
        lane = self._lanes.get(label)
        first = lane.peek() if lane is not None and may else None
        shown = self._shown.get(label)
        if shown is first:
            return
        if shown is not None:
            del self._shown[label]
            super().remove(shown)
            self._hide(shown, 1)
            if lane is not None:
                lane.rekey(shown)  # its key is asked for again at its time only under its present version
                self._note_time(label)
        if first is not None:
            self._shown[label] = first
            super().add(first)
            self._hide(first, -1)

    def _hide(self, r: Request, count: int) -> None:
        """`count` more (or fewer) of the kind of `r` wait in lanes alone."""
        self._hidden += count
        if not r.preemptions:
            self._hidden_fresh += count

    def _note_time(self, label: str) -> None:
        """Look at this lane again when time changes a key in it."""
        due = self._lanes[label].next_due()
        if due is None:
            return
        heapq.heappush(self._timed, (due, label))
        if len(self._timed) > 2 * len(self) + 64:
            times = ((lane.next_due(), label) for label, lane in self._lanes.items())
            self._timed = [(at, label) for at, label in times if at is not None]
            heapq.heapify(self._timed)

    def _place(self, label: str) -> tuple[int, float, int]:
        first = self._lanes[label].peek()
        assert first is not None
        return place(first)
