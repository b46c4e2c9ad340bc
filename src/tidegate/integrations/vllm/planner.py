"""The core's planner over vLLM's pool and seats. It decides; vLLM carries out, and may carry out less."""

from __future__ import annotations

from collections.abc import Collection

from tidegate.core.blocks import Match
from tidegate.core.draft import Draft
from tidegate.core.plan import Chunk, StepPlan
from tidegate.core.planner import Planner
from tidegate.core.reasons import InTurn, Why
from tidegate.core.request import Request
from tidegate.core.running import in_order
from tidegate.core.view import Settled, StepView
from tidegate.integrations.vllm.hosted import HostedRequest
from tidegate.integrations.vllm.pool import VllmPool


class VllmPlanner(Planner):
    """Who gives way, who is admitted and how much each prompt computes are decided as everywhere.

    offered: who is to be admitted in this step, in order, and why
    limits_of: tokens that vLLM may schedule of these requests at most, by request id; the others are not limited
    """

    _kv: VllmPool

    offered: dict[HostedRequest, Why]
    limits_of: dict[str, int]

    def plan(self, now: float, settled: Settled | None = None) -> StepPlan:
        self.offered = {}
        return super().plan(now, settled)

    def _plan_decodes(self, d: Draft) -> None:
        """Every decode gets its token, but those for whose block there is no room: they pause for this step."""
        running, available = self._running, self._kv.available
        decodes = running.decodes.members
        if len(d.growers) > available:
            paused = set(in_order(d.growers)[max(0, available) :])
            decodes = [r for r in decodes if r not in paused]
            d.plan.held_back_by = "stalled"
        self._kv.take(min(len(d.growers), max(0, available)))
        d.plan.decodes = decodes  # type: ignore[assignment]  # requests, where our executors have slots
        d.left -= len(decodes) * self._per_decode

    def _admit(self, r: Request, match: Match, d: Draft, why: Why | None) -> None:
        kv, size = self._kv, self._limits.block_size
        lease = kv.reserve(match, self._room.wanted(r) - match.blocks, r)
        self._queue.remove(r)
        r.rewind(match.blocks * size)
        self._running.seat(r, lease)
        kv.announce(lease, r.block_hashes, r.known_tokens // size)
        assert isinstance(r, HostedRequest)
        self.offered[r] = why or InTurn(r.key, r.seq, self._score_unit)
        (d.plan.restored if r.preemptions else d.plan.admitted).append(r.id)

    def _chunk(self, r: Request, d: Draft, step: StepView, others: Collection[Request] | None) -> bool:
        more = super()._chunk(r, d, step, others)
        assert isinstance(r, HostedRequest)
        if r in d.chunks:
            self._kv.chunk(r, d.chunks[r])
        return more

    def _launch(self, d: Draft) -> None:
        """Say what vLLM is to do: a chunk for each prompt, nothing for whoever pauses, a token for the others."""
        plan, running = d.plan, self._running
        limits = self.limits_of = {}
        for r in running.prefilling:
            tokens = limits[r.id] = d.chunks.get(r, 0)
            if tokens:
                plan.chunks.append(Chunk(-1, r.planned, tokens, r.planned + tokens >= r.known_tokens))
        if len(plan.decodes) < len(running.decodes):
            computed = set(plan.decodes)
            limits.update((r.id, 0) for r in running.decodes.members if r not in computed)
        plan.context = running.decodes.context
        if not plan:
            plan.step = -1
            return
        self._next_step += 1
