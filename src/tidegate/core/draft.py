"""A plan in the making."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.core.plan import StepPlan
from tidegate.core.request import Request
from tidegate.core.swap import Transfer
from tidegate.core.view import Settled


@dataclass(slots=True)
class Draft:
    """What one call of the planner has decided so far.

    left:         tokens of the step's budget that are not spent
    prefill_left: those of them that prompts may have
    growers:      decodes that need a block in this step
    displacers:   waiting requests for whom others gave way, and who
    paused:       prompts that get no chunk, so that they can be evicted once no step in flight computes them
    chunks:       tokens of each prompt's chunk
    transfers:    copies to the host and back that begin with this step
    settled:      what is known of the step beforehand; None where nobody waits for a promised first token
    """

    plan: StepPlan
    left: int
    prefill_left: int
    growers: list[Request]
    displacers: dict[Request, tuple[str, ...]]
    paused: set[Request]
    chunks: dict[Request, int]
    transfers: list[Transfer]
    settled: Settled | None

    @property
    def due(self) -> int | None:
        """Prompt tokens after which the step had better end (`StepView.due`)."""
        return None if self.settled is None else self.settled.due

    def gave_way(self, r: Request) -> bool:
        """Whether `r` was evicted in this very plan: it does not come back in it."""
        return r.preempted_at == self.plan.now and any(p.request_id == r.id for p in self.plan.preempted)
