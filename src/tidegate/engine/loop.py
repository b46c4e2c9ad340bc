"""The engine: one thread that turns plans into tokens.

    while the engine is awake: apply what was computed, plan what comes next, deliver what happened

Everything that touches the scheduler runs in that thread. Other threads leave it messages (a function
and a future for its answer) and are answered between two steps, while the executor computes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeVar

from tidegate.core.events import Emitted, Event, Finished
from tidegate.core.plan import StepPlan, StepResult
from tidegate.core.request import Request
from tidegate.core.scheduler import Scheduler, Snapshot
from tidegate.engine.clock import Clock, RealClock
from tidegate.engine.executor import Executor
from tidegate.engine.output import Delta, OutputProcessor, OutputState, Usage, output_of
from tidegate.engine.stream import Stream
from tidegate.errors import Draining, EngineDead, RequestRefused

_log = logging.getLogger(__name__)
T = TypeVar("T")

# Tokens whose hashing does not hold an event loop up: 8,192 take about half a millisecond.
SHORT_PROMPT = 8192


class Observer(Protocol):
    """Somebody who is told what happened. Called in the engine's thread: be quick, never raise, never block."""

    def events(self, events: Sequence[Event]) -> None:
        """What the scheduler told since the last call, in order."""

    def step(self, plan: StepPlan, seconds: float) -> None:
        """A step was computed; `seconds` is how long the executor was busy with it."""


class _Message(NamedTuple):
    work: Callable[[], Any]
    answer: Future[Any]


class _Step(NamedTuple):
    plan: StepPlan
    result: Future[StepResult]
    submitted: float


class Engine:
    """Serves requests whose `handle` is an `OutputState`, with one scheduler and one executor.

    `depth` is how many plans may be with the executor at once: 1 waits for every result before planning,
    2 plans a step while the one before it is computed. `submit`, `abort`, `explain`, `snapshot`, `health`
    and `drain` may be called from any event loop; `start` and `stop` from any thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        depth: int = 2,
        clock: Clock | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        if depth not in (1, 2):
            raise ValueError(f"pipeline depth must be 1 or 2, not {depth}")
        self.executor = executor
        self.clock: Clock = clock or RealClock()
        self.observers = list(observers)
        self._scheduler = scheduler
        self._depth = depth
        self._outputs = OutputProcessor(executor.max_num_seqs)
        self._pipeline: deque[_Step] = deque()
        self._live: dict[str, tuple[Stream, int]] = {}
        self._last_done = 0.0

        self._changed = threading.Condition()
        self._inbox: deque[_Message] = deque()
        self._stopping = False
        self._draining_for: float | None = None
        self._death: EngineDead | None = None
        self._idle: list[Future[None]] = []
        self._thread = threading.Thread(target=self._run, name="tidegate-engine", daemon=True)

    # Called from outside ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the steps in flight; whoever still waits gets `EngineDead`. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self.executor.close()

    async def submit(self, requests: Sequence[Request]) -> Stream:
        """Hand in requests that stand or fall together and return the stream of their outputs.

        Raises RequestRefused (none of them was taken, or the engine drains), ValueError for an id in use,
        or EngineDead.
        """
        if self._draining_for is not None:
            raise Draining(self._draining_for)
        stream = Stream([r.id for r in requests], self.abort)
        await self._name_blocks(requests)
        try:
            await self._ask(lambda: self._add(requests, stream))
        except asyncio.CancelledError:
            stream.abort()
            raise
        return stream

    async def _name_blocks(self, requests: Sequence[Request]) -> None:
        """Hash the prompts here and not between two steps; long ones in a thread, so that the event loop goes on."""
        for r in requests:
            if r.prompt_tokens <= SHORT_PROMPT:
                self._scheduler.name_blocks(r)
            else:
                await asyncio.to_thread(self._scheduler.name_blocks, r)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Give requests up; their streams end with `cancelled`. Unknown and ended ones are ignored."""
        self._post(lambda: [self._scheduler.abort(i, self.clock.now()) for i in request_ids])

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        """What the scheduler did with a request and why; None if it does not know it (any more)."""
        return await self._ask(lambda: self._scheduler.explain(request_id))

    async def snapshot(self) -> Snapshot:
        """The scheduler's load at this moment."""
        return await self._ask(lambda: self._scheduler.snapshot(self.clock.now()))

    @property
    def health(self) -> str:
        """`ok`, `draining` or `dead`; a full queue is the door's to tell."""
        if self._death is not None or self._stopping:
            return "dead"
        return "ok" if self._draining_for is None else "draining"

    @property
    def death(self) -> EngineDead | None:
        """Why the engine is dead; None while it lives."""
        return self._death

    async def drain(self, timeout: float) -> bool:
        """Take nothing new and wait until everything has ended, at most `timeout` seconds.

        What has not ended by then ends with EngineDead. True if everything ended by itself.
        """
        self._draining_for = timeout
        emptied: Future[None] = Future()
        try:
            await self._ask(lambda: self._idle.append(emptied))
            await asyncio.wait_for(asyncio.wrap_future(emptied), timeout)
        except TimeoutError:
            await self._ask(lambda: self._abandon(EngineDead("the server shut down before the request had ended")))
            return False
        except EngineDead:
            return False
        return True

    def _post(self, work: Callable[[], T]) -> Future[T]:
        """Leave `work` for the engine's thread; the future is its answer."""
        answer: Future[T] = Future()
        with self._changed:
            if self._death is None and not self._stopping:
                self._inbox.append(_Message(work, answer))
                self._changed.notify_all()
                return answer
        answer.set_exception(self._death or EngineDead("the engine was stopped"))
        return answer

    def _ask(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.wrap_future(self._post(work))

    # The engine's thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._awake():
                self._apply_computed()
                self._plan_next()
                self._deliver()
            self._die(EngineDead("the engine was stopped"))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the waiting clients must hear of it
            _log.exception("the engine loop failed")
            self._die(EngineDead(f"the engine failed: {type(error).__name__}: {error}"))

    def _awake(self) -> bool:
        """Sleep until there is a message, a computed step or a time to plan again; False once stopped."""
        wake = self._scheduler.next_wake(self.clock.now()) if self._has_room else self._scheduler.next_expiry
        with self._changed:
            if not self._something_to_do():
                self._changed.wait(None if wake is None else max(0.0, wake - self.clock.now()))
            if self._stopping:
                return False
            messages, self._inbox = self._inbox, deque()
        for message in messages:
            self._answer(message)
        return True

    @property
    def _has_room(self) -> bool:
        return len(self._pipeline) < self._depth

    def _something_to_do(self) -> bool:
        return self._stopping or bool(self._inbox) or bool(self._pipeline and self._pipeline[0].result.done())

    def _notify(self, _: object = None) -> None:
        with self._changed:
            self._changed.notify_all()

    @staticmethod
    def _answer(message: _Message) -> None:
        if not message.answer.set_running_or_notify_cancel():
            return
        try:
            message.answer.set_result(message.work())
        except (RequestRefused, ValueError) as fault:
            message.answer.set_exception(fault)  # the caller's, who may mend it
        except BaseException as error:
            message.answer.set_exception(EngineDead(f"the engine failed: {error}"))
            raise

    def _add(self, requests: Sequence[Request], stream: Stream) -> None:
        now = self.clock.now()
        for index, request in enumerate(requests):
            try:
                self._scheduler.add(request, now)
            except (RequestRefused, ValueError):
                for earlier in requests[:index]:
                    self._scheduler.abort(earlier.id, now)
                raise
            self._live[request.id] = (stream, index)

    def _apply_computed(self) -> None:
        """Results, oldest first: find the ends that their text shows, and tell the scheduler."""
        while self._pipeline and self._pipeline[0].result.done():
            plan, future, submitted = self._pipeline.popleft()
            result = self._outputs.process(plan, future.result())
            now = self.clock.now()
            busy = now - max(submitted, self._last_done)
            self._last_done = now
            if result.seconds is None:
                result.seconds = busy
            self._scheduler.apply(plan, result, now)
            for observer in self.observers:
                observer.step(plan, busy)

    def _plan_next(self) -> None:
        """Keep the executor busy: plan until the pipeline is full or nothing can be planned."""
        self._scheduler.expire(self.clock.now())
        while self._has_room:
            now = self.clock.now()
            plan = self._scheduler.plan(now)
            if not plan:
                return
            future = self.executor.submit(plan)
            self._pipeline.append(_Step(plan, future, now))
            future.add_done_callback(self._notify)

    def _deliver(self) -> None:
        """All that happened since the last call, in one hand-over to each event loop."""
        events = self._scheduler.take_events()
        if events:
            for observer in self.observers:
                observer.events(events)
            self._hand_over(self._deltas(events))
        if not self._live and self._idle:
            for emptied in self._idle:
                if emptied.set_running_or_notify_cancel():
                    emptied.set_result(None)
            self._idle.clear()

    def _deltas(self, events: Sequence[Event]) -> dict[asyncio.AbstractEventLoop, list[tuple[Stream, int, Delta]]]:
        """What is new for each stream, by the event loop it lives on."""
        grown: dict[str, OutputState] = {}
        ended: list[Request] = []
        for event in events:
            if isinstance(event, Emitted):
                for request in event.requests:
                    grown[request.id] = output_of(request.handle)
            elif isinstance(event, Finished):
                request = event.request
                output_of(request.handle).close(event.reason, _usage(request))
                grown[request.id] = output_of(request.handle)
                ended.append(request)
        batches: dict[asyncio.AbstractEventLoop, list[tuple[Stream, int, Delta]]] = {}
        for request_id, output in grown.items():
            if (live := self._live.get(request_id)) is not None:
                batches.setdefault(live[0].loop, []).append((*live, output.take()))
        for request in ended:
            self._live.pop(request.id, None)
            request.handle = None  # the scheduler remembers ended requests; their output state may go
        return batches

    @staticmethod
    def _hand_over(batches: dict[asyncio.AbstractEventLoop, list[tuple[Stream, int, Delta]]]) -> None:
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(_put_all, batch)
            except RuntimeError:
                # The loop was closed, and every reader with it.
                _log.debug("nobody is left to read %d deltas", len(batch))

    def _abandon(self, error: EngineDead) -> None:
        """End every stream with `error` and its requests with it."""
        streams = {stream for stream, _ in self._live.values()}
        for request_id in list(self._live):
            self._scheduler.abort(request_id, self.clock.now())
        self._live.clear()
        _fail_all(streams, error)

    def _die(self, error: EngineDead) -> None:
        """Nobody waits for a dead engine: every stream, message and drain gets the error."""
        with self._changed:
            self._death = error
            messages, self._inbox = self._inbox, deque()
        for answer in (*(message.answer for message in messages), *self._idle):
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)
        self._idle.clear()
        streams = {stream for stream, _ in self._live.values()}
        self._live.clear()
        _fail_all(streams, error)


def _usage(request: Request) -> Usage:
    return Usage(request.prompt_tokens, request.emitted, request.cached_tokens)


def _put_all(batch: Sequence[tuple[Stream, int, Delta]]) -> None:
    for stream, index, delta in batch:
        stream.put(index, delta)


def _fail_all(streams: set[Stream], error: EngineDead) -> None:
    for stream in streams:
        try:
            stream.loop.call_soon_threadsafe(stream.fail, error)
        except RuntimeError:
            _log.debug("nobody is left to hear that %s", error)
