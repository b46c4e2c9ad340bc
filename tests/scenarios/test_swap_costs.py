"""What a scenario may say of swapping: host pools, and what computing and copying cost."""

import pytest

from tidegate.core.plan import Copy
from tidegate.core.scheduler import Scheduler
from tidegate.executors.scripted import ScriptedExecutor
from tidegate.simulate.scenario import parse
from tidegate.simulate.scenario_run import run

# Both run until they need 9 blocks of the 8; one gives way, with 4 blocks, and is cheaper to compute again.
TIGHT = """
id: T3
cfg: {kv: 8, budget: 64, max_seqs: 2, policy: vllm-v1, host_blocks: 4, disk_blocks: 2, params: {restore: auto},
      cost: {prefill_tok_us: 5, copy_block_us: 100}}
reqs: [{id: A, t: 0, p: 30, o: 50}, {id: B, t: 0, p: 30, o: 50}]
"""


class Copying(Scheduler):
    """Sends the first two blocks of every victim to the host, and never fetches them."""

    def plan(self, now):
        tables = {r.id: list(r.lease.table) for r in self.running.members}
        plan = super().plan(now)
        plan.swapped_out = [Copy(p.request_id, tables[p.request_id][:2], [1, 5]) for p in plan.preempted]
        return plan


class Seeing(Copying):
    """Keeps what it is given."""

    seen: list

    def __init__(self, policy, limits, context):
        super().__init__(policy, limits, context)
        self.context, self.limits_given = context, limits
        Seeing.seen = [self]

    def apply(self, plan, result, now):
        if plan.swapped_out:
            Seeing.seen.append(result)
        super().apply(plan, result, now)


def test_host_pools_and_costs_reach_the_scheduler():
    run(parse(TIGHT), scheduler=Seeing)
    scheduler, *results = Seeing.seen
    assert (scheduler.limits_given.host_blocks, scheduler.limits_given.disk_blocks) == (4, 2)
    assert scheduler.context.step_time.prefill_token == pytest.approx(5e-6)
    assert results
    assert all(result.copy_seconds == pytest.approx(2 * 100e-6) for result in results)


def test_a_step_that_copies_lasts_longer_where_steps_have_a_length():
    outcome = run(parse(TIGHT, {"cfg.step_ms": "5"}), scheduler=Copying)
    lengths = {row.step: after.time - row.time for row, after in zip(outcome.steps, outcome.steps[1:], strict=False)}
    copies = {row.step for row in outcome.steps if row.preempted}
    assert copies
    assert all(length == pytest.approx(0.0052 if step in copies else 0.005) for step, length in lengths.items())


def test_copies_take_no_time_where_steps_are_the_unit():
    outcome = run(parse(TIGHT), scheduler=Copying)
    assert [row.time for row in outcome.steps] == list(range(len(outcome.steps)))


def test_copied_blocks_are_counted_and_failed_ones_are_not():
    outcome = run(parse(TIGHT), scheduler=Copying)
    preempted = [victim["id"] for row in outcome.steps for victim in row.preempted]
    assert preempted
    for name, fate in outcome.requests.items():
        assert fate.swapped_blocks == 2 * preempted.count(name)

    def failing(**sizes):
        return ScriptedExecutor(**sizes, fail_copies=["A", "B"])

    outcome = run(parse(TIGHT), scheduler=Copying, executor=failing)
    assert all(fate.swapped_blocks == 0 for fate in outcome.requests.values())


def test_the_double_has_the_pools_of_the_file():
    made = []

    def keeping(**sizes):
        made.append(ScriptedExecutor(**sizes))
        return made[-1]

    run(parse(TIGHT), executor=keeping)
    assert (made[0].host_blocks, made[0].disk_blocks) == (4, 2)
