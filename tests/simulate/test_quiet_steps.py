"""Steps taken at once must leave behind what the same steps leave that are planned and applied one by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tidegate.core.events import Event, Finished
from tidegate.core.limits import Limits
from tidegate.core.policy import PolicyContext
from tidegate.core.predict import HistoryPredictor, StepTime
from tidegate.core.presets import PRESETS, build_policy
from tidegate.core.quiet import LOUD
from tidegate.core.request import FinishReason, Request
from tidegate.core.scheduler import Scheduler
from tidegate.core.slo import NO_SLO, Slo, SloClass
from tidegate.core.step_time import LearnedStepTime
from tidegate.executors.sim.cost import CostModel
from tidegate.executors.sim.hardware import find_hardware
from tidegate.executors.sim.kernel_tables import KernelTables
from tidegate.executors.sim.models import find_model
from tidegate.executors.sim.step_cost import StepCost
from tidegate.observe.records import Record
from tidegate.observe.steplog import StepRow
from tidegate.simulate.run import EngineSetup, simulate
from tidegate.simulate.workload import WorkloadRequest

COST = CostModel(find_hardware("h100"), find_model("llama-3.1-8b"), host_overhead=1e-3)
PARAMS: dict[str, dict[str, Any]] = {"sjf": {"aging_window": 5.0}, "fair": {}, "joint": {"aging_window": 3.0}}
CLASSES = ("interactive", "completion", "offline", "batch")


def load(seed: int, count: int, rate: float, prompt: int = 900, outputs: int = 120) -> list[WorkloadRequest]:
    """Bursts of mixed classes and tenants, some of which share prefixes."""
    rng = random.Random(seed)
    requests, at = [], 0.0
    for _ in range(count):
        at += rng.expovariate(rate) if rng.random() < 0.8 else 0.0
        tokens = rng.randint(1, prompt)
        family = rng.randrange(6)
        ids = tuple((family * 1000 + i) if i < 3 else rng.randrange(10**9) for i in range(-(-tokens // 128)))
        requests.append(
            WorkloadRequest(
                at,
                tokens,
                max(1, int(rng.expovariate(1 / outputs))),
                tenant=f"t{rng.randrange(3)}",
                slo_class=rng.choice(CLASSES),
                hash_ids=ids if rng.random() < 0.7 else (),
                hash_block_tokens=128,
            )
        )
    return requests


def flattened(event: Event) -> tuple[Any, ...]:
    """An event with ids in place of the live requests, which go on changing."""

    def plain(value: Any) -> Any:
        if isinstance(value, Request):
            return value.id
        if isinstance(value, list):
            return [plain(v) for v in value]
        return tuple(map(plain, value)) if isinstance(value, tuple) else value

    return (type(event).__name__, *map(plain, event))


def outcome(
    requests: list[WorkloadRequest], setup: EngineSetup, stepping: bool, observed: bool = True, **given: Any
) -> tuple[list[Record], list[StepRow], list[tuple[Any, ...]]]:
    records: list[Record] = []
    rows: list[StepRow] = []
    events: list[tuple[Any, ...]] = []

    def observe(seen: Sequence[Event], replica: str) -> None:
        events.extend(map(flattened, seen))

    simulate(
        requests,
        setup,
        records.extend,
        on_step=rows.append,
        observers=[observe] if observed else [],
        stepping=stepping,
        **given,
    )
    return records, rows, events


def setup(policy: str, **limits: Any) -> EngineSetup:
    known = {**PRESETS[policy].limits, "num_blocks": 400, "max_num_seqs": 12, "max_num_batched_tokens": 512, **limits}
    return EngineSetup(build_policy(policy, PARAMS.get(policy)), Limits(**known), COST)


@pytest.mark.parametrize("rate", [3.0, 40.0], ids=["light", "heavy"])
@pytest.mark.parametrize("policy", sorted(PRESETS))
def test_the_outcome_is_that_of_stepping_to_the_last_bit(policy: str, rate: float) -> None:
    requests = load(7, 150, rate)
    fast, slow = outcome(requests, setup(policy), False), outcome(requests, setup(policy), True)
    for one, other in zip(fast, slow, strict=True):
        assert one == other
    assert len(fast[0]) == len(requests)
    assert outcome(requests, setup(policy), False, observed=False)[:2] == slow[:2]


@pytest.mark.parametrize(
    "limits",
    [
        {"num_blocks": 90},
        {"num_blocks": 90, "headroom": "none"},
        {"num_blocks": 120, "headroom": "quantile"},
        {"num_blocks": 120, "headroom": "declared"},
        {"num_blocks": 90, "headroom": "none", "host_blocks": 60},
        {"num_blocks": 3000, "max_num_seqs": 64},
        {"max_resources": 2},
        {"prefix_caching": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", ["joint", "priority", "vllm-v1"])
def test_so_it_is_where_memory_is_short_or_plenty(policy: str, limits: dict[str, Any]) -> None:
    for seed in range(2):
        requests = load(seed, 80, 25.0)
        slow = outcome(requests, setup(policy, **limits), True)
        assert outcome(requests, setup(policy, **limits), False) == slow
        assert outcome(requests, setup(policy, **limits), False, observed=False)[:2] == slow[:2]


class Warming(StepCost):
    """Steps that grow shorter as contexts grow, as measured kernels may."""

    validated = False

    def step_seconds(self, chunks: Iterable[tuple[int, int]] = (), decodes: int = 0, context: int = 0) -> float:
        tokens = decodes + sum(length for _, length in chunks)
        return 0.01 / (1 + context / 500) + 1e-5 * tokens if tokens else 0.0


OTHERS: dict[str, Callable[[], StepCost]] = {
    "kernel tables": lambda: KernelTables(COST.hardware, COST.model, host_overhead=1e-3),
    "kernel tables, two GPUs": lambda: KernelTables(COST.hardware, COST.model, tp=2, backend="sglang"),
    "warming": lambda: Warming("warming", COST.hardware, COST.model),
}


@pytest.mark.parametrize("policy", ["joint", "priority", "vllm-v1"])
@pytest.mark.parametrize("cost", OTHERS)
def test_so_it_is_with_other_cost_models(policy: str, cost: str) -> None:
    for num_blocks, rate in ((400, 3.0), (90, 25.0)):
        priced = replace(setup(policy, num_blocks=num_blocks), cost=OTHERS[cost]())
        requests = load(3, 80, rate)
        slow = outcome(requests, priced, True)
        assert outcome(requests, priced, False) == slow
        assert outcome(requests, priced, False, observed=False)[:2] == slow[:2]


def test_pools_that_are_short_were_met() -> None:
    """The cases above hold for nothing unless somebody is preempted in them."""
    records, rows, _events = outcome(load(1, 80, 25.0), setup("priority", num_blocks=90, headroom="none"), False)
    assert sum(r.preemptions or 0 for r in records) > 5
    assert sum(row.preempted for row in rows) == sum(r.preemptions or 0 for r in records)


@pytest.mark.parametrize(("tpot", "gap"), [(0.0083, 0.4), (0.0086, 0.4), (0.0096, 0.0), (0.0098, 0.0), (0.0101, 0.0)])
@pytest.mark.parametrize("policy", ["joint", "sla"])
def test_decodes_take_turns_at_the_same_steps(policy: str, tpot: float, gap: float) -> None:
    """Contexts grow in a quiet span, until those who were promised nothing have to skip steps."""
    classes = {"interactive": SloClass("interactive", Slo(tpot=tpot)), "batch": SloClass("batch", NO_SLO, 10)}
    rng = random.Random(2)
    requests = [
        WorkloadRequest(
            i * gap, rng.randint(50, 900), 600 if not gap else 300, slo_class="interactive" if i % 8 == 0 else "batch"
        )
        for i in range(60 if gap else 40)
    ]
    wide = setup(policy, num_blocks=8000, max_num_seqs=64)
    fast, slow = (outcome(requests, wide, stepping, classes=classes) for stepping in (False, True))
    assert fast == slow
    assert any(0 < row.decodes < row.running - 4 and not row.prefill_tokens for row in slow[1])


def test_most_steps_of_a_light_load_are_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    plan = Scheduler.plan
    monkeypatch.setattr(Scheduler, "plan", lambda self, now: planned.append(now) or plan(self, now))
    _, rows, _ = outcome(load(3, 100, 2.0), setup("joint"), False)
    assert len(planned) < len(rows) / 4


def engine(step_time: Any = None, **given: Any) -> Scheduler:
    ctx = PolicyContext(HistoryPredictor(), step_time or StepTime())
    return Scheduler(build_policy("fcfs"), Limits(64, max_num_seqs=4, headroom="none"), ctx)


def decoding(scheduler: Scheduler, *requests: Request) -> None:
    """All of `requests` decode from now on, at 1 s."""
    from tidegate.core.plan import StepResult

    for r in requests:
        scheduler.add(r, 0.0)
    plan = scheduler.plan(0.0)
    scheduler.apply(plan, StepResult([0] * len(requests), seconds=1.0), 1.0)


def test_quiet_steps_end_with_a_last_token() -> None:
    scheduler = engine()
    decoding(scheduler, Request("a", prompt_tokens=10, max_tokens=20), Request("b", prompt_tokens=10, max_tokens=50))
    quiet = scheduler.quiet_steps(1.0)
    assert (quiet.steps, quiet.ends, quiet.decodes, quiet.context) == (19, True, 2, 22)
    assert sum(scheduler.running.decodes.crossings()) == 2
    scheduler.pass_steps([2.0 + i for i in range(19)], None)
    (ended,) = [e for e in scheduler.take_events() if isinstance(e, Finished)]
    assert (ended.request.id, ended.now, ended.reason, ended.request.emitted) == ("a", 20.0, FinishReason.LENGTH, 20)
    scheduler.kv.check()
    assert [r.id for r in scheduler.running.members] == ["b"]
    assert scheduler.quiet_steps(20.0)[:2] == (30, True)


def test_quiet_steps_end_where_blocks_do() -> None:
    scheduler = Scheduler(build_policy("fcfs"), Limits(3, headroom="none", oversize="clip"), engine().ctx)
    decoding(scheduler, Request("a", prompt_tokens=16), Request("b", prompt_tokens=16))
    assert scheduler.quiet_steps(1.0) is LOUD  # both cross at once and one block is left


def test_a_wake_bounds_them_in_time() -> None:
    scheduler = engine()
    decoding(scheduler, Request("a", prompt_tokens=10, max_tokens=50))
    scheduler.add(Request("later", prompt_tokens=10, max_tokens=5, not_before=7.5), 1.0)
    assert scheduler.quiet_steps(1.0).until == 7.5
    assert scheduler.quiet_steps(7.5) is LOUD


def test_nothing_is_quiet_with_a_step_in_flight_or_a_prompt_to_compute() -> None:
    scheduler = engine()
    decoding(scheduler, Request("a", prompt_tokens=10, max_tokens=50))
    scheduler.add(Request("b", prompt_tokens=10, max_tokens=5), 1.0)
    assert scheduler.quiet_steps(1.0) is LOUD
    scheduler.plan(1.0)
    assert scheduler.quiet_steps(1.0) is LOUD


@pytest.mark.parametrize("what", ["token ids", "learning"])
def test_hosts_that_need_each_result_get_none(what: str) -> None:
    scheduler = engine(LearnedStepTime() if what == "learning" else None)
    prompt = {"token_ids": range(10)} if what == "token ids" else {"prompt_tokens": 10}
    decoding(scheduler, Request("a", max_tokens=50, **prompt))  # type: ignore[arg-type]
    assert scheduler.quiet_steps(1.0) is LOUD


def test_pool_and_counters_are_right_afterwards() -> None:
    scheduler = engine()
    decoding(scheduler, Request("a", prompt_tokens=10, max_tokens=50), Request("b", prompt_tokens=30, max_tokens=50))
    before = scheduler.kv.available
    quiet = scheduler.quiet_steps(1.0)
    assert quiet.steps == 49
    scheduler.pass_steps([2.0 + i for i in range(48)], [0, 0])
    scheduler.kv.check()
    assert before - scheduler.kv.available == 3 + 3  # 58 and 78 tokens, in 1 and 2 blocks so far
    a, b = scheduler.running.members
    assert (a.computed, a.emitted, b.planned, b.sampled) == (58, 49, 78, 49)
    assert scheduler.quiet_steps(50.0)[:2] == (1, True)  # the last
    scheduler.pass_steps([50.5], [0, 0])
    assert not scheduler.has_work
    assert scheduler.kv.available == 64
    assert scheduler.quiet_steps(51.0) is LOUD


def test_the_costs_are_those_of_the_model() -> None:
    _, rows, _ = outcome(load(5, 40, 3.0), setup("fcfs"), False)
    decode_rows = [row for row in rows if not row.prefill_tokens]
    assert len(decode_rows) > 100
    for row in decode_rows:
        assert row.seconds == COST.step_seconds(decodes=row.decodes, context=row.context_tokens)


def test_a_class_that_ages_is_looked_at_in_time() -> None:
    """Keys that time changes end a quiet span: a batch request overtakes when its time has come."""
    policy = build_policy("joint", {"aging_window": 0.5})
    few = replace(setup("joint", max_num_seqs=2), policy=policy)
    requests = load(11, 60, 30.0)
    assert outcome(requests, few, False) == outcome(requests, few, True)
