"""The jobs that wait for an engine, in the order of a policy of the core and over its own queues. Pure.

Jobs of one pool and one rank stand in one lane: if the first of a lane finds no room, no other of it does, while
another lane's may. Between lanes the order's own keys decide. Where tenants share fairly, a lane's first is that of the
tenant who was served least (`FairShare`, over all lanes together), and ranks are the priorities of the classes.

Jobs on their second try come before all others, in the order in which they came back. Each may go elsewhere than the
one before it, so more than the first of each pool are looked at.
"""

from __future__ import annotations

from asyncio import Future
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, count, islice
from math import ceil, inf
from typing import TypeAlias

from tidegate.config.idle import WITHOUT_CLASSES
from tidegate.core.backlog import Backlog
from tidegate.core.expiry import Expiry
from tidegate.core.groups import GroupedQueue
from tidegate.core.policies.deadlines import latest_start
from tidegate.core.policies.orders import Aged
from tidegate.core.policy import Displace, Grouping, Key, Policy, PolicyContext, Reject
from tidegate.core.queue import WaitingQueue
from tidegate.core.request import FinishReason, Request, Status
from tidegate.core.slo import NO_SLO
from tidegate.core.view import LoadView, Work
from tidegate.gateway.job import Job
from tidegate.routing.choice import Choice

Lane: TypeAlias = tuple[str, int]

RETRIED = 32
"""Jobs of a pool on their second try that are looked at when an engine has room."""

REKEYS = 32
"""Keys of a lane that are asked for again at once, because time has changed them; the others follow later."""


class HeldJob(Request):
    """A job as a policy of the core sees it, and whoever waits for its engine.

    avoid: engines that have failed it; empty on its first try
    """

    __slots__ = ("avoid", "job", "waiter")

    def __init__(self, job: Job, queue_ttl: float | None, avoid: Collection[str] = ()) -> None:
        claim, view = job.claim, job.view
        super().__init__(
            job.id,
            prompt_tokens=max(1, view.prompt_tokens),
            max_tokens=job.max_tokens,
            arrival=job.arrival,
            tenant=claim.tenant,
            slo_class=claim.slo_class,
            priority=claim.priority,
            slo=NO_SLO if claim.slo == NO_SLO else claim.slo,
            queue_ttl=queue_ttl,
        )
        self.job = job
        self.avoid = avoid
        self.waiter: Future[Choice] | None = None


class HeldQueue:
    """Those who wait, who of them comes first, who may wait at all, and for how long. Times are seconds on one clock.

    pool_of:    pool of each class that has one
    priorities: of all classes
    fair:       how tenants share; None where the policy does that itself, or nobody wants it
    """

    def __init__(
        self,
        policy: Policy,
        ctx: PolicyContext,
        pool_of: Mapping[str, str],
        priorities: Collection[int],
        fair: Grouping | None = None,
    ) -> None:
        order = policy.order
        self._policy = policy
        self._order = order
        self._ctx = ctx
        self._pool_of = pool_of
        self._own = order if isinstance(order, Grouping) else None
        self._grouping = self._own or fair
        plain = order.order if isinstance(order, Aged) else order
        one_class = self._grouping is None or self._own is not None or isinstance(plain, WITHOUT_CLASSES)
        self._ranks = [] if one_class else sorted(set(priorities))
        self._lanes: dict[Lane, WaitingQueue] = {}
        self._retried: dict[str, dict[HeldJob, None]] = {}  # by pool
        self._expiry = Expiry()
        self._arrivals = count()
        self._backlog = Backlog(self._weigh) if policy.admit.weighs else None
        self._size = 0

    def __iter__(self) -> Iterator[HeldJob]:
        """In no particular order."""
        for again in self._retried.values():
            yield from again
        for lane in self._lanes.values():
            for r in lane:
                assert isinstance(r, HeldJob)
                yield r

    def blocked(self, slo_class: str, priority: int) -> bool:
        """Whether others wait whom such a job would have to pass."""
        return bool(self._lanes) and self._lane(slo_class, priority) in self._lanes

    def refusal(self, r: HeldJob, load: LoadView, door: PolicyContext) -> tuple[Reject | None, Sequence[HeldJob]]:
        """Why `r`, which arrives, may not wait, if so; else those who no longer wait because it does.

        load: what else is known of it; what waits is filled in here
        door: a context whose speed is that of all engines together
        """
        if self._policy.admit.open:
            return None, ()
        self._arrive(r)
        verdict = self._policy.admit.decide(r, self._weighed(r, load), door)
        if isinstance(verdict, Displace):
            return None, self._displaced(r, verdict)
        return (verdict if isinstance(verdict, Reject) else None), ()

    def add(self, r: HeldJob) -> None:
        """`r`, which was not refused, waits from now on."""
        r.move(Status.WAITING)
        self._arrive(r)
        if r.queue_ttl is not None:
            self._expiry.watch(r, r.arrival + r.queue_ttl, FinishReason.TIMEOUT)
        if r.avoid:
            self._retried.setdefault(self._pool(r.slo_class), {})[r] = None
            return
        if self._backlog is not None:
            r.key = self._order.key(r, self._ctx)
            self._backlog.enter(r)
        name = self._lane(r.slo_class, r.priority)
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = self._begin()
        lane.add(r)
        self._size += 1
        last_start = self._last_start(r)
        if last_start is not None:
            self._expiry.watch(r, last_start, FinishReason.SHED)

    def remove(self, r: HeldJob) -> None:
        """`r` waits no more. Raises KeyError if it did not."""
        if r.avoid:
            self._remove_retried(r)
            return
        name = self._lane(r.slo_class, r.priority)
        lane = self._lanes[name]
        lane.remove(r)
        r.move(Status.FINISHED)
        self._size -= 1
        if self._backlog is not None:
            self._backlog.leave(r)
        if not len(lane):
            del self._lanes[name]

    def heads(self, now: float) -> list[HeldJob]:
        """Those on their second try, as far as they are looked at, and the first of every lane, in order."""
        self._ctx.now = now
        again = sorted(chain.from_iterable(islice(p, RETRIED) for p in self._retried.values()), key=lambda r: r.seq)
        found: list[tuple[tuple[int, float, int], HeldJob]] = []
        for lane in self._lanes.values():
            lane.rekey_due(now, REKEYS)
            head = lane.peek()
            assert isinstance(head, HeldJob)
            assert head.key is not None
            key = head.key if self._grouping is self._own else self._order.key(head, self._ctx)
            found.append(((key.tier, key.score, head.seq), head))
        found.sort()  # arrival sequences are unique: jobs are never compared
        return [*again, *(head for _, head in found)]

    def ahead_of(self, r: HeldJob) -> int:
        """How many of its lane come before `r`, on its first try. Costs as much as waits there: for one who asks."""
        return self._lanes[self._lane(r.slo_class, r.priority)].ahead_of(r)

    def expired(self, now: float) -> Iterator[tuple[HeldJob, FinishReason]]:
        """Those who have waited too long, and why that is too long; each is told once and has to be removed."""
        for r, reason in self._expiry.expired(now):
            assert isinstance(r, HeldJob)
            yield r, reason

    def next_expiry(self) -> float | None:
        """When the next of them will have waited too long; None if nobody ever will."""
        return self._expiry.next_due()

    def _arrive(self, r: HeldJob) -> None:
        if r.seq < 0:
            r.seq = next(self._arrivals)
            r.tier = self._order.tier(r, self._ctx)

    def _remove_retried(self, r: HeldJob) -> None:
        pool = self._pool(r.slo_class)
        del self._retried[pool][r]
        r.move(Status.FINISHED)
        if not self._retried[pool]:
            del self._retried[pool]

    def _pool(self, slo_class: str) -> str:
        return self._pool_of.get(slo_class, "")

    def _lane(self, slo_class: str, priority: int) -> Lane:
        return self._pool(slo_class), bisect_right(self._ranks, priority)

    def _begin(self) -> WaitingQueue:
        if self._grouping is None:
            return WaitingQueue(self._key)
        return GroupedQueue(self._key, self._grouping, self._ctx)

    def _key(self, r: Request) -> Key:
        r.tier = self._order.tier(r, self._ctx)
        return self._order.key(r, self._ctx)

    def _last_start(self, r: HeldJob) -> float | None:
        """When nothing could keep the promises of `r` any more, were it alone; None where nobody is given up."""
        if not self._policy.admit.sheds:
            return None
        latest = latest_start(r, self._ctx, self._ctx.cached(r))
        return latest if r.arrival < latest < inf else None

    def _weighed(self, r: HeldJob, load: LoadView) -> LoadView:
        load = load._replace(waiting=self._size)
        backlog = self._backlog
        if backlog is None:
            return load
        key = self._order.key(r, self._ctx)
        return load._replace(
            own=backlog.work_of(r),
            queued=backlog.total,
            of_class=backlog.of_class(r.slo_class),
            worse=backlog.worse_than(r.tier),
            ahead=backlog.ahead_of((key.tier, key.score, r.seq)).plus(load.ahead),
        )

    def _displaced(self, r: HeldJob, verdict: Displace) -> list[HeldJob]:
        """So many of those who wait and are of a worse class as make the room that is wanted."""
        assert self._backlog is not None
        requests, tokens, gone = verdict.requests, verdict.tokens, []
        for worst in self._backlog.worst_first(r.tier):
            if requests <= 0 and tokens <= 0:
                break
            assert isinstance(worst, HeldJob)
            requests -= 1
            tokens -= self._backlog.work_of(worst).tokens
            self.remove(worst)
            gone.append(worst)
        return gone

    def _weigh(self, r: Request) -> Work:
        outputs = ceil(self._ctx.predictor.output_tokens(r))
        return Work(1, max(1, r.prompt_tokens - self._ctx.cached(r)), max(0, outputs - 1))
