"""vLLM's schedulers with Tidegate's decisions: one mixin on both.

`schedule()` stays vLLM's. Before it runs, the plan is made, whoever gives way is preempted, and vLLM's waiting queue
is filled with those who may be admitted; while it runs, single requests are limited to their chunks; after it, what it
really scheduled is told back. Without a host (an obstacle was found) every method is vLLM's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tidegate.integrations.vllm.attach import attach
from tidegate.integrations.vllm.host import Host

_Stock: Any = Scheduler if TYPE_CHECKING else object
"""What the mixin stands before, for whoever checks types."""


class Hosted(_Stock):
    """The mixin. It stands before one of vLLM's scheduler classes, whose constructor it has."""

    tidegate: Host | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tidegate = self._make_host()

    def _make_host(self) -> Host | None:
        """Whoever decides; None where vLLM does."""
        return attach(self, time.monotonic, time.time)

    def add_request(self, request: Any) -> None:
        new = request.request_id not in self.requests  # else it goes on with a session
        super().add_request(request)
        if self.tidegate is not None and new:
            self.tidegate.arrived(request)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> list[Any]:
        ended: list[Any] = super().finish_requests(request_ids, finished_status)
        if self.tidegate is not None:
            self.tidegate.finished(ended, finished_status)
        return ended

    def schedule(self, throttle_prefills: bool = False) -> Any:
        host = self.tidegate
        if host is None:
            return super().schedule(throttle_prefills)
        host.before_schedule(throttle_prefills)
        limits = host.limits_of
        if limits:
            # The one place where vLLM asks, for each request, how much of it to schedule; 0 leaves it out of the step.
            unlimited = super()._reserve_prefill_lookahead

            def limited(request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
                tokens: int = unlimited(request, num_computed_tokens, num_new_tokens)
                most = limits.get(request.request_id)
                return tokens if most is None else min(tokens, most)

            self._reserve_prefill_lookahead = limited
        try:
            output = super().schedule(throttle_prefills)
        finally:
            if limits:
                del self._reserve_prefill_lookahead
        host.after_schedule(output)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        host = self.tidegate
        if host is not None:
            host.step_done()
        outputs: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        if host is not None:
            host.after_update(outputs)
        return outputs

    def _preempt_request(self, request: Any, timestamp: float, *args: Any, **kwargs: Any) -> None:
        if self.tidegate is not None:
            self.tidegate.preempted(request)
        super()._preempt_request(request, timestamp, *args, **kwargs)

    def shutdown(self) -> None:
        if self.tidegate is not None:
            self.tidegate.close()
        super().shutdown()


class TidegateScheduler(Hosted, Scheduler):
    """vLLM's `Scheduler` with Tidegate's decisions."""


class TidegateAsyncScheduler(Hosted, AsyncScheduler):
    """vLLM's `AsyncScheduler` with Tidegate's decisions."""
