"""Plans one step. The only place that reserves blocks and spends the token budget.

The order is fixed: who gives way is settled first, then the decodes are planned, then prompts (running
and waiting, merged in policy order) share what is left of the budget, then a blocked head may be passed
by requests that cannot delay it. Nothing planned is ever taken back. (Where steps are all prompts or all
decodes, the turn is settled first, and growth only for a step that decodes.)
"""

from __future__ import annotations

from collections.abc import Collection

from tidegate.core.backfill import Backfill
from tidegate.core.blocks import Match
from tidegate.core.cohorts import Cohort, Cohorts
from tidegate.core.draft import Draft
from tidegate.core.ends import delayed
from tidegate.core.eviction import Eviction
from tidegate.core.kv import KvCache
from tidegate.core.lifecycle import Lifecycle, Step
from tidegate.core.limits import Limits
from tidegate.core.plan import Chunk, Join, StepPlan
from tidegate.core.policy import Policy, PolicyContext
from tidegate.core.queue import WaitingQueue
from tidegate.core.reasons import BesideWaiting, InPlaceOf, InTurn, Why, score_unit
from tidegate.core.request import Request
from tidegate.core.room import Room
from tidegate.core.running import Running, in_order, place
from tidegate.core.swap import Swap, Transfer
from tidegate.core.view import Settled, StepView


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
        swap: Swap,
    ) -> None:
        self._policy = policy
        self._limits = limits
        self._ctx = ctx
        self._kv = kv
        self._queue = queue
        self._running = running
        self._lifecycle = lifecycle
        self._swap = swap
        self._room = Room(limits, kv, running, policy.features)
        self._eviction = Eviction(policy, limits, ctx, kv, queue, running, lifecycle, self._room, swap)
        self._backfill = Backfill(policy, limits, ctx, kv, queue, running)
        if policy.budget.max_stride > 1:
            move = lifecycle.move_decode
            running.cohorts = Cohorts(running.decodes, running.load, policy.budget, ctx, limits, move)
        self._per_decode = limits.tokens_per_decode
        self._score_unit = score_unit(policy.order)
        self._next_step = 0
        self._prefill_steps = 0
        self._blocked: tuple[Request, int, int, str] | None = None

    def plan(self, now: float, settled: Settled | None = None) -> StepPlan:
        """The next step, in flight from now on; an empty plan if there is nothing to compute."""
        # Written out: default factories would make up a tenth of a steady step.
        plan = StepPlan(self._next_step, now, [], [], [], [], [], [], [], [], [], [])
        draft = Draft(plan, self._limits.max_num_batched_tokens, 0, [], {}, set(), {}, [], settled)
        if self._running.cohorts is not None:
            self._running.turn = self._running.cohorts.next_turn()
        if self._policy.features.mixed_batches:
            self._eviction.settle_growth(draft)
            self._eviction.settle_urgent(draft)
            self._plan_decodes(draft)
            self._plan_prompts(draft)
        else:
            self._plan_unmixed(draft)
        self._launch(draft)
        return plan

    @property
    def blocked(self) -> tuple[Request, str] | None:
        """The head that was last found blocked, and by which constraint."""
        return None if self._blocked is None else (self._blocked[0], self._blocked[3])

    def at_rest(self, waiting: int) -> bool:
        """Whether planning again starts, evicts and displaces nobody, while no key, seat or block comes free and so
        many requests wait.

        True only where that is known without looking for it anew: where the last plan found it so.
        """
        queue, running = self._queue, self._running
        if running.prefilling or running.stalled or self._prefill_steps:
            return False
        if not waiting:
            return True
        if running.free_seats:
            head = queue.peek() if self._blocked is not None else None
            if head is None or self._blocked is None or self._blocked[:3] != (head, head.version, self._kv.epoch):
                return False
            if self._policy.features.backfill and not self._backfill.exhausted:
                return False
        return self._eviction.displaces_nobody()

    def take_numbers(self, steps: int) -> int:
        """So many steps are planned elsewhere; returns the number of the first."""
        first = self._next_step
        self._next_step += steps
        return first

    # Decodes

    def _plan_decodes(self, d: Draft) -> None:
        """Every decode gets its token, and its block where it crosses into one."""
        running = self._running
        resumed = [r for r in d.growers if r in running.stalled] if running.stalled else []
        if d.growers and len(d.growers) > self._kv.available:
            growers = in_order(d.growers)
            for r in growers[self._kv.available :]:
                self._lifecycle.stall(r)
            resumed = [r for r in growers[: self._kv.available] if r in running.stalled]
            d.plan.held_back_by = "stalled"
        d.plan.growth = running.grow(resumed)
        for r in resumed:
            running.start_decoding(r)
        decodes, turn = running.decodes, running.turn
        if turn is not None and running.cohorts is not None and running.due_decodes:
            d.plan.decodes = running.cohorts.advance(turn).slots
        elif decodes.members:
            decodes.advance()
            d.plan.decodes = decodes.slots
        d.left -= len(d.plan.decodes) * self._per_decode

    def _plan_unmixed(self, d: Draft) -> None:
        """A step of prompts alone or of decodes alone; decodes get a turn after `max_prefill_steps`."""
        if not self._running.due_decodes or self._prefill_steps < self._policy.features.max_prefill_steps:
            self._eviction.settle_urgent(d)
            self._plan_prompts(d)
        if d.chunks:
            self._prefill_steps += 1
            return
        self._eviction.settle_growth(d)
        self._plan_decodes(d)
        if not d.plan.decodes and self._prefill_steps:  # nobody could decode after all: the turn is not lost
            self._plan_prompts(d)
        elif d.plan.held_back_by is None and (len(self._queue) or self._running.prefilling):
            d.plan.held_back_by = "decode turn"
        self._prefill_steps = 0

    # Prompts

    def _plan_prompts(self, d: Draft) -> None:
        """Unfinished prompts and those that can be admitted share the budget, in policy order."""
        running = self._running
        if not running.prefilling:
            if not len(self._queue):
                return
            if not running.free_seats and d.left > 0:  # as in nearly all steady steps
                d.plan.held_back_by = "seats"
                return
        decodes = len(d.plan.decodes) * self._per_decode
        budget, crowd = self._limits.max_num_batched_tokens, self._crowd()
        view = StepView(d.plan.now, budget, decodes, running.load, d.due, crowd)
        d.prefill_left = min(d.left, self._prompt_tokens(view, d.settled))
        unfinished: list[Request] = []
        if running.prefilling:
            unfinished = in_order(r for r in running.prefilling if r not in d.paused and not r.copying)
            unfinished.reverse()
        capped: list[Request] = []
        while d.prefill_left > 0:
            head = self._admissible(d)
            if unfinished and (head is None or place(unfinished[-1]) < place(head[0])):
                r = unfinished.pop()
            elif head is not None:
                r = head[0]
                self._admit(r, head[1], d, head[2])
            else:
                break
            if self._chunk(r, d, view, unfinished):
                capped.append(r)
        if capped:
            capped = [r for r in capped if self._chunk(r, d, view, None)]
        self._plan_backfill(d, view)
        if d.plan.held_back_by is None:
            if capped and d.prefill_left > 0:
                d.plan.held_back_by = "chunk size"
            elif len(self._queue):
                d.plan.held_back_by = "prefill budget"

    def _crowd(self) -> int | None:
        """`StepView.crowd`, as far as is known: the head that was last found to lack memory waits still."""
        lacks_memory = self._blocked is not None and self._blocked[0] in self._queue
        return sum(r.known_tokens for r in self._running.prefilling) if lacks_memory else None

    def _prompt_tokens(self, step: StepView, settled: Settled | None) -> int:
        """Prompt tokens that the budget gives; it need not be asked again for the step it was settled for."""
        if settled is None or settled.due is not None or step.decodes != settled.decodes:
            return self._policy.budget.tokens(step, self._ctx)
        same = step.load.context == settled.context + self._running.due_decodes  # the tokens that they write in it
        return settled.tokens if same else self._policy.budget.tokens(step, self._ctx)

    def _contended(self, r: Request, others: Collection[Request]) -> bool:
        """Whether another prompt of the same class or a better one waits for tokens of this step."""
        head = self._queue.peek()
        return (head is not None and head.tier <= r.tier) or any(o.tier <= r.tier for o in others)

    def _chunk(self, r: Request, d: Draft, step: StepView, others: Collection[Request] | None) -> bool:
        """Give `r` tokens of this step, beside those it has; True if it could use more of them.

        `others` are unfinished prompts that come after it; None where what is left is nobody else's.
        """
        if r.copying:
            return False
        taken = d.chunks.get(r, 0)
        left, remaining = taken + d.prefill_left, r.known_tokens - r.planned
        contended = others is not None and remaining > left and self._contended(r, others)
        allowed = self._policy.budget.chunk(r, remaining, left, step, contended, self._ctx)
        tokens = min(remaining, left, allowed) - taken
        if tokens > 0:
            d.chunks[r] = taken + tokens
            d.prefill_left -= tokens
            d.left -= tokens
        return taken + tokens < remaining

    def _admissible(self, d: Draft) -> tuple[Request, Match, Why | None] | None:
        """The first waiting request, if it can start now, and why if not in its turn; else None, and the plan names
        what holds it back."""
        if not self._running.free_seats:
            if len(self._queue):
                d.plan.held_back_by = "seats"
            return None
        head = self._queue.peek()
        if d.displacers and head is not None and d.gave_way(head):
            # Its key may have changed while it ran; those for whom it gave way come first all the same.
            head = next((r for r in d.displacers if r in self._queue), head)
        if head is None:
            if len(self._queue):
                d.plan.held_back_by = "resource slots"
            return None
        if self._blocked is not None and self._blocked[:3] == (head, head.version, self._kv.epoch):
            d.plan.held_back_by = self._blocked[3]
            return None
        self._blocked = None
        held, match = self._verdict(head, d)
        if held == "shared prefix":
            d.plan.held_back_by = held
            return self._beside_waiting(d)
        if held is None:
            return head, match, InPlaceOf(d.displacers[head]) if head in d.displacers else None
        d.plan.held_back_by = held
        if held in ("kv", "headroom", "return after preemption"):
            self._blocked = (head, head.version, self._kv.epoch, held)
        return None

    def _beside_waiting(self, d: Draft) -> tuple[Request, Match, Why] | None:
        """The first that can start while those before it wait for a prefix, their seats and blocks left to them."""
        seats, blocks = self._running.free_seats, 0
        front = self._queue.front()
        for r in front:
            held, match = self._verdict(r, d, blocks)
            if held is None and seats > 0:
                return r, match, BesideWaiting(front[0].id)
            if held != "shared prefix":
                return None
            seats -= 1
            blocks += self._room.wanted(r) - match.blocks + match.idle
        return None

    def _verdict(self, r: Request, d: Draft, kept: int = 0) -> tuple[str | None, Match]:
        """What keeps `r` from starting now (None: nothing), and the cached prefix it would start from.

        `kept` blocks are somebody else's.
        """
        running, kv = self._running, self._kv
        match = kv.nothing
        if r.in_flight:
            return ("copy in flight" if r.host else "token in flight"), match
        if d.gave_way(r):
            return "preempted in this step", match
        if self._policy.features.keep_ends and r not in d.displacers and delayed(r, running, self._ctx) is not None:
            return "promised ends", match
        partial = self._limits.partial_prefills
        if partial is not None and len(running.prefilling) >= partial:
            return "partial prefills", match
        match, awaited = self._room.match(r)
        if awaited:
            return "shared prefix", match
        spare = kv.available - kept - match.idle - (self._room.wanted(r) - match.blocks)
        if spare < 0:
            return "kv", match
        if running.members and spare < self._room.headroom(r, r in d.displacers):
            return ("return after preemption" if r.preemptions else "headroom"), match
        return None, match

    def _admit(self, r: Request, match: Match, d: Draft, why: Why | None) -> None:
        """`r` takes a seat: in its turn, or else `why`."""
        kv, plan, size = self._kv, d.plan, self._limits.block_size
        lease = kv.reserve(match, self._room.wanted(r) - match.blocks, r)
        prefix, cached = match.blocks * size, self._room.in_place(r, match)
        returning = bool(r.preemptions)
        self._queue.remove(r)
        r.rewind(cached)
        self._running.seat(r, lease)
        self._lifecycle.start(r, plan.step, cached, plan.now, why or InTurn(r.key, r.seq, self._score_unit))
        kv.announce(lease, r.block_hashes, r.known_tokens // size)
        tokens = r.token_ids if r.token_ids is not None else ()
        plan.joined.append(Join(r.slot, r.id, r.handle, tokens, cached, r.emitted, lease.table.copy()))
        (plan.restored if returning else plan.admitted).append(r.id)
        transfer = self._swap.into(r, prefix) if r.host else None
        if transfer is not None:
            d.transfers.append(transfer)
            plan.swapped_in.append(transfer.copy)

    def _plan_backfill(self, d: Draft, step: StepView) -> None:
        """Requests that cannot delay the blocked head start beside what runs."""
        if self._blocked is None or d.prefill_left <= 0 or not self._policy.features.backfill:
            return
        if not len(self._queue) or not self._running.free_seats:
            return
        head, held_by = self._blocked[0], self._blocked[3]
        for r in self._backfill.candidates(head):
            held, match = self._verdict(r, d)
            past = self._backfill.harmless(r, match, head, held_by, step) if held is None else None
            if past is not None:
                self._admit(r, match, d, past)
                self._chunk(r, d, step, None)
            elif held not in (None, "kv", "headroom", "return after preemption"):
                self._backfill.try_again()
            if d.prefill_left <= 0 or not self._running.free_seats:
                self._backfill.try_again()
                break

    # Launch

    def _launch(self, d: Draft) -> None:
        """Close the plan and put it in flight. An empty one takes no number; seats given up wait for the next."""
        plan, running = d.plan, self._running
        if not d.chunks and not plan:
            plan.step = -1
            return
        decodes = running.decodes
        if plan.decodes:
            clock = decodes.clock
            if running.turn is None:
                ending = decodes.ending(clock)
                outputs = decodes.lists if decodes.keeping else []  # nobody's tokens are kept: nothing to append to
                step = Step(plan, decodes.members, outputs, clock, ending, [], d.transfers, [])
            else:
                step = self._step_with(running.turn, plan, d.transfers)
            plan.context = decodes.context if running.turn is None else running.load.context
        else:
            step = Step(plan, [], [], 0, [], [], d.transfers, [])
        plan.draft_tokens = self._limits.draft_tokens
        plan.left = running.take_left()
        self._next_step += 1
        if d.chunks:
            self._launch_chunks(d.chunks, step)
        self._lifecycle.launch(step)

    def _launch_chunks(self, chunks: dict[Request, int], step: Step) -> None:
        """Count the tokens of each prompt as planned; whoever has all of its prompt decodes from the next step on."""
        kv, size = self._kv, self._limits.block_size
        for r, tokens in chunks.items():
            start, known = r.planned, r.known_tokens
            end = start + tokens
            emits = end == known
            chunk = Chunk(r.slot, start, tokens, emits)
            step.plan.chunks.append(chunk)
            step.chunks.append((r, chunk))
            r.count(tokens, emits)
            assert r.lease is not None
            if r.block_hashes:
                kv.commit(r.lease, r.block_hashes, end // size)
                if not emits:
                    kv.announce(r.lease, r.block_hashes, known // size)
            if not emits:
                continue
            if r.sampled == r.target:
                step.last.append(r)
            else:
                self._running.start_decoding(r)

    def _step_with(self, turn: Cohort, plan: StepPlan, transfers: list[Transfer]) -> Step:
        """The step in which the main set and a cohort decode."""
        main, own = self._running.decodes, turn.decodes
        both = turn.together(main)
        ending = [*main.ending(main.clock), *own.ending(own.clock)]
        also = own, own.clock
        return Step(plan, both.members, both.outputs, main.clock, ending, [], transfers, [], also=also)
