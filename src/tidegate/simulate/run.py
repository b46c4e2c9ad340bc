"""A simulated run: requests of a workload arrive at one engine or at several, on a virtual clock.

Every engine is the production `Scheduler` with a pool, a policy and a clock of its own; the cost model says how
long its steps take. Nothing is random, so a run repeats to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from tidegate.core.events import Event
from tidegate.core.limits import Limits
from tidegate.core.policy import Policy, PolicyContext
from tidegate.core.predict import HistoryPredictor, Predictor
from tidegate.core.scheduler import Scheduler
from tidegate.core.slo import DEFAULT_CLASSES, SloClass
from tidegate.executors.sim.cost import CostModel
from tidegate.executors.sim.executor import SimExecutor
from tidegate.executors.sim.step_time import CostTime
from tidegate.observe.records import Record, Recorder
from tidegate.simulate.arrivals import arrivals
from tidegate.simulate.instance import Instance, Observer, StepSink
from tidegate.simulate.workload import WorkloadRequest

RecordSink: TypeAlias = Callable[[list[Record]], None]


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What each engine of a run is made of. Every engine gets a predictor of its own."""

    policy: Policy
    limits: Limits
    cost: CostModel
    predictor: Callable[[], Predictor] = HistoryPredictor

    def scheduler(self) -> tuple[Scheduler, SimExecutor]:
        """A new engine."""
        executor = SimExecutor(self.cost, self.limits.block_size)
        step_time = CostTime(self.cost, self.limits.max_num_batched_tokens)
        context = PolicyContext(self.predictor(), step_time, copy_time=executor.copy_time())
        return Scheduler(self.policy, self.limits, context), executor


@dataclass(frozen=True, slots=True)
class Totals:
    """How much was simulated: requests that arrived, steps of all engines, and the time of the last result."""

    requests: int
    steps: int
    seconds: float


def simulate(
    workload: Iterable[WorkloadRequest],
    setup: EngineSetup,
    on_records: RecordSink,
    *,
    classes: Mapping[str, SloClass] = DEFAULT_CLASSES,
    declared: int | None = None,
    on_step: StepSink | None = None,
    observers: Sequence[Observer] = (),
    on_arrival: Callable[[int], None] | None = None,
    stepping: bool = False,
) -> Totals:
    """Simulate `workload` to its last result.

    on_records: takes the records of requests that ended, a few at a time, and may keep the list
    declared:   see `arrivals`
    on_step:    takes a row of every step
    observers:  each is told the events of every step
    on_arrival: told, now and then, how many requests have arrived
    stepping:   plan every single step, instead of taking those at once in which only decoding happens

    Memory holds only what waits and runs. Raises InputError for requests that make no sense.
    """
    scheduler, executor = setup.scheduler()
    told: tuple[Observer, ...] = (*observers, RecordObserver("0", on_records))
    instance = Instance("0", scheduler, executor, told, on_step, stepping)
    number = 0
    for number, r in enumerate(arrivals(workload, classes, setup.limits.block_size, declared), 1):
        instance.run_until(r.arrival)
        instance.add(r, r.arrival)
        if on_arrival is not None and not number % 256:
            on_arrival(number)
    instance.run_until(inf)
    if on_arrival is not None:
        on_arrival(number)
    return Totals(number, instance.steps, scheduler.ctx.now)


class RecordObserver:
    """Passes a record on for every request that ended."""

    __slots__ = ("_recorder", "_sink")

    def __init__(self, replica: str, sink: RecordSink) -> None:
        self._recorder = Recorder(replica)
        self._sink = sink

    def __call__(self, events: Sequence[Event]) -> None:
        recorder = self._recorder
        recorder.observe(events)
        if recorder.records:
            self._sink(recorder.records)
            recorder.records = []
