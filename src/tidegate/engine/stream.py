"""The client's end of the engine: an asynchronous iterator that a step fills in one go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tidegate.engine.output import Delta


class Stream:
    """The outputs of requests that were submitted together, as `(index, Delta)` in order of arrival.

    What arrives while nobody looks is merged, one delta per sequence; a reader that is slow therefore
    holds at most its own `max_tokens`. Iteration ends after every sequence's last delta, or raises the
    error with which the engine failed. Lives on the event loop that was running when it was made.
    """

    def __init__(self, request_ids: Sequence[str], abort: Callable[[Sequence[str]], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self.request_ids = tuple(request_ids)
        self._abort = abort
        self._open = set(range(len(request_ids)))
        self._pending: dict[int, Delta] = {}
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, index: int, delta: Delta) -> None:
        """Deliver what is new in sequence `index`. Call it on the stream's loop."""
        before = self._pending.get(index)
        if before is None:
            self._pending[index] = delta
        else:
            before.absorb(delta)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End the stream with an error; what was delivered before can still be read. On the stream's loop."""
        if self._open:
            self._error = error
            self._wake()

    def abort(self) -> None:
        """Give up whatever has not ended. Idempotent."""
        if self._open:
            self._abort([self.request_ids[i] for i in sorted(self._open)])

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        while not self._pending:
            if not self._open:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        index = next(iter(self._pending))
        delta = self._pending.pop(index)
        if delta.finish_reason is not None:
            self._open.discard(index)
        return index, delta

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
