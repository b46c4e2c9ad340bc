"""A job's life between the queue and its one end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec

from tidegate.api.errors import ApiError
from tidegate.config import GatewayConfig
from tidegate.gateway.attempt import Attempt, Deadlines, How
from tidegate.gateway.budget import RetryBudget
from tidegate.gateway.dispatch import Dispatch
from tidegate.gateway.fleet import Fleet
from tidegate.gateway.front import Reply
from tidegate.gateway.job import Job
from tidegate.gateway.passing_on import pass_on
from tidegate.routing.choice import Choice
from tidegate.routing.health import Failure

MAX_ATTEMPTS = 4
"""Replicas that a request is sent to at most: of failures that show at once. A silent one is left only once."""

_FAILURES = {
    How.ERROR: Failure.ERROR,
    How.UNREACHABLE: Failure.REFUSED,
    How.RESET: Failure.RESET,
    How.NO_FIRST_TOKEN: Failure.STALL,
    How.CUT: Failure.CUT,
    How.STALLED: Failure.STALL,
}


class End(msgspec.Struct, frozen=True):
    """How a job ended. Times are seconds on the event loop's clock.

    status:         the answer's, 499 where the client left before it
    replica:        the one that had it last; None where none had
    attempts:       replicas that had it
    first_token_at: of a stream
    prompt_tokens:  as the engine counted them; None where it did not say
    outputs:        tokens that came: as the engine counted them, else the events of the stream
    reason:         what went wrong, in words
    """

    status: int
    how: How
    replica: str | None
    attempts: int
    first_token_at: float | None
    prompt_tokens: int | None
    outputs: int
    reason: str


class Observer(Protocol):
    """Who is told what happens to jobs. Each that was read whole ends once."""

    def sent(self, job: Job, choice: Choice, attempt: int, now: float) -> None: ...

    def first_token(self, job: Job, now: float) -> None: ...

    def failed(self, job: Job, replica: str, how: How, reason: str, now: float) -> None:
        """An attempt failed its engine, or was turned away by it; another may follow."""
        ...

    def ended(self, job: Job, end: End, now: float) -> None: ...


class Proxy:
    """Sends jobs and passes answers on. `config` may be exchanged at any time."""

    def __init__(self, config: GatewayConfig, fleet: Fleet, dispatch: Dispatch, observers: Sequence[Observer]) -> None:
        self.config = config
        self.fleet = fleet
        self.dispatch = dispatch
        self.observers = observers
        self.budget = RetryBudget(config.retry_share)
        self.loop = asyncio.get_running_loop()

    def serve(self, job: Job, reply: Reply, ended: Callable[[End], None]) -> Coroutine[Any, Any, None]:
        """Answer a job. Cancelled when its client leaves; ApiError where no engine answers it.

        `ended` is told how, in each case.
        """
        return _Exchange(self, job, reply, ended).run()


class _Exchange:
    """One job on its way; told of tokens by its attempts."""

    def __init__(self, proxy: Proxy, job: Job, reply: Reply, ended: Callable[[End], None]) -> None:
        self._proxy = proxy
        self._ended = ended
        self._fleet = proxy.fleet
        self._loop = proxy.loop
        self._job = job
        self._reply = reply
        self._attempts: list[tuple[str, Attempt]] = []
        self._first_token_at: float | None = None
        self._outputs = 0

    async def run(self) -> None:
        how, status, reason = How.ERROR, 500, ""
        try:
            attempt = await self._until_answered()
            how, status, reason = attempt.how or how, attempt.status, attempt.reason
        except asyncio.CancelledError:
            how, status, reason = self._cancelled()
            raise
        except ApiError as error:
            how = (self._attempts and self._attempts[-1][1].how) or How.REFUSED
            status, reason = error.status, str(error)
            raise
        finally:
            end = self._end(how, status, reason)
            now = self._loop.time()
            self._proxy.dispatch.served(self._job, end.outputs)
            self._ended(end)
            for observer in self._proxy.observers:
                observer.ended(self._job, end, now)

    def _cancelled(self) -> tuple[How, int, str]:
        if not self._reply.given_up:
            return How.CLIENT_LEFT, 499, ""
        status = self._attempts[-1][1].status if self._reply.started else 503
        return How.SHUT_DOWN, status, "the gateway was shut down"

    async def _until_answered(self) -> Attempt:
        """Try replicas until one answers or no further one may be tried."""
        avoid: set[str] = set()
        self._proxy.budget.sent(self._loop.time())
        while True:
            attempt = await self._try(avoid)
            if self._reply.ended:
                return attempt
            avoid.add(self._attempts[-1][0])
            if not self._may_try_again(avoid):
                return self._give_up(attempt)

    async def _try(self, avoid: set[str]) -> Attempt:
        try:
            choice = await self._proxy.dispatch.take(self._job, avoid)
        except ApiError:
            if self._attempts and self._attempts[-1][1].refusal is not None:
                return self._give_up(self._attempts[-1][1])
            raise
        job, config = self._job, self._proxy.config
        slo_class = job.claim.slo_class
        first = config.first_token_of(slo_class) if job.streams else config.answer_seconds
        attempt = Attempt(self._reply, self, Deadlines(first, config.stall_of(slo_class)), self._loop)
        self._attempts.append((choice.replica.name, attempt))
        try:
            for observer in self._proxy.observers:
                observer.sent(job, choice, len(self._attempts), self._loop.time())
            await self._send(attempt)
        finally:
            self._account(attempt)
        return attempt

    def _send(self, attempt: Attempt) -> Coroutine[Any, Any, How]:
        job, replica = self._job, self._fleet.of(self._job.id)
        headers, body = pass_on(replica.kind, job.claim, job.headers, job.body, replica.wanted.pass_class)
        own = [(b"x-request-id", job.id.encode())]
        if replica.wanted.api_key is not None:
            own.append((b"authorization", b"Bearer " + replica.wanted.api_key.encode()))
        length = len(body) if body or job.method == "POST" else None
        head = replica.upstream.head(job.method, job.path, [*headers, *own], length)
        return attempt.run(replica.upstream, head, body)

    def _account(self, attempt: Attempt) -> None:
        """Tell the fleet how an attempt ended."""
        id, now, how = self._job.id, self._loop.time(), attempt.how
        if how is How.TURNED_AWAY:
            self._fleet.turned_away(id, now, attempt.refusal.retry_after if attempt.refusal else None)
        elif how in _FAILURES:
            self._fleet.failed(id, now, _FAILURES[how])
        else:
            self._fleet.ended(id, now, complete=how is How.DONE)
            return
        for observer in self._proxy.observers:
            observer.failed(self._job, self._attempts[-1][0], how, attempt.reason, now)

    def _may_try_again(self, avoid: set[str]) -> bool:
        """Whether the last attempt, of which nothing reached the client, may be followed by another.

        Whoever has turned it away is not asked again: where there is nobody else, the client hears when to come back.
        """
        silent = sum(attempt.how is How.NO_FIRST_TOKEN for _, attempt in self._attempts)
        if len(self._attempts) >= MAX_ATTEMPTS or silent > 1:
            return False
        if self._attempts[-1][1].how is How.TURNED_AWAY and not self._proxy.dispatch.elsewhere(self._job, avoid):
            return False
        return self._proxy.budget.take(self._loop.time())

    def _give_up(self, attempt: Attempt) -> Attempt:
        """Answer a request that nobody served: with what the engine said, where it said something."""
        refusal = attempt.refusal
        if refusal is not None:
            self._reply.whole(refusal.status, refusal.headers, bytes(refusal.body))
            return attempt
        if attempt.how is How.NO_FIRST_TOKEN:
            raise ApiError(504, f"no engine answered in time: {attempt.reason}", code=attempt.how.value)
        raise ApiError(502, f"no engine could answer: {attempt.reason}", code=attempt.how and attempt.how.value)

    def _end(self, how: How, status: int, reason: str) -> End:
        name, attempt = self._attempts[-1] if self._attempts else (None, None)
        usage = attempt.usage if attempt is not None else {}
        outputs = usage.get("completion", self._outputs)
        return End(status, how, name, len(self._attempts), self._first_token_at, usage.get("prompt"), outputs, reason)

    # What attempts tell.

    def first_token(self, now: float) -> None:
        self._first_token_at = now
        self._fleet.first_token(self._job.id, now)
        for observer in self._proxy.observers:
            observer.first_token(self._job, now)

    def tokens(self, now: float, n: int) -> None:
        self._outputs += n
        self._fleet.tokens(self._job.id, now, n)
