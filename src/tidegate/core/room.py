"""What a request needs to start: which prefix it finds, how many blocks it takes, how many must stay free."""

from __future__ import annotations

from math import ceil

from tidegate.core.blocks import Match
from tidegate.core.hashing import BlockHash
from tidegate.core.kv import KvCache
from tidegate.core.limits import Limits
from tidegate.core.policy import Features
from tidegate.core.request import Request
from tidegate.core.running import Running, hashes_of, place


class Room:
    """Answers about waiting requests; changes nothing. Sizes are blocks."""

    def __init__(self, limits: Limits, kv: KvCache, running: Running, features: Features) -> None:
        self._limits = limits
        self._kv = kv
        self._running = running
        self._hold_pending = features.hold_pending
        # Head-room "declared" promises that nobody is ever evicted.
        self._displaces = features.displace and limits.headroom != "declared"
        self._size = limits.block_size
        self._max_preemptions = limits.max_preemptions
        self._span = kv.blocks_for(limits.resume_span)
        self._watermark = ceil(limits.watermark * limits.num_blocks) if limits.headroom == "watermark" else 0

    def match(self, r: Request) -> tuple[Match, bool]:
        """The cached prefix of `r`, and whether it had better wait for another that computes its next block.

        It waits for whoever is ahead of it in the order: one behind it might not get on for long.
        The last known token is never taken from the cache: computing it yields the next one.
        """
        hashes = hashes_of(r, self._kv)
        if not hashes:
            return self._kv.nothing, False
        limit = min(len(hashes), (r.known_tokens - 1) // self._size)
        match = self._kv.match(hashes, limit) if limit else self._kv.nothing
        if not self._hold_pending or r.host:
            return match, False
        lease = self._kv.awaited(hashes, match, limit)
        return match, lease is not None and self._worth_waiting(r, lease.owner)

    def missing(self, r: Request, match: Match) -> BlockHash | None:
        """The first block of `r` that `match` lacks and others may wait for; None where nobody waits for blocks."""
        hashes = hashes_of(r, self._kv)
        shared = self._hold_pending and not r.host and match.blocks < len(hashes)
        return hashes[match.blocks] if shared else None

    def in_place(self, r: Request, match: Match) -> int:
        """KV tokens of `r` that need no computing if it starts from `match`: cached ones, or those on the host."""
        return max(match.blocks * self._size, r.host_tokens)

    def _worth_waiting(self, r: Request, owner: object) -> bool:
        if not isinstance(owner, Request):
            return False
        # Where a cached prefix betters one's place, what the owner has computed puts its followers before it.
        follows = self._kv.ranks and owner.tier <= r.tier and owner.seq < r.seq
        return follows or place(owner) < place(r)

    def wanted(self, r: Request) -> int:
        """Blocks that `r` holds when it starts: for all it knows, or for its whole footprint once it was
        evicted so often that it must never be again."""
        if r.preemptions >= self._max_preemptions:
            return r.footprint
        return -(-r.known_tokens // self._size)

    def headroom(self, r: Request, displaced: bool = False) -> int:
        """Blocks that must stay free when `r` starts beside others.

        None where it is of a better class than somebody who runs, or has `displaced` somebody for its seat or blocks:
        worse ones give way as it grows, and evicting for head-room as well would only be too early. But a request that
        was preempted comes back only if everybody's growth over `resume_span` is covered, and what covers it is not
        given to its equals who start later.
        """
        running, span = self._running, self._span
        if not r.preemptions and self._displaces and (displaced or r.tier < (running.worst_tier or 0)):
            return 0
        if self._limits.headroom == "declared":
            return running.outstanding + r.footprint - self.wanted(r)
        if r.preemptions:
            own = r.footprint - self.wanted(r)
            reserve = min(own, span) + sum(min(running.growth_left(m), span) for m in running.members)
        else:
            reserve = self._watermark
            if running.returned:
                reserve += sum(min(running.growth_left(m), span) for m in running.returned)
        if running.expected is None:
            return reserve
        wanted = self.wanted(r)
        return max(reserve, running.expected.total + running.expected.peak(r, wanted) - wanted)

    def headroom_for(self, m: Request, r: Request) -> int:
        """The part of the head-room of `r` that is there because `m` runs: it goes when `m`, of a worse class, does."""
        if not r.preemptions and self._displaces:
            return 0
        growth = self._running.growth_left(m)
        if self._limits.headroom == "declared":
            return growth
        reserve = min(growth, self._span) if r.preemptions or m.preemptions else 0
        expected = self._running.expected
        if expected is None:
            return reserve
        # The head-room is the larger of two sums; one that is there for those who returned may outlast `m`.
        alone = not r.preemptions and not self._running.returned
        return expected.left(m) if alone else min(reserve, expected.left(m))
