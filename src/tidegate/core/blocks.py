"""The prefix index: which computed blocks hold which prefix, in *runs* of blocks.

A radix tree over the hash chain. A run is a stretch of blocks without a branch in it; taking, giving
back and evicting cost one operation a run, not one a block. `refs` counts the leases whose path goes
through a run, so that a run nobody holds is evictable, from its tail, least recently used first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

from tidegate.core.hashing import BlockHash, continue_hashes


class Run:
    """A stretch of cached blocks; `blocks[i]` holds the prefix that `hashes[i]` names.

    The last blocks of a run may have no hash yet: `unhashed` are their tokens. Most outputs are never
    asked for again, so they are hashed when a match comes as far as them, and not before.
    """

    __slots__ = ("blocks", "children", "hashes", "parent", "refs", "unhashed", "used")

    def __init__(self, parent: Run | None, hashes: list[BlockHash], blocks: list[int], refs: int, used: int) -> None:
        self.parent = parent
        self.hashes = hashes
        self.blocks = blocks
        self.children: dict[BlockHash, Run] = {}
        self.refs = refs
        self.used = used
        self.unhashed: Sequence[int] = ()

    def hash_all(self) -> None:
        """Hash the blocks that were put behind without."""
        if self.unhashed:
            size = len(self.unhashed) // (len(self.blocks) - len(self.hashes))
            self.hashes += continue_hashes(self.hashes[-1], self.unhashed, size)
            self.unhashed = ()


class Match(NamedTuple):
    """The longest cached prefix of a hash chain.

    run:    the deepest run it reaches, of which the first `inside` blocks match
    blocks: matched blocks in all
    idle:   those among them that nobody holds (taking them uses up that many evictable blocks)
    """

    run: Run
    inside: int
    blocks: int
    idle: int


class PrefixIndex:
    """Cached blocks by prefix. Knows nothing of free blocks: it hands evicted ones to the caller."""

    def __init__(self) -> None:
        self.root = Run(None, [], [], refs=1, used=0)
        self.nothing = Match(self.root, 0, 0, 0)
        self.evictable = 0
        self._clock = count(1)
        self._serial = count()
        self._idle_leaves: list[tuple[int, int, Run]] = []
        self._runs = 0

    def match(self, hashes: Sequence[BlockHash], limit: int) -> Match:
        """The longest cached prefix of the first `limit` hashes."""
        if not limit or hashes[0] not in self.root.children:
            return self.nothing
        run, inside, at, idle = self.root, 0, 0, 0
        while at < limit:
            child = run.children.get(hashes[at])
            if child is None:
                break
            if child.unhashed and limit - at > len(child.hashes):
                child.hash_all()
            inside = _common(child.hashes, hashes, at, limit)
            at += inside
            if not child.refs:
                idle += inside
            run = child
            if inside < len(child.blocks):
                break
        return Match(run, inside, at, idle)

    def hold(self, match: Match) -> Run:
        """Hold the matched prefix; returns the run that ends exactly with it."""
        run = match.run
        if match.inside < len(run.blocks):
            run = self._split(run, match.inside)
        for r in path(run):
            if not r.refs:
                self.evictable -= len(r.blocks)
            r.refs += 1
        return run

    def release(self, run: Run) -> None:
        """Give up one hold of the prefix that ends with `run`."""
        now = next(self._clock)
        for r in path(run):
            r.refs -= 1
            if not r.refs:
                r.used = now
                self.evictable += len(r.blocks)
                if not r.children:
                    self._push_idle(r)

    def extend(self, run: Run, hashes: list[BlockHash], blocks: list[int]) -> Run | None:
        """Put blocks behind `run`, held once by the caller. None where that prefix is cached already."""
        if hashes[0] in run.children:
            return None
        if run.refs == 1 and not run.children and run.parent is not None:
            run.hashes += hashes
            run.blocks += blocks
            return run
        child = Run(run, hashes, blocks, refs=1, used=next(self._clock))
        run.children[hashes[0]] = child
        self._runs += 1
        return child

    def extend_unhashed(self, run: Run, tokens: Sequence[int], blocks: list[int]) -> bool:
        """Put blocks behind `run`, where nobody else holds or continues it, without hashing their tokens."""
        if run.refs != 1 or run.children or run.parent is None:
            return False
        assert not run.unhashed, "only the last holder of a run leaves blocks behind it, once"
        run.blocks += blocks
        run.unhashed = tokens
        return True

    def evict(self, blocks: int) -> list[int]:
        """Forget up to `blocks` blocks that nobody holds, least recently used first; returns their ids."""
        freed: list[int] = []
        while len(freed) < blocks and self._idle_leaves:
            used, _, run = self._idle_leaves[0]
            if run.refs or run.children or run.used != used or not run.blocks:
                heapq.heappop(self._idle_leaves)
                continue
            take = min(blocks - len(freed), len(run.blocks))
            freed += reversed(run.blocks[-take:])
            if take == len(run.blocks):
                heapq.heappop(self._idle_leaves)
                self._drop(run)
            else:
                self._shorten(run, len(run.blocks) - take)
        self.evictable -= len(freed)
        return freed

    def runs(self) -> Iterator[Run]:
        """Every run, parents first; the root is not one."""
        todo = list(self.root.children.values())
        while todo:
            run = todo.pop()
            yield run
            todo += run.children.values()

    @staticmethod
    def _shorten(run: Run, blocks: int) -> None:
        """Keep the first `blocks` blocks of a run."""
        if run.unhashed:
            size = len(run.unhashed) // (len(run.blocks) - len(run.hashes))
            run.unhashed = run.unhashed[: max(0, blocks - len(run.hashes)) * size]
        del run.blocks[blocks:], run.hashes[blocks:]

    def _split(self, run: Run, at: int) -> Run:
        """Cut `run` after `at` blocks; returns the new upper half. Holders of `run` hold both halves."""
        parent = run.parent
        assert parent is not None
        upper = Run(parent, run.hashes[:at], run.blocks[:at], run.refs, run.used)
        parent.children[upper.hashes[0]] = upper
        run.hash_all()
        run.hashes, run.blocks, run.parent = run.hashes[at:], run.blocks[at:], upper
        upper.children[run.hashes[0]] = run
        self._runs += 1
        return upper

    def _drop(self, run: Run) -> None:
        """Unlink a run whose last block was evicted; its parent may become an idle leaf."""
        parent = run.parent
        assert parent is not None
        del parent.children[run.hashes[0]]
        run.blocks, run.hashes, run.unhashed = [], [], ()
        self._runs -= 1
        if not parent.refs and not parent.children:
            self._push_idle(parent)

    def _push_idle(self, run: Run) -> None:
        heap = self._idle_leaves
        heapq.heappush(heap, (run.used, next(self._serial), run))
        if len(heap) > 2 * self._runs + 64:  # entries of runs that were held again pile up otherwise
            heap[:] = [(r.used, next(self._serial), r) for r in self.runs() if not r.refs and not r.children]
            heapq.heapify(heap)


def path(run: Run) -> Iterator[Run]:
    """`run` and what stands above it, the root left out."""
    node: Run = run
    while node.parent is not None:
        yield node
        node = node.parent


def matched_runs(match: Match) -> Iterator[tuple[Run, int]]:
    """The runs of a match with how many blocks of each it takes."""
    for run in path(match.run):
        yield run, match.inside if run is match.run else len(run.blocks)


def _common(run: list[BlockHash], hashes: Sequence[BlockHash], at: int, limit: int) -> int:
    """How many of `run`'s hashes equal `hashes[at:limit]`. Chained: the first difference ends it."""
    n = min(len(run), limit - at)
    if run[n - 1] == hashes[at + n - 1]:
        return n
    low, high = 1, n - 1  # hashes[at:at+low] equal, hashes[at+high] differs
    while low < high:
        middle = (low + high) // 2
        if run[middle] == hashes[at + middle]:
            low = middle + 1
        else:
            high = middle
    return low
