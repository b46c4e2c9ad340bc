"""Who gives way: for decodes that lack a block, and for urgent requests that wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from tidegate.core.blocks import Match
from tidegate.core.draft import Draft
from tidegate.core.hashing import BlockHash
from tidegate.core.kv import KvCache
from tidegate.core.lifecycle import Lifecycle
from tidegate.core.limits import Limits
from tidegate.core.plan import Preemption
from tidegate.core.policies.deadlines import latest_start
from tidegate.core.policy import Policy, PolicyContext
from tidegate.core.queue import WaitingQueue
from tidegate.core.reasons import tier_name
from tidegate.core.request import Request
from tidegate.core.room import Room
from tidegate.core.running import Running, in_order, place
from tidegate.core.swap import Swap
from tidegate.core.view import Candidate, Need, StepView

BARGAIN = 2.0
"""How many times cheaper it must be that the first in the order gives way rather than those after it."""


class Eviction:
    """Settles, before anything is planned, who gives seat and blocks back in this step.

    Whoever computes a chunk in a step in flight cannot be evicted yet. If nobody else can give way, it is
    paused: without a chunk in this plan it can be evicted in the next.
    """

    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        ctx: PolicyContext,
        kv: KvCache,
        queue: WaitingQueue,
        running: Running,
        lifecycle: Lifecycle,
        room: Room,
        swap: Swap,
    ) -> None:
        self._policy = policy
        self._limits = limits
        self._ctx = ctx
        self._kv = kv
        self._queue = queue
        self._running = running
        self._lifecycle = lifecycle
        self._room = room
        self._swap = swap
        self._tier_name = tier_name(policy.order)
        self._last: set[Request] = set()
        self._vain: tuple[int, int, int] | None = None

    def settle_growth(self, d: Draft) -> None:
        """Find who needs a block to decode now; if there are too few, some wait or give way.

        The first in the order gives way to an equal only where that is `BARGAIN` times cheaper, so that somebody
        always gets on; the worst classes that lack blocks are asked first, so that nobody gives way to a worse one.
        """
        running = self._running
        crossing = running.decodes.crossing().members if running.turn is None else running.crossing()
        d.growers = [*running.stalled, *crossing]
        short = len(d.growers) - self._kv.available if d.growers else 0
        if short <= 0 or self._ends_soon(short, d):
            return
        need, reason = Need(short, 0), "KV blocks wanted by running requests"
        first = min(running.members, key=place)
        for tier in sorted({r.tier for r in d.growers}, reverse=True):
            equals = [r for r in running.members if r.tier >= tier]
            if self._make_room(self._candidates(equals, d), need, reason, d, first=first):
                return
        if not d.paused:  # whoever is left has been evicted too often to be evicted again
            self._make_room(self._candidates(d.growers, d), need, reason, d)

    def settle_urgent(self, d: Draft) -> None:
        """Waiting requests of a better class take the seats and blocks that they lack from worse ones."""
        queue, running = self._queue, self._running
        head = queue.peek() if self._policy.features.displace else None
        worst = running.worst_tier if head is not None else None
        if head is None or worst is None or head.tier >= worst:
            return
        if self._vain == (queue.epoch, self._kv.epoch, running.version):
            return
        seats, blocks = running.free_seats, self._kv.available - len(d.growers)
        tokens, prompts = self._tokens_left(head, d), len(running.prefilling)
        promised: set[object] = set()  # idle prefixes that count once, however many start from them
        begun: set[BlockHash] = set()  # blocks that those before compute first: who shares them waits for them
        for r in queue.front():
            if (
                r.tier >= worst
                or r.in_flight
                or d.gave_way(r)
                or not self._due(r)
                or tokens <= 0
                or prompts == self._limits.partial_prefills
            ):
                break
            match, awaited = self._room.match(r)
            missing = self._room.missing(r, match)
            if awaited or (missing is not None and missing in begun):
                continue
            idle = {part: n for part, n in self._kv.idle_parts(match).items() if part not in promised}
            promised |= idle.keys()
            wanted = self._room.wanted(r) - match.blocks + sum(idle.values())
            reserve = self._room.headroom(r) if running.members else 0
            need = Need(max(0, wanted + reserve - blocks), max(0, 1 - seats))
            if need.blocks or need.seats:
                victims = self._displace(r, match, need, d)
                if not victims:
                    self._vain = (queue.epoch, self._kv.epoch, running.version) if not d.paused else None
                    break
                d.displacers[r] = tuple(request_of(v).id for v in victims)
                blocks += sum(v.blocks for v in victims)
                seats += len(victims)
            if missing is not None:
                begun.add(missing)
            blocks -= wanted
            seats -= 1
            prompts += 1
            tokens -= r.known_tokens - self._room.in_place(r, match)

    def displaces_nobody(self) -> bool:
        """Whether it is known that no waiting request takes the place of a running one, as things stand."""
        queue, running = self._queue, self._running
        head = queue.peek() if self._policy.features.displace else None
        worst = running.worst_tier if head is not None else None
        if head is None or worst is None or head.tier >= worst:
            return True
        return self._vain == (queue.epoch, self._kv.epoch, running.version)

    def _due(self, r: Request) -> bool:
        """Whether `r` takes others' places now: at once, or only as its promise comes near."""
        slack = self._policy.features.displace_slack
        if slack is None:
            return True
        latest = latest_start(r, self._ctx, self._ctx.cached(r))
        return latest == inf or latest - self._ctx.now <= slack

    def _displace(self, r: Request, match: Match, need: Need, d: Draft) -> Sequence[Candidate]:
        """Those who give way to the waiting `r`: of a worse class, and behind it in the order as well."""
        at = place(r)
        worse = [v for v in self._running.members if v.tier > r.tier and place(v) > at]
        if not worse:
            return ()
        candidates = [
            c._replace(blocks=self._freed(v, d, match) + self._room.headroom_for(v, r))
            for c, v in ((c, request_of(c)) for c in self._candidates(worse, d))
        ]
        what = "seat" if need.seats else "KV blocks"
        better = f"{self._tier_name} {r.tier} < {min(v.tier for v in worse)}"
        return self._make_room(candidates, need, f"{what} wanted by {r.id} ({better})", d, match)

    def _tokens_left(self, r: Request, d: Draft) -> int:
        """Prefill tokens that are left for `r` after the decodes and the unfinished prompts before it."""
        budget = self._policy.budget
        decodes = self._running.due_decodes * self._limits.tokens_per_decode
        step = StepView(d.plan.now, self._limits.max_num_batched_tokens, decodes, self._running.load, d.due)
        left = min(d.left - step.decodes, budget.tokens(step, self._ctx))
        for u in in_order(self._running.prefilling):
            if left <= 0 or place(u) > place(r):
                break
            left -= budget.chunk(u, u.known_tokens - u.planned, left, step, r.tier <= u.tier, self._ctx)
        return left

    def _ends_soon(self, short: int, d: Draft) -> bool:
        """Whether requests that end within `stall_steps`, and lack nothing themselves, free `short` blocks."""
        for r in self._running.ending_within(self._limits.stall_steps):
            if r not in d.growers and r.lease is not None:
                short -= self._kv.freed_by(r.lease)
        return short <= 0

    def _candidates(self, requests: Iterable[Request], d: Draft) -> list[Candidate]:
        """What evicting each of these would free and lose, first in the order first; some never give way again."""
        size, kv, host = self._limits.block_size, self._kv, self._swap.view()
        found = []
        for r in in_order(r for r in requests if r.preemptions < self._limits.max_preemptions):
            assert r.lease is not None
            lost = max(0, r.planned - kv.kept_by_others(r.lease) * size)
            candidate = Candidate(r, self._freed(r, d), lost, kv.blocks_for(r.planned))
            price = self._policy.restore.price(candidate, host, self._ctx)
            found.append(candidate._replace(seconds=price.seconds))
        return found

    def _freed(self, r: Request, d: Draft, beside: Match | None = None) -> int:
        """Blocks that `r` frees if it goes, the one it wants in this step included."""
        assert r.lease is not None
        return self._kv.freed_by(r.lease, beside) + (r in d.growers)

    def _make_room(
        self,
        candidates: list[Candidate],
        need: Need,
        reason: str,
        d: Draft,
        beside: Match | None = None,
        first: Request | None = None,
    ) -> Sequence[Candidate]:
        """Evict a set of these that covers `need`, or nobody; pause those that may not be evicted yet.

        `beside` is the prefix that whoever needs the room takes up itself; `first` gives way only if that is a bargain.
        """
        choose = self._policy.victim.choose
        others = [c for c in candidates if c.request is not first]
        ready = [c for c in others if not request_of(c).in_flight]
        victims: Sequence[Candidate] = ()
        if self._policy.features.spare:
            spared = [c for c in ready if not self._spared(request_of(c))]
            victims = choose(spared, need, self._ctx) if len(spared) < len(ready) else ()
        victims = victims or choose(ready, need, self._ctx) or self._jointly(ready, need, beside)
        if victims and self._policy.features.spare and len(others) < len(candidates):
            victims = self._bargain(victims, candidates, need)
        for v in victims:
            self._preempt(v, reason, d)
        if victims:
            self._last = {request_of(v) for v in victims}
        else:
            d.paused |= {r for r in map(request_of, choose(others, need, self._ctx)) if r.in_flight}
        return victims

    def _bargain(self, victims: Sequence[Candidate], candidates: list[Candidate], need: Need) -> Sequence[Candidate]:
        """A set of all `candidates` instead of `victims`, if it is brought back so much sooner.

        An unfinished prompt gives way in any case: nobody reads along while it waits.
        """
        if not all(v.request.emitted for v in victims):
            return victims
        free = [c for c in candidates if not request_of(c).in_flight and not self._spared(request_of(c))]
        cheaper = self._policy.victim.choose(free, need, self._ctx)
        if cheaper and BARGAIN * sum(c.seconds for c in cheaper) <= sum(v.seconds for v in victims):
            return cheaper
        return victims

    def _spared(self, r: Request) -> bool:
        """Whether others should give way before `r`: it is about to end, or was the last one to give way."""
        return r in self._last or 0 < r.target - r.sampled <= self._limits.nearly_done

    def _jointly(self, candidates: list[Candidate], need: Need, beside: Match | None) -> list[Candidate]:
        """The last in the order that cover `need` together: blocks they share come free only with all of them."""
        chosen: list[Candidate] = []
        for c in reversed(candidates):
            chosen.append(c)
            leases = [r.lease for r in map(request_of, chosen) if r.lease is not None]
            if len(chosen) >= need.seats and self._kv.freed_by_all(leases, beside) >= need.blocks:
                return chosen
        return []

    def _preempt(self, victim: Candidate, reason: str, d: Draft) -> None:
        r = request_of(victim)
        price = self._policy.restore.price(victim, self._swap.view(), self._ctx)
        if price.why:
            reason = f"{reason}; {price.why}"
        if r in d.growers:
            d.growers.remove(r)
        if price.mode == "swap":
            transfer = self._swap.out(r)
            d.transfers.append(transfer)
            d.plan.swapped_out.append(transfer.copy)
        self._lifecycle.preempt(r, price.mode, reason, d.plan.step, d.plan.now)
        d.plan.preempted.append(Preemption(r.id, price.mode, reason))


def request_of(c: Candidate) -> Request:
    """The request behind a candidate that was made here."""
    assert isinstance(c.request, Request)
    return c.request
