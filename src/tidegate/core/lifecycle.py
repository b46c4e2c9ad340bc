"""The only place that changes a request's status, and the place where results become events."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.core.backlog import Backlog
from tidegate.core.decodes import DecodeSet
from tidegate.core.events import (
    Admitted,
    Arrived,
    Computed,
    Emitted,
    Event,
    Finished,
    Preempted,
    Rejected,
    Restored,
    Timing,
)
from tidegate.core.explain import Diary
from tidegate.core.lanes import Lanes
from tidegate.core.plan import Chunk, StepPlan, StepResult
from tidegate.core.policy import PolicyContext, Reject
from tidegate.core.queue import WaitingQueue
from tidegate.core.reasons import Why
from tidegate.core.request import FinishReason, Request, Status
from tidegate.core.running import Running
from tidegate.core.slo import NO_SLO
from tidegate.core.swap import Swap, Transfer

# Runs an iterator for its effects, in C: this is the one thing done for every token.
_exhaust = deque[None](maxlen=0).extend


@dataclass(slots=True)
class Step:
    """A plan in flight, with the requests behind its slots.

    members, outputs: the decode set's lists as they were planned
    clock:   the decode set's clock after this step; 0 where nobody decodes
    last:    requests whose last token by length is planned here
    chunks:  each chunk with its request
    transfers: copies to the host and back
    leavers: decodes that left the set while this step was in flight
    ended:   whether a request that it computes has ended meanwhile
    also:    a cohort that decodes beside the set, and its clock after this step
    """

    plan: StepPlan
    members: list[Request]
    outputs: list[list[int]]
    clock: int
    last: list[Request]
    chunks: list[tuple[Request, Chunk]]
    transfers: list[Transfer]
    leavers: list[Request]
    ended: bool = False
    also: tuple[DecodeSet, int] | None = None


class Lifecycle:
    """Moves requests through the table of core/request.py and tells it as events."""

    def __init__(self, queue: WaitingQueue, running: Running, swap: Swap, ctx: PolicyContext) -> None:
        self.events: list[Event] = []
        self.requests: dict[str, Request] = {}
        self.diary = Diary()
        self.in_flight: list[Step] = []
        self._queue = queue
        self._running = running
        self._swap = swap
        self._ctx = ctx
        self.backlog: Backlog | None = None
        self.lanes: Lanes | None = None

    # At the door and in the queue

    def reject(self, r: Request, refusal: Reject, now: float) -> None:
        """`r` never enters."""
        r.move(Status.FINISHED)
        r.finish_reason = FinishReason.REFUSED
        refused = Rejected(now, r, refusal.reason, refusal.message, refusal.retry_after)
        self.events.append(refused)
        self.diary.close(refused)

    def park(self, r: Request, now: float) -> None:
        """`r` has arrived but may not be scheduled yet."""
        self._arrive(r, now)
        r.move(Status.PARKED)
        if self.backlog is not None:
            self.backlog.enter(r)

    def wait(self, r: Request, now: float) -> None:
        """`r` may be scheduled from now on."""
        if r.status is Status.NEW:
            self._arrive(r, now)
        r.move(Status.WAITING)
        self._queue.add(r)
        if self.backlog is not None:
            self.backlog.enter(r)

    def _arrive(self, r: Request, now: float) -> None:
        self.requests[r.id] = r
        arrived = Arrived(now, r)
        self.events.append(arrived)
        self.diary.open(arrived)

    # In a plan

    def start(self, r: Request, step: int, cached: int, now: float, why: Why) -> None:
        """`r` took a seat, for the first time or again, with `cached` KV tokens in place."""
        returning = r.status is Status.PREEMPTED
        r.move(Status.RUNNING)
        if self.backlog is not None:
            self.backlog.leave(r)
        if self.lanes is not None:
            self.lanes.started(r)
        if returning:
            recompute = max(0, r.lost - cached)
            r.recomputed_tokens += recompute
            assert r.preempted_at is not None
            r.preempted_wait += now - r.preempted_at
            r.preempted_at = None
            self._tell(Restored(now, r, step, cached, recompute, why))
        else:
            r.admitted_at = now
            r.cached_tokens = cached
            self._tell(Admitted(now, r, step, cached, why))

    def preempt(self, r: Request, mode: str, reason: str, step: int, now: float) -> None:
        """`r` gives its seat and blocks back and waits to be computed again."""
        r.lost = r.planned
        self._vacate(r)
        r.move(Status.PREEMPTED)
        r.preemptions += 1
        r.preempted_at = now
        self._queue.add(r)
        if self.backlog is not None:
            self.backlog.enter(r)
        self._tell(Preempted(now, r, step, mode, reason))

    def stall(self, r: Request) -> None:
        """`r` keeps its seat and skips steps until there is a block for it."""
        self._mark_leaver(r)
        self._running.stall(r)

    def move_decode(self, r: Request, to: DecodeSet) -> None:
        """`r` goes on decoding in another set, at that one's steps."""
        self._mark_leaver(r)
        self._running.switch(r, to)

    def launch(self, step: Step) -> None:
        """`step` is in flight from now on; those whose last token it computes give their blocks back."""
        self.in_flight.append(step)
        for r, _ in step.chunks:
            r.in_flight += 1
        for t in step.transfers:
            t.request.in_flight += 1
        for r in step.last:
            self._vacate(r)

    # When a result comes, or a client goes

    def apply(self, step: Step, result: StepResult, now: float) -> None:
        """The oldest step in flight was computed."""
        assert self.in_flight[0] is step
        del self.in_flight[0]
        if step.transfers:
            self._apply_transfers(step.transfers, result)
        tokens = result.tokens
        requests: Sequence[Request] = step.members
        decodes = len(step.members)
        first: list[Request] = []
        if step.outputs:
            _exhaust(map(list.append, step.outputs, tokens))
        if step.clock:
            self._running.decodes.apply(now)
        if step.also is not None:
            step.also[0].apply(now)
        if step.chunks:
            requests = list(requests)
            self._apply_chunks(step, tokens, requests, first, now)
        if step.leavers or step.chunks:
            requests, tokens, decodes = self._settle_leavers(step, requests, tokens, now)
        if requests:
            self.events.append(Emitted(now, step.plan.step, requests, tokens, decodes, first))
        if result.finished:
            everybody = step.members + [r for r, c in step.chunks if c.emits]
            for index, reason in result.finished:
                if everybody[index].status is not Status.FINISHED:
                    self.finish(everybody[index], reason, now)
        for r in step.last:
            if r.status is not Status.FINISHED:
                self.finish(r, _by_length(r), now)

    def end_by_length(self, ending: Sequence[Request], now: float) -> None:
        """The last tokens of these were computed in a step that no plan was made for."""
        for r in ending:
            self._vacate(r)
        for r in ending:
            self.finish(r, _by_length(r), now)

    def finish(self, r: Request, reason: FinishReason, now: float) -> None:
        """`r` ends here, whatever it was doing."""
        if r.lease is not None:
            self._vacate(r)
        elif r in self._queue:
            self._queue.remove(r)
            self._swap.drop(r)
        if self.backlog is not None:
            self.backlog.leave(r)
        r.move(Status.FINISHED)
        r.finish_reason = reason
        del self.requests[r.id]
        if reason is FinishReason.STOP or reason is FinishReason.LENGTH:
            self._ctx.predictor.observe(r, r.emitted)
        if r.in_flight:
            for step in self.in_flight:
                step.ended = True
        timing = _timing(r, now)
        missed: tuple[str, ...] = ()
        if r.slo is not NO_SLO and reason is not FinishReason.CANCELLED:
            p99_gap = timing.p99_gap if r.slo.tbt is not None else None  # which takes sorting them
            missed = r.slo.missed(timing.ttft, timing.tpot, p99_gap, timing.e2e)
        ended = Finished(now, r, reason, timing, missed)
        self.events.append(ended)
        self.diary.close(ended)

    def _apply_transfers(self, transfers: list[Transfer], result: StepResult) -> None:
        for t in transfers:
            t.request.in_flight -= 1
            self._swap.done(t, t.request.id in result.failed_copies)
        if not result.failed_copies:
            self._swap.observe(transfers, result.copy_seconds)

    def _apply_chunks(
        self, step: Step, tokens: Sequence[int], requests: list[Request], first: list[Request], now: float
    ) -> None:
        at = len(step.members)
        for r, chunk in step.chunks:
            r.in_flight -= 1
            _, start, length, emits = chunk
            alive = r.status is not Status.FINISHED
            if alive:
                r.count(computed=length, emitted=emits)
                self.events.append(Computed(now, step.plan.step, r, start, length))
            if not emits:
                continue
            requests.append(r)
            if alive:
                if r.token_ids is not None:
                    r.token_ids.append(tokens[at])
                if r.first_token_at is None:
                    first.append(r)
                _stamp(r, now)
            at += 1

    def _settle_leavers(
        self, step: Step, requests: Sequence[Request], tokens: Sequence[int], now: float
    ) -> tuple[Sequence[Request], Sequence[int], int]:
        """Count the tokens of decodes that left meanwhile; drop the tokens of requests that ended."""
        for r in step.leavers:
            r.in_flight -= 1
            if r.status is Status.FINISHED:
                if r.token_ids is not None:
                    r.token_ids.pop()
            else:
                r.count(computed=1, emitted=1)
                _stamp(r, now)
        if not step.ended:
            return requests, tokens, len(step.members)
        kept = [(r, t) for r, t in zip(requests, tokens, strict=True) if r.status is not Status.FINISHED]
        decodes = sum(r.status is not Status.FINISHED for r in step.members)
        return [r for r, _ in kept], [t for _, t in kept], decodes

    def _vacate(self, r: Request) -> None:
        self._mark_leaver(r)
        self._running.vacate(r)
        if self.lanes is not None:
            self.lanes.left(r)

    def _tell(self, decision: Admitted | Restored | Preempted) -> None:
        """Told to observers and written into the diary."""
        self.events.append(decision)
        self.diary.note(decision)

    def _mark_leaver(self, r: Request) -> None:
        """Tokens of `r` that are in flight will be counted one by one, no longer by the clock."""
        d, main = r.decode_set, self._running.decodes
        if d is not None:
            for step in self.in_flight:
                if d is main:
                    clock = step.clock
                else:
                    clock = step.also[1] if step.also is not None and step.also[0] is d else 0
                if clock > r.joined_clock:
                    step.leavers.append(r)
                    r.in_flight += 1


def _by_length(r: Request) -> FinishReason:
    return FinishReason.LENGTH_KV if r.clip else FinishReason.LENGTH


def _stamp(r: Request, now: float) -> None:
    """A token of `r` outside its decode set's clock was delivered."""
    if r.first_token_at is None:
        r.first_token_at = now
    elif r.last_token_at is not None:
        r.gaps.append(now - r.last_token_at)
    r.last_token_at = now


def _timing(r: Request, now: float) -> Timing:
    arrival, first, last, outputs = r.arrival, r.first_token_at, r.last_token_at, r.emitted
    waited = r.preempted_wait + (now - r.preempted_at if r.preempted_at is not None else 0.0)
    return Timing(
        None if r.admitted_at is None else r.admitted_at - arrival,
        None if first is None else first - arrival,
        (last - first) / (outputs - 1) if outputs > 1 and first is not None and last is not None else None,
        now - arrival,
        waited,
        r.gaps,
    )
