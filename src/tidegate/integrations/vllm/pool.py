"""vLLM's block pool, as the core's planner asks about it.

Every answer is read from vLLM. The one thing added are *pledges*: vLLM takes a prompt's blocks chunk by chunk, while
the planner starts a prompt only if all of it will fit, so what an unfinished prompt has yet to take is nobody else's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

from tidegate.core.blocks import Match
from tidegate.core.hashing import BlockHash
from tidegate.core.kv import KvCache, Lease
from tidegate.integrations.vllm.hosted import HostedRequest

LOOK_EVERY = 8
"""Steps after which whoever comes first for its cached prefix is looked at again, in case it was evicted."""

_GROUP = (0,)


class Holding(Lease):
    """What one request holds in vLLM: `wanted` blocks were promised to it in all, `pledge` it has yet to take.

    The first `shown` were full when that was last looked at.
    """

    __slots__ = ("_tables", "pledge", "shown", "wanted")

    owner: HostedRequest

    def __init__(self, tables: Any, owner: HostedRequest, wanted: int, pledge: int, shown: int) -> None:
        self._tables = tables
        self.owner = owner
        self.wanted = wanted
        self.pledge = pledge
        self.shown = shown
        self.released = False

    @property
    def table(self) -> list[Any]:  # type: ignore[override]
        """vLLM's blocks of the request, in order."""
        return self._tables.get(self.owner.id, [])


class VllmPool(KvCache):
    """A `KvCache` over vLLM's `KVCacheManager` with one group of full attention.

    `Match.run` are the matched blocks. `reserve` and `release` move pledges only: vLLM allocates and frees.
    """

    def __init__(self, manager: Any, block_size: int) -> None:
        self._manager = manager
        self._blocks = manager.block_pool
        self._tables = manager.coordinator.single_type_managers[0].req_to_blocks
        self.num_blocks = self._blocks.num_gpu_blocks - 1  # one is vLLM's null block
        self.block_size = block_size
        self.prefix_caching = bool(manager.enable_caching)
        self.nothing: Match = Match((), 0, 0, 0)  # type: ignore[arg-type]
        self.epoch = 0
        self.evictions = 0
        self.ranks = False
        self.watched: Collection[BlockHash] = ()
        self.appeared: list[BlockHash] = []  # watched blocks that were computed and were not taken yet
        self._unfinished: dict[Holding, None] = {}
        self._awaited: dict[BlockHash, Lease] = {}
        self._coming: set[BlockHash] = set()
        self._pledged = 0
        self._free_before = self.free
        self._steps = 0

    def refresh(self) -> None:
        """A step is to be planned: see what vLLM did since the last."""
        self._steps += 1
        self.evictions = self._steps // LOOK_EVERY
        free = self.free
        if free > self._free_before or self._unfinished:
            self.epoch += 1
        self._free_before = free
        self._awaited.clear()
        self._coming.clear()
        self.settle()
        for holding in self._unfinished:
            self.announce(holding, holding.owner.block_hashes, holding.wanted)

    def settle(self) -> None:
        """vLLM has taken blocks: what is left of each pledge."""
        pledged = 0
        for holding in list(self._unfinished) if self._unfinished else ():
            self._show(holding)
            holding.pledge = max(0, holding.wanted - len(holding.table))
            pledged += holding.pledge
            if not holding.pledge and holding.owner.planned >= holding.owner.prompt_tokens:
                del self._unfinished[holding]
        self._pledged = pledged

    def _show(self, holding: Holding) -> None:
        """vLLM caches what it schedules: somebody may wait for blocks of this prompt."""
        full = holding.owner.planned // self.block_size
        if full > holding.shown:
            names = holding.owner.block_hashes[holding.shown : full]
            self.appeared += [name for name in names if name in self.watched]
            holding.shown = full

    @property
    def free(self) -> int:
        """Blocks that can be had of vLLM; which of them hold something cached is not told apart."""
        return self._blocks.get_num_free_blocks()

    @property
    def available(self) -> int:
        return self.free - self._pledged

    def take(self, blocks: int) -> None:
        """So many are spoken for in the step being planned."""
        self._pledged += blocks

    def match(self, hashes: Sequence[BlockHash], limit: int) -> Match:
        if not limit or not self.prefix_caching:
            return self.nothing
        find, found = self._blocks.get_cached_block, []
        coming = self._coming
        matched = 0
        for name in islice(hashes, limit):
            hit = find(name, _GROUP)
            if hit is not None:
                found.append(hit[0])
            elif name not in coming:
                break
            matched += 1
        idle = sum(not block.ref_cnt for block in found)
        return Match(tuple(found), 0, matched, idle)  # type: ignore[arg-type]

    def chunk(self, r: HostedRequest, tokens: int) -> None:
        """So many of `r` are computed in the step being planned.

        vLLM shares blocks from when they are scheduled, in the same step already: what they fill is as good as cached.
        """
        hashes, size = r.block_hashes, self.block_size
        if self.prefix_caching and r.planned // size < len(hashes):
            self._awaited.pop(hashes[r.planned // size], None)
            end = r.planned + tokens
            self._coming.update(hashes[r.planned // size : end // size])
            if end // size < min(r.known_tokens // size, len(hashes)) and r.lease is not None:
                self._awaited.setdefault(hashes[end // size], r.lease)

    def idle_parts(self, match: Match) -> dict[object, int]:
        return {block.block_id: 1 for block in _blocks(match) if not block.ref_cnt}

    def awaited(self, hashes: Sequence[BlockHash], match: Match, limit: int) -> Lease | None:
        return self._awaited.get(hashes[match.blocks]) if match.blocks < limit else None

    def announce(self, lease: Lease, hashes: Sequence[BlockHash], blocks: int) -> None:
        assert isinstance(lease.owner, HostedRequest)
        at = lease.owner.planned // self.block_size
        if self.prefix_caching and at < min(blocks, len(hashes)):
            self._awaited.setdefault(hashes[at], lease)

    def reserve(self, match: Match, blocks: int, owner: object = None) -> Holding:
        assert isinstance(owner, HostedRequest)
        holding = Holding(self._tables, owner, match.blocks + blocks, blocks + match.idle, match.blocks)
        self._unfinished[holding] = None
        self._pledged += holding.pledge
        return holding

    def release(self, lease: Lease) -> None:
        """The pledge is void; vLLM frees the blocks. A second time does nothing, as vLLM may end what we just ended."""
        assert isinstance(lease, Holding)
        if not lease.released:
            lease.released = True
            if lease in self._unfinished:
                del self._unfinished[lease]
                self._pledged -= lease.pledge
            self.epoch += 1

    def freed_by(self, lease: Lease, beside: Match | None = None) -> int:
        assert isinstance(lease, Holding)
        kept = {block.block_id for block in _blocks(beside)} if beside is not None else ()
        return lease.pledge + sum(b.ref_cnt == 1 and b.block_id not in kept for b in lease.table)

    def freed_by_all(self, leases: Collection[Lease], beside: Match | None = None) -> int:
        kept = {block.block_id for block in _blocks(beside)} if beside is not None else set()
        holdings = [lease for lease in leases if isinstance(lease, Holding)]
        held = Counter(b.block_id for holding in holdings for b in holding.table)
        blocks = {b.block_id: b for holding in holdings for b in holding.table}
        pledged = sum(holding.pledge for holding in holdings)
        return pledged + sum(blocks[i].ref_cnt == n and i not in kept for i, n in held.items())

    def kept_by_others(self, lease: Lease) -> int:
        assert isinstance(lease, Holding)
        return sum(b.ref_cnt > 1 for b in lease.table)

    def take_appeared(self) -> list[BlockHash]:
        """Watched blocks that were computed since the last call, and are cached."""
        appeared, self.appeared = self.appeared, []
        find = self._blocks.get_cached_block
        return [name for name in appeared if find(name, _GROUP) is not None]


def _blocks(match: Match) -> Sequence[Any]:
    return match.run  # type: ignore[return-value]
