"""Each fast structure of the core against its slow twin."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.core.harness import limits, request
from tidegate.core.blocks import Run, _common
from tidegate.core.decodes import DecodeSet
from tidegate.core.hashing import block_hashes
from tidegate.core.kv import KvCache
from tidegate.core.policy import Key, PolicyContext
from tidegate.core.predict import HistoryPredictor, OraclePredictor, StepTime
from tidegate.core.queue import WaitingQueue
from tidegate.core.request import LEGAL, FinishReason, Request, Status
from tidegate.core.timing import StepTimes, nearest_rank
from tidegate.errors import ConfigError, IllegalTransition


class QueueMachine(RuleBasedStateMachine):
    """The lazy heap against a list that is sorted whole every time."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: dict[str, Key] = {}
        self.queue = WaitingQueue(lambda r: self.keys[r.id], window=4)
        self.members: list[Request] = []
        self.serial = itertools.count()

    @rule(tier=st.integers(0, 2), score=st.integers(0, 3), returning=st.booleans())
    def add(self, tier: int, score: int, returning: bool) -> None:
        r = Request(f"r{next(self.serial)}", prompt_tokens=1)
        r.seq, r.tier, r.preemptions = next(self.serial), tier, int(returning)
        self.keys[r.id] = Key(tier, float(score))
        self.queue.add(r)
        self.members.append(r)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.members:
            r = data.draw(st.sampled_from(self.members))
            self.members.remove(r)
            self.queue.remove(r)

    @rule(data=st.data(), score=st.integers(0, 3))
    def rekey(self, data: st.DataObject, score: int) -> None:
        if self.members:
            r = data.draw(st.sampled_from(self.members))
            self.keys[r.id] = Key(r.tier, float(score))
            self.queue.rekey(r)

    def sorted(self) -> list[Request]:
        left = sorted(self.members, key=lambda r: (self.keys[r.id].tier, self.keys[r.id].score, r.seq))
        order = []
        while left:
            first = left[0]
            if not first.preemptions:
                first = next((r for r in left if r.preemptions and r.tier == first.tier), first)
            order.append(first)
            left.remove(first)
        return order

    @invariant()
    def same_order(self) -> None:
        expected = self.sorted()
        assert len(self.queue) == len(expected)
        assert self.queue.peek() is (expected[0] if expected else None)
        assert self.queue.front() == expected[:4]
        assert self.queue.fresh == sum(not r.preemptions for r in expected)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_time_alone_moves_a_request_when_its_key_is_due() -> None:
    urgent = {"a": 5.0}
    now = [0.0]

    def order(r: Request) -> Key:
        due = urgent.get(r.id)
        if due is None:
            return Key(1, 0.0)
        return Key(0, 0.0) if now[0] >= due else Key(2, 0.0, until=due)

    queue = WaitingQueue(order)
    for seq, id in enumerate("ba"):
        r = Request(id, prompt_tokens=1)
        r.seq = seq
        queue.add(r)
    assert queue.next_due() == 5.0
    queue.rekey_due(4.9)
    assert [r.id for r in queue.front()] == ["b", "a"]
    now[0] = 5.0
    queue.rekey_due(5.0)
    assert [r.id for r in queue.front()] == ["a", "b"]
    assert queue.next_due() is None


def test_a_request_that_was_queued_anew_is_not_asked_at_its_old_time() -> None:
    asked: list[float] = []
    until = [5.0]

    def order(r: Request) -> Key:
        asked.append(until[0])
        return Key(0, 0.0, until=until[0])

    queue = WaitingQueue(order)
    r = Request("a", prompt_tokens=1)
    r.seq = 0
    queue.add(r)
    queue.remove(r)
    until[0] = 9.0
    queue.add(r)
    queue.rekey_due(6.0)
    assert asked == [5.0, 9.0], "what was due at 5 was another stay in the queue"


class DecodeMachine(RuleBasedStateMachine):
    """Counters derived from the clock against counters that are counted, at pipeline depth 1 and 2."""

    def __init__(self) -> None:
        super().__init__()
        self.decodes = DecodeSet(4)
        self.kv = KvCache(10_000, 4)
        self.counted: dict[Request, list[int]] = {}  # planned, emitted
        self.in_flight: list[list[Request]] = []
        self.serial = itertools.count()

    @rule(prompt=st.integers(1, 9), outputs=st.integers(2, 9), whole=st.booleans())
    def join(self, prompt: int, outputs: int, whole: bool) -> None:
        r = request(f"r{next(self.serial)}", prompt, outputs)
        r.seq = next(self.serial)
        r.target = outputs
        r.footprint = self.kv.blocks_for(prompt + outputs - 1)
        held = r.footprint if whole else self.kv.blocks_for(prompt)
        r.lease = self.kv.reserve(self.kv.match((), 0), held)
        r.count(planned=prompt, sampled=1, computed=prompt, emitted=1)
        self.counted[r] = [prompt, 1]
        self.decodes.join(r)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.decodes.members and not self.in_flight:
            r = data.draw(st.sampled_from(self.decodes.members))
            self.decodes.leave(r)
            assert [r.planned, r.emitted] == self.counted.pop(r)
            assert r.decode_set is None

    @rule()
    def advance(self) -> None:
        if not self.decodes.members or len(self.in_flight) == 2:
            return
        crossing = {
            r for r, (planned, _) in self.counted.items() if planned % 4 == 0 and len(r.lease.table) * 4 <= planned
        }
        assert set(self.decodes.crossing().members) == crossing
        self.kv.grow([r.lease.table for r in crossing])
        self.decodes.advance()
        self.in_flight.append(list(self.counted))
        for counts in self.counted.values():
            counts[0] += 1
        ending = {r for r in self.counted if r.sampled == r.target}
        assert set(self.decodes.ending(self.decodes.clock)) == ending
        for r in ending:
            self.apply_all()
            self.decodes.leave(r)
            self.counted.pop(r)

    @rule()
    def apply(self) -> None:
        if self.in_flight:
            for r in self.in_flight.pop(0):
                if r in self.counted:
                    self.counted[r][1] += 1
            self.decodes.apply(float(self.decodes.applied))

    def apply_all(self) -> None:
        while self.in_flight:
            self.apply()

    @invariant()
    def counters_agree(self) -> None:
        for r, (planned, emitted) in self.counted.items():
            if r.decode_set is not None and r.sampled <= r.target:
                assert (r.planned, r.emitted) == (planned, emitted)


TestDecodeMachine = DecodeMachine.TestCase
TestDecodeMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_handed_out_lists_never_change() -> None:
    decodes = DecodeSet(4)
    kv = KvCache(8, 4)
    a, b = (request(id, 1, 50) for id in "ab")
    a.lease, b.lease = kv.reserve(kv.nothing, 1), kv.reserve(kv.nothing, 1)
    for slot, r in enumerate((a, b)):
        r.slot, r.seq, r.target = slot, slot, 50
        decodes.join(r)
    decodes.advance()
    planned = decodes.slots
    decodes.advance()
    assert decodes.slots is planned, "nobody came or went: the very same list"
    decodes.leave(a)
    assert planned == [0, 1]
    assert decodes.slots == [1]


def test_times_of_long_gone_clocks_are_forgotten() -> None:
    decodes = DecodeSet(4)
    for step in range(3 * DecodeSet.FORGET_EVERY):
        decodes.advance()
        decodes.apply(float(step))
    assert len(decodes.times) <= DecodeSet.FORGET_EVERY


@given(st.lists(st.floats(0, 10), min_size=1, max_size=40), st.data())
def test_gaps_are_differences_of_times(durations: list[float], data: st.DataObject) -> None:
    times = list(itertools.accumulate(durations))
    log = StepTimes()
    for t in times:
        log.record(t)
    first = data.draw(st.integers(1, len(times)))
    last = data.draw(st.integers(first, len(times)))
    log.forget(data.draw(st.integers(0, first)))
    expected = [times[c - 1] - times[c - 2] for c in range(first + 1, last + 1)]
    assert list(log.gaps(first, last)) == expected
    assert log.at(last) == times[last - 1]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=300), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_nearest_rank_covers_its_share(values: list[int], share: float) -> None:
    at = nearest_rank(sorted(values), share)
    assert at in values
    assert sum(v <= at for v in values) >= share * len(values)
    assert not any(sum(v <= x for v in values) >= share * len(values) for x in values if x < at)


def test_nothing_has_no_rank() -> None:
    assert nearest_rank([], 0.99) is None


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20))
def test_common_prefix_of_a_chain_by_bisection(a: list[int], b: list[int]) -> None:
    chain_a, chain_b = block_hashes(a, 1), block_hashes(b, 1)
    naive = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chain_a, chain_b, strict=False))))
    if naive:
        assert _common(Run(None, chain_a, [], 0, 0).hashes, chain_b, 0, len(chain_b)) == naive


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 5), st.integers(0, 30))
def test_hashes_continue_where_they_stopped(tokens: list[int], size: int, cut: int) -> None:
    known = block_hashes(tokens[:cut], size)
    assert block_hashes(tokens, size, known=known) == block_hashes(tokens, size)


def test_a_block_hash_covers_everything_before_it_and_the_salt() -> None:
    base = block_hashes([1, 2, 3, 4], 2)
    assert block_hashes([9, 2, 3, 4], 2)[1] != base[1]
    assert block_hashes([1, 2, 3, 4], 2, "s")[0] != base[0]
    with pytest.raises(TypeError, match="made up"):
        block_hashes([1, 2, 3, 4], 2, known=[17])


def context() -> PolicyContext:
    return PolicyContext(HistoryPredictor(), StepTime())


def test_the_transition_table_is_the_law() -> None:
    for before, after in itertools.product(Status, Status):
        r = request("a", 1, 1)
        r.status = before
        if after in LEGAL[before]:
            r.move(after)
            assert r.status is after
        else:
            with pytest.raises(IllegalTransition, match="a: "):
                r.move(after)


def test_history_predicts_its_quantile_and_forgets() -> None:
    history = HistoryPredictor(quantile=0.5, depth=8, keys=4)
    r = request("a", 10, 100)
    assert history.output_tokens(r) == 100, "without history: what was declared"
    for outputs in (10, 20, 30):
        history.observe(r, outputs)
    assert history.output_tokens(r) == 20
    for _ in range(8):
        history.observe(r, 60)
    assert history.output_tokens(r) == 60
    assert history.output_tokens(request("b", 1000, 5)) == 5, "its class answers, capped by what was declared"
    for n in range(50):
        history.observe(request("c", 10, 5, tenant=f"t{n}"), 1)
    assert len(history._history) <= 4


def test_the_oracle_knows_and_falls_back_to_what_was_declared() -> None:
    assert OraclePredictor().output_tokens(request("a", 1, 9, oracle_tokens=4)) == 4
    assert OraclePredictor().output_tokens(request("a", 1, 9)) == 9


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_blocks": 0}, "num_blocks must be at least 1"),
        ({"max_num_seqs": 300}, "max_num_batched_tokens"),
        ({"headroom": "lots"}, "none, watermark, quantile, declared"),
        ({"headroom_quantile": 0.5}, "does nothing with headroom"),
        ({"headroom": "quantile", "headroom_quantile": 1.5}, "headroom_quantile must be above 0"),
        ({"max_resources": 0}, "max_resources must be at least 1"),
        ({"resource_patience": -1.0}, "resource_patience must be at least 0"),
        ({"oversize": "no"}, "refuse, clip"),
        ({"watermark": 1.0}, r"\[0, 1\)"),
        ({"partial_prefills": 0}, "partial_prefills"),
    ],
)
def test_limits_that_contradict_themselves_are_refused(given: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        limits(**given)


def test_every_finish_reason_is_spelled_as_clients_see_it() -> None:
    assert {reason.value for reason in FinishReason} >= {"stop", "length", "length_kv", "cancelled"}
