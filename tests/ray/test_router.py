"""The router, without a cluster: real requests and replica names of Ray, the real matching, no processes."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping
from dataclasses import fields
from random import Random
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest

from tidegate.config import ServerConfig
from tidegate.errors import ConfigError
from tidegate.integrations.ray.application import OWNED, ROUTER
from tidegate.integrations.ray.call import Call
from tidegate.integrations.ray.router import TidegateRouter
from tidegate.routing.health import Failure
from tidegate.routing.ledger import Ledger
from tidegate.routing.route import ROUTES, build_route
from tidegate.routing.speed import Speed
from tidegate.routing.text_blocks import text_blocks
from tidegate.routing.view import ReplicaView, RouteView

ENGINES = DeploymentID("engines")
TEXT = "Ebb and flow and flow and ebb. " * 60


class Replica:
    """As much of Ray's `RunningReplica` as a router touches before it sends. `queue` is its queue's length."""

    def __init__(self, name: str, queue: int = 0, metadata: Mapping[str, Any] | None = None) -> None:
        self.replica_id = ReplicaID(name, ENGINES)
        self.max_ongoing_requests = 5
        self.node_id = "node"
        self.availability_zone = None
        self.replica_metadata = metadata or {"seats": 4, "kv_tokens": 4096}
        self.routing_stats: Mapping[str, Any] = {}
        self.queue = queue
        self.asked = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.asked += 1
        return self.queue


def router(*replicas: Replica, route: str = "joint") -> TidegateRouter:
    # As Serve makes it: unpickled by value, from what the deployment's configuration holds.
    made: Any = RequestRouterConfig(request_router_class=ROUTER).get_request_router_class()
    router = made(ENGINES, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
    router.initialize_state(route=route)
    router.update_replicas(list(replicas))
    return router


def call(id: str, text: str = TEXT, replica: str = "") -> Call:
    blocks = text_blocks([text.encode()])
    view = RouteView(id, "interactive", len(text) // 4, blocks, 128.0)
    return Call(view, "POST", "/v1/completions", b"", [], text.encode(), replica)


def pending(id: str, *args: Any) -> PendingRequest:
    return PendingRequest(args=list(args), kwargs={}, metadata=RequestMetadata(id, id))


async def chosen(router: TidegateRouter, request: PendingRequest) -> str:
    [[replica]] = await router.choose_replicas(list(router.curr_replicas.values()), request)
    return replica.replica_id.unique_id


@pytest.mark.parametrize("route", ROUTES)
async def test_it_decides_as_the_route_alone_does(route: str) -> None:
    names = ["a", "b", "c"]
    theirs = router(*map(Replica, names), route=route)
    theirs.random.seed(5)
    ours = build_route(route, random=Random(5))
    ledger = Ledger(lost=lambda view: ours.forget(view.name))
    typical = Speed()
    views = [ReplicaView(name, seats=4, kv_tokens=4096, speed=Speed(typical)) for name in names]
    drawn = Random(3)
    out: list[str] = []
    for number in range(200):
        request = call(f"r{number}", f"{drawn.randrange(8)} " + TEXT[: drawn.randrange(600, 1800)])
        choice = ours.choose(request.view, views, 0.0)
        ledger.sent(request.view, choice, 0.0)
        assert await chosen(theirs, pending(f"r{number}", request)) == choice.replica.name
        out.append(request.view.id)
        if len(out) > 6:
            gone = out.pop(drawn.randrange(len(out)))
            ledger.ended(gone, 0.0, complete=False)
            theirs.ledger.ended(gone, 0.0, complete=False)


async def test_many_at_once_see_each_other_and_get_what_was_chosen_for_them() -> None:
    there = router(Replica("a"), Replica("b"), route="least-loaded")
    requests = [pending(f"r{n}", call(f"r{n}")) for n in range(6)]
    got = await asyncio.gather(*(there._choose_replica_for_request(r) for r in requests))
    assert sorted(replica.replica_id.unique_id for replica in got) == ["a"] * 3 + ["b"] * 3
    assert {name: view.outstanding for name, view in there.views.items()} == {"a": 3, "b": 3}


async def test_what_the_front_tells_reaches_the_views() -> None:
    there = router(Replica("a"), Replica("b"))
    calls = [call(f"r{n}", f"{n} {TEXT}") for n in range(4)]
    for request in calls:
        await chosen(there, pending(request.view.id, request))
    counts = lambda name: sum(getattr(view, name) for view in there.views.values())  # noqa: E731
    assert counts("outstanding") == 4
    told = [request.told for request in calls]
    assert all(told)
    told[0].tokens(1)  # type: ignore[union-attr]
    await asyncio.sleep(0)
    assert counts("decoding") == 1
    told[0].ended(complete=True)  # type: ignore[union-attr]
    told[1].failed(Failure.CUT)  # type: ignore[union-attr]
    told[2].turned_away(30.0)  # type: ignore[union-attr]
    await asyncio.sleep(0)
    assert counts("outstanding") == 1
    busy = [name for name, view in there.views.items() if view.health.busy_until > 0]
    assert len(busy) == 1
    assert await chosen(there, pending("next", call("next"))) not in busy


async def test_a_request_that_is_routed_again_counts_once() -> None:
    there = router(Replica("a"), Replica("b"))
    request = pending("r", call("r"))
    for _ in range(3):
        await chosen(there, request)
    assert sum(view.outstanding for view in there.views.values()) == 1
    assert request.routing_context.should_backoff  # without it Ray asks again at once, for ever


async def test_a_call_whose_front_left_holds_nothing() -> None:
    there = router(Replica("a"))
    gone = call("r")
    gone.over = True
    await chosen(there, pending("r", gone))
    assert there.views["a"].outstanding == 0


async def test_bodies_of_other_deployments_are_looked_into() -> None:
    there = router(Replica("a"), Replica("b"))
    body = {"messages": [{"role": "user", "content": TEXT}], "model": "m"}
    first = await chosen(there, pending("1", body))
    there.on_request_completed(ReplicaID(first, ENGINES), "1")
    assert there.views[first].outstanding == 0
    longer = {**body, "messages": [*body["messages"], {"role": "assistant", "content": "Indeed."}]}
    assert {await chosen(there, pending("2", longer)) for _ in range(5)} == {first}
    assert await chosen(there, pending("3", object())) in {"a", "b"}


async def test_a_request_that_is_cancelled_before_it_is_sent_holds_nothing() -> None:
    full = Replica("a", queue=5)
    there = router(full)
    task = asyncio.create_task(there._choose_replica_for_request(pending("r", {"prompt": TEXT})))
    while full.asked < 3:
        await asyncio.sleep(0.01)
    assert there.views["a"].outstanding == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)
    assert there.views["a"].outstanding == 0


async def test_replicas_that_go_are_forgotten_with_their_prefixes() -> None:
    a, b = Replica("a"), Replica("b")
    there = router(a, b)
    first = await chosen(there, pending("1", call("1")))
    there.ledger.ended("1", 0.0)
    there.on_replica_actor_died(ReplicaID(first, ENGINES))
    left = await chosen(there, pending("2", call("2")))
    assert left != first
    there.ledger.ended("2", 0.0)
    there.update_replicas([a, b])  # its name is there again, its cache is not
    for n in range(3, 11):
        assert await chosen(there, pending(f"{n}", call(f"{n}"))) == left
        there.ledger.ended(f"{n}", 0.0)


async def test_a_newcomer_is_taken_to_be_as_fast_as_the_others() -> None:
    there = router(Replica("a"))
    for _ in range(20):
        there.views["a"].speed.first_token(1000, 0.3)
    there.update_replicas([Replica("a"), Replica("b")])
    newcomer = there.views["b"].speed
    assert newcomer.base_s + 1000 * newcomer.token_s == pytest.approx(0.3, rel=0.3)


async def test_what_replicas_say_of_themselves_is_taken_over() -> None:
    a = Replica("a", metadata={"seats": 7, "kv_tokens": 99})
    there = router(a)
    view = there.views["a"]
    assert (view.seats, view.kv_tokens, view.facts) == (7, 99, None)
    a.routing_stats = {"running": 3, "waiting": 2, "kv_usage": 0.5}
    there.update_replicas([a])
    facts = view.facts
    assert facts is not None
    assert (facts.running, facts.waiting, facts.kv_usage, view.others) == (3, 2, 0.5, 5)
    there.update_replicas([a])
    assert view.facts is facts  # nothing new was said


async def test_a_named_replica_is_asked_and_nobody_counts_it() -> None:
    there = router(Replica("a"), Replica("b"))
    for name in ("a", "b", "a"):
        assert await chosen(there, pending("r", call("r", replica=name))) == name
    assert all(view.sent == 0 for view in there.views.values())


async def test_an_unknown_route_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown route 'nearest'"):
        router(route="nearest")


def test_a_call_goes_to_an_engine_without_what_is_the_routers() -> None:
    sent = call("r")
    sent.told = object()  # type: ignore[assignment]
    came = pickle.loads(pickle.dumps(sent))  # noqa: S301 - ours
    assert came.told is None
    assert came.view.blocks == ()
    assert (came.view.id, came.body, came.path) == ("r", sent.body, sent.path)


def test_every_option_of_the_server_is_read_or_refused() -> None:
    read = {"api_keys", "default_class", "drain_seconds", "max_body_bytes", "service_tiers", "tenant_labels"}
    assert {f.name for f in fields(ServerConfig)} - read == {p[7:] for p in OWNED if p.startswith("server.")}
