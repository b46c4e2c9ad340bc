"""KV memory: who holds which blocks. `match`, `reserve`, `grow`, `commit`, `release`.

Every block is in exactly one of three places: free, cached (in the prefix index, held or idle), or
private to one lease. `check()` proves it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from tidegate.core.blocks import Match, PrefixIndex, Run, matched_runs, path
from tidegate.core.hashing import BlockHash
from tidegate.errors import KvError

# Runs an iterator for its effects, in C.
_exhaust = deque[None](maxlen=0).extend


class Lease:
    """Blocks one request holds: `table[:committed]` lie in the prefix index, the rest is private.

    `owner` is whatever the lease was reserved for.
    """

    __slots__ = ("awaited", "committed", "owner", "released", "run", "sealed", "table")

    def __init__(self, run: Run, table: list[int], committed: int, owner: object) -> None:
        self.owner = owner
        self.run = run
        self.table = table
        self.committed = committed
        self.sealed = False  # its prefix was committed by another: what follows stays private
        self.awaited: BlockHash | None = None
        self.released = False


class KvCache:
    """A pool of `num_blocks` blocks of `block_size` tokens, with a prefix cache over it."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.index = PrefixIndex()
        self.epoch = 0  # grows whenever blocks come back or become shared: "does not fit" may be wrong then
        self._evict_batch = min(64, num_blocks // 256)  # some more at once: the walk costs more than the blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self.nothing = self.index.nothing
        self.evictions = 0  # grows whenever cached blocks are forgotten
        self.ranks = False  # whether what is cached decides who comes first
        self.watched: Collection[BlockHash] = ()  # hashes whose appearance is noted
        self.appeared: list[BlockHash] = []  # those of them that became cached and were not taken yet
        self._leases: set[Lease] = set()
        self._awaited: dict[BlockHash, Lease] = {}

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Blocks that can be had: free ones, and cached ones that nobody holds."""
        return len(self._free) + self.index.evictable

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` KV tokens."""
        return -(-tokens // self.block_size)

    def match(self, hashes: Sequence[BlockHash], limit: int) -> Match:
        """The longest cached prefix of the first `limit` block hashes; holds nothing yet."""
        return self.index.match(hashes, limit if self.prefix_caching else 0)

    def idle_parts(self, match: Match) -> dict[object, int]:
        """The parts of a match that nobody holds, with their blocks: taken up once, however often they are matched."""
        return {run: blocks for run, blocks in matched_runs(match) if not run.refs}

    def awaited(self, hashes: Sequence[BlockHash], match: Match, limit: int) -> Lease | None:
        """The lease for which the first block that `match` lacks is being computed right now, if any."""
        return self._awaited.get(hashes[match.blocks]) if match.blocks < limit else None

    def reserve(self, match: Match, blocks: int, owner: object = None) -> Lease:
        """Hold the matched prefix and `blocks` more. Raises KvError if they are not to be had."""
        if blocks > self.available - match.idle:
            raise KvError(f"{blocks} blocks wanted, {self.available - match.idle} available")
        if match.blocks:
            run = self.index.hold(match)
            table = [b for r in reversed(list(path(run))) for b in r.blocks]
        else:
            run, table = match.run, []
        lease = Lease(run, table, len(table), owner)
        table += self._take(blocks)
        self._leases.add(lease)
        return lease

    def grow(self, tables: Sequence[list[int]]) -> list[int]:
        """One more block for each of these leases' tables; returns their ids. Raises KvError if there are too few."""
        blocks = self._take(len(tables))
        _exhaust(map(list.append, tables, blocks))
        return blocks

    def commit(self, lease: Lease, hashes: Sequence[BlockHash], blocks: int) -> None:
        """The first `blocks` blocks of `lease` are computed and full: others may use them from now on."""
        if not self.prefix_caching or lease.sealed:
            return
        if blocks > len(hashes):
            blocks = len(hashes)
        if lease.awaited is not None:
            self._stop_awaiting(lease)
        if blocks > lease.committed:
            new = list(hashes[lease.committed : blocks])
            run = self.index.extend(lease.run, new, lease.table[lease.committed : blocks])
            if run is None:
                lease.sealed = True
                return
            lease.run = run
            lease.committed = blocks
            self.epoch += 1
            if self.watched:
                self.appeared += [name for name in new if name in self.watched]

    def take_appeared(self) -> list[BlockHash]:
        """Watched blocks that became cached since the last call."""
        appeared, self.appeared = self.appeared, []
        return appeared

    def commit_outputs(self, lease: Lease, hashes: Sequence[BlockHash], tokens: Sequence[int], full: int) -> bool:
        """The first `full` of `tokens` are computed; blocks behind `hashes` are hashed only if they are asked for.

        False where that cannot be said without hashing them now: call `commit` then.
        """
        blocks = full // self.block_size
        if not self.prefix_caching or lease.sealed or lease.committed != len(hashes):
            return False
        if blocks > lease.committed:
            behind = tokens[lease.committed * self.block_size : blocks * self.block_size]
            if not self.index.extend_unhashed(lease.run, behind, lease.table[lease.committed : blocks]):
                return False
            lease.committed = blocks
            self.epoch += 1
        return True

    def announce(self, lease: Lease, hashes: Sequence[BlockHash], blocks: int) -> None:
        """The blocks of `lease` up to `blocks` are being computed: who shares them had better wait."""
        if lease.awaited is not None:
            self._stop_awaiting(lease)
        if self.prefix_caching and not lease.sealed and blocks > lease.committed < len(hashes):
            lease.awaited = hashes[lease.committed]
            self._awaited.setdefault(lease.awaited, lease)

    def release(self, lease: Lease) -> None:
        """Give every block of `lease` back. Raises KvError the second time."""
        if lease.released:
            raise KvError("a lease was released twice")
        lease.released = True
        self._leases.discard(lease)
        if lease.awaited is not None:
            self._stop_awaiting(lease)
        self._free += reversed(lease.table[lease.committed :])
        self.index.release(lease.run)
        self.epoch += 1

    def freed_by(self, lease: Lease, beside: Match | None = None) -> int:
        """Blocks that would become available if `lease` were released now.

        With `beside`, those do not count that the match itself would take up again.
        """
        taken = dict(matched_runs(beside)) if beside is not None else {}
        freed = len(lease.table) - lease.committed
        for run in path(lease.run):
            if run.refs > 1:
                break
            freed += len(run.blocks) - taken.get(run, 0)
        return freed

    def freed_by_all(self, leases: Collection[Lease], beside: Match | None = None) -> int:
        """The same if all of `leases` were released now: blocks that only they share come free as well."""
        taken = dict(matched_runs(beside)) if beside is not None else {}
        holders: dict[Run, int] = {}
        for lease in leases:
            for run in path(lease.run):
                holders[run] = holders.get(run, 0) + 1
        private = sum(len(lease.table) - lease.committed for lease in leases)
        return private + sum(len(run.blocks) - taken.get(run, 0) for run, n in holders.items() if run.refs == n)

    def kept_by_others(self, lease: Lease) -> int:
        """Blocks of `lease` that others hold as well, so that they would not be lost."""
        return len(lease.table) - self.freed_by(lease)

    def check(self) -> None:
        """Prove conservation: every block is in one place, and every count is what it says.

        Raises KvError. Costs as much as there is: for tests.
        """
        cached = [b for run in self.index.runs() for b in run.blocks]
        private = [b for lease in self._leases for b in lease.table[lease.committed :]]
        if sorted(self._free + cached + private) != list(range(self.num_blocks)):
            counts = f"free {len(self._free)} + cached {len(cached)} + private {len(private)}"
            raise KvError(f"{counts} are not the blocks 0 to {self.num_blocks - 1}, each once")
        refs: dict[Run, int] = {}
        for lease in self._leases:
            chain = [b for r in reversed(list(path(lease.run))) for b in r.blocks]
            if chain != lease.table[: lease.committed]:
                raise KvError("a lease's table does not follow its path in the index")
            for run in path(lease.run):
                refs[run] = refs.get(run, 0) + 1
        for run in self.index.runs():
            if run.refs != refs.get(run, 0):
                raise KvError(f"a run counts {run.refs} holders and has {refs.get(run, 0)}")
            unhashed = len(run.unhashed) // self.block_size
            if len(run.blocks) != len(run.hashes) + unhashed or not run.hashes:
                raise KvError("a run is empty or lopsided")
        evictable = sum(len(run.blocks) for run in self.index.runs() if not run.refs)
        if evictable != self.index.evictable:
            raise KvError(f"{self.index.evictable} blocks counted evictable, {evictable} are")

    def _take(self, blocks: int) -> list[int]:
        free = self._free
        if blocks > len(free):
            free += self.index.evict(max(blocks - len(free), self._evict_batch))
            self.evictions += 1
            if blocks > len(free):
                raise KvError(f"{blocks} blocks wanted, {len(free)} available")
        if not blocks:
            return []
        taken = free[: -blocks - 1 : -1]
        del free[-blocks:]
        return taken

    def _stop_awaiting(self, lease: Lease) -> None:
        assert lease.awaited is not None
        if self._awaited.get(lease.awaited) is lease:
            del self._awaited[lease.awaited]
        lease.awaited = None
