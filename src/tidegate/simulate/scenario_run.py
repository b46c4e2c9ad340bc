"""Runs a scenario step by step on the real scheduler and the scripted executor, and records every step.

One step lasts one time unit unless the scenario gives steps a length (`step_ms`). In step `n` the
requests with `t == n` arrive, a step is planned, executed and applied, and requests with
`cancel == n` are aborted after that: they may compute in step n and not in step n+1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tidegate.config.idle import Scheduling, idle_scheduling
from tidegate.core.copy_time import CopyTime
from tidegate.core.events import Admitted, Arrived, Emitted, Event, Finished, Preempted, Rejected, Restored
from tidegate.core.explain import seated
from tidegate.core.limits import Limits
from tidegate.core.plan import StepPlan, StepResult
from tidegate.core.policies.doors import QueueLimit
from tidegate.core.policy import Policy, PolicyContext
from tidegate.core.predict import OraclePredictor, Predictor
from tidegate.core.presets import DEFAULT_POLICY, PRESETS, Preset, compose, parameters
from tidegate.core.request import Request
from tidegate.core.scheduler import Scheduler
from tidegate.custom import find_policy, is_own
from tidegate.errors import ConfigError, InputError, RequestRefused
from tidegate.executors.scripted import Script, ScriptedExecutor
from tidegate.predictors.choice import build_predictor
from tidegate.simulate.formula_time import FormulaTime
from tidegate.simulate.nearest import nearest
from tidegate.simulate.scenario import LIMIT_KEYS, Scenario, ScenarioConfig, ScenarioRequest, place

if TYPE_CHECKING:
    from tidegate.observe.trace import TraceWriter

TIMING_KEYS = ("queued", "ttft", "tpot", "max_gap", "p99_gap", "e2e", "preempted")
"""What an outcome tells of `Timing`, in seconds: not each gap."""

STUCK_AFTER = 3
"""Empty steps in a row, with nothing to come, after which a run is over although requests wait."""


@dataclass(slots=True)
class Step:
    """One row of a run. `free_blocks`, `waiting` and `running` are as planned, before the step's ends.

    `free_blocks` counts cached blocks that nobody holds; `waiting` counts everybody who has arrived
    and has no seat, the preempted and the blocked included. `why` says of everybody who took a seat for
    what reason.
    """

    step: int
    time: float
    scheduled: dict[str, int] = field(default_factory=dict)
    emitted: dict[str, int] = field(default_factory=dict)
    admitted: list[str] = field(default_factory=list)
    preempted: list[dict[str, str]] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)
    why: dict[str, str] = field(default_factory=dict)
    rejected: list[dict[str, str]] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    free_blocks: int = 0
    waiting: int = 0
    running: int = 0
    held_back_by: str | None = None


@dataclass(slots=True)
class Fate:
    """What became of one request. Steps are indices, None where it never happened."""

    arrival_step: int
    admitted_step: int | None = None
    first_token_step: int | None = None
    finish_step: int | None = None
    finish_reason: str | None = None
    outputs: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    swapped_blocks: int = 0
    cached_tokens: int = 0
    max_gap_steps: int | None = None


@dataclass(slots=True)
class Wait:
    """Starvation of one priority, in time units: the longest first wait of a run, and who still waits."""

    longest: float = 0.0
    longest_id: str | None = None
    waiting_now: int = 0
    longest_now: float = 0.0
    longest_now_id: str | None = None


@dataclass(slots=True)
class Outcome:
    """A finished run. `to_json` is the stable form; `streams` are the token ids each client saw."""

    scenario: Scenario
    policy: str
    steps: list[Step]
    requests: dict[str, Fate]
    timing: dict[str, dict[str, Any]]
    waits: dict[str, Wait]
    stuck: bool
    streams: dict[str, list[int]]

    def to_json(self) -> dict[str, Any]:
        """The documented output of `tidegate scenario --json` (docs/scenarios.md)."""
        return {
            "scenario": self.scenario.id,
            "policy": self.policy,
            "steps_run": len(self.steps),
            "requests": {name: _as_dict(fate) for name, fate in self.requests.items()},
            "steps": [_as_dict(step) for step in self.steps],
            "timing": self.timing,
            "waits": {priority: _as_dict(wait) for priority, wait in self.waits.items()},
            "stuck": self.stuck,
        }


def run(
    scenario: Scenario,
    policy: str | Policy | None = None,
    *,
    max_steps: int | None = None,
    trace: TraceWriter | None = None,
    scheduler: Callable[[Policy, Limits, PolicyContext], Scheduler] = Scheduler,
    executor: Callable[..., ScriptedExecutor] = ScriptedExecutor,
) -> Outcome:
    """Run `scenario` to its end, or for `max_steps` steps.

    `policy` (a name, `package.module:NAME` too, or a whole policy) goes before the scenario's own. `trace` is told
    of every step and request. `scheduler` and `executor` are the classes to build, so that a test can put a broken
    one in their place.
    Raises InputError for an unknown policy or limits that contradict each other.
    """
    config = scenario.config
    chosen, preset = _policy(config, policy)
    copy_time = CopyTime() if config.copy_block_s is None else CopyTime(config.copy_block_s, config.copy_block_s)
    step_time = FormulaTime.of(config.step_ms, config.budget, config.prefill_token_s)
    context = PolicyContext(predictor=OraclePredictor(), step_time=step_time, copy_time=copy_time)
    limits = _limits(config, preset)
    _refuse_idle(config, chosen, limits, policy)
    planner = scheduler(chosen, limits, context)
    sizes = {"num_blocks": config.num_blocks, "block_size": config.block_size, "max_num_seqs": config.max_seqs}
    double = executor(**sizes, host_blocks=config.host_blocks, disk_blocks=config.disk_blocks)
    game = _Run(scenario, chosen.name, planner, double, trace)
    game.warm()
    context.predictor = _predictor(config)  # only now: what warmed the cache is no history
    return game.play(max_steps)


def _policy(config: ScenarioConfig, policy: str | Policy | None) -> tuple[Policy, Preset | None]:
    """The policy to run, and the preset that it is made from or named after."""
    found = policy if isinstance(policy, Policy) else _find(config, policy)
    preset = found if isinstance(found, Preset) else PRESETS.get(found.name)
    if isinstance(found, Preset):
        name = str(policy or config.policy or DEFAULT_POLICY)
        _check_params(name, found, config.params)
        built = compose(name, found, {**config.door, **config.params})
    else:
        built = found
        if config.door:
            built = replace(built, admit=QueueLimit(**config.door))
    if config.mixed_batches is not None:
        built = replace(built, features=replace(built.features, mixed_batches=config.mixed_batches))
    return built, preset


def _refuse_idle(config: ScenarioConfig, chosen: Policy, limits: Limits, asked: str | Policy | None) -> None:
    """Raise ConfigError for what the file or the command line says and that does nothing beside the rest."""
    host = bool(limits.host_blocks or limits.disk_blocks)
    written = config.written | ({"cfg.policy"} if asked is not None else set())
    for said, why in idle_scheduling(Scheduling(limits, chosen, host), chosen.name, place).items():
        if said in written:
            raise ConfigError(f"{said} does nothing {why}")


def _find(config: ScenarioConfig, wanted: str | None) -> Preset | Policy:
    """What the name `wanted` stands for, or else the one in the scenario."""
    name = wanted or config.policy or DEFAULT_POLICY
    if is_own(name):
        if wanted is None:
            raise InputError(f"cfg.policy names code, {name!r}, which only the option --policy may")
        found = find_policy(name)
        if isinstance(found, Policy) and config.params:
            raise InputError(f"cfg.params does nothing: policy {name} is whole and has no parameters")
        return found
    if name not in PRESETS:
        raise InputError(f"unknown policy {name!r}; {nearest(name, tuple(PRESETS))}")
    return PRESETS[name]


def _check_params(policy: str, preset: Preset, params: Mapping[str, Any]) -> None:
    """Every parameter is one that policies have, and of its type."""
    hints = parameters(preset)
    for name, value in params.items():
        if name not in hints:
            raise InputError(f"policy {policy} has no parameter {name!r}; {nearest(name, tuple(hints))}")
        try:
            TypeAdapter(hints[name], config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError as error:
            wanted = error.errors()[0]["msg"].removeprefix("Input should be ")
            raise InputError(f"cfg.params.{name} is {wanted}, not {value!r}") from None


def _limits(config: ScenarioConfig, preset: Preset | None) -> Limits:
    """The scenario's limits; what only a preset of a known design says is taken from that."""
    known = preset.limits if preset is not None else {}
    further = {key: value for key, value in known.items() if key in LIMIT_KEYS} | dict(config.limits)
    return Limits(
        max_num_seqs=config.max_seqs,
        max_num_batched_tokens=config.budget,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        headroom=config.headroom,
        oversize=config.oversize,
        partial_prefills=config.partial_prefills,
        prefix_caching=config.prefix_caching,
        host_blocks=config.host_blocks,
        disk_blocks=config.disk_blocks,
        draft_tokens=config.draft,
        **further,
    )


def _predictor(config: ScenarioConfig) -> Predictor:
    """The predictor that the scenario asks for, fed with the history that it brings."""
    predictor = build_predictor(config.predictor)
    for prompt, outputs in config.history:
        predictor.observe(Request("history", prompt_tokens=prompt, max_tokens=outputs), outputs)
    return predictor


def _as_dict(row: Step | Fate | Wait) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__slots__}


class _Hashes:
    """Block hashes for prompts without token ids: plain numbers, equal where prefixes are equal."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._next = 0
        self._prefixes: dict[str, range] = {}

    def prefix(self, name: str, blocks: int) -> range:
        """The first `blocks` hashes of prefix `name`."""
        known = self._prefixes.get(name, range(0))
        if len(known) < blocks:
            if known:
                raise InputError(f"prefix {name!r} is used with {len(known)} blocks and with {blocks}")
            known = self._prefixes[name] = self._fresh(blocks)
        return known[:blocks]

    def prompt(self, spec: ScenarioRequest) -> Sequence[int]:
        """Hashes of the full blocks of a prompt: its prefix's, then its own."""
        blocks = spec.prompt // self.block_size
        shared = self.prefix(spec.prefix, spec.prefix_tokens // self.block_size) if spec.prefix else range(0)
        own = self._fresh(blocks - len(shared))
        return [*shared, *own] if shared else own

    def _fresh(self, count: int) -> range:
        start, self._next = self._next, self._next + count
        return range(start, self._next)


class _Run:
    """The state of one run: the loop, and the rows it fills."""

    def __init__(
        self,
        scenario: Scenario,
        policy: str,
        scheduler: Scheduler,
        executor: ScriptedExecutor,
        trace: TraceWriter | None = None,
    ) -> None:
        self.scenario = scenario
        self.trace = trace
        self.scheduler = scheduler
        self.executor = executor
        self.hashes = _Hashes(scenario.config.block_size)
        self.now = 0.0
        self.index = 0
        self.running: dict[str, None] = {}
        self.waiting: dict[str, None] = {}
        self.slots: dict[int, str] = {}
        self.requests: dict[str, Request] = {}
        self.last_emission: dict[str, int] = {}
        self.outcome = Outcome(scenario, policy, [], {}, {}, {}, False, {})

    def warm(self) -> None:
        """Bring resident prefixes into the cache: compute them before the first step, then forget who did."""
        for name, blocks in self.scenario.config.resident.items():
            tokens = blocks * self.scenario.config.block_size
            ghost = Request(
                f"prefix {name}",
                prompt_tokens=tokens,
                max_tokens=1,
                block_hashes=self.hashes.prefix(name, blocks),
                oracle_tokens=1,
                handle=Script(range(1)),
            )
            try:
                self.scheduler.add(ghost, self.now)
            except RequestRefused as refusal:
                raise InputError(f"{self.scenario.id}: prefix {name} does not fit: {refusal}") from None
            while plan := self.scheduler.plan(self.now):
                self.scheduler.apply(plan, self.executor.submit(plan).result(), self.now)
            self.scheduler.take_events()

    def play(self, max_steps: int | None) -> Outcome:
        arrivals = list(reversed(self.scenario.requests))
        cancels = _by_step(self.scenario.requests)
        empty = 0
        while arrivals or cancels or self.scheduler.has_work:
            if max_steps is not None and self.index >= max_steps:
                break
            if not arrivals and not cancels and empty >= STUCK_AFTER:
                self.outcome.stuck = True
                break
            row = Step(self.index, self.now)
            self.outcome.steps.append(row)
            while arrivals and arrivals[-1].arrival == self.index:
                self._arrive(arrivals.pop(), row)
            plan = self._step(row)
            for name in cancels.pop(self.index, ()):
                self.scheduler.abort(name, self.now)
            self._absorb(row)
            empty = 0 if plan or self._time_helps() else empty + 1
            self.index += 1
        self._close()
        return self.outcome

    def _step(self, row: Step) -> StepPlan:
        """Plan, execute, apply; time passes by the length of the step, an empty one included."""
        plan = self.scheduler.plan(self.now)
        self._absorb(row)
        self._note_plan(plan, row)
        prefill = sum(chunk.length for chunk in plan.chunks)
        formula = self.scenario.config.step_ms
        copying = self._copy_seconds(plan)
        decodes = len(plan.decodes) * (1 + plan.draft_tokens)
        seconds = 1.0 if formula is None else formula(decodes, prefill) / 1000.0
        started = self.now
        waiting, free = len(self.scheduler.waiting), self.scheduler.kv.available
        self.now += seconds + (0.0 if formula is None else copying)
        if plan:
            if self.trace is not None:
                self.trace.plan(plan, started, self.now - started, waiting=waiting, free_blocks=free)
            result = self.executor.submit(plan).result()
            result.seconds, result.copy_seconds = seconds, copying
            self._note_copies(plan, result)
            self.scheduler.apply(plan, result, self.now)
            self._absorb(row)
        return plan

    def _copy_seconds(self, plan: StepPlan) -> float:
        """What this plan's copies take, one after another."""
        each = self.scenario.config.copy_block_s or 0.0
        return each * sum(len(copy.device) for copy in (*plan.swapped_out, *plan.swapped_in))

    def _note_copies(self, plan: StepPlan, result: StepResult) -> None:
        for copy in plan.swapped_out:
            if copy.request_id not in result.failed_copies:
                self.outcome.requests[copy.request_id].swapped_blocks += len(copy.device)

    def _note_plan(self, plan: StepPlan, row: Step) -> None:
        for slot in plan.left:
            self.slots.pop(slot, None)
        for join in plan.joined:
            self.slots[join.slot] = join.request_id
        row.scheduled = {self.slots[slot]: 1 + plan.draft_tokens for slot in plan.decodes}
        row.scheduled |= {self.slots[chunk.slot]: chunk.length for chunk in plan.chunks}
        for name in row.scheduled:
            fate = self.outcome.requests[name]
            if fate.admitted_step is None:
                fate.admitted_step = row.step
        row.held_back_by = plan.held_back_by
        row.free_blocks = self.scheduler.kv.available
        row.waiting, row.running = len(self.waiting), len(self.running)

    def _arrive(self, spec: ScenarioRequest, row: Step) -> None:
        request = Request(
            spec.id,
            prompt_tokens=spec.prompt,
            max_tokens=spec.declared,
            arrival=self.now,
            tenant=spec.tenant,
            slo_class=spec.slo_class,
            priority=spec.priority,
            slo=spec.slo,
            block_hashes=self.hashes.prompt(spec),
            not_before=spec.blocked_until,
            queue_ttl=spec.queue_ttl,
            resource=spec.resource,
            oracle_tokens=spec.outputs,
            handle=Script(range(spec.outputs), stops=spec.outputs < spec.declared),
        )
        self.outcome.requests[spec.id] = Fate(arrival_step=row.step)
        self.outcome.streams[spec.id] = []
        self.requests[spec.id] = request
        try:
            self.scheduler.add(request, self.now)
        except RequestRefused as refusal:
            fate = self.outcome.requests[spec.id]
            fate.finish_step, fate.finish_reason = row.step, "refused"
            row.rejected.append({"id": spec.id, "reason": refusal.reason, "message": str(refusal)})

    def _absorb(self, row: Step) -> None:
        events = self.scheduler.take_events()
        if self.trace is not None:
            self.trace.events(events)
        for event in events:
            self._fold(event, row)

    def _fold(self, event: Event, row: Step) -> None:
        match event:
            case Arrived(request=r):
                self.waiting[r.id] = None
            case Admitted(request=r):
                row.admitted.append(r.id)
                row.why[r.id] = seated(Admitted, event.why)
                self._seat(r.id)
                self._end_of_wait(r.id, event.now - r.arrival)
            case Restored(request=r):
                row.restored.append(r.id)
                row.why[r.id] = seated(Restored, event.why)
                self._seat(r.id)
            case Preempted(request=r):
                row.preempted.append({"id": r.id, "mode": event.mode, "reason": event.reason})
                self.running.pop(r.id)
                self.waiting[r.id] = None
            case Emitted():
                self._emit(event, row)
            case Finished(request=r):
                row.finished.append(r.id)
                self.running.pop(r.id, None)
                if self.waiting.pop(r.id, r) is None and r.admitted_at is None:
                    self._end_of_wait(r.id, event.now - r.arrival)
                self._note_end(event, row)
            case Rejected():
                pass  # the exception of `add` said so

    def _seat(self, name: str) -> None:
        self.waiting.pop(name, None)
        self.running[name] = None

    def _emit(self, event: Emitted, row: Step) -> None:
        for request, token in zip(event.requests, event.tokens, strict=True):
            name, fate = request.id, self.outcome.requests[request.id]
            self.outcome.streams[name].append(token)
            row.emitted[name] = row.emitted.get(name, 0) + 1
            fate.outputs += 1
            if fate.first_token_step is None:
                fate.first_token_step = row.step
            else:
                fate.max_gap_steps = max(fate.max_gap_steps or 0, row.step - self.last_emission[name])
            self.last_emission[name] = row.step

    def _note_end(self, event: Finished, row: Step) -> None:
        fate = self.outcome.requests[event.request.id]
        fate.finish_step, fate.finish_reason = row.step, event.reason.value
        self.outcome.timing[event.request.id] = {
            **{name: getattr(event.timing, name) for name in TIMING_KEYS},
            "missed": list(event.missed),
        }

    def _end_of_wait(self, name: str, waited: float) -> None:
        wait = self._wait_of(name)
        if waited >= wait.longest:
            wait.longest, wait.longest_id = waited, name

    def _wait_of(self, name: str) -> Wait:
        return self.outcome.waits.setdefault(str(self.requests[name].priority), Wait())

    def _close(self) -> None:
        """At the end of a run: final counters, and how long those have waited who never got a seat."""
        for name, fate in self.outcome.requests.items():
            request = self.requests[name]
            fate.preemptions = request.preemptions
            fate.recomputed_tokens = request.recomputed_tokens
            fate.cached_tokens = request.cached_tokens
            if name in self.waiting and request.admitted_at is None:
                wait, waited = self._wait_of(name), self.now - request.arrival
                wait.waiting_now += 1
                if waited > wait.longest_now:
                    wait.longest_now, wait.longest_now_id = waited, name
                self._end_of_wait(name, waited)

    def _time_helps(self) -> bool:
        wake = self.scheduler.next_wake(self.now)
        return wake is not None and wake != float("inf")


def _by_step(requests: Sequence[ScenarioRequest]) -> dict[int, list[str]]:
    cancels: dict[int, list[str]] = {}
    for request in requests:
        if request.cancel is not None:
            cancels.setdefault(request.cancel, []).append(request.id)
    return cancels
