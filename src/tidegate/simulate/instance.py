"""One simulated engine: a real scheduler on a virtual clock, and the cost model in place of an accelerator."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import inf
from typing import TypeAlias

from tidegate.core.events import Event
from tidegate.core.plan import StepPlan, StepResult
from tidegate.core.quiet import QuietSteps
from tidegate.core.request import Request
from tidegate.core.scheduler import Scheduler
from tidegate.errors import RequestRefused
from tidegate.executors.sim.executor import SimExecutor
from tidegate.observe.steplog import StepRow, causal_pairs
from tidegate.simulate.true_ends import TrueEnds

Observer: TypeAlias = Callable[[Sequence[Event], str], None]
"""Takes the events of a step, and the name of the engine."""
StepSink: TypeAlias = Callable[[StepRow], None]

STUCK_AFTER = 3
"""Empty plans in a row, with nobody to come and no time to wait for, after which the scheduler is at fault."""


class Instance:
    """Plans, waits as long as the step takes, applies: `run_until` a time, `add` a request, and so on.

    A result at the very time of an arrival comes before it, a plan after it. Steps in which only decoding happens
    are taken at once (`Scheduler.quiet_steps`) unless `stepping`; the outcome is the same to the last bit.

    observers: each is told the events of every step in order
    watchers:  each is told the same, but for the tokens of quiet steps
    on_step:   takes a row of every step
    ends:      ends requests that declared more outputs than they have; None where nobody does
    depth:     2 plans each step when the one before it begins, as `engine.loop.Engine` does, or, where it is a quiet
               one, when somebody arrives, who alone could tell
    """

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        executor: SimExecutor,
        observers: Sequence[Observer],
        watchers: Sequence[Observer],
        on_step: StepSink | None = None,
        stepping: bool = False,
        ends: TrueEnds | None = None,
        depth: int = 1,
    ) -> None:
        self.name = name
        self.scheduler = scheduler
        self.steps = 0
        self._executor = executor
        self._observers = (*observers, *watchers)
        self._tells_tokens = bool(observers)
        self._on_step = on_step
        self._stepping = stepping
        self._ends_of = ends
        self._depth = depth
        self._next = inf  # when to plan
        self._step: tuple[StepPlan, StepResult] | None = None  # in flight
        self._start, self._end = -inf, inf  # of that
        self._ahead: tuple[StepPlan, StepResult, float] | None = None  # the step after it, and its seconds
        self._busy_until = 0.0  # with steps that are done with
        self._quiet: QuietSteps | None = None  # a span of steps that is under way
        self._begin = 0.0  # of that
        self._ends: list[float] = []  # of its steps, as far as they were looked at
        self._empty = 0
        self._arrived = False  # whether somebody has since the last plan

    def run_until(self, until: float) -> bool:
        """Do what is due before `until` (seconds), and take results that come at it; whether there was anything."""
        done = False
        while True:
            if self._step is not None:
                if self._end > until:
                    return done
                self._apply(*self._step)
            elif self._quiet is not None:
                self._executor.extend(self._ends, self._quiet, self._begin, until)
                if self._ends[-1] > until or not self._looked_through(self._quiet):
                    return done
                self._pass(self._quiet, self._ends)
            elif self._next >= until:
                return done
            else:
                self._plan(self._next)
            done = True

    def next_event(self, until: float) -> float:
        """When something happens next that is due before `until` or comes at it (seconds): a result, or a plan."""
        if self._step is not None:
            return self._end
        if self._quiet is not None:
            self._executor.extend(self._ends, self._quiet, self._begin, until)
            return self._ends[-1]
        return self._next

    def add(self, r: Request, now: float) -> None:
        """`r` arrives. `run_until` has been called with `now` (seconds)."""
        if self._quiet is not None:
            self._interrupt(self._quiet, now)
        self._arrived = True
        self._plan_ahead(self._start)
        try:
            self.scheduler.add(r, now)
        except RequestRefused:  # told as an event
            self._tell()
        else:
            if self._ends_of is not None:
                self._ends_of.watch(r)
        if self._step is None:
            self._next = max(self._busy_until, min(self._next, now))
        else:
            self._plan_ahead(now)

    def _plan(self, now: float, stepping: bool = False) -> None:
        """Begin the next step, or a span of quiet ones."""
        arrived, self._arrived = self._arrived, False
        if not (arrived or stepping or self._stepping):  # whoever arrived is likely to begin
            quiet = self._quiet_steps(now)
            if quiet.steps > 0:
                self._quiet, self._begin, self._ends, self._next = quiet, now, [], inf
                return
        planned = self._planned(now, now)
        if planned is None:
            self._rest(now)
        else:
            self._begin_step(planned, now)

    def _plan_ahead(self, now: float) -> None:
        """At depth 2: plan what follows the step in flight, if that was not done and there is something to plan."""
        if self._depth == 2 and self._step is not None and self._ahead is None:
            self._ahead = self._planned(now, self._end)

    def _planned(self, now: float, start: float) -> tuple[StepPlan, StepResult, float] | None:
        """The plan of the next step, which begins at `start`; its result, and its seconds. None if it is empty."""
        seated = 0 if self._on_step is None else len(self.scheduler.running)
        plan = self.scheduler.plan(now)
        if not plan:
            return None
        result, seconds = self._executor.run(plan)
        if self._ends_of is not None:
            result.finished = self._ends_of.of(plan)
        self.steps += 1
        if self._on_step is not None:
            self._on_step(self._row(plan, start, seconds, seated))
        return plan, result, seconds

    def _begin_step(self, planned: tuple[StepPlan, StepResult, float], now: float) -> None:
        plan, result, seconds = planned
        self._step, self._start, self._end, self._next, self._empty = (plan, result), now, now + seconds, inf, 0
        self._ahead = None
        if self._depth == 2 and (self._stepping or result.finished or not self.scheduler.quiet_next(now)):
            self._plan_ahead(now)

    def _quiet_steps(self, now: float) -> QuietSteps:
        """At depth 2 the last one is not among them: in it what follows is planned."""
        quiet = self.scheduler.quiet_steps(now)
        most = quiet.steps if self._ends_of is None or self._ends_of.quiet is None else self._ends_of.quiet
        if self._depth == 2:
            return quiet._replace(steps=min(quiet.steps - quiet.ends, most) - 1, ends=False)
        return quiet if most >= quiet.steps else quiet._replace(steps=most, ends=False)

    def _rest(self, now: float) -> None:
        """Nothing can be computed: until time changes that, or somebody arrives."""
        self._tell()
        if not self.scheduler.has_work:
            self._next = inf
            return
        wake = self.scheduler.next_wake(now)
        self._empty += 1
        if wake is None or wake == inf:
            if self._empty >= STUCK_AFTER:
                raise RuntimeError(
                    f"instance {self.name} is stuck: requests wait, nothing runs, and nothing is to come"
                )
            wake = now
        self._next = wake

    def _apply(self, plan: StepPlan, result: StepResult) -> None:
        self.scheduler.apply(plan, result, self._end)
        now, self._step = self._end, None
        if self._ahead is None:
            self._next, self._end = now, inf
        else:
            self._begin_step(self._ahead, now)
        self._tell()

    def _looked_through(self, quiet: QuietSteps) -> bool:
        """Whether the ends of all steps of the span are known."""
        return len(self._ends) == quiet.steps or self._ends[-1] >= quiet.until

    def _interrupt(self, quiet: QuietSteps, now: float) -> None:
        """Somebody arrives within the span: end it after its last whole step; one that has begun goes on.

        Where nobody hears of its tokens, nobody ends with it and no step is planned while it runs, that one is done
        with as well: whoever arrives meanwhile changes nothing in it and finds what it would have found; only the order
        of events would tell.
        """
        whole = bisect_right(self._ends, now)
        begun = (self._ends[whole - 1] if whole else self._begin) < now
        ending = quiet.ends and whole + 1 == quiet.steps
        if begun and self._depth == 1 and not (self._tells_tokens or ending):
            self._pass(quiet, self._ends[: whole + 1])
            return
        self._pass(quiet, self._ends[:whole])
        if begun:
            self._plan(self._next, stepping=True)

    def _pass(self, quiet: QuietSteps, ends: list[float]) -> None:
        """Take the first steps of the span, which end at `ends`, and leave it."""
        self._quiet, self._next = None, ends[-1] if ends else self._begin
        if not ends:
            return
        self._busy_until = ends[-1]
        self.steps += len(ends)
        if self._ends_of is not None:
            self._ends_of.pass_steps(len(ends))
        rows = [] if self._on_step is None else self._quiet_rows(quiet, ends)
        self.scheduler.pass_steps(ends, [0] * quiet.decodes if self._tells_tokens else None)
        if self._on_step is not None:
            if quiet.ends and len(ends) == quiet.steps:
                rows[-1] = rows[-1]._replace(free_blocks=self.scheduler.kv.available)
            for row in rows:
                self._on_step(row)
        self._tell()

    def _tell(self) -> None:
        events = self.scheduler.take_events()
        if events:
            for observer in self._observers:
                observer(events, self.name)

    def _row(self, plan: StepPlan, start: float, seconds: float, seated: int) -> StepRow:
        scheduler = self.scheduler
        return StepRow(
            start_s=start,
            seconds=seconds,
            prefill_tokens=sum(chunk.length for chunk in plan.chunks),
            decodes=len(plan.decodes),
            context_tokens=plan.context,
            running=seated + len(plan.admitted) + len(plan.restored) - len(plan.preempted),
            waiting=len(scheduler.waiting),
            free_blocks=scheduler.kv.available,
            preempted=len(plan.preempted),
            replica=self.name,
            prefill_context=sum(chunk.start for chunk in plan.chunks),
            prefill_pairs=sum(causal_pairs(chunk.start, chunk.length) for chunk in plan.chunks),
        )

    def _quiet_rows(self, quiet: QuietSteps, ends: Sequence[float]) -> list[StepRow]:
        """Rows of the first steps of the span, which end at `ends`, before they are taken."""
        rows: list[StepRow] = []
        scheduler, step_seconds = self.scheduler, self._executor.cost.step_seconds
        running, waiting, free = len(scheduler.running), len(scheduler.waiting), scheduler.kv.available
        n, context, start = quiet.decodes, quiet.context, self._begin
        growth = scheduler.running.decodes.crossings()
        for step, end in enumerate(ends):
            free -= growth[step % len(growth)]
            seconds = step_seconds(decodes=n, context=context)
            rows.append(StepRow(start, seconds, 0, n, context, running, waiting, free, 0, self.name, 0, 0))
            context += n
            start = end
        return rows
