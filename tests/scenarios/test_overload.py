"""Scenarios of the group "Overload, timeouts, deadlines": who may wait, how long, and what everybody is told."""

import gc
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from math import ceil

import pytest

from tests.server.scripted_model import ScriptedModel, goes_on
from tests.server.serving import serving
from tidegate.core.events import Admitted, Finished, Rejected
from tidegate.core.limits import Limits
from tidegate.core.presets import build_policy
from tidegate.core.request import FinishReason, Request
from tidegate.core.scheduler import Scheduler
from tidegate.errors import RequestRefused
from tidegate.executors.scripted import Script, ScriptedExecutor

UNTIMED = {"cfg.queue_ttl": None, "C.ttl": None}


class House:
    """A scheduler on a scripted executor whose steps last `step_s` seconds; keeps what everybody was told."""

    def __init__(self, limits, step_s=1.0, policy="priority", **door):
        self.scheduler = Scheduler(build_policy(policy, door), limits)
        self.executor = ScriptedExecutor(
            num_blocks=limits.num_blocks, block_size=limits.block_size, max_num_seqs=limits.max_num_seqs
        )
        self.step_s = step_s
        self.now = 0.0
        self.ends = Counter()
        self.ended = {}
        self.queued = []
        self.retries = []

    def add(self, name, arrival, prompt=16, outputs=1, **given):
        try:
            self.scheduler.add(
                Request(
                    name,
                    prompt_tokens=prompt,
                    max_tokens=outputs,
                    arrival=arrival,
                    handle=Script(range(outputs)),
                    **given,
                ),
                arrival,
            )
        except RequestRefused as refusal:
            self.retries.append(refusal.retry_after)
        self.fold()

    def step(self):
        plan = self.scheduler.plan(self.now)
        self.now += self.step_s
        if plan:
            self.scheduler.apply(plan, self.executor.submit(plan).result(), self.now)
        self.fold()

    def fold(self):
        for told in self.scheduler.take_events():
            if isinstance(told, Admitted):
                self.queued.append(told.now - told.request.arrival)
            elif isinstance(told, Finished | Rejected):
                assert told.request.id not in self.ended, "ends twice"
                reason = FinishReason.REFUSED if isinstance(told, Rejected) else told.reason
                self.ended[told.request.id] = reason
                self.ends[reason] += 1


# S43


@pytest.fixture(scope="module")
def overload():
    """20 requests a second for 600 s at a service of 0.1 s each, 64 may wait; (house, most waiting, sizes)."""
    house = House(Limits(num_blocks=8, max_num_seqs=1, max_num_batched_tokens=16), step_s=0.1, max_waiting=64)
    most, sizes, arrival = 0, [], 0
    while arrival < 12_000 or house.scheduler.has_work:
        while arrival < 12_000 and arrival / 20 <= house.now:
            before = len(house.ended)
            house.add(f"r{arrival}", arrival / 20)
            assert len(house.ended) - before <= 1
            most = max(most, len(house.scheduler.waiting))
            arrival += 1
        house.step()
        if arrival in (4_000, 12_000) and len(sizes) < 2 and (not sizes or arrival == 12_000):
            sizes.append(_held(house))
    return house, most, sizes


def _held(house):
    """What the scheduler holds, in bytes: containers it owns, not the counts that the test keeps."""
    gc.collect()
    queue, lifecycle = house.scheduler.waiting, house.scheduler._lifecycle
    return sum(map(sys.getsizeof, (queue._rest, queue._live, lifecycle.requests, lifecycle.events)))


@pytest.mark.expects("S43", 0)
def test_s43_the_queue_ends(overload):
    _, most, _ = overload
    assert most == 64


@pytest.mark.expects("S43", 1)
def test_s43_refusals_are_answered_at_once_with_a_hint(overload):
    house, _, _ = overload
    assert house.ends[FinishReason.REFUSED] == len(house.retries) > 5_000
    assert all(retry is not None and retry > 0 for retry in house.retries)


@pytest.mark.expects("S43", 2)
def test_s43_whoever_is_accepted_waits_no_longer_than_the_queue_is_long(overload):
    house, _, _ = overload
    ranked = sorted(house.queued)
    assert ranked[ceil(0.99 * len(ranked)) - 1] <= 6.5
    assert ranked[-1] <= 6.5


@pytest.mark.expects("S43", 3)
def test_s43_memory_is_flat(overload):
    house, _, (early, late) = overload
    assert late <= early
    assert not house.scheduler.waiting
    assert house.scheduler.kv.available == 8


def test_s43_without_an_end_the_queue_grows():
    house = House(Limits(num_blocks=8, max_num_seqs=1, max_num_batched_tokens=16), step_s=0.1)
    for arrival in range(400):
        while arrival / 20 > house.now:
            house.step()
        house.add(f"r{arrival}", arrival / 20)
    assert len(house.scheduler.waiting) > 150


# S44


def _accepted(run):
    return [name for name, fate in run.outcome.requests.items() if fate.finish_reason != "refused"]


@pytest.mark.expects("S44", 0)
@pytest.mark.parametrize("limit", ["max_queued_tokens", "ttft_target_s"])
def test_s44_work_is_accepted_in_order_of_arrival(play, limit):
    """By either limit alone: 20,000 tokens are 2 seconds."""
    other = {"max_queued_tokens": "ttft_target_s", "ttft_target_s": "max_queued_tokens"}[limit]
    for set in (None, {f"cfg.{other}": None}):
        assert _accepted(play("S44", set=set)) == ["BIG", *(f"S[{i}]" for i in range(10))]


@pytest.mark.expects("S44", 1)
def test_s44_the_rest_is_refused(play):
    run = play("S44")
    refused = [name for name, fate in run.family("S").items() if fate.finish_reason == "refused"]
    assert refused == [f"S[{i}]" for i in range(10, 30)]


@pytest.mark.expects("S44", 2)
def test_s44_the_second_big_one_is_refused(play):
    run = play("S44")
    assert run["BIG2"].finish_reason == "refused"
    reasons = {entry["id"]: entry["reason"] for row in run.rows for entry in row.rejected}
    assert reasons["BIG2"] in ("queue_full", "deadline")
    alone = play("S44", set={"cfg.ttft_target_s": None})
    assert {e["reason"] for row in alone.rows for e in row.rejected} == {"queue_full"}
    promised = play("S44", set={"cfg.max_queued_tokens": None})
    assert {e["reason"] for row in promised.rows for e in row.rejected} == {"deadline"}


@pytest.mark.expects("S44", 3)
def test_s44_an_idle_engine_takes_what_is_larger_than_the_limit(play):
    run = play("S44", set={"BIG.p": 30_000}, without=["BIG2", "S"])
    assert run["BIG"].finish_reason == "length"


# S46


@pytest.mark.expects("S46", 0)
def test_s46_the_shorter_limit_of_a_request(play):
    assert (play("S46")["C"].finish_step, play("S46")["C"].finish_reason) == (40, "timeout")


@pytest.mark.expects("S46", 1)
def test_s46_the_limit_of_all(play):
    assert (play("S46")["B"].finish_step, play("S46")["B"].finish_reason) == (110, "timeout")


@pytest.mark.expects("S46", 2)
def test_s46_they_never_compute(play):
    run = play("S46")
    assert not run.scheduled("B")
    assert not run.scheduled("C")


@pytest.mark.expects("S46", 3)
def test_s46_whoever_runs_is_not_touched(play):
    run, alone = play("S46"), play("S46", without=["B", "C"])
    assert run["A"] == alone["A"]
    assert run["A"].outputs == 150


@pytest.mark.expects("S46", 4)
@pytest.mark.parametrize(("own", "of_all", "end"), [(30, 100, 40), (100, 30, 40), (None, 50, 60), (50, None, 60)])
def test_s46_limits_combine_to_the_shorter(play, own, of_all, end):
    run = play("S46", set={"C.ttl": own, "cfg.queue_ttl": of_all})
    assert run["C"].finish_step == end


def test_s46_without_limits_everybody_is_served(play):
    run = play("S46", set=UNTIMED)
    assert {run[name].finish_reason for name in "ABC"} == {"length"}


def test_s46_a_seat_that_comes_free_in_the_same_step_is_too_late(play):
    """Expiry comes before planning: A ends at step 149, so a seat is free at 150."""
    for ttl, end in ((140, "timeout"), (141, "length")):
        run = play("S46", set={"C.ttl": ttl, "cfg.queue_ttl": None}, without=["B"])
        assert run["C"].finish_reason == end


# S48


@pytest.fixture(scope="module")
def burst():
    """300 arrivals at once, then 1000 that are cancelled as soon as they are submitted."""
    house = House(Limits(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=256), max_waiting=6)
    submitted = 0
    for _ in range(300):
        house.add(f"b{submitted}", house.now, outputs=4)
        submitted += 1
    house.step()
    for _ in range(1000):
        house.add(f"b{submitted}", house.now, outputs=4)
        house.scheduler.abort(f"b{submitted}", house.now)
        house.fold()
        submitted += 1
        if not submitted % 50:
            house.step()
    while house.scheduler.has_work:
        house.step()
    return house, submitted


@pytest.mark.expects("S48", 0)
def test_s48_everybody_is_counted(burst):
    house, submitted = burst
    served = house.ends[FinishReason.LENGTH]
    assert submitted == served + house.ends[FinishReason.REFUSED] + house.ends[FinishReason.CANCELLED]
    assert min(served, house.ends[FinishReason.REFUSED], house.ends[FinishReason.CANCELLED]) > 0


@pytest.mark.expects("S48", 1)
def test_s48_everybody_gets_an_answer(burst):
    house, submitted = burst
    assert set(house.ended) == {f"b{n}" for n in range(submitted)}


@pytest.mark.expects("S48", 2)
def test_s48_the_house_is_whole_again(burst):
    house, _ = burst
    for n in range(20):
        house.add(f"again{n}", house.now, outputs=50)
        if n == 5:
            house.step()
    held = house.scheduler.snapshot(house.now)
    house.step()
    for n in range(20, 30):
        house.add(f"again{n}", house.now, outputs=50)
    held = house.scheduler.snapshot(house.now)
    assert held.waiting + held.running == 14
    while house.scheduler.has_work:
        house.step()
    assert house.scheduler.kv.available == 64


@pytest.mark.expects("S48", 3)
def test_s48_a_full_queue_is_busy_not_dead():
    model = ScriptedModel(goes_on, max_num_seqs=8)
    with serving(model, {"scheduler": {"max_num_seqs": 8, "max_waiting": 6}}) as served:
        model.gate.clear()
        with ThreadPoolExecutor(30) as clients:
            body = {"prompt": "the tide", "max_tokens": 4}
            posts = [clients.submit(served.http.post, "/v1/completions", json=body) for _ in range(30)]
            while sum(post.done() for post in posts) < 16:  # 8 may run and 6 wait
                assert served.http.get("/health").status_code == 200
            assert served.http.get("/health").json() == {"status": "busy"}
            model.gate.set()
            answers = Counter(post.result().status_code for post in posts)
        assert answers.total() == 30
        assert set(answers) == {200, 429}
        assert answers[200] >= 6
        assert served.http.get("/health").json() == {"status": "ok"}


def test_s48_displaced_ones_get_an_answer_too():
    house = House(
        Limits(num_blocks=64, max_num_seqs=1, max_num_batched_tokens=64), max_waiting=3, displace_waiting=True
    )
    for n in range(5):
        house.add(f"batch{n}", 0.0, outputs=4, priority=10)
    house.add("middle", 0.0, outputs=4, priority=5)
    house.add("urgent", 0.0, outputs=4)
    house.add("equal", 0.0, outputs=4, priority=10)
    while house.scheduler.has_work:
        house.step()
    assert house.ends == {FinishReason.REFUSED: 3, FinishReason.DISPLACED: 2, FinishReason.LENGTH: 3}
    assert house.ended["batch2"] is house.ended["batch1"] is FinishReason.DISPLACED
    assert house.ended["equal"] is FinishReason.REFUSED


def test_an_unstarted_one_is_never_confused_with_one_that_began():
    """A time limit for the queue says nothing of a request that was preempted: it has begun."""
    limits = Limits(num_blocks=64, max_num_seqs=1, max_num_batched_tokens=64, headroom="none")
    house = House(limits)
    house.add("old", 0.0, prompt=32, outputs=60, priority=10, queue_ttl=20.0)
    for _ in range(10):
        house.step()
    house.add("urgent", house.now, prompt=32, outputs=30)
    for _ in range(20):
        house.step()
    assert house.scheduler.snapshot(house.now).waiting == 1
    while house.scheduler.has_work:
        house.step()
    assert house.ended == {"urgent": FinishReason.LENGTH, "old": FinishReason.LENGTH}
