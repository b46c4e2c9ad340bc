"""The seam between the loop and whoever computes a step."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from tidegate.core.plan import StepPlan, StepResult


class Executor(Protocol):
    """Computes plans, in order.

    num_blocks: KV blocks the scheduler may hand out, ids 0 .. num_blocks-1.
    block_size: KV tokens a block holds.
    max_model_len: the most tokens (prompt + output) the model handles.
    max_num_seqs: slots, ids 0 .. max_num_seqs-1.
    host_blocks: blocks of host memory that KV can be swapped to, host ids 0 .. host_blocks-1; 0 is none.
    disk_blocks: blocks of a file beyond those, host ids host_blocks .. host_blocks+disk_blocks-1.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    host_blocks: int
    disk_blocks: int

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Take a non-empty plan and return at once; plans complete in the order of submission.

        With pipeline depth 2 a plan may be submitted before the result of the one before it was read:
        its decodes feed on tokens that the earlier step samples, which the executor keeps by slot.
        The future raises what the step raised; the executor is then of no further use. A `Copy` that fails
        raises nothing: the result names its request in `failed_copies`, and the step goes on.
        """
        ...

    def close(self) -> None:
        """Release threads and memory. Idempotent."""
        ...
