"""The held queue: who gets an engine, in which order, and who does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.engines import ByHand, job
from tidegate.api.errors import ApiError
from tidegate.config import Config, resolve
from tidegate.core.predict import HistoryPredictor
from tidegate.core.slo import Slo
from tidegate.gateway.discovery import Wanted
from tidegate.gateway.dispatch import Dispatch
from tidegate.gateway.facts import EngineFacts
from tidegate.gateway.fleet import Fleet
from tidegate.gateway.job import Job
from tidegate.routing.choice import Choice
from tidegate.routing.pools import Pools
from tidegate.routing.route import build_route
from tidegate.routing.speed import Speed
from tidegate.routing.view import Facts, ReplicaView


class Held:
    """A dispatch over engines by hand, and the tasks of those who wait."""

    def __init__(self, raw: dict[str, Any], *replicas: ReplicaView, clock: Callable[[], float] | None = None) -> None:
        self.config: Config = resolve(raw)
        self.fleet = ByHand(*replicas)
        self.predictor = HistoryPredictor()
        pools = pools_of(self.config)
        route = build_route("least-loaded", random=Random(1), pools=pools)
        own = clock or asyncio.get_running_loop().time
        self.dispatch = Dispatch(self.config, self.fleet, route, pools, Speed(), self.predictor, own)
        self.tasks: dict[str, asyncio.Task[Choice]] = {}
        self.asked: dict[str, tuple[Job, tuple[str, ...]]] = {}

    async def ask(self, *jobs: Job, avoid: tuple[str, ...] = ()) -> None:
        for one in jobs:
            self.asked[one.id] = one, avoid
            self.tasks[one.id] = asyncio.create_task(self.dispatch.take(one, avoid))
            await settle()

    async def end(self, id: str, outputs: int = 0) -> None:
        self.dispatch.served(job(id), outputs)
        self.fleet.ended(id, 0.0)
        await settle()

    @property
    def order(self) -> list[str]:
        return [id for id, _ in self.fleet.log]


def pools_of(config: Config) -> Pools:
    pools = config.gateway.pools
    return Pools(pools.classes if pools.mode != "shared" else {}, pools.borrow if pools.mode == "borrow" else None)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def one_seat(**gateway: Any) -> dict[str, Any]:
    return {"gateway": {"fair": False, **gateway}}


async def test_an_engine_with_room_is_given_at_once() -> None:
    held = Held(one_seat(), ReplicaView("a", seats=1), ReplicaView("b", seats=1))
    first = await held.dispatch.take(job("1"))
    second = await held.dispatch.take(job("2"))
    assert {first.replica.name, second.replica.name} == {"a", "b"}
    assert held.dispatch.waiting == 0


async def test_who_waits_gets_the_seat_that_comes_free_in_the_order_of_the_policy() -> None:
    held = Held(one_seat(), ReplicaView("a", seats=1))
    await held.ask(job("runs"), job("batch", "batch"), job("offline", "offline"), job("chat"), job("chat2"))
    assert held.order == ["runs"]
    assert held.dispatch.waiting == 4
    for ended in ("runs", "chat", "chat2", "offline"):
        await held.end(ended)
    assert held.order == ["runs", "chat", "chat2", "offline", "batch"]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", ["0", "1", "2", "3"]),
        ("priority", ["2", "3", "0", "1"]),
        ("sjf", ["3", "2", "0", "1"]),
        ("edf", ["2", "3", "0", "1"]),
        ("fair", ["0", "2", "3", "1"]),
    ],
)
async def test_any_policy_of_the_core_orders_the_queue(policy: str, order: list[str]) -> None:
    held = Held({**one_seat(), "scheduler": {"policy": policy}}, ReplicaView("a", seats=1))
    if policy == "fair":
        held = Held({"scheduler": {"policy": policy}}, ReplicaView("a", seats=1))
    await held.ask(
        job("runs", tenant="x"),
        job("0", "offline", "y", tokens=300),
        job("1", "batch", "y", tokens=400),
        job("2", "interactive", "z", tokens=90),
        job("3", "interactive", "w", tokens=30),
    )
    for ended in ("runs", *order[:-1]):
        await held.end(ended)
    assert held.order == ["runs", *order]


async def test_one_seat_wakes_one_waiter() -> None:
    held = Held(one_seat(), ReplicaView("a", seats=2))
    await held.ask(*(job(f"{i}") for i in range(40)))
    held.fleet.asked = 0
    await held.end("0")
    assert held.order == ["0", "1", "2"]
    assert held.fleet.asked <= 4  # however many wait
    assert sum(task.done() for task in held.tasks.values()) == 3


async def test_a_seat_that_was_given_to_somebody_who_left_goes_to_the_next() -> None:
    held = Held(one_seat(), ReplicaView("a", seats=1))
    await held.ask(job("runs"), job("leaves"), job("stays"))
    held.dispatch.served(job("runs"), 0)
    held.fleet.ended("runs", 0.0)  # hands the seat to "leaves", whose task has not run yet
    held.tasks["leaves"].cancel()
    await settle()
    assert held.order == ["runs", "leaves", "stays"]
    assert held.fleet.replicas[0].outstanding == 1
    assert (await held.tasks["stays"]).replica.name == "a"


async def test_who_leaves_the_queue_is_forgotten() -> None:
    held = Held(one_seat(), ReplicaView("a", seats=1))
    await held.ask(job("runs"), job("leaves"), job("stays"))
    held.tasks["leaves"].cancel()
    await settle()
    assert held.dispatch.waiting == 1
    await held.end("runs")
    assert held.order == ["runs", "stays"]


async def test_who_leaves_in_the_moment_in_which_a_seat_comes_free_does_not_get_it() -> None:
    held = Held(one_seat(), ReplicaView("a", seats=1))
    await held.ask(job("runs"), job("gone"), job("next"))
    held.tasks["gone"].cancel()
    await held.end("runs")  # before the task has noticed
    assert held.order == ["runs", "next"]
    assert held.tasks["gone"].cancelled()
    await held.end("next")
    assert (held.dispatch.waiting, held.fleet.replicas[0].outstanding) == (0, 0)


async def test_tenants_share_by_what_they_were_served() -> None:
    held = Held({}, ReplicaView("a", seats=1))
    await held.ask(job("0", tenant="flood"), *(job(f"f{i}", tenant="flood") for i in range(6)))
    await held.ask(job("m0", tenant="modest"), job("m1", tenant="modest"))
    for _ in range(8):
        await held.end(held.order[-1], outputs=10)
    assert held.order.index("m1") <= 4  # FCFS would serve it last
    assert sorted(held.order) == sorted(held.tasks)


async def test_weights_are_shares() -> None:
    raw = {"gateway": {"weights": {"gold": 3.0}}}
    held = Held(raw, ReplicaView("a", seats=1))
    await held.ask(job("0"), *(job(f"g{i}", tenant="gold") for i in range(20)))
    await held.ask(*(job(f"s{i}", tenant="silver") for i in range(20)))
    for _ in range(16):
        await held.end(held.order[-1], outputs=10)
    gold = sum(id.startswith("g") for id in held.order)
    assert 11 <= gold <= 13  # of 16


async def test_fairness_does_not_put_batch_before_chat() -> None:
    held = Held({}, ReplicaView("a", seats=1))
    await held.ask(job("0", tenant="chatty"), job("b", "batch", tenant="newcomer"))
    await held.ask(*(job(f"c{i}", tenant="chatty") for i in range(3)))
    for _ in range(4):
        await held.end(held.order[-1], outputs=500)
    assert held.order == ["0", "c0", "c1", "c2", "b"]


async def test_outputs_count_as_service() -> None:
    held = Held({}, ReplicaView("a", seats=1))
    await held.ask(job("0", tenant="wordy"))
    await held.ask(job("1", tenant="wordy"), job("2", tenant="terse", tokens=300))
    await held.end("0", outputs=5000)
    assert held.order == ["0", "2"]


@pytest.mark.parametrize("fair", [True, False])
async def test_whose_promise_becomes_urgent_while_it_waits_comes_first(fair: bool) -> None:
    now = [0.0]
    raw = {"gateway": {"fair": fair}, "classes": {"interactive": {"ttft": 10.0}}}
    held = Held(raw, ReplicaView("a", seats=1), clock=lambda: now[0])
    await held.ask(job("runs"), job("plain", slo=Slo()), job("promised", arrival=1.0, config=held.config))
    now[0] = 10.95
    await held.end("runs")
    assert held.order == ["runs", "promised"]


async def test_an_engine_that_comes_back_without_a_word_serves_those_who_wait_first() -> None:
    held = Held(one_seat(), ReplicaView("a", seats=1))
    held.fleet.down = {"a"}
    await held.ask(job("first"))
    held.fleet.down = set()
    await held.ask(job("second"))
    assert held.order == ["first"]


@pytest.mark.parametrize("fair", [True, False])
async def test_isolated_pools_do_not_block_each_other(fair: bool) -> None:
    pools = {"mode": "isolated", "classes": {"batch": "bulk", "interactive": "chat"}}
    raw = {"gateway": {"pools": pools, "fair": fair}}
    held = Held(raw, ReplicaView("bulk", "bulk", seats=1), ReplicaView("chat", "chat", seats=1))
    await held.ask(*(job(f"b{i}", "batch") for i in range(12)))
    assert held.order == ["b0"]
    await held.ask(job("c0"), job("c1"))
    assert held.fleet.log == [("b0", "bulk"), ("c0", "chat")]
    await held.end("b0")
    await held.end("c0")
    assert held.fleet.log[2:] == [("b1", "bulk"), ("c1", "chat")]


def two_pools(**gateway: Any) -> Held:
    pools = {"mode": "isolated", "classes": {"batch": "bulk", "interactive": "chat"}}
    bulk, chat = ReplicaView("bulk", "bulk", seats=1), ReplicaView("chat", "chat", seats=1)
    return Held(one_seat(pools=pools, **gateway), bulk, chat)


async def test_a_second_try_in_an_isolated_pool_stays_there() -> None:
    held = two_pools()
    assert (await held.dispatch.take(job("again"), avoid=("chat",))).replica.name == "chat"
    assert not held.dispatch.elsewhere(job("again"), ("chat",))


async def test_while_an_isolated_pool_is_down_its_jobs_wait_for_it_and_no_longer_than_jobs_are_held() -> None:
    held = two_pools(hold_seconds=0.05)
    held.fleet.down = {"chat"}
    await held.ask(job("1"), job("b", "batch"))
    assert held.fleet.log == [("b", "bulk")]
    held.fleet.revive("chat")
    await settle()
    assert held.fleet.log[1:] == [("1", "chat")]
    await held.end("1")
    held.fleet.down = {"chat"}
    await held.ask(job("2"), job("b2", "batch"))
    with pytest.raises(ApiError) as down:
        await held.tasks["2"]
    assert (down.value.status, down.value.code) == (503, "no_engine")
    assert held.dispatch.waiting == 1  # whose pool is up, and full
    await held.end("b")
    assert held.fleet.log[2:] == [("b2", "bulk")]


async def test_a_pool_is_another_only_once_its_engines_are() -> None:
    held = two_pools()
    await held.ask(job("runs"), job("waits"))
    pools = {"mode": "isolated", "classes": {"batch": "bulk", "interactive": "talk"}}
    config = resolve(one_seat(pools=pools))
    with held.dispatch.paused():
        held.fleet.replicas[1].pool = "talk"
        held.fleet.room()
        assert held.fleet.log == [("runs", "chat")]
        new = pools_of(config)
        held.dispatch.reload(config, build_route("least-loaded", random=Random(1), pools=new), new)
    assert held.fleet.log == [("runs", "chat")]
    await held.end("runs")
    assert held.fleet.log[1:] == [("waits", "chat")]


async def test_a_second_try_comes_first_and_not_to_the_engine_that_failed() -> None:
    held = Held(one_seat(), ReplicaView("a", seats=1), ReplicaView("b", seats=1))
    await held.ask(job("0"), job("1"), job("2"))
    on_b = next(id for id, name in held.fleet.log if name == "b")
    on_a = next(id for id, name in held.fleet.log if name == "a")
    await held.ask(job("again"), avoid=("a",))
    await held.end(on_a)
    assert held.fleet.log[-1] == ("2", "a")  # a second try does not keep others from where it does not go
    await held.end(on_b)
    assert held.fleet.log[-1] == ("again", "b")


async def test_where_no_other_engine_is_up_the_one_that_failed_is_tried_again() -> None:
    held = Held(one_seat(), ReplicaView("a", seats=2))
    assert (await held.dispatch.take(job("again"), avoid=("a",))).replica.name == "a"


async def test_the_queue_has_an_end() -> None:
    held = Held({**one_seat(), "scheduler": {"max_waiting": 2}}, ReplicaView("a", seats=1))
    await held.ask(job("runs"), job("1"), job("2"), job("3"))
    with pytest.raises(ApiError) as refusal:
        await held.tasks["3"]
    assert (refusal.value.status, refusal.value.code) == (429, "queue_full")
    assert int(refusal.value.headers["Retry-After"]) >= 1
    assert held.dispatch.waiting == 2


async def test_classes_and_tokens_have_ends_of_their_own() -> None:
    classes = {"batch": {"max_waiting": 1}}
    raw = {**one_seat(), "scheduler": {"max_waiting_tokens": 1000}, "classes": classes}
    held = Held(raw, ReplicaView("a", seats=1))
    await held.ask(job("runs"), job("b0", "batch", max_tokens=1), job("b1", "batch", max_tokens=1))
    await held.ask(job("long", tokens=950, max_tokens=1), job("short", tokens=50, max_tokens=1))
    refused = {id for id, task in held.tasks.items() if task.done() and task.exception()}
    assert refused == {"b1", "long"}


async def test_a_better_class_takes_the_place_of_the_worst_if_asked() -> None:
    raw = {**one_seat(), "scheduler": {"max_waiting": 1, "displace_waiting": True}}
    held = Held(raw, ReplicaView("a", seats=1))
    await held.ask(job("runs"), job("batch", "batch"), job("chat"))
    with pytest.raises(ApiError) as displaced:
        await held.tasks["batch"]
    assert (displaced.value.status, displaced.value.code) == (503, "displaced")
    await held.end("runs")
    assert held.order == ["runs", "chat"]


async def test_whose_promise_those_ahead_will_break_is_told_at_once_if_asked() -> None:
    raw = {**one_seat(), "scheduler": {"refuse_hopeless": True}}
    held = Held(raw, ReplicaView("a", seats=1))
    await held.ask(job("runs"), *(job(f"b{i}", "batch", tokens=20_000, priority=0) for i in range(3)))
    now = asyncio.get_running_loop().time()
    await held.ask(job("late", arrival=now, slo=resolve({}).slo_classes["completion"].slo))
    with pytest.raises(ApiError) as refusal:
        await held.tasks["late"]
    assert (refusal.value.status, refusal.value.code) == (429, "deadline")


async def test_whoever_waits_too_long_is_told() -> None:
    raw = {**one_seat(), "classes": {"batch": {"queue_ttl": 0.02}}}
    held = Held(raw, ReplicaView("a", seats=1))
    now = asyncio.get_running_loop().time()
    await held.ask(job("runs"), job("late", "batch", arrival=now), job("waits", arrival=now))
    with pytest.raises(ApiError) as late:
        await held.tasks["late"]
    assert (late.value.status, late.value.code) == (504, "timeout")
    assert held.dispatch.waiting == 1
    held.tasks["waits"].cancel()


async def test_whoever_waits_too_long_on_its_second_try_is_told() -> None:
    raw = {**one_seat(), "classes": {"batch": {"queue_ttl": 0.02}}}
    held = Held(raw, ReplicaView("a", seats=1))
    await held.ask(job("runs"))
    await held.ask(job("late", "batch", arrival=asyncio.get_running_loop().time()), avoid=("a",))
    async with asyncio.timeout(20):
        with pytest.raises(ApiError) as late:
            await held.tasks["late"]
    assert (late.value.status, late.value.code) == (504, "timeout")
    assert held.dispatch.waiting == 0


async def test_second_tries_of_a_full_pool_hide_no_others() -> None:
    held = two_pools()
    await held.ask(job("b", "batch"), job("c"))
    await held.ask(*(job(f"b{i}", "batch") for i in range(40)), avoid=("x",))
    await held.ask(job("again"), avoid=("x",))
    await held.end("c")
    assert held.fleet.log[2:] == [("again", "chat")]
    await held.end("b")
    assert held.fleet.log[3:] == [("b0", "bulk")]


async def test_second_tries_stay_second_tries_in_a_new_configuration() -> None:
    held = Held(one_seat(), ReplicaView("a", seats=1), ReplicaView("b", seats=1))
    await held.ask(job("0"), job("1"), job("waits"))
    await held.ask(job("again"), avoid=("a",))
    pools = Pools()
    held.dispatch.reload(held.config, build_route("least-loaded", random=Random(1), pools=pools), pools)
    on_b = next(id for id, name in held.fleet.log if name == "b")
    await held.end(on_b)
    assert held.fleet.log[2:] == [("again", "b")]


async def test_room_that_time_alone_makes_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("routing.view", "gateway.fleet"):
        monkeypatch.setattr(f"tidegate.{module}.FACTS_LAST_S", 0.02)
    fleet = Fleet(lambda name: None, Speed(), 1.0)
    fleet.update([Wanted("a", "http://127.0.0.1:1")])
    route, clock = build_route("least-loaded", random=Random(1)), asyncio.get_running_loop().time
    dispatch = Dispatch(resolve({}), fleet, route, Pools(), Speed(), HistoryPredictor(), clock)
    await dispatch.take(job("runs"))
    fleet.told("a", EngineFacts("vllm", running=1, waiting=1))
    waits = asyncio.create_task(dispatch.take(job("waits")))
    await settle()
    assert not waits.done()
    async with asyncio.timeout(20):  # the engine says nothing more
        assert (await waits).replica.name == "a"


async def test_a_promise_that_nothing_can_keep_is_given_up_if_asked() -> None:
    raw = {**one_seat(), "scheduler": {"shed_hopeless": True}, "classes": {"completion": {"ttft": 0.05}}}
    held = Held(raw, ReplicaView("a", seats=1))
    now = asyncio.get_running_loop().time()
    hasty = resolve(raw).slo_classes["completion"].slo
    await held.ask(job("runs"), job("hasty", "completion", arrival=now, slo=hasty))
    with pytest.raises(ApiError) as shed:
        await held.tasks["hasty"]
    assert (shed.value.status, shed.value.code) == (503, "shed")


async def test_while_no_engine_is_up_jobs_are_held_and_the_first_to_come_back_serves_them() -> None:
    held = Held(one_seat(), ReplicaView("a", seats=2))
    held.fleet.down = {"a"}
    await held.ask(job("1"), job("2"))
    assert held.order == []
    held.fleet.revive("a")
    await settle()
    assert held.order == ["1", "2"]


async def test_after_a_while_without_engines_everybody_is_told() -> None:
    held = Held(one_seat(hold_seconds=0.02), ReplicaView("a", seats=2))
    held.fleet.down = {"a"}
    await held.ask(job("1"))
    with pytest.raises(ApiError) as down:
        await held.tasks["1"]
    assert (down.value.status, down.value.code) == (503, "no_engine")
    with pytest.raises(ApiError):
        await held.dispatch.take(job("2"))
    held.fleet.revive("a")
    assert (await held.dispatch.take(job("3"))).replica.name == "a"


async def test_each_time_without_engines_is_a_time_of_its_own() -> None:
    now = [0.0]
    held = Held(one_seat(hold_seconds=10.0), ReplicaView("a", seats=2), clock=lambda: now[0])
    held.fleet.down = {"a"}
    await held.ask(job("1"))
    held.tasks["1"].cancel()
    await settle()
    held.fleet.revive("a")  # while nobody waits
    now[0] = 20.0
    held.fleet.down = {"a"}
    await held.ask(job("2"))
    assert not held.tasks["2"].done()
    held.fleet.down = set()  # without a word
    await held.dispatch.take(job("3"))
    now[0] = 40.0
    await held.end("3")
    held.fleet.down = {"a"}
    await held.ask(job("4"))
    assert not held.tasks["4"].done()
    now[0] = 50.0
    await held.ask(job("5"))
    assert held.tasks["5"].done()


async def test_an_engine_that_has_asked_for_no_requests_is_up_and_waited_for() -> None:
    now = [0.0]
    held = Held(one_seat(hold_seconds=10.0), ReplicaView("a", seats=2), clock=lambda: now[0])
    held.fleet.busy = {"a"}
    await held.ask(job("1"))
    assert "asked for no requests" in (held.dispatch.explain("1") or {})["held_back_by"]
    now[0] = 20.0
    await held.ask(job("2"))
    assert held.dispatch.waiting == 2
    held.fleet.busy = set()
    held.fleet.room()
    assert held.order == ["1", "2"]


async def test_in_flight_bounds_what_an_engine_gets() -> None:
    held = Held(one_seat(in_flight=3), ReplicaView("a", seats=99))
    await held.ask(*(job(f"{i}") for i in range(5)))
    assert held.order == ["0", "1", "2"]


async def test_an_engine_that_says_that_requests_wait_in_it_is_full_with_those_that_run() -> None:
    held = Held(one_seat(), ReplicaView("a"))
    await held.ask(*(job(f"{i}") for i in range(4)))
    assert len(held.order) == 4  # nobody knows its seats
    now = asyncio.get_running_loop().time()
    held.fleet.replicas[0].told(Facts(now, running=2, waiting=2))
    await held.ask(job("4"))
    assert len(held.order) == 4
    await held.end("0")
    await held.end("1")
    assert len(held.order) == 4
    await held.end("2")
    assert held.order[-1] == "4"


async def test_stale_facts_stop_nothing() -> None:
    held = Held(one_seat(), ReplicaView("a"), ReplicaView("b", seats=4))
    now = asyncio.get_running_loop().time()
    for replica in held.fleet.replicas:
        replica.told(Facts(now - 60, running=9, waiting=1000))
    await held.ask(*(job(f"{i}") for i in range(8)))
    assert len(held.order) == 8
    for replica in held.fleet.replicas:
        replica.told(Facts(now, running=0, waiting=1000))
        replica.outstanding = 0  # we have none there: it is told something by whatever it says
    assert await held.dispatch.take(job("idle"))


async def test_lengths_are_learned_from_ends() -> None:
    held = Held(one_seat(), ReplicaView("a", seats=9))
    for i in range(5):
        await held.dispatch.take(job(f"{i}"))
        await held.end(f"{i}", outputs=7)
    assert held.predictor.output_tokens(job_view(job("next"))) == 7


def job_view(one: Job) -> Any:
    from tidegate.gateway.held import HeldJob

    return HeldJob(one, None)


async def test_why_a_job_waits() -> None:
    held = Held(one_seat(), ReplicaView("a", seats=1))
    await held.ask(job("runs"), job("1"), job("2"))
    told = held.dispatch.explain("2")
    assert told is not None
    assert told["ahead"] == 1
    assert told["engines"] == {"a": {"outstanding": 1, "bound": 1}}
    assert told["policy"] == "joint"
    assert held.dispatch.explain("runs") is None
    assert held.dispatch.waits()["interactive"][0] == 2
    held.fleet.down = {"a"}
    assert (held.dispatch.explain("2") or {})["held_back_by"] == "no engine is up"


async def test_a_new_configuration_keeps_those_who_wait_and_orders_them_anew() -> None:
    held = Held({**one_seat(), "scheduler": {"policy": "fcfs"}}, ReplicaView("a", seats=1))
    await held.ask(job("runs"), job("b", "batch"), job("c"), job("leaves"))
    config = resolve({**one_seat(), "scheduler": {"policy": "priority"}})
    pools = Pools()
    held.dispatch.reload(config, build_route("least-loaded", random=Random(1), pools=pools), pools)
    held.tasks["leaves"].cancel()
    await settle()
    await held.end("runs")
    await held.end("c")
    assert held.order == ["runs", "c", "b"]


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(["joint", "fcfs", "priority", "sjf", "sla", "mlfq", "fair", "lcf"]),
    isolated=st.booleans(),
    moves=st.lists(
        st.tuples(
            st.sampled_from(["ask", "ask", "ask", "end", "end", "leave", "down", "up", "again"]),
            st.sampled_from(["interactive", "completion", "offline", "batch"]),
            st.sampled_from(["x", "y", "z"]),
            st.integers(0, 10**6),
        ),
        max_size=60,
    ),
)
def test_under_any_load_every_job_ends_once_no_engine_is_overfilled_and_no_room_stays_unused(
    policy: str, isolated: bool, moves: list[tuple[str, str, str, int]]
) -> None:
    asyncio.run(_random_load(policy, isolated, moves))


async def _random_load(policy: str, isolated: bool, moves: list[tuple[str, str, str, int]]) -> None:
    raw: dict[str, Any] = {"scheduler": {"policy": policy, "max_waiting": 20}, "gateway": {}}
    if isolated:
        raw["gateway"]["pools"] = {"mode": "isolated", "classes": {"batch": "bulk", "offline": "bulk"}}
    held = Held(raw, ReplicaView("a", seats=2), ReplicaView("b", "bulk", seats=2))
    for n, (move, slo_class, tenant, drawn) in enumerate(moves):
        out = [id for id, task in held.tasks.items() if task.done() and not failed(task) and id not in ended(held)]
        waits = [id for id, task in held.tasks.items() if not task.done()]
        if move in ("ask", "again"):
            await held.ask(job(f"{n}", slo_class, tenant), avoid=("a",) if move == "again" else ())
        elif move == "end" and out:
            ended(held).add(out[drawn % len(out)])
            await held.end(out[drawn % len(out)], outputs=drawn % 50)
        elif move == "leave" and waits:
            held.tasks[waits[drawn % len(waits)]].cancel()
            await settle()
        elif move == "down":
            held.fleet.down.add("ab"[drawn % 2])
            held.fleet.room()  # as a request's failure is the end of it
            await settle()
        elif move == "up":
            held.fleet.revive("ab"[drawn % 2])
            await settle()
        check(held)
    for name in "ab":
        held.fleet.revive(name)
    for _ in range(len(held.tasks)):
        await settle()
        for id in [i for i, task in held.tasks.items() if task.done() and not failed(task) and i not in ended(held)]:
            ended(held).add(id)
            await held.end(id)
    assert held.dispatch.waiting == 0
    assert all(task.done() for task in held.tasks.values())
    assert len(set(held.order)) == len(held.order)
    assert all(c.outstanding == 0 for c in held.fleet.replicas)
    for task in held.tasks.values():
        with suppress(ApiError, asyncio.CancelledError):
            await task


def failed(task: asyncio.Task[Choice]) -> bool:
    return task.cancelled() or task.exception() is not None


def ended(held: Any) -> set[str]:
    found: set[str] = held.__dict__.setdefault("ended", set())
    return found


def check(held: Held) -> None:
    """No engine has more than it may, and nobody waits for whom one has room."""
    assert all(c.outstanding <= 2 for c in held.fleet.replicas)
    for id, task in held.tasks.items():
        if task.done():
            continue
        one, avoid = held.asked[id]
        fleet, pools = held.fleet, pools_of(held.config)
        others = pools.allowed(one.view, fleet.candidates(0.0, avoid), {}, 0.0, fleet.pools)
        allowed = others or pools.allowed(one.view, fleet.candidates(0.0), {}, 0.0, fleet.pools)
        assert all(c.outstanding == 2 for c in allowed), f"{id} waits though an engine has room"
