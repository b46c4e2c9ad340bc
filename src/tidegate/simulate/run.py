"""A simulated run: requests of a workload arrive at one engine or at several, on a virtual clock.

Every engine is the production `Scheduler` with a pool, a policy and a clock of its own; the cost model says how
long its steps take. Nothing is random, so a run repeats to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tidegate.core.events import Event, Finished, Rejected
from tidegate.core.limits import Limits
from tidegate.core.policy import Policy, PolicyContext
from tidegate.core.predict import HistoryPredictor, Predictor
from tidegate.core.scheduler import Scheduler
from tidegate.core.slo import DEFAULT_CLASSES, SloClass
from tidegate.errors import ConfigError
from tidegate.executors.sim.executor import SimExecutor
from tidegate.executors.sim.step_cost import StepCost
from tidegate.executors.sim.step_time import CostTime
from tidegate.observe.records import Record, Recorder
from tidegate.routing.route import Route
from tidegate.routing.speed import Speed
from tidegate.routing.view import ReplicaView
from tidegate.simulate.fleet import Fleet
from tidegate.simulate.incoming import Incoming
from tidegate.simulate.instance import Instance, Observer, StepSink
from tidegate.simulate.true_ends import TrueEnds
from tidegate.simulate.workload import WorkloadRequest

RecordSink: TypeAlias = Callable[[list[Record]], None]

TYPICAL_CHUNK = 2048
"""Tokens of the prefill step that says what a prompt token costs, as far as a route knows beforehand."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What each engine of a run is made of. Every engine gets a predictor of its own.

    depth: 1 plans a step when the one before it has ended, 2 when that begins, as `scheduler.pipeline_depth`
    """

    policy: Policy
    limits: Limits
    cost: StepCost
    predictor: Callable[[], Predictor] = HistoryPredictor
    depth: int = 1

    def scheduler(self) -> tuple[Scheduler, SimExecutor]:
        """A new engine."""
        executor = SimExecutor(self.cost, self.limits.block_size)
        step_time = CostTime(self.cost, self.limits.max_num_batched_tokens)
        context = PolicyContext(self.predictor(), step_time, copy_time=executor.copy_time())
        return Scheduler(self.policy, self.limits, context), executor


@dataclass(frozen=True, slots=True)
class FleetSetup:
    """How many engines there are, and how requests come to them.

    pools: the name and the engines of each pool; one without a name where there is nothing to tell apart
    route: builds the route. None for one engine
    route_name: what results call it
    """

    pools: Sequence[tuple[str, int]] = (("", 1),)
    route: Callable[[], Route] | None = None
    route_name: str | None = None

    @property
    def engines(self) -> int:
        """How many there are in all."""
        return sum(engines for _, engines in self.pools)

    def views(self, limits: Limits, token_s: float) -> list[ReplicaView]:
        """What is known of each engine beforehand: what it holds, and what seconds a prompt token probably takes.

        Raises ConfigError for several engines without a route.
        """
        pools = [pool for pool, engines in self.pools for _ in range(engines)]
        if not pools or (len(pools) > 1 and self.route is None):
            raise ConfigError(f"{len(pools)} engines need a route")
        seats, tokens, typical = limits.max_num_seqs, limits.pool_tokens, Speed(token_s=token_s)
        return [ReplicaView(str(n), pool, seats, tokens, Speed(typical)) for n, pool in enumerate(pools)]


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
    fleet: FleetSetup = FleetSetup(),
    classes: Mapping[str, SloClass] = DEFAULT_CLASSES,
    declared: int | None = None,
    on_step: StepSink | None = None,
    observers: Sequence[Observer] = (),
    on_arrival: Callable[[int], None] | None = None,
    stepping: bool = False,
) -> Totals:
    """Simulate `workload` to its last result.

    on_records: takes the records of requests that ended, a few at a time, and may keep the list
    declared:   outputs that every request declares, see `Incoming`
    on_step:    takes a row of every step
    observers:  each is told the events of every step of every engine
    on_arrival: told, now and then, how many requests have arrived
    stepping:   plan every single step, instead of taking those at once in which only decoding happens

    Memory holds only what waits and runs. Raises InputError for requests that make no sense.
    """

    arriving = Incoming(workload, classes, setup.limits.block_size, declared)

    def ended(events: Sequence[Event], replica: str) -> None:
        for event in events:
            if isinstance(event, Finished | Rejected):
                arriving.ended(event.request.id, event.now)

    def build(view: ReplicaView, told: Sequence[Observer]) -> Instance:
        scheduler, executor = setup.scheduler()
        watchers: list[Observer] = [*told, RecordObserver(view.name, on_records)]
        if arriving.loops:
            watchers.append(ended)
        ends = None if declared is None else TrueEnds()
        return Instance(view.name, scheduler, executor, observers, watchers, on_step, stepping, ends, setup.depth)

    token_s = setup.cost.prefill_seconds(TYPICAL_CHUNK) / TYPICAL_CHUNK
    route = None if fleet.route is None else fleet.route()
    engines = Fleet(fleet.views(setup.limits, token_s), route, build)
    engines.run(arriving, on_arrival)
    return Totals(arriving.taken, engines.steps, max(i.scheduler.ctx.now for i in engines.instances))


class RecordObserver:
    """Passes a record on for every request that ended."""

    __slots__ = ("_recorder", "_sink")

    def __init__(self, replica: str, sink: RecordSink) -> None:
        self._recorder = Recorder(replica)
        self._sink = sink

    def __call__(self, events: Sequence[Event], replica: str) -> None:
        recorder = self._recorder
        recorder.observe(events)
        if recorder.records:
            self._sink(recorder.records)
            recorder.records = []
