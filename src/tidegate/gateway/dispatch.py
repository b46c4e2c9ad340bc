"""Who goes to which engine, and when: jobs wait here, in order, until one has room for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, Protocol

from tidegate.api.errors import ApiError, refused, unserved
from tidegate.config import Config
from tidegate.core.policies.fairness import FairShare
from tidegate.core.policy import Grouping, PolicyContext
from tidegate.core.predict import Predictor, StepTime
from tidegate.core.request import FinishReason
from tidegate.core.view import LoadView, RequestView, Work
from tidegate.gateway.held import HeldJob, HeldQueue
from tidegate.gateway.job import Job
from tidegate.routing.choice import Choice
from tidegate.routing.pools import Pools
from tidegate.routing.route import Route
from tidegate.routing.speed import Speed
from tidegate.routing.view import ReplicaView

UNBOUNDED = 2**31
"""Tokens of a step: nobody outside an engine knows, and how fast it computes prompts was learned with all delays."""


class Engines(Protocol):
    """The engines, as far as whoever chooses among them is concerned. The fleet is that."""

    @property
    def pools(self) -> Set[str]:
        """Those that have an engine, up or not."""
        ...

    def candidates(self, now: float, avoid: Collection[str] = ()) -> Sequence[ReplicaView]:
        """Those that may be sent requests now, with room or without, but for those named in `avoid`."""
        ...

    def up(self, now: float) -> Sequence[ReplicaView]:
        """Those, and those that have asked for no requests for a while: they are busy, not down."""
        ...

    def on_room(self, callback: Callable[[], None]) -> None:
        """Call back when a request has ended, an engine has come, or one may be tried again."""
        ...

    def sent(self, job: Job, choice: Choice, now: float) -> None: ...
    def ended(self, request_id: str, now: float, complete: bool = True) -> None: ...


def pools_of(config: Config) -> Pools:
    """Which engines may serve which classes."""
    pools = config.gateway.pools
    promises = {name: c.slo for name, c in config.slo_classes.items()}
    of_class = pools.classes if pools.mode != "shared" else {}
    return Pools(of_class, pools.borrow if pools.mode == "borrow" else None, promises)


class Dispatch:
    """Hands each job an engine as soon as one has room, the first in the policy's order first.

    speed:     what the engines have in common, learned
    predictor: output lengths; told of every end
    clock:     seconds; that of the running event loop
    """

    def __init__(
        self,
        config: Config,
        fleet: Engines,
        route: Route,
        pools: Pools,
        speed: Speed,
        predictor: Predictor,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._route = route
        self._pools = pools
        self._speed = speed
        self._clock = clock
        self._ctx = PolicyContext(predictor, self._one_engine(), cached=self._cached)
        self._queue = self._queue_of(config)
        self._held: dict[str, HeldJob] = {}
        self._tenants: dict[str, str] = {}  # of those who are with an engine
        self._down_since: dict[str | None, float] = {}  # by pool; None where no engine of any is up
        self._timer: asyncio.TimerHandle | None = None
        self._pumping = False
        fleet.on_room(self._pump)

    def reload(self, config: Config, route: Route, pools: Pools) -> None:
        """Another configuration holds from now on; whoever waits keeps waiting, in its order."""
        waiting = sorted(self._queue, key=lambda r: r.seq)
        for r in waiting:
            self._queue.remove(r)
        self._config, self._route, self._pools = config, route, pools
        self._queue = self._queue_of(config)
        for r in waiting:
            again = self._held[r.id] = HeldJob(r.job, self._ttl(r.slo_class), r.avoid)
            again.waiter = r.waiter
            self._queue.add(again)
        self._down_since = {}  # pools may be others, and so may be how long jobs are held
        self._pump()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is handed out meanwhile: engines and pools change together."""
        self._pumping = True
        try:
            yield
        finally:
            self._pumping = False
            self._pump()

    # One job

    async def take(self, job: Job, avoid: Collection[str] = ()) -> Choice:
        """The engine that serves `job`; the fleet has been told that it goes there.

        `avoid` names engines that have failed it: it then comes before all others, and goes to one of those only if no
        other that may serve it is up. Cancelling this leaves the queue. Raises ApiError: 429 if it may not wait, 503 if
        no engine is up or another job displaced it, 504 if it waited too long.
        """
        now = self._clock()
        if avoid or not self._queue.blocked(job.claim.slo_class, job.claim.priority):
            choice = self._chosen(job, avoid, now)
            if choice is not None:
                return choice
        r = HeldJob(job, self._ttl(job.claim.slo_class), avoid)
        r.waiter = given = asyncio.get_running_loop().create_future()
        self._hold(r, now)
        try:
            return await given
        except asyncio.CancelledError:
            if job.id in self._held:
                self._let_go(self._held[job.id])
                self._set_timer()
            elif given.done() and not given.cancelled() and given.exception() is None:
                self._vacate(job.id)
                self._fleet.ended(job.id, self._clock(), False)
            raise

    def elsewhere(self, job: Job, avoid: Collection[str]) -> bool:
        """Whether an engine that is not in `avoid` could take `job` now or when it has room."""
        now = self._clock()
        return bool(self._allowed(job, self._fleet.candidates(now, avoid), now))

    def served(self, job: Job, outputs: int) -> None:
        """`job`, which had an engine, has ended after `outputs` tokens, however it did. Once is enough."""
        tenant = self._tenants.get(job.id)
        if tenant is None:
            return
        self._ctx.service.emit(tenant, outputs)
        self._vacate(job.id)
        if outputs:
            self._ctx.predictor.observe(job.view, outputs)

    # Whoever asks

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._held)

    def waits(self) -> dict[str, tuple[int, float]]:
        """By class: how many wait, and for how long the longest has (seconds). Costs as much as waits."""
        now, found = self._clock(), dict[str, tuple[int, float]]()
        for r in self._held.values():
            n, longest = found.get(r.slo_class, (0, 0.0))
            found[r.slo_class] = n + 1, max(longest, now - r.arrival)
        return found

    def explain(self, job_id: str) -> Mapping[str, Any] | None:
        """Why a job waits; None if it does not."""
        r = self._held.get(job_id)
        if r is None:
            return None
        now = self._clock()
        engines, up = self._may_serve(r.job, r.avoid, now), self._fleet.up(now)
        told: dict[str, Any] = {
            "tenant": r.tenant,
            "seconds": now - r.arrival,
            "held_back_by": _held_back_by(engines, self._allowed(r.job, up, now)),
            "engines": {c.name: {"outstanding": c.outstanding, "bound": self._bound(c)} for c in engines},
        }
        if not r.avoid:
            told["ahead"] = self._queue.ahead_of(r)
            told["policy"] = self._config.scheduler.policy
        return told

    # Holding and handing out

    def _hold(self, r: HeldJob, now: float) -> None:
        """`r` waits, unless the policy does not let it. Raises ApiError."""
        self._look(now)
        if self._given_up(r, now):
            raise self._no_engine()
        if not r.avoid:
            self._admit(r, now)
        self._queue.add(r)
        self._held[r.id] = r
        self._pump()  # an engine may have come back without a word
        self._set_timer()

    def _admit(self, r: HeldJob, now: float) -> None:
        """Let `r` wait, perhaps in the place of others. Raises ApiError where the policy does not."""
        self._ctx.now = now
        self._ctx.step_time = self._one_engine()
        refusal, displaced = self._queue.refusal(r, self._load(now), self._all_engines(now))
        if refusal is not None:
            raise refused(refusal.reason.value, refusal.message, refusal.retry_after)
        for other in displaced:
            self._end(other, unserved(FinishReason.DISPLACED))

    def _pump(self) -> None:
        """Hand out what room there is."""
        if self._pumping or not (self._held or self._down_since):
            return
        self._pumping = True
        try:
            self._ctx.step_time = self._one_engine()
            while self._held and self._hand_out(self._clock()):
                pass
        finally:
            self._pumping = False
        self._look(self._clock())
        self._set_timer()

    def _hand_out(self, now: float) -> bool:
        """Give the first for whom an engine has room that engine. False if there is nobody."""
        if not any(self._has_room(c, now) for c in self._fleet.candidates(now)):
            return False
        for r in self._queue.heads(now):
            assert r.waiter is not None
            if r.waiter.done():  # its client has just left; it has not noticed yet
                self._let_go(r)
                return True
            choice = self._chosen(r.job, r.avoid, now)
            if choice is not None:
                self._let_go(r)
                r.waiter.set_result(choice)
                return True
        return False

    def _chosen(self, job: Job, avoid: Collection[str], now: float) -> Choice | None:
        """Send `job` to an engine now; None if none that may serve it has room."""
        free = [c for c in self._may_serve(job, avoid, now) if self._has_room(c, now)]
        if not free:
            return None
        if self._down_since:
            self._look(now)
        choice = self._route.choose(job.view, free, now)
        self._fleet.sent(job, choice, now)
        if job.id not in self._tenants:
            self._tenants[job.id] = job.claim.tenant
            self._ctx.service.seat(job.claim.tenant, job.view.prompt_tokens - choice.cached_tokens)
        return choice

    def _may_serve(self, job: Job, avoid: Collection[str], now: float) -> Sequence[ReplicaView]:
        """The engines that are up and may serve `job`, with room or without; those of `avoid` only if no other may."""
        others = self._allowed(job, self._fleet.candidates(now, avoid), now)
        return others if others or not avoid else self._allowed(job, self._fleet.candidates(now), now)

    def _allowed(self, job: Job, engines: Sequence[ReplicaView], now: float) -> Sequence[ReplicaView]:
        """Those of `engines` that its pool lets serve a job."""
        return self._pools.allowed(job.view, engines, {}, now, self._fleet.pools)

    def _let_go(self, r: HeldJob) -> None:
        """`r` waits no more."""
        del self._held[r.id]
        self._queue.remove(r)

    def _end(self, r: HeldJob, error: ApiError) -> None:
        """`r`, which is in no queue any more, gets an answer without an engine."""
        self._held.pop(r.id, None)
        if r.waiter is not None and not r.waiter.done():
            r.waiter.set_exception(error)

    def _vacate(self, job_id: str) -> None:
        tenant = self._tenants.pop(job_id, None)
        if tenant is not None:
            self._ctx.service.vacate(tenant)

    # Time

    def _set_timer(self) -> None:
        """Wake up when the next of those who wait has waited too long."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._queue.next_expiry()
        if due is not None:
            self._timer = asyncio.get_running_loop().call_at(due, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self._clock()
        for r, reason in self._queue.expired(now):
            self._let_go(r)
            self._end(r, unserved(reason))
        self._pump()
        self._set_timer()

    def _look(self, now: float) -> None:
        """Note which pools have no engine that is up, and since when."""
        up = {c.pool for c in self._fleet.up(now)}
        known, down = self._down_since, [*(self._fleet.pools - up), *(() if up else (None,))]
        self._down_since = {pool: known.get(pool, now) for pool in down}
        if self._down_since.keys() - known.keys():
            patience = self._config.gateway.hold_seconds + 0.001  # clocks of loops are coarse
            asyncio.get_running_loop().call_later(patience, self._give_up)

    def _given_up(self, r: HeldJob, now: float) -> bool:
        """Whether no engine that may serve `r` has been up for as long as jobs are held."""
        since = self._down_since.get(self._pools.kept_to(r.slo_class, self._fleet.pools))
        return since is not None and now >= since + self._config.gateway.hold_seconds

    def _give_up(self) -> None:
        """Tell those who have waited too long for an engine to be up."""
        now = self._clock()
        self._look(now)
        for r in list(self._held.values()) if self._down_since else ():
            if self._given_up(r, now):
                self._let_go(r)
                self._end(r, self._no_engine())

    def _no_engine(self) -> ApiError:
        return ApiError(
            503,
            f"no engine for this request has been up for {self._config.gateway.hold_seconds:g} s; try again later",
            code="no_engine",
            headers={"Retry-After": "5"},
        )

    # What is known of the engines

    def _bound(self, c: ReplicaView) -> int | None:
        """Requests that an engine gets at once; None where nothing bounds them."""
        own = self._config.gateway.in_flight
        return c.seats if own is None else own

    def _has_room(self, c: ReplicaView, now: float) -> bool:
        """Whether an engine may get another request. One that we left idle always may, whatever is told of it.

        An engine of which nobody knows how many it runs at once is full while it says that requests wait in it.
        """
        if not c.outstanding:
            return True
        own = self._config.gateway.in_flight
        if own is not None:
            return c.outstanding < own
        facts = None if c.facts is None else c.fresh(now)
        load = c.outstanding if facts is None else c.outstanding + c.others
        if c.seats is not None:
            return load < c.seats
        return facts is None or not facts.waiting or facts.running is None or load < facts.running

    def _load(self, now: float) -> LoadView:
        up = self._fleet.up(now)
        bounds = [self._bound(c) or c.outstanding + 1 for c in up]
        unfinished = sum(c.pending_tokens for c in up)
        return LoadView(
            now,
            waiting=0,
            running=sum(c.outstanding for c in up),
            free_blocks=0,
            seats=max(1, sum(bounds)),
            budget=UNBOUNDED,
            ahead=Work(0, unfinished),
        )

    def _one_engine(self) -> StepTime:
        return StepTime(self._speed.token_s, self._speed.output_s)

    def _all_engines(self, now: float) -> PolicyContext:
        """What policies assume of all engines together: prompts are computed side by side."""
        n, one = max(1, len(self._fleet.up(now))), self._ctx
        step_time = StepTime(self._speed.token_s / n, self._speed.output_s)
        return PolicyContext(one.predictor, step_time, now, service=one.service, cached=one.cached)

    def _cached(self, r: RequestView) -> int:
        """Tokens of a job's prompt that are cached at the engine which holds the most."""
        assert isinstance(r, HeldJob)
        return max(self._route.prefixes.held(r.job.view).tokens.values(), default=0)

    def _ttl(self, slo_class: str) -> float | None:
        known = self._config.classes.get(slo_class)  # a new configuration may lack it
        return None if known is None else known.queue_ttl

    def _queue_of(self, config: Config) -> HeldQueue:
        policy, gateway = config.build_policy(), config.gateway
        shares = gateway.fair and not isinstance(policy.order, Grouping)
        fair = FairShare(weights=gateway.weights) if shares else None
        priorities = [c.priority for c in config.classes.values()]
        return HeldQueue(policy, self._ctx, pools_of(config).of_class, priorities, fair)


def _held_back_by(engines: Sequence[ReplicaView], up: Sequence[ReplicaView]) -> str:
    """Why a job waits, of whose engines these may be sent requests, and these are up."""
    if engines:
        return "its engines are full, or others come first"
    return "its engines have asked for no requests for a while" if up else "no engine is up"
