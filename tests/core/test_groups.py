"""Queues by groups: keys that time changes, and one account of service for several queues."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.groups import GroupedQueue
from tidegate.core.policies.fairness import FairShare
from tidegate.core.policy import Key, PolicyContext
from tidegate.core.predict import OraclePredictor, StepTime
from tidegate.core.request import Request

FAIR = FairShare()


def context() -> PolicyContext:
    return PolicyContext(OraclePredictor(), StepTime())


def request(n: int, tenant: str) -> Request:
    r = Request(f"{n}", prompt_tokens=10, tenant=tenant)
    r.seq = n
    return r


@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "serve", "time", "leave"]), st.sampled_from("xyz"), st.integers(0, 10**6)
        ),
        max_size=60,
    )
)
def test_the_first_is_always_the_least_served_tenants_by_keys_as_they_are_now(
    moves: list[tuple[str, str, int]],
) -> None:
    """Keys fall behind at a time of their own; against a sort of everything."""
    ctx = context()
    late = {}

    def key(r: Request) -> Key:
        due = late[r]
        return Key(0, float(r.seq), due) if ctx.now < due else Key(1, float(r.seq))

    queue = GroupedQueue(key, FAIR, ctx)
    for n, (move, tenant, drawn) in enumerate(moves):
        waiting = sorted(queue, key=lambda r: r.seq)
        if move == "add":
            r = request(n, tenant)
            late[r] = ctx.now + 1 + drawn % 5
            queue.add(r)
        elif move == "serve":
            ctx.service.seat(tenant, drawn % 1000)
            ctx.service.vacate(tenant)
        elif move == "time":
            ctx.now += drawn % 3
            queue.rekey_due(ctx.now)
        elif waiting:
            queue.remove(waiting[drawn % len(waiting)])
        expected = min(
            queue, key=lambda r: (FAIR.group_score(r.tenant, ctx), *place_of_group(queue, r, key)), default=None
        )
        assert queue.peek() is expected
        due = [late[r] for r in queue if late[r] > ctx.now]
        assert queue.next_due() == min(due, default=None)


def place_of_group(queue: GroupedQueue, r: Request, key: Any) -> tuple[Any, ...]:
    """Between tenants of one score the first arrival of their first requests decides, then the key."""

    def own(one: Request) -> tuple[int, float, int]:
        found = key(one)
        return found.tier, found.score, one.seq

    first = min((one for one in queue if one.tenant == r.tenant), key=own)
    return first.seq, *own(r)


def test_asking_again_for_a_key_is_no_new_arrival_of_its_group() -> None:
    ctx = context()
    due = {"x": 1.0, "y": float("inf")}
    queue = GroupedQueue(lambda r: Key(0, 0.0, due[r.tenant] if ctx.now < 1 else float("inf")), FAIR, ctx)
    ctx.service.seat("y", 500)
    for n, tenant in enumerate("yx"):
        queue.add(request(n, tenant))
    ctx.service.seat("y", 500)
    before = FAIR.group_score("x", ctx)
    ctx.now = 2.0
    assert [r.tenant for r in queue.rekey_due(ctx.now)] == ["x"]
    assert FAIR.group_score("x", ctx) == before  # else it would be lifted to the least who waits


def test_a_tenant_who_waits_in_another_queue_is_not_forgotten() -> None:
    ctx = context()
    chat, bulk = (GroupedQueue(lambda r: Key(0, 0.0), FAIR, ctx) for _ in range(2))
    one, other = request(0, "x"), request(1, "x")
    chat.add(one)
    bulk.add(other)
    account = ctx.service.account("x")
    chat.remove(one)
    for n in range(2, 20):  # whoever begins to wait has two of the idle looked at, and those who may be are forgotten
        bulk.add(request(n, f"t{n}"))
    assert ctx.service.account("x") is account
