"""KV memory: conservation after any sequence of operations, and the radix index against a per-block twin."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from tidegate.core.hashing import block_hashes
from tidegate.core.kv import KvCache, Lease
from tidegate.errors import KvError

BLOCK = 4


class KvMachine(RuleBasedStateMachine):
    """Reserve, grow, commit and release at random; the counts hold and nobody reads another's block.

    The twin is a dict from block id to the hash whose content it holds: what a lease finds cached must be
    what somebody committed under exactly that prefix, and no block is ever in two private hands.
    """

    leases = Bundle("leases")

    @initialize(blocks=st.integers(1, 40), caching=st.booleans())
    def start(self, blocks: int, caching: bool) -> None:
        self.kv = KvCache(blocks, BLOCK, caching)
        self.content: dict[int, object] = {}
        self.hashes: dict[Lease, list] = {}
        self.texts: dict[Lease, tuple[list[int], str]] = {}
        self.extended: set[Lease] = set()

    @rule(target=leases, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=60), salt=st.sampled_from("ab"))
    def reserve(self, tokens: list[int], salt: str):
        hashes = block_hashes(tokens, BLOCK, salt)
        limit = min(len(hashes), (len(tokens) - 1) // BLOCK)
        match = self.kv.match(hashes, limit)
        wanted = self.kv.blocks_for(len(tokens)) - match.blocks
        if wanted > self.kv.available - match.idle:
            with pytest.raises(KvError, match="wanted"):
                self.kv.reserve(match, wanted)
            return multiple()
        lease = self.kv.reserve(match, wanted)
        assert len(lease.table) == self.kv.blocks_for(len(tokens))
        for block, expected in zip(lease.table[: match.blocks], hashes, strict=False):
            assert self.content[block] == expected, "a cached block holds another prefix"
        for block in lease.table[match.blocks :]:
            self.content[block] = None
        self.hashes[lease] = hashes
        self.texts[lease] = tokens, salt
        return lease

    @rule(lease=leases, share=st.floats(0, 1))
    def commit(self, lease: Lease, share: float) -> None:
        if lease.released:
            return
        blocks = int(share * len(self.hashes[lease]))
        before = lease.committed
        self.kv.commit(lease, self.hashes[lease], blocks)
        for at in range(before, lease.committed):
            self.content[lease.table[at]] = self.hashes[lease][at]
        self.kv.announce(lease, self.hashes[lease], len(self.hashes[lease]))

    @rule(lease=leases, outputs=st.lists(st.integers(0, 1), max_size=20))
    def commit_outputs(self, lease: Lease, outputs: list[int]) -> None:
        """What a leaving request does: its outputs follow without hashes, and are found all the same."""
        if lease.released or lease in self.extended:
            return
        tokens, salt = self.texts[lease]
        known = [*tokens, *outputs]
        full = min(len(known), len(lease.table) * BLOCK)
        if self.kv.commit_outputs(lease, self.hashes[lease], known, full):
            self.extended.add(lease)
            self.hashes[lease] = block_hashes(known[:full], BLOCK, salt)
            for at in range(lease.committed):
                self.content[lease.table[at]] = self.hashes[lease][at]
            match = self.kv.match(self.hashes[lease], len(self.hashes[lease]))
            assert match.blocks == lease.committed == full // BLOCK or not self.kv.prefix_caching

    @rule(lease=leases)
    def grow(self, lease: Lease) -> None:
        if lease.released or not self.kv.available:
            return
        (block,) = self.kv.grow([lease.table])
        assert lease.table[-1] == block
        self.content[block] = None

    @rule(lease=consumes(leases))
    def release(self, lease: Lease) -> None:
        if lease.released:
            return
        promised, before = self.kv.freed_by(lease), self.kv.available
        self.kv.release(lease)
        assert self.kv.available == before + promised
        with pytest.raises(KvError, match="twice"):
            self.kv.release(lease)

    @invariant()
    def conserved(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check()


TestKvMachine = KvMachine.TestCase
TestKvMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def filled(kv: KvCache, tokens: list[int], salt: str = "") -> Lease:
    """A lease whose full blocks are all committed."""
    hashes = block_hashes(tokens, BLOCK, salt)
    match = kv.match(hashes, len(hashes))
    lease = kv.reserve(match, kv.blocks_for(len(tokens)) - match.blocks)
    kv.commit(lease, hashes, len(hashes))
    return lease


def test_a_prefix_is_shared_and_a_salt_isolates() -> None:
    kv = KvCache(16, BLOCK)
    first = filled(kv, list(range(12)))
    second = filled(kv, [*range(8), 99, 99, 99, 99])
    assert second.table[:2] == first.table[:2]
    assert second.table[2] != first.table[2]
    salted = block_hashes(list(range(12)), BLOCK, "tenant")
    assert kv.match(salted, 3).blocks == 0


def test_the_least_recently_used_tail_is_evicted_first() -> None:
    kv = KvCache(6, BLOCK)
    old, new = filled(kv, list(range(12))), filled(kv, list(range(100, 112)))
    kv.release(old)
    kv.release(new)
    assert kv.free == 0
    lease = kv.reserve(kv.match((), 0), 1)
    assert kv.match(block_hashes(list(range(12)), BLOCK), 3).blocks == 2, "the old chain lost its tail"
    assert kv.match(block_hashes(list(range(100, 112)), BLOCK), 3).blocks == 3
    kv.release(lease)
    kv.check()


def test_a_shared_prefix_outlives_its_branches() -> None:
    kv = KvCache(5, BLOCK)
    first, second = filled(kv, [*range(4), 1, 1, 1, 1]), filled(kv, [*range(4), 2, 2, 2, 2])
    kv.release(first)
    kv.release(second)
    lease = kv.reserve(kv.match((), 0), 4)
    assert kv.match(block_hashes(list(range(4)), BLOCK), 1).blocks == 1, "leaves go before what they stand on"
    kv.release(lease)


def test_who_shares_a_block_in_the_making_is_told_to_wait() -> None:
    kv = KvCache(16, BLOCK)
    hashes = block_hashes(list(range(12)), BLOCK)
    lease = kv.reserve(kv.match(hashes, 3), 3)
    kv.announce(lease, hashes, 3)
    assert kv.awaited(hashes, kv.match(hashes, 3), 3) is lease
    kv.commit(lease, hashes, 3)
    assert kv.awaited(hashes, kv.match(hashes, 3), 3) is None
    assert kv.match(hashes, 3).blocks == 3


def test_a_prefix_computed_twice_stays_private_the_second_time() -> None:
    kv = KvCache(16, BLOCK)
    hashes = block_hashes(list(range(12)), BLOCK)
    leases = [kv.reserve(kv.match(hashes, 0), 3) for _ in range(2)]
    for lease in leases:
        kv.commit(lease, hashes, 3)
        kv.check()
    assert [lease.committed for lease in leases] == [3, 0]
    for lease in leases:
        kv.release(lease)
    kv.check()
    assert kv.available == 16


def test_outputs_are_hashed_only_when_a_match_comes_as_far() -> None:
    kv = KvCache(16, BLOCK)
    text = list(range(24))
    hashes = block_hashes(text[:8], BLOCK)
    lease = kv.reserve(kv.match(hashes, 2), 6)
    kv.commit(lease, hashes, 2)
    assert kv.commit_outputs(lease, hashes, text, 22)
    kv.release(lease)
    (run,) = kv.index.runs()
    assert len(run.hashes) == 2
    assert kv.match(hashes, 2).blocks == 2
    assert len(run.hashes) == 2, "the prompt alone asks for none of them"
    follow_up = block_hashes([*text[:20], 99, 99, 99, 99], BLOCK)
    assert kv.match(follow_up, 6).blocks == 5
    held = kv.reserve(kv.match(follow_up, 6), 1)
    kv.check()
    kv.release(held)
    kv.check()


def test_what_a_sharer_frees_alone_and_together() -> None:
    kv = KvCache(16, BLOCK)
    text = list(range(8))
    first, second = filled(kv, [*text, 1, 1, 1, 1]), filled(kv, [*text, 2, 2, 2, 2])
    assert (kv.freed_by(first), kv.kept_by_others(first)) == (1, 2)
    assert kv.freed_by_all([first, second]) == 4
    again = kv.match(block_hashes(text, BLOCK), 2)
    assert kv.freed_by_all([first, second], beside=again) == 2
    kv.release(first)
    assert kv.freed_by(second) == 3
    assert kv.freed_by(second, beside=again) == 1


def test_check_finds_a_lost_block() -> None:
    kv = KvCache(8, BLOCK)
    lease = kv.reserve(kv.match((), 0), 2)
    lease.table.pop()
    with pytest.raises(KvError, match="each once"):
        kv.check()


def test_idle_entries_of_a_busy_cache_stay_bounded() -> None:
    kv = KvCache(64, BLOCK)
    for _ in range(5_000):
        kv.release(filled(kv, list(range(8))))
    assert len(kv.index._idle_leaves) < 200
    kv.check()
