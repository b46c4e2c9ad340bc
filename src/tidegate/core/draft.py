"""A plan in the making."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.core.plan import StepPlan
from tidegate.core.request import Request
from tidegate.core.swap import Transfer


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
    due:          prompt tokens after which the step had better end (`StepView.due`)
    """

    plan: StepPlan
    left: int
    prefill_left: int
    growers: list[Request]
    displacers: dict[Request, tuple[str, ...]]
    paused: set[Request]
    chunks: dict[Request, int]
    transfers: list[Transfer]
    due: int | None

    def gave_way(self, r: Request) -> bool:
        """Whether `r` was evicted in this very plan: it does not come back in it."""
        return r.preempted_at == self.plan.now and any(p.request_id == r.id for p in self.plan.preempted)
