"""Random lives of requests that are swapped out and in, by hand-built plans on any executor."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from tests.executors.driver import Driver, Work
from tidegate.engine.executor import Executor

SEATS = 3
BLOCK = 4
LONGEST = 48
POOL = SEATS * LONGEST // BLOCK
MAX_STEPS = 3000


@dataclass(frozen=True)
class Ask:
    """One request: its prompt, its outputs, and what the executor is to know of it."""

    prompt: tuple[int, ...]
    max_tokens: int
    handle: object


class Lives:
    """Requests join, compute in chunks, decode, and are swapped out and in at random, until all have ended.

    Seats and blocks are enough for whoever is seated, and blocks are handed out in random order, so that what
    was swapped out is soon overwritten. Whoever's copy failed is computed anew from its tokens.
    """

    def __init__(self, executor: Executor, asks: list[Ask], rng: random.Random, depth: int) -> None:
        self.executor = executor
        self.rng = rng
        self.driver = Driver(executor, list(range(POOL)), depth)
        self.waiting = list(enumerate(asks))
        self.works: list[Work] = []
        self.parked: list[Work] = []
        self.restarting: list[Work] = []
        self.free_host = list(range(executor.host_blocks + executor.disk_blocks))
        self.events: Counter[str] = Counter()

    def run(self) -> list[Work]:
        """Every request with all its outputs."""
        while self.waiting or self.parked or self.restarting or self.driver.by_slot:
            self.rng.shuffle(self.driver.free)
            self.rng.shuffle(self.free_host)
            self._settle_lost()
            self._reclaim_host()
            self._swap_out()
            self._swap_in()
            if self.restarting and self.driver.free_slots:
                self.driver.resume(self.restarting.pop())
            elif self.waiting and self.driver.free_slots:
                index, ask = self.waiting.pop(0)
                self.works.append(self.driver.add(str(index), list(ask.prompt), ask.max_tokens, ask.handle))
            self.driver.step({w.id: self.rng.randint(0, 9) for w in self.driver.by_slot.values()})
            assert self.driver.steps < MAX_STEPS
        self.driver.drain()
        return self.works

    def _swap_out(self) -> None:
        driver = self.driver
        seated = [w for w in driver.by_slot.values() if w.planned and w.restored_in < driver.read_steps and not w.lost]
        if not seated or self.rng.random() > 0.4:
            return
        victim = self.rng.choice(seated)
        if -(-victim.planned // BLOCK) > len(self.free_host):
            return
        self.events["token in flight"] += victim.sampled > len(victim.outputs)
        self.events["block filled in part"] += victim.planned % BLOCK > 0
        self.events["in prefill"] += victim.slot not in driver.decodes
        driver.swap_out(victim, self.free_host)
        for block in victim.host:
            self.free_host.remove(block)
        self.parked.append(victim)
        self.events["out"] += 1

    def _swap_in(self) -> None:
        for work in list(self.parked):
            known = work.sampled == len(work.outputs) and work not in self.driver.copied
            if known and not work.lost and self.driver.free_slots and self.rng.random() < 0.4:
                self.parked.remove(work)
                self.driver.swap_in(work)
                self.events["in"] += 1

    def _reclaim_host(self) -> None:
        """Host blocks are free once the result of the copy that read them is known."""
        for work in self.driver.by_slot.values():
            if work.host and work.restored_in < self.driver.read_steps:
                self.free_host += work.host
                work.host = []

    def _settle_lost(self) -> None:
        """Whoever's copy failed gives up what it has of KV and starts over from its tokens."""
        for work in [w for w in (*self.parked, *self.driver.by_slot.values()) if w.lost]:
            self.driver.drain()
            if work in self.parked:
                self.parked.remove(work)
            else:
                self.driver.preempt(work)
            self.free_host += work.host
            work.host = []
            self.restarting.append(work)
            self.events["lost"] += 1
