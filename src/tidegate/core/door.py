"""The door: what the policy may know of the load when a request arrives, and what its verdict brings about."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, inf, nextafter

from tidegate.core.backlog import Backlog
from tidegate.core.kv import KvCache
from tidegate.core.limits import Limits
from tidegate.core.policy import Displace, Policy, PolicyContext, Reject
from tidegate.core.queue import WaitingQueue
from tidegate.core.request import FinishReason, Request
from tidegate.core.running import Running, hashes_of
from tidegate.core.slo import NO_SLO
from tidegate.core.view import LoadView, Work


class Door:
    """Asks the policy whether a request may wait, and ends those who have to make room for it.

    `end(request, reason, now)` ends one that waits. Where the policy weighs what waits, `backlog` is kept by
    whoever moves requests; else it is None and costs nothing.
    """

    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        ctx: PolicyContext,
        kv: KvCache,
        queue: WaitingQueue,
        running: Running,
        end: Callable[[Request, FinishReason, float], None],
    ) -> None:
        self._policy = policy
        self._limits = limits
        self._ctx = ctx
        self._kv = kv
        self._queue = queue
        self._running = running
        self._end = end
        self._open = policy.admit.open
        self.backlog = Backlog(self._weigh) if policy.admit.weighs else None

    def refusal(self, r: Request, now: float, parked: int) -> Reject | None:
        """Why `r` may not wait, if so; `parked` others wait until they may be scheduled."""
        if self._open:
            return None
        verdict = self._policy.admit.decide(r, self._load(r, now, parked), self._ctx)
        if isinstance(verdict, Displace):
            self._displace(r, verdict, now)
        return verdict if isinstance(verdict, Reject) else None

    def last_start(self, r: Request) -> float | None:
        """The latest time at which `r` can start and still keep its promises, alone on the machine (seconds).

        As predicted now, with what the prefix cache holds now. None where the policy gives nobody up, nothing is
        promised, or it could not be kept on arrival either.
        """
        slo = r.slo
        if slo is NO_SLO or not self._policy.admit.sheds:
            return None
        work, service = self._weigh(r), self._ctx.step_time.service
        spare = inf if slo.ttft is None else slo.ttft - service(work.prefill, 0)
        if slo.e2e is not None:
            spare = min(spare, slo.e2e - service(work.prefill, work.outputs))
        return nextafter(r.arrival + spare, inf) if 0 < spare < inf else None

    def _load(self, r: Request, now: float, parked: int) -> LoadView:
        running, limits, backlog = self._running, self._limits, self.backlog
        load = LoadView(
            now,
            self._queue.fresh + parked,
            len(running),
            self._kv.available,
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
        )
        if backlog is None:
            return load
        key = self._policy.order.key(r, self._ctx)
        unfinished = sum(m.known_tokens - m.planned for m in running.prefilling)
        return load._replace(
            own=backlog.work_of(r),
            queued=backlog.total,
            of_class=backlog.of_class(r.slo_class),
            worse=backlog.worse_than(r.tier),
            ahead=backlog.ahead_of((key.tier, key.score, r.seq)).plus(Work(0, unfinished)),
        )

    def _displace(self, r: Request, verdict: Displace, now: float) -> None:
        """So many as have to, of those who wait and are of a worse class, end for `r`."""
        assert self.backlog is not None
        requests, tokens = verdict.requests, verdict.tokens
        for worst in self.backlog.worst_first(r.tier):
            if requests <= 0 and tokens <= 0:
                break
            requests -= 1
            tokens -= self.backlog.work_of(worst).tokens
            self._end(worst, FinishReason.DISPLACED, now)

    def _weigh(self, r: Request) -> Work:
        hashes = hashes_of(r, self._kv)
        limit = min(len(hashes), (r.known_tokens - 1) // self._limits.block_size)
        cached = self._kv.match(hashes, limit).blocks * self._limits.block_size if limit else 0
        outputs = min(r.target, ceil(self._ctx.predictor.output_tokens(r)))
        return Work(1, r.known_tokens - cached, max(0, outputs - r.emitted - 1))
