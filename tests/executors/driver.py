"""A tiny driver of an executor: hand-built plans, no scheduler. Keeps the rules of `core.plan`."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from tidegate.core.plan import Chunk, Copy, Join, StepPlan, StepResult
from tidegate.engine.executor import Executor
from tidegate.engine.sampling import SamplingParams


@dataclass
class Handle:
    """What an executor may know of a request's owner."""

    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))


@dataclass
class Work:
    """One request under way.

    `planned` counts KV tokens planned, `sampled` outputs planned. Output `i` came in `results[i]`, as its
    token number `indices[i]`. `host` blocks hold its KV while it is swapped out; what step `restored_in` swaps in
    may be computed on once that step's result is read. `lost` says that the last copy of it failed.
    """

    id: str
    tokens: list[int]
    prompt: int
    max_tokens: int
    handle: object
    blocks: list[int] = field(default_factory=list)
    slot: int = -1
    planned: int = 0
    sampled: int = 0
    results: list[StepResult] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    restored_in: int = -1
    lost: bool = False

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.prompt :]


class Driver:
    """Builds plans by hand and reads results `depth` steps later.

    Blocks are handed out by the caller's order, so that tables come out shuffled.
    """

    def __init__(self, executor: Executor, free: list[int], depth: int = 1) -> None:
        self.executor = executor
        self.free = free
        self.depth = depth
        self.decodes: list[int] = []
        self.by_slot: dict[int, Work] = {}
        self.free_slots = list(range(executor.max_num_seqs))
        self.joined: list[Join] = []
        self.left: list[int] = []
        self.swapped_out: list[Copy] = []
        self.swapped_in: list[Copy] = []
        self.in_flight: deque[tuple[list[Work], list[Work], Future[StepResult]]] = deque()
        self.copied: list[Work] = []
        self.steps = 0
        self.read_steps = 0

    def add(
        self, id: str, prompt: list[int], max_tokens: int, handle: object | None = None, shared: list[int] | None = None
    ) -> Work:
        """A new request takes a slot; the blocks `shared` hold its first tokens computed already."""
        work = Work(id, list(prompt), len(prompt), max_tokens, handle or Handle())
        self._seat(work, shared or [])
        return work

    def resume(self, work: Work) -> None:
        """Seat a preempted request again; all its known tokens are computed once more."""
        self._seat(work, [])

    def preempt(self, work: Work) -> None:
        """Take a request's slot and blocks away. Call it with nothing in flight."""
        assert not self.in_flight
        self._leave(work)
        self.free[:0] = work.blocks

    def swap_out(self, work: Work, host: list[int]) -> None:
        """In the next step `work` leaves, and its computed KV goes to the first of `host` that hold it all.

        Its device blocks are free for others in that step already. A token in flight may still arrive.
        """
        needed = -(-work.planned // self.executor.block_size)
        work.host = host[:needed]
        self._leave(work)
        self.free[:0] = work.blocks
        self.swapped_out.append(Copy(work.id, work.blocks[:needed], list(work.host)))
        self.copied.append(work)

    def swap_in(self, work: Work) -> None:
        """In the next step `work` takes a slot and gets its KV back, in other blocks; every token of it was read."""
        assert work.sampled == len(work.outputs)
        self._seat(work, [], work.planned)
        self.swapped_in.append(Copy(work.id, work.blocks[: len(work.host)], work.host))
        self.copied.append(work)
        work.restored_in = self.steps

    def step(self, chunks: dict[str, int] | None = None) -> None:
        """Plan one step: every decode, and `chunks` tokens by request id; then read what is due."""
        plan_chunks, growth, emitting = [], [], list(map(self.by_slot.__getitem__, self.decodes))
        for work in emitting:
            work.planned += 1
            work.sampled += 1
            if work.planned > len(work.blocks) * self.executor.block_size:
                work.blocks.append(self.free.pop())
                growth.append((work.slot, work.blocks[-1]))
        ended = []
        for slot, work in self.by_slot.items():
            length = min((chunks or {}).get(work.id, 0), len(work.tokens) - work.planned)
            if slot in self.decodes or length <= 0 or work.restored_in >= self.read_steps or work.lost:
                continue
            emits = work.planned + length == len(work.tokens)
            plan_chunks.append(Chunk(slot, work.planned, length, emits))
            work.planned += length
            if emits:
                work.sampled += 1
                emitting.append(work)
                ended.append(work)
        copies = (self.swapped_out, self.swapped_in)
        plan = StepPlan(self.steps, 0.0, self.decodes, plan_chunks, self.joined, self.left, growth, *copies)
        if plan:
            self.steps += 1
            self.in_flight.append((emitting, self.copied, self.executor.submit(plan)))
            self.joined, self.left, self.swapped_out, self.swapped_in, self.copied = [], [], [], [], []
        done = {w.slot for w in emitting if w.sampled == w.max_tokens}
        if ended or done:
            self.decodes = [s for s in self.decodes + [w.slot for w in ended] if s not in done]
        for slot in done:
            work = self.by_slot[slot]
            self._leave(work)
            self.free[:0] = work.blocks
        while self.in_flight and (len(self.in_flight) >= self.depth or not plan):
            self.read()

    def read(self) -> None:
        """Apply the oldest result in flight."""
        emitting, copied, future = self.in_flight.popleft()
        result = future.result(timeout=120)
        self.read_steps += 1
        for work in copied:
            work.lost = work.id in result.failed_copies
        for index, (work, token) in enumerate(zip(emitting, result.tokens, strict=True)):
            work.tokens.append(token)
            work.results.append(result)
            work.indices.append(index)

    def drain(self) -> None:
        while self.in_flight:
            self.read()

    def run(self, chunk: int = 1 << 20) -> None:
        """Step until every seated request has its `max_tokens`."""
        while self.by_slot:
            self.step({w.id: chunk for w in self.by_slot.values()})
        self.drain()

    def _seat(self, work: Work, shared: list[int], cached: int | None = None) -> None:
        size = self.executor.block_size
        need = -(-len(work.tokens) // size) - len(shared)
        work.blocks = shared + [self.free.pop() for _ in range(need)]
        work.slot = self.free_slots.pop()
        work.planned = len(shared) * size if cached is None else cached
        work.lost = False
        self.by_slot[work.slot] = work
        outputs = len(work.tokens) - work.prompt
        self.joined.append(Join(work.slot, work.id, work.handle, work.tokens, work.planned, outputs, list(work.blocks)))

    def _leave(self, work: Work) -> None:
        del self.by_slot[work.slot]
        if work.slot in self.decodes:
            self.decodes = [s for s in self.decodes if s != work.slot]
        self.free_slots.append(work.slot)
        self.left.append(work.slot)
