"""Plans one step. The only place that reserves blocks and spends the token budget.

The order is fixed: who gives way is settled first, then the decodes are planned, then prompts (running
and waiting, merged in policy order) share what is left of the budget, then a blocked head may be passed
by requests that cannot delay it. Nothing planned is ever taken back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from tidegate.core.backfill import Backfill
from tidegate.core.blocks import Match
from tidegate.core.kv import KvCache
from tidegate.core.lifecycle import Lifecycle, Step
from tidegate.core.limits import Limits
from tidegate.core.plan import Chunk, Join, Preemption, StepPlan
from tidegate.core.policy import Policy, PolicyContext
from tidegate.core.queue import WaitingQueue
from tidegate.core.request import Request
from tidegate.core.running import Running, hashes_of, in_order, place
from tidegate.core.view import Candidate, Need, StepView


@dataclass(slots=True)
class Draft:
    """A plan in the making. `left` are tokens of the step's budget, `prefill_left` those for prompts."""

    plan: StepPlan
    left: int
    prefill_left: int = 0
    growers: dict[Request, None] = field(default_factory=dict)
    chunks: dict[Request, int] = field(default_factory=dict)


class Planner:
    """Turns the waiting and the running into the next `Step`."""

    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        ctx: PolicyContext,
        kv: KvCache,
        queue: WaitingQueue,
        running: Running,
        lifecycle: Lifecycle,
    ) -> None:
        self._policy = policy
        self._limits = limits
        self._ctx = ctx
        self._kv = kv
        self._queue = queue
        self._running = running
        self._lifecycle = lifecycle
        self._backfill = Backfill(limits, kv, queue, running)
        self._next_step = 0
        self._prefill_steps = 0
        self._blocked: tuple[Request, int, int, str] | None = None
        self._vain: tuple[int, int, int] | None = None

    def plan(self, now: float) -> StepPlan:
        """The next step, in flight from now on; an empty plan if there is nothing to compute."""
        draft = Draft(StepPlan(self._next_step, now), self._limits.max_num_batched_tokens)
        if self._policy.features.mixed_batches:
            self._settle_growth(draft)
            self._settle_urgent(draft)
            self._plan_decodes(draft)
            self._plan_prompts(draft)
        else:
            self._plan_unmixed(draft)
        self._launch(draft)
        return draft.plan

    @property
    def blocked(self) -> tuple[Request, str] | None:
        """The head that was last found blocked, and by which constraint."""
        return None if self._blocked is None else (self._blocked[0], self._blocked[3])

    # Who gives way

    def _settle_growth(self, d: Draft) -> None:
        """Find who needs a block to decode now; if there are too few, some wait or give way."""
        running = self._running
        d.growers = dict.fromkeys([*running.stalled, *running.decodes.crossing()])
        short = len(d.growers) - self._kv.available
        if short <= 0 or self._ends_soon(short, d):
            return
        first = min(running.members, key=place)
        tiers = sorted({r.tier for r in d.growers}, reverse=True)
        for tier in tiers:
            candidates = self._candidates((r for r in running.members if r.tier >= tier and r is not first), d)
            victims = self._policy.victim.choose(candidates, Need(short, 0), self._ctx)
            if victims:
                for v in victims:
                    self._preempt(v, d, "KV blocks wanted by running requests")
                return

    def _ends_soon(self, short: int, d: Draft) -> bool:
        """Whether requests that end within `stall_steps`, and lack nothing themselves, free `short` blocks."""
        decodes, kv = self._running.decodes, self._kv
        for clock in range(decodes.clock + 1, decodes.clock + 1 + self._limits.stall_steps):
            for r in decodes.ending(clock):
                if r not in d.growers and r.lease is not None:
                    short -= kv.freed_by(r.lease)
        return short <= 0

    def _settle_urgent(self, d: Draft) -> None:
        """Waiting requests of a better class take the seats and blocks that they lack from worse ones."""
        queue, running = self._queue, self._running
        worst = running.worst_tier
        head = queue.peek() if self._policy.features.displace and worst is not None else None
        if head is None or worst is None or head.tier >= worst:
            return
        state = (queue.epoch, self._kv.epoch, running.version)
        if self._vain == state:
            return
        seats = running.free_seats
        blocks = self._kv.available - len(d.growers)
        tokens = d.left - len(running.decodes)
        for r in queue.front():
            if r.tier >= worst or r.in_flight or (tokens <= 0 and r is not head):
                break
            match, awaited = self._match(r)
            if awaited:
                continue
            wanted = self._blocks_wanted(r) - match.blocks
            reserve = self._headroom(r) if running.members else 0
            need = Need(max(0, wanted + match.idle + reserve - blocks), max(0, 1 - seats))
            if need.blocks or need.seats:
                at = place(r)
                worse = (v for v in running.members if v.tier > r.tier and place(v) > at)
                victims = self._policy.victim.choose(self._candidates(worse, d), need, self._ctx)
                if not victims:
                    self._vain = (queue.epoch, self._kv.epoch, running.version)
                    break
                for v in victims:
                    blocks += v.blocks
                    seats += 1
                    what = "seat" if need.seats else "KV blocks"
                    self._preempt(v, d, f"{what} wanted by {r.id} (priority {r.tier} < {v.request.tier})")
            blocks -= wanted + match.idle
            seats -= 1
            tokens -= r.known_tokens - match.blocks * self._limits.block_size

    def _candidates(self, requests: Iterable[Request], d: Draft) -> list[Candidate]:
        """Those among running requests that may be evicted at all, with what that frees and costs."""
        found = []
        for r in requests:
            if r.in_flight or r.preemptions >= self._limits.max_preemptions:
                continue
            assert r.lease is not None
            found.append(Candidate(r, self._kv.freed_by(r.lease) + (r in d.growers), r.planned))
        return found

    def _preempt(self, victim: Candidate, d: Draft, reason: str) -> None:
        r = victim.request
        assert isinstance(r, Request)
        mode = self._policy.restore.choose(victim, self._ctx)
        d.growers.pop(r, None)
        self._lifecycle.preempt(r, mode, reason, d.plan.step, d.plan.now)
        d.plan.preempted.append(Preemption(r.id, mode, reason))

    # Decodes

    def _plan_decodes(self, d: Draft) -> None:
        """Every decode gets its token, and its block where it crosses into one."""
        running = self._running
        growers = list(d.growers)
        if len(growers) > self._kv.available:
            growers = in_order(growers)
            for r in growers[self._kv.available :]:
                self._lifecycle.stall(r)
            del growers[self._kv.available :]
            d.plan.held_back_by = "stalled"
        blocks = running.grow(growers)
        d.plan.growth = list(zip([r.slot for r in growers], blocks, strict=True))
        for r in growers if running.stalled else ():
            if r in running.stalled:
                running.start_decoding(r)
        if running.decodes.members:
            running.decodes.advance()
            d.plan.decodes = running.decodes.slots
            d.left -= len(running.decodes)

    def _plan_unmixed(self, d: Draft) -> None:
        """A step of prompts alone or of decodes alone; decodes get a turn after `max_prefill_steps`."""
        self._settle_urgent(d)
        if not self._running.decodes.members or self._prefill_steps < self._policy.features.max_prefill_steps:
            self._plan_prompts(d)
        if d.chunks:
            self._prefill_steps += 1
            return
        self._settle_growth(d)
        self._plan_decodes(d)
        if not d.plan.decodes and self._prefill_steps:  # nobody could decode after all: the turn is not lost
            self._plan_prompts(d)
        elif d.plan.held_back_by is None and (len(self._queue) or self._running.prefilling):
            d.plan.held_back_by = "decode turn"
        self._prefill_steps = 0

    # Prompts

    def _plan_prompts(self, d: Draft) -> None:
        """Unfinished prompts and those that can be admitted share the budget, in policy order."""
        view = StepView(d.plan.now, self._limits.max_num_batched_tokens, len(d.plan.decodes))
        d.prefill_left = min(d.left, self._policy.budget.tokens(view, self._ctx))
        unfinished = in_order(self._running.prefilling)
        unfinished.reverse()
        capped: list[Request] = []
        while d.prefill_left > 0:
            head = self._admissible(d)
            if unfinished and (head is None or place(unfinished[-1]) < place(head[0])):
                r = unfinished.pop()
            elif head is not None:
                r = head[0]
                self._admit(r, head[1], d)
            else:
                break
            self._chunk(r, d, unfinished, capped)
        for r in capped:
            self._chunk(r, d, None, capped=[])
        if d.prefill_left > 0 and len(self._queue):
            self._plan_backfill(d)
        elif len(self._queue) and d.plan.held_back_by is None and d.left > 0:
            d.plan.held_back_by = "prefill budget"

    def _contended(self, r: Request, others: Collection[Request]) -> bool:
        """Whether another prompt of the same class or a better one waits for tokens of this step."""
        head = self._queue.peek()
        return (head is not None and head.tier <= r.tier) or any(o.tier <= r.tier for o in others)

    def _chunk(self, r: Request, d: Draft, others: Collection[Request] | None, capped: list[Request]) -> None:
        """Give `r` its tokens of this step. `others` are unfinished too; None where nobody else wants any."""
        taken = d.chunks.get(r, 0)
        remaining = r.known_tokens - r.planned - taken
        tokens = min(remaining, d.prefill_left)
        if tokens:
            contended = remaining > tokens and others is not None and self._contended(r, others)
            tokens = min(tokens, self._policy.budget.chunk(r, remaining, d.prefill_left, contended, self._ctx))
        if tokens < remaining:
            capped.append(r)
        if tokens:
            d.chunks[r] = taken + tokens
            d.prefill_left -= tokens
            d.left -= tokens

    def _admissible(self, d: Draft) -> tuple[Request, Match] | None:
        """The first waiting request, if it can start now; else None, and the plan names what holds it back."""
        if not len(self._queue):
            return None
        if not self._running.free_seats:
            d.plan.held_back_by = "seats"
            return None
        head = self._queue.peek()
        assert head is not None
        if self._blocked is not None and self._blocked[:3] == (head, head.version, self._kv.epoch):
            d.plan.held_back_by = self._blocked[3]
            return None
        held, match = self._verdict(head, d)
        if held == "shared prefix":  # it waits for another's chunk, not for room: those behind it may start
            for r in self._queue.front()[1:]:
                held, match = self._verdict(r, d)
                if held != "shared prefix":
                    head = r
                    break
            else:
                d.plan.held_back_by = "shared prefix"
                return None
        if held is None:
            return head, match
        d.plan.held_back_by = held
        if head is self._queue.peek() and held in ("kv", "headroom", "return after preemption"):
            self._blocked = (head, head.version, self._kv.epoch, held)
        return None

    def _verdict(self, r: Request, d: Draft) -> tuple[str | None, Match]:
        """What keeps `r` from starting now (None: nothing), and the cached prefix it would start from."""
        running, kv = self._running, self._kv
        match = kv.nothing
        if r.in_flight:
            return "token in flight", match
        if r.preempted_at == d.plan.now and any(p.request_id == r.id for p in d.plan.preempted):
            return "preempted in this step", match
        partial = self._limits.partial_prefills
        if partial is not None and len(running.prefilling) >= partial:
            return "partial prefills", match
        match, awaited = self._match(r)
        if awaited:
            return "shared prefix", match
        spare = kv.available - match.idle - (self._blocks_wanted(r) - match.blocks)
        if spare < 0:
            return "kv", match
        if running.members and spare < self._headroom(r):
            return ("return after preemption" if r.preemptions else "headroom"), match
        return None, match

    def _match(self, r: Request) -> tuple[Match, bool]:
        """The cached prefix of `r`, and whether its next block is being computed for another right now.

        The last known token is never taken from the cache: computing it yields the next one.
        """
        hashes = hashes_of(r, self._kv)
        limit = min(len(hashes), (r.known_tokens - 1) // self._limits.block_size)
        match = self._kv.match(hashes, limit)
        return match, self._policy.features.hold_pending and self._kv.awaits(hashes, match, limit)

    def _blocks_wanted(self, r: Request) -> int:
        """Blocks reserved when `r` starts: all it knows, or its whole footprint once it was evicted too often."""
        if r.preemptions >= self._limits.max_preemptions:
            return r.footprint
        return self._kv.blocks_for(r.known_tokens)

    def _headroom(self, r: Request) -> int:
        """Blocks that must stay free beside `r`'s own when it starts among others."""
        limits, running = self._limits, self._running
        own = r.footprint - self._blocks_wanted(r)
        if limits.headroom == "declared":
            return running.outstanding + own
        if r.preemptions:
            span = self._kv.blocks_for(limits.resume_span)
            return min(own, span) + sum(min(running.growth_left(m), span) for m in running.members)
        return int(limits.watermark * limits.num_blocks + 0.999) if limits.headroom == "watermark" else 0

    def _admit(self, r: Request, match: Match, d: Draft) -> None:
        kv, plan = self._kv, d.plan
        lease = kv.reserve(match, self._blocks_wanted(r) - match.blocks)
        cached = match.blocks * self._limits.block_size
        returning = bool(r.preemptions)
        self._queue.remove(r)
        r.rewind(cached)
        self._running.seat(r, lease)
        self._lifecycle.start(r, plan.step, cached, plan.now)
        kv.announce(lease, hashes_of(r, kv), r.known_tokens // self._limits.block_size)
        tokens = r.token_ids if r.token_ids is not None else ()
        plan.joined.append(Join(r.slot, r.id, r.handle, tokens, cached, r.emitted, lease.table.copy()))
        (plan.restored if returning else plan.admitted).append(r.id)

    def _plan_backfill(self, d: Draft) -> None:
        """Requests that cannot delay the blocked head start beside what runs."""
        if not self._policy.features.backfill or self._blocked is None or not self._running.free_seats:
            return
        head = self._blocked[0]
        if head is not self._queue.peek():
            return
        for r in self._backfill.candidates(head):
            held, match = self._verdict(r, d)
            if held is None and self._backfill.harmless(r, match, head, d.prefill_left):
                self._admit(r, match, d)
                self._chunk(r, d, None, capped=[])
            if d.prefill_left <= 0 or not self._running.free_seats:
                break

    # Launch

    def _launch(self, d: Draft) -> None:
        """Close the plan and put it in flight. An empty one takes no number; seats given up wait for the next."""
        plan, running, kv = d.plan, self._running, self._kv
        if not d.chunks and not plan.decodes:
            plan.step = -1
            return
        step = Step(
            plan,
            running.decodes.members if plan.decodes else [],
            running.decodes.sinks if plan.decodes else [],
            running.decodes.clock if plan.decodes else 0,
            [],
        )
        if plan.decodes:
            step.last = running.decodes.ending(running.decodes.clock)
        plan.left = running.take_left()
        self._next_step += 1
        for r, tokens in d.chunks.items():
            start, known = r.planned, r.known_tokens
            end = start + tokens
            emits = end == known
            chunk = Chunk(r.slot, start, tokens, emits)
            plan.chunks.append(chunk)
            step.chunks.append((r, chunk))
            r.count(planned=tokens, sampled=int(emits))
            assert r.lease is not None
            hashes = hashes_of(r, kv)
            kv.commit(r.lease, hashes, end // self._limits.block_size)
            if not emits:
                kv.announce(r.lease, hashes, known // self._limits.block_size)
            elif r.sampled == r.target:
                step.last.append(r)
            else:
                running.start_decoding(r)
        self._lifecycle.launch(step)
