"""Service counters, fair shares, and the queue that moves by groups."""

from __future__ import annotations

from itertools import zip_longest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.harness import Run, limits, request
from tidegate.core.groups import GroupedQueue
from tidegate.core.policies.fairness import FairShare, LeastServed
from tidegate.core.policies.orders import Aged
from tidegate.core.policy import Key, PolicyContext
from tidegate.core.predict import OraclePredictor, StepTime
from tidegate.core.request import Request
from tidegate.core.service import Service
from tidegate.errors import ConfigError


@settings(max_examples=60, deadline=None)
@given(data=st.data(), depth=st.sampled_from([1, 2]), blocks=st.integers(8, 40))
def test_counters_are_what_was_planned(data: st.DataObject, depth: int, blocks: int) -> None:
    """Preempted, stalled, cancelled or stopped: each tenant's account is the sum over its requests."""
    run = Run.of("lcf", limits(num_blocks=blocks, block_size=4, max_num_batched_tokens=24, max_num_seqs=4), depth)
    requests = []
    for n in range(data.draw(st.integers(1, 10))):
        r = request(f"r{n}", data.draw(st.integers(1, 30)), data.draw(st.integers(1, 20)), tenant=f"t{n % 3}")
        run.stop_after[r.id] = data.draw(st.integers(1, 20))
        requests.append(r)
    inputs: dict[str, int] = dict.fromkeys(("t0", "t1", "t2"), 0)
    service = run.scheduler.ctx.service
    for step in range(400):
        if step < len(requests):
            run.add(requests[step])
        if data.draw(st.integers(0, 30)) == 0:
            run.abort(f"r{data.draw(st.integers(0, 9))}")
        for join in run.step().joined:
            r = next(r for r in requests if r.id == join.request_id)
            if not r.preemptions:
                inputs[r.tenant] += r.prompt_tokens - join.cached
        for tenant, counted in inputs.items():
            account = service.account(tenant)
            assert account.inputs == counted
            assert account.outputs == sum(r.sampled for r in requests if r.tenant == tenant)
        if step > len(requests) and not run.scheduler.has_work and not run._in_flight:
            break


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_grouped_queue_equals_its_slow_twin(data: st.DataObject) -> None:
    """Whatever is added, taken out or charged, the first is the oldest of the group that has the least score now."""
    scores = dict.fromkeys("abc", 0)

    class Charged(FairShare):
        def group_score(self, group: str, ctx: PolicyContext) -> float:
            return scores[group]

    context = PolicyContext(OraclePredictor(), StepTime())
    queue = GroupedQueue(lambda r: Key(0, 0.0), Charged(), context, window=4)
    waiting: list[Request] = []
    for seq in range(data.draw(st.integers(1, 60))):
        match data.draw(st.sampled_from(["add", "add", "charge", "remove", "first"])):
            case "add":
                r = request(f"r{seq}", 4, 4, tenant=data.draw(st.sampled_from("abc")))
                r.seq = seq
                r.preemptions = data.draw(st.sampled_from([0, 0, 0, 1]))
                queue.add(r)
                waiting.append(r)
            case "charge":
                scores[data.draw(st.sampled_from("abc"))] += data.draw(st.integers(0, 5))
            case "remove" if waiting:
                queue.remove(waiting.pop(data.draw(st.integers(0, len(waiting) - 1))))
            case "first" if waiting:
                first = queue.peek()
                assert first is not None
                queue.remove(first)
                waiting.remove(first)
        heads = {g: min((r.seq for r in waiting if r.tenant == g and not r.preemptions), default=None) for g in "abc"}
        order = sorted(g for g in "abc" if heads[g] is not None)
        order.sort(key=lambda g: (scores[g], heads[g]))
        fresh = [r for g in order for r in sorted(waiting, key=lambda r: r.seq) if r.tenant == g and not r.preemptions]
        turns = zip_longest(*([r for r in fresh if r.tenant == g] for g in order))
        dealt = [r for turn in turns for r in turn if r is not None]
        back = [r for r in waiting if r.preemptions]
        front = queue.front()
        assert set(front[: len(back)]) <= set(back)
        assert front[len(back) :] == dealt[: max(0, 4 - len(back))]
        assert queue.peek() is (front[0] if front else None)
        assert len(queue) == len(waiting)
        assert queue.fresh == len(fresh)
        for index, r in enumerate(fresh):
            assert queue.ahead_of(r) >= index + len(back) - sum(scores[o.tenant] == scores[r.tenant] for o in fresh)


def test_the_idle_bank_nothing_and_newcomers_are_not_locked_out() -> None:
    """A tenant who slept is lifted to the others; without the lift he locks them out until he has caught up."""
    began: dict[str, list[str]] = {}
    for policy in ("fair", "lcf"):
        run = Run.of(policy, limits(max_num_seqs=1, num_blocks=200), backfill=False)
        for n in range(60):
            run.add(request(f"a{n}", 16, 8, tenant="awake"))
        run.steps(200)
        for n in range(20):
            run.add(request(f"s{n}", 16, 8, tenant="asleep"))
        run.steps(160)
        began[policy] = [join.request_id for plan in run.plans[200:] for join in plan.joined][:16]
    assert 7 <= sum(id.startswith("s") for id in began["fair"]) <= 9
    assert sum(id.startswith("s") for id in began["lcf"]) == len(began["lcf"]) == 16


def test_a_tenant_lifted_to_the_last_who_waited() -> None:
    """Nobody waits any more when he comes: still no hour of credit."""
    context = PolicyContext(OraclePredictor(), StepTime())
    order = FairShare()
    order.enter("a", None, context)
    context.service.seat("a", 500)
    order.leave("a", context)
    order.enter("b", None, context)
    assert order.group_score("b", context) == 500


def test_weights_divide_what_is_charged() -> None:
    context = PolicyContext(OraclePredictor(), StepTime())
    order = FairShare(w_in=1.0, w_out=4.0, weights={"gold": 2.0})
    for tenant in ("gold", "plain"):
        context.service.seat(tenant, 100)
        context.service.emit(tenant)
    assert order.group_score("gold", context) == (100 + 4) / 2
    assert order.group_score("plain", context) == 104
    assert LeastServed(w_out=3.0).group_score("plain", context) == 103


def test_accounts_are_bounded() -> None:
    """The number of tenants is the clients' choice."""
    run = Run.of("fair", limits(max_num_seqs=2))
    for n in range(2_000):
        run.add(request(f"r{n}", 4, 1, tenant=f"t{n}"))
        run.steps(2)
    assert len(run.scheduler.ctx.service) < 20
    service = Service(remember=10)
    for n in range(500):
        service.enter(f"t{n}")
        service.seat(f"t{n}", n)
        service.leave(f"t{n}")
        service.vacate(f"t{n}")
        service.tidy(0.0, lambda tenant: 1.0)
    assert len(service) <= 11


def test_groups_that_come_and_go_leave_nothing_behind() -> None:
    run = Run.of("fair", limits(max_num_seqs=1))
    run.add(request("runs", 4, 900))
    run.step()
    for n in range(1_000):
        run.add(request(f"r{n}", 4, 4, tenant=f"t{n % 7}"))
        run.abort(f"r{n}")
    queue = run.scheduler.waiting
    assert isinstance(queue, GroupedQueue)
    assert len(queue._heads) < 100
    assert not queue._groups


@pytest.mark.parametrize("order", [FairShare(), LeastServed()])
def test_what_moves_tenants_is_not_aged(order: FairShare | LeastServed) -> None:
    with pytest.raises(ConfigError, match="it moves tenants, not requests"):
        Aged(order)
