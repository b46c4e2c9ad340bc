"""An executor that computes nothing and says how long it would have taken, by the cost model."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from math import inf

from tidegate.core.copy_time import CopyTime
from tidegate.core.plan import Copy, StepPlan, StepResult
from tidegate.core.quiet import QuietSteps
from tidegate.executors.sim.step_cost import StepCost


class SimExecutor:
    """Every token it returns is 0. Copies run beside the compute of their step, over the link of each GPU.

    block_size: tokens of a KV block
    """

    __slots__ = ("_block_copy_s", "cost")

    def __init__(self, cost: StepCost, block_size: int) -> None:
        self.cost = cost
        link = cost.hardware.link_bandwidth * cost.kv_shares
        self._block_copy_s = block_size * cost.model.kv_bytes_per_token / link

    def run(self, plan: StepPlan) -> tuple[StepResult, float]:
        """The result of a step, and the seconds it took."""
        emitting = decodes = len(plan.decodes)
        chunks: list[tuple[int, int]] = []
        for _, start, length, emits in plan.chunks:
            chunks.append((start, length))
            emitting += emits
        seconds = self.cost.step_seconds(chunks, decodes, plan.context)
        if plan.swapped_out or plan.swapped_in:
            copying = self._copy_seconds(plan.swapped_out) + self._copy_seconds(plan.swapped_in)
            seconds = max(seconds, copying)
            return StepResult([0] * emitting, copy_seconds=copying, seconds=seconds), seconds
        return StepResult([0] * emitting, seconds=seconds), seconds

    def copy_time(self) -> CopyTime:
        """What a scheduler should believe of copies."""
        return CopyTime(self._block_copy_s, self._block_copy_s)

    def extend(self, times: list[float], quiet: QuietSteps, begin: float, until: float) -> None:
        """Append when further quiet steps end, up to the first that ends after `until`.

        `times` are the ends of the first of them, of which there may be none yet; the first begins at `begin`.
        The same additions as step by step, so that the times are the same to the last bit.
        """
        steps, _, last, decodes, context = quiet
        done, at = len(times), times[-1] if times else begin
        within = until if until < last else last
        while done < steps and at < last and at <= until:
            # Where those are not enough after all, it is asked again.
            seconds = self.cost.decode_span(decodes, context + done * decodes, steps - done, within - at)
            ends = list(accumulate(seconds, initial=at))
            # The first that ends after `until`, and the first that may not be planned any more, are the bounds.
            bound = bisect_right(ends, until, 1)
            if last < inf:
                bound = min(bound, bisect_left(ends, last, 1))
            times += ends[1 : bound + 1]
            done, at = len(times), times[-1]

    def _copy_seconds(self, copies: list[Copy]) -> float:
        return sum(len(copy.device) for copy in copies) * self._block_copy_s
