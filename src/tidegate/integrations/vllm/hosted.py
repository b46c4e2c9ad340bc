"""A request that vLLM holds, as the core sees it: its counters are vLLM's own, read when they are asked for.

So nothing is counted twice and nothing can drift apart. What vLLM does not know (class, promises, place in the
order, what its client saw) is ours.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tidegate.core.request import Request, Status


class Ended(NamedTuple):
    """What is left of vLLM's request when it has ended, so that records can be made of it."""

    num_computed_tokens: int
    num_output_tokens: int
    num_tokens: int
    num_output_placeholders: int = 0


class HostedRequest(Request):
    """`handle` is vLLM's request; the other arguments are those of `core.request.Request`.

    Of a request that is about to be admitted, `rewind` says how many tokens it finds cached; vLLM knows that only
    once it has scheduled it.
    """

    __slots__ = ()

    handle: Any

    def __init__(self, handle: Any, **own: Any) -> None:
        super().__init__(handle.request_id, prompt_tokens=handle.num_prompt_tokens, handle=handle, **own)
        # vLLM's own list, which grows with the outputs; a request that must not read the cache finds nothing in it.
        self.block_hashes = [] if handle.skip_reading_prefix_cache else handle.block_hashes

    @property
    def planned(self) -> int:
        """KV tokens whose computation is scheduled or done."""
        return self.handle.num_computed_tokens or self._planned

    computed = planned  # a step in flight is taken for done: who waits for it cannot be told

    @property
    def sampled(self) -> int:
        """Output tokens scheduled or done."""
        return self.handle.num_output_tokens + self.handle.num_output_placeholders

    @property
    def emitted(self) -> int:
        """Output tokens that vLLM has delivered."""
        return self.handle.num_output_tokens

    @property
    def known_tokens(self) -> int:
        """The prompt and the outputs delivered so far."""
        return self.handle.num_tokens

    @property
    def clock(self) -> int:
        """Output tokens, for whoever counts what its tenant was served (core/service.py, `Clock`)."""
        return self.handle.num_output_tokens

    @property
    def in_flight(self) -> int:
        """Whether it may not start yet, because tokens of a step before its preemption are still to be delivered.

        Whoever runs may always be preempted: vLLM delivers what is in flight.
        """
        if self.status is Status.RUNNING:
            return 0
        return int(self.handle.num_stale_output_tokens > 0 and not self.handle.drop_stale_output)

    @in_flight.setter
    def in_flight(self, steps: int) -> None:
        """vLLM knows what is in flight."""

    def let_go(self) -> None:
        """It has ended: keep its counts, and not vLLM's request."""
        h = self.handle
        self.handle = Ended(h.num_computed_tokens, h.num_output_tokens, h.num_tokens)
        self.block_hashes = []
