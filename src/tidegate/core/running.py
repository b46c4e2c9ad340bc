"""Who is running: seats, leases, and the two ways to compute (prefill, decode)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge

from tidegate.core.cohorts import Cohort, Cohorts
from tidegate.core.decode_load import DecodeLoad
from tidegate.core.decodes import DecodeSet
from tidegate.core.expected import ExpectedGrowth
from tidegate.core.hashing import BlockHash, block_hashes
from tidegate.core.kv import KvCache, Lease
from tidegate.core.limits import Limits
from tidegate.core.plan import Growth
from tidegate.core.policy import Key
from tidegate.core.request import Request
from tidegate.core.service import Service


class Running:
    """Requests that hold a seat and blocks.

    members:     all of them, in order of admission
    decodes:     those that emit a token a step; its clock counts the steps that decode
    cohorts:     those that emit one in some steps only; None where everybody decodes in every step
    turn:        the cohort that decodes in the step being planned, beside `decodes`
    load:        what was promised to those who decode
    prefilling:  those with known tokens still to compute
    stalled:     decodes that wait, seated, for a block
    left:        seats given up since the last plan that was executed
    returned:    those that were preempted before
    peak_blocks: blocks all of them would hold at their peaks, each alone
    outstanding: blocks by which all of them may still grow, as declared
    version:     grows whenever somebody comes, goes or changes place
    expected:    what they are predicted to grow by, where head-room goes by that
    service:     told what is computed for each tenant, where the policy shares by it
    on_decode:   told who begins to decode, where the policy's keys follow outputs
    """

    def __init__(self, kv: KvCache, limits: Limits, expected: ExpectedGrowth | None = None) -> None:
        self.kv = kv
        self.expected = expected
        self.members: dict[Request, None] = {}
        self.decodes = DecodeSet(limits.block_size)
        self.cohorts: Cohorts | None = None
        self.turn: Cohort | None = None
        self.load = DecodeLoad((self.decodes,))
        self.prefilling: dict[Request, None] = {}
        self.stalled: dict[Request, None] = {}
        self.returned: dict[Request, None] = {}
        self.left: list[int] = []
        self.peak_blocks = 0
        self.outstanding = 0
        self.version = 0
        self._seats = list(range(limits.max_num_seqs - 1, -1, -1))
        self._tiers: dict[int, int] = {}
        self.service: Service | None = None
        self.on_decode: Callable[[Request], None] | None = None

    def __len__(self) -> int:
        return len(self.members)

    @property
    def free_seats(self) -> int:
        return len(self._seats)

    @property
    def worst_tier(self) -> int | None:
        """The largest tier that runs; None if nobody does."""
        return max(self._tiers) if self._tiers else None

    def seat(self, r: Request, lease: Lease) -> None:
        """`r` takes a seat and will compute its known tokens."""
        r.lease = lease
        r.slot = self._seats.pop()
        self.members[r] = None
        self.prefilling[r] = None
        if r.preemptions:
            self.returned[r] = None
        self._tiers[r.tier] = self._tiers.get(r.tier, 0) + 1
        self.peak_blocks += r.footprint
        self.outstanding += self.growth_left(r)
        if self.expected is not None:
            self.expected.seat(r)
        self.version += 1
        if self.service is not None:  # what is computed once more is not charged
            self.service.seat(r.tenant, 0 if r.preemptions else r.prompt_tokens - r.planned)

    def grow(self, resumed: Sequence[Request]) -> list[Growth]:
        """One more block for each decode that crosses into one, and for those `resumed` after they stalled."""
        crossing = self.decodes.crossing()
        slots, tables, members = crossing.slots, crossing.lists, crossing.members
        if self.turn is not None:
            others = self.turn.decodes.crossing()
            slots, tables = slots + others.slots, tables + others.lists
            members = members + others.members
        if resumed:
            slots = [*(r.slot for r in resumed), *slots]
            tables = [*(r.lease.table for r in resumed if r.lease is not None), *tables]
        if not slots:
            return []
        self.outstanding -= len(slots)
        growth = list(zip(slots, self.kv.grow(tables), strict=True))
        if self.expected is not None:
            self.expected.grow([*resumed, *members])
        return growth

    def advance(self, steps: int) -> None:
        """So many decodes of everybody in `decodes`, each with the blocks it crosses into."""
        decodes, kv, expected = self.decodes, self.kv, self.expected
        while steps:
            # What is evicted, and what growth is expected, goes by the step: together go those that need neither.
            together = steps if expected is None else 1
            tables = decodes.crossing_within(together)
            if together > 1 and len(tables) > kv.free:
                together = max(1, decodes.covered(kv.free, together))
                tables = decodes.crossing_within(together)
            if tables:
                kv.grow(tables)
                self.outstanding -= len(tables)
            if expected is not None:
                expected.grow(decodes.crossing().members)
            decodes.advance(together)
            steps -= together

    def start_decoding(self, r: Request) -> None:
        """`r` decodes from the next advance on."""
        if self.service is not None and r in self.prefilling:
            self.service.emit(r.tenant)
        self.prefilling.pop(r, None)
        self.stalled.pop(r, None)
        self.load.add(r)
        decodes = self.decodes if self.cohorts is None else self.cohorts.home(r)
        decodes.join(r)
        if self.service is not None:
            self.service.join(r.tenant, decodes)
        if self.on_decode is not None:
            self.on_decode(r)

    def stall(self, r: Request) -> None:
        """`r` keeps its seat and blocks and skips steps until it gets a block."""
        self._stop_decoding(r)
        self.stalled[r] = None

    def switch(self, r: Request, to: DecodeSet) -> None:
        """`r` goes on decoding in another set."""
        assert r.decode_set is not None
        if self.service is not None:
            self.service.part(r.tenant, r.decode_set, r.joined_clock)
            self.service.join(r.tenant, to)
        r.decode_set.leave(r)
        to.join(r)

    @property
    def due_decodes(self) -> int:
        """How many decode in the step being planned."""
        decodes = len(self.decodes.members)
        return decodes if self.turn is None else decodes + len(self.turn.decodes.members)

    def crossing(self) -> list[Request]:
        """Those of them that need a block for it, `turn` included."""
        members = self.decodes.crossing().members
        return members if self.turn is None else members + self.turn.decodes.crossing().members

    def ending_within(self, steps: int) -> Iterator[Request]:
        """Decodes whose last token comes within so many steps from now."""
        if self.cohorts is not None:
            return self.cohorts.ending_within(steps)
        decodes = self.decodes
        clocks = range(decodes.clock + 1, decodes.clock + 1 + steps)
        return (r for clock in clocks for r in decodes.ending(clock))

    def ends(self) -> Iterator[tuple[int, int]]:
        """(clock of `decodes` at the last token at the fastest, blocks at the peak) of every decode, by clock."""
        return self.decodes.ends() if self.turn is None or self.cohorts is None else merge(*self.cohorts.ends())

    def vacate(self, r: Request) -> None:
        """`r` gives seat and blocks back; its full computed blocks stay cached while memory lasts."""
        assert r.lease is not None
        self._stop_decoding(r)
        if self.service is not None:
            if r in self.prefilling and r.planned >= r.known_tokens:
                self.service.emit(r.tenant)
            self.service.vacate(r.tenant)
        self.peak_blocks -= r.footprint
        self.outstanding -= self.growth_left(r)
        if self.expected is not None:
            self.expected.vacate(r)
        self._keep_computed(r, r.lease)
        self.kv.release(r.lease)
        r.lease = None
        self.left.append(r.slot)
        self._seats.append(r.slot)
        r.slot = -1
        del self.members[r]
        self.prefilling.pop(r, None)
        self.stalled.pop(r, None)
        self.returned.pop(r, None)
        self._count_out(r.tier)
        self.version += 1

    def move(self, r: Request, tier: int, key: Key) -> None:
        """`r` stands at another place from now on; remembered verdicts about who may give way are void."""
        if r.decode_set is not None:
            self.load.drop(r)
        self._count_out(r.tier)
        r.tier = tier
        r.key = key
        self._tiers[tier] = self._tiers.get(tier, 0) + 1
        if r.decode_set is not None:
            self.load.add(r)
        self.version += 1

    def _stop_decoding(self, r: Request) -> None:
        if r.decode_set is not None:
            if self.service is not None:
                self.service.part(r.tenant, r.decode_set, r.joined_clock)
            r.decode_set.leave(r)
            self.load.drop(r)

    def _count_out(self, tier: int) -> None:
        self._tiers[tier] -= 1
        if not self._tiers[tier]:
            del self._tiers[tier]

    def _keep_computed(self, r: Request, lease: Lease) -> None:
        """Leave the full blocks that `r` computed to the prefix cache."""
        full = min(r.planned, r.known_tokens)
        if r.token_ids is not None and self.kv.commit_outputs(lease, r.block_hashes, r.token_ids, full):
            return
        self.kv.commit(lease, hashes_of(r, self.kv), full // self.kv.block_size)

    def take_left(self) -> list[int]:
        """Seats given up since the last call."""
        left, self.left = self.left, []
        return left

    def growth_left(self, r: Request) -> int:
        """Blocks by which `r` may still grow, as declared."""
        assert r.lease is not None
        growth = r.footprint - len(r.lease.table)
        return growth if growth > 0 else 0


def hashes_of(r: Request, kv: KvCache) -> list[BlockHash]:
    """Block hashes of every full block of `r`'s known tokens, computed once each.

    A host that keeps no token ids gives the prompt's hashes itself; outputs then have none.
    """
    if not kv.prefix_caching:
        return []
    hashes, tokens, size = r.block_hashes, r.token_ids, kv.block_size
    if tokens is not None and len(tokens) >= (len(hashes) + 1) * size:
        hashes = r.block_hashes = block_hashes(tokens, size, r.cache_salt, hashes)
    return hashes


def in_order(requests: Iterable[Request]) -> list[Request]:
    """Sorted by the key each got when it was queued."""
    return sorted(requests, key=place)


def place(r: Request) -> tuple[int, float, int]:
    """(tier, score, arrival sequence) of a request that was queued."""
    assert r.key is not None
    return r.key.tier, r.key.score, r.seq
