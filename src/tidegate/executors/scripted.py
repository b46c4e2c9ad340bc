"""A test double that ships: it computes nothing, answers from scripts, and distrusts every plan.

Whoever adds a request hangs a `Script` on it as its handle: the token ids it will emit and whether the
last of them is a stop. The executor sees what every executor sees, plans with slots, block ids and
handles, and holds each plan to the contract of `core/plan.py`; the first breach raises `PlanError`
with the step, the slot and what is wrong. A scheduler that runs on it without an error would not
have corrupted a real KV cache.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ClassVar

from tidegate.core.plan import Copy, Join, StepPlan, StepResult
from tidegate.core.request import FinishReason
from tidegate.errors import InputError, TidegateError
from tidegate.executors.scripted_host import HostBlocks, Saved

PAST_THE_STOP = -1
"""Token id of a decode that was planned before its stop token was known; the scheduler drops it."""


class PlanError(TidegateError):
    """A plan breaks the contract between the scheduler and its executor."""


@dataclass(frozen=True, slots=True)
class Script:
    """What one request will emit.

    tokens: output token ids in order.
    stops:  the last of them is a stop token, so the request ends there whatever it declared. Without
            it the request must end by length at the same place, or an error says that it did not.
    """

    tokens: Sequence[int]
    stops: bool = False


@dataclass(slots=True)
class _Slot:
    """What an executor knows of one slot. Sizes are tokens.

    restored_in: the step that swapped it in, if one did
    """

    request_id: str
    script: Script
    blocks: list[int]
    position: int
    emitted: int
    decoding: bool = False
    known: Sequence[int] = ()
    content: list[int] = field(default_factory=list)
    chains: list[int] = field(default_factory=list)
    restored_in: int | None = None


class ScriptedExecutor:
    """An `Executor` whose outputs are given. Every submitted plan is complete at once.

    Plans are applied in the order of submission and need no result of an earlier plan, so it serves
    at any pipeline depth; `depth` says how many decodes may run past a stop token before that counts
    as an error (depth - 1). Blocks hold the token ids that were written to them where plans carry
    ids, so that a prefix hit on blocks of another content is caught, and likewise what is swapped in.

    host_blocks, disk_blocks: as in `engine.executor.Executor`.
    fail_copies: whose copies fail: ids of requests, or a function of a copy and whether it goes out.
    seconds_of: tells how long a plan "took"; None measures nothing.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_num_seqs: int,
        max_model_len: int = 1 << 30,
        depth: int = 1,
        host_blocks: int = 0,
        disk_blocks: int = 0,
        fail_copies: Collection[str] | Callable[[Copy, bool], bool] = (),
        seconds_of: Callable[[StepPlan], float] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.depth = depth
        self.host_blocks = host_blocks
        self.disk_blocks = disk_blocks
        self.fail_copies = fail_copies
        self._host = HostBlocks(host_blocks + disk_blocks)
        self.seconds_of = seconds_of
        self._last_step: int | None = None
        self._slots: dict[int, _Slot] = {}
        self._holders = [0] * num_blocks
        self._written = [0] * num_blocks
        self._content: dict[int, int] = {}

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Check and "compute" a plan. The future carries its `StepResult`, or the `PlanError`."""
        future: Future[StepResult] = Future()
        try:
            future.set_result(self._execute(plan))
        except PlanError as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Nothing to release."""

    def blocks_held(self) -> int:
        """Blocks in the tables of live slots, shared ones once."""
        return sum(1 for holders in self._holders if holders)

    def _execute(self, plan: StepPlan) -> StepResult:
        if not plan:
            raise PlanError("an empty plan was submitted; it has nothing to execute")
        if self._last_step is not None and plan.step != self._last_step + 1:
            raise PlanError(f"step {plan.step} was submitted after step {self._last_step}")
        self._last_step = plan.step
        gone = [self._leave(plan, slot) for slot in plan.left]
        failed = self._swap_out(plan, gone)
        for join in plan.joined:
            self._join(plan, join)
        failed += self._swap_in(plan)
        for slot, block in plan.growth:
            self._grow(plan, slot, block)
        busy = plan.decodes + [chunk.slot for chunk in plan.chunks]
        if len(set(busy)) != len(busy):
            twice = next(slot for slot in busy if busy.count(slot) > 1)
            raise self._breach(plan, twice, "is scheduled twice in one step")
        tokens: list[int] = []
        finished: list[tuple[int, FinishReason]] = []
        for slot in plan.decodes:
            self._decode(plan, slot)
            self._sample(plan, slot, tokens, finished)
        for chunk in plan.chunks:
            self._prefill(plan, chunk.slot, chunk.start, chunk.length, chunk.emits)
            if chunk.emits:
                self._sample(plan, chunk.slot, tokens, finished)
        seconds = None if self.seconds_of is None else self.seconds_of(plan)
        return StepResult(tokens, finished, failed_copies=failed, seconds=seconds)

    def _leave(self, plan: StepPlan, slot: int) -> _Slot:
        state = self._slots.pop(slot, None)
        if state is None:
            raise self._breach(plan, slot, "left, but nobody holds it")
        for block in state.blocks:
            self._holders[block] -= 1
        return state

    def _join(self, plan: StepPlan, join: Join) -> None:
        if not 0 <= join.slot < self.max_num_seqs:
            raise self._breach(plan, join.slot, f"does not exist: there are {self.max_num_seqs}")
        if join.slot in self._slots:
            raise self._breach(plan, join.slot, f"was joined by {join.request_id} while it is held")
        if not isinstance(join.handle, Script):
            raise self._breach(plan, join.slot, f"joined without a Script as its handle ({join.handle!r})")
        if len(set(join.blocks)) != len(join.blocks):
            raise self._breach(plan, join.slot, "joined with a block twice in its table")
        state = _Slot(join.request_id, join.handle, list(join.blocks), join.cached, join.outputs)
        state.known = tuple(join.tokens)
        self._slots[join.slot] = state
        for block in state.blocks:
            self._hold(plan, join.slot, block)
        if all(copy.request_id != join.request_id for copy in plan.swapped_in):
            self._take_cached(plan, join.slot, state)

    def _hold(self, plan: StepPlan, slot: int, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise self._breach(plan, slot, f"got block {block}; there are {self.num_blocks}")
        self._holders[block] += 1

    def _swap_out(self, plan: StepPlan, gone: Sequence[_Slot]) -> list[str]:
        """Copy blocks of requests that leave in this step to the host; returns the ids of those that fail."""
        failed = []
        left = {state.request_id: state for state in gone}
        written: set[int] = set()
        for copy in plan.swapped_out:
            state = left.pop(copy.request_id, None)
            if state is None:
                raise _bad_copy(plan, copy, "is swapped out, but did not leave a slot in this step")
            self._check_copy(plan, copy, state)
            empty = [b for b in copy.device if state.blocks.index(b) * self.block_size >= state.position]
            if empty:
                raise _bad_copy(plan, copy, f"is swapped out, but nothing is computed in block {empty[0]}")
            if not written.isdisjoint(copy.host):
                raise _bad_copy(plan, copy, "is swapped out to a host block that another copy writes")
            written.update(copy.host)
            fails = self._fails(copy, True)
            if fails:
                failed.append(copy.request_id)
            for device, host in zip(copy.device, copy.host, strict=True):
                if fails:
                    self._host.lose(host, plan.step)
                else:
                    self._host.put(host, self._saved(state, state.blocks.index(device)))
        return failed

    def _swap_in(self, plan: StepPlan) -> list[str]:
        """Copy host blocks to requests that join in this step; returns the ids of those that fail."""
        failed = []
        joined = {join.request_id: join.slot for join in plan.joined}
        written = {host for copy in plan.swapped_out for host in copy.host}
        for copy in plan.swapped_in:
            slot = joined.pop(copy.request_id, None)
            if slot is None:
                raise _bad_copy(plan, copy, "is swapped in, but did not join in this step")
            state = self._slots[slot]
            self._check_copy(plan, copy, state)
            if not written.isdisjoint(copy.host):
                raise _bad_copy(plan, copy, "is swapped in from a host block that this step writes")
            state.restored_in = plan.step
            state.content = list(state.known[: state.position])
            unknown_yet = plan.step - self.depth
            if self._fails(copy, False) or any(self._host.lost_after(host, unknown_yet) for host in copy.host):
                failed.append(copy.request_id)
                state.position = min(state.position, state.blocks.index(copy.device[0]) * self.block_size)
                self._take_cached(plan, slot, state)  # whose prefix is cached goes on from there
            else:
                for device, host in zip(copy.device, copy.host, strict=True):
                    self._restore(plan, copy, slot, device, host)
                self._take_cached(plan, slot, state, copy.device)
        return failed

    def _restore(self, plan: StepPlan, copy: Copy, slot: int, device: int, host: int) -> None:
        """One block comes back, and is what the request is said to have computed in it."""
        state = self._slots[slot]
        index = state.blocks.index(device)
        saved, wanted = self._host.get(host), self._saved(state, index)
        if self._holders[device] > 1:
            raise self._breach(plan, slot, f"is swapped in to block {device}, which another slot holds")
        if saved is None:
            raise _bad_copy(plan, copy, f"is swapped in from host block {host}, which holds nothing")
        if not saved.serves(wanted):
            held = f"{saved.tokens} tokens of block {saved.place} of {saved.owner}"
            found = f"finds {held} in host block {host}, not its own {wanted.tokens} of block {index}"
            raise _bad_copy(plan, copy, found)
        self._written[device] = wanted.tokens
        if state.known and wanted.tokens == self.block_size:
            self._content[device] = self._chain(state, index)

    def _saved(self, state: _Slot, index: int) -> Saved:
        """What block `index` of a request's table holds of it."""
        start = index * self.block_size
        tokens = max(0, min(state.position - start, self.block_size))
        before = self._chain(state, index - 1) if state.known and index and tokens else 0
        return Saved(state.request_id, index, tokens, before, tuple(state.content[start : start + tokens]))

    def _check_copy(self, plan: StepPlan, copy: Copy, state: _Slot) -> None:
        """A copy pairs blocks of its request's table with as many host blocks that exist, each once."""
        _, device, host = copy
        if not device or len(device) != len(host):
            raise _bad_copy(plan, copy, f"copies {len(device)} blocks to or from {len(host)} host blocks")
        if len(set(device)) != len(device) or len(set(host)) != len(host):
            raise _bad_copy(plan, copy, "copies a block twice")
        for block in device:
            if block not in state.blocks:
                raise _bad_copy(plan, copy, f"copies block {block}, which is not in its table")
        for block in host:
            if not 0 <= block < self._host.size:
                raise _bad_copy(plan, copy, f"copies host block {block}; there are {self._host.size}")

    def _fails(self, copy: Copy, out: bool) -> bool:
        if callable(self.fail_copies):
            return self.fail_copies(copy, out)
        return copy.request_id in self.fail_copies

    def _take_cached(self, plan: StepPlan, slot: int, state: _Slot, restored: Collection[int] = ()) -> None:
        """Check that the blocks of a prefix hit are full and hold this prompt; the rest starts afresh.

        `restored` blocks were swapped in, and checked: only the last cached one of them may be filled in part.
        """
        whole, rest = divmod(state.position, self.block_size)
        if whole + bool(rest) > len(state.blocks) or (rest and state.blocks[whole] not in restored):
            raise self._breach(plan, slot, f"joined with {state.position} cached tokens in {len(state.blocks)} blocks")
        if state.known:
            self._check_known(plan, slot, state)
        for index, block in enumerate(state.blocks):
            if block in restored:
                continue
            if index >= whole:
                if self._holders[block] > 1:
                    raise self._breach(plan, slot, f"got block {block} to write, which another slot holds")
                self._written[block] = 0
            elif self._written[block] != self.block_size:
                computed = self._written[block]
                raise self._breach(plan, slot, f"reuses block {block}, of which {computed} tokens are computed")
        if state.known:
            state.content = list(state.known[: state.position])
            for index in range(whole):
                if self._content.get(state.blocks[index]) != self._chain(state, index):
                    raise self._breach(plan, slot, f"reuses block {state.blocks[index]}, which holds another prefix")

    def _check_known(self, plan: StepPlan, slot: int, state: _Slot) -> None:
        """A resumed request must bring back every output it emitted, as emitted."""
        if state.position >= len(state.known):
            raise self._breach(plan, slot, "joined with nothing left to compute")
        outputs = list(state.known[len(state.known) - state.emitted :])
        if outputs != list(state.script.tokens[: state.emitted]):
            raise self._breach(plan, slot, f"came back with other outputs than its first {state.emitted}")

    def _grow(self, plan: StepPlan, slot: int, block: int) -> None:
        state = self._live(plan, slot)
        self._hold(plan, slot, block)
        if self._holders[block] > 1:
            raise self._breach(plan, slot, f"grew into block {block}, which is held already")
        self._written[block] = 0
        state.blocks.append(block)

    def _decode(self, plan: StepPlan, slot: int) -> None:
        state = self._computing(plan, slot)
        if not state.decoding:
            raise self._breach(plan, slot, f"decodes before its prompt is computed (at {state.position})")
        fed = state.script.tokens[state.emitted - 1] if state.emitted <= len(state.script.tokens) else PAST_THE_STOP
        self._write(plan, slot, state, (fed,))

    def _prefill(self, plan: StepPlan, slot: int, start: int, length: int, emits: bool) -> None:
        state = self._computing(plan, slot)
        if length < 1:
            raise self._breach(plan, slot, f"got a chunk of {length} tokens")
        if state.decoding:
            raise self._breach(plan, slot, "got a chunk after it began to decode")
        if start != state.position:
            raise self._breach(plan, slot, f"got a chunk from {start}, but {state.position} tokens are computed")
        if state.known and emits != (start + length == len(state.known)):
            raise self._breach(plan, slot, f"chunk {start}+{length} of {len(state.known)} has emits={emits}")
        tokens = state.known[start : start + length] if state.known else range(length)
        self._write(plan, slot, state, tokens)
        state.decoding = emits

    def _write(self, plan: StepPlan, slot: int, state: _Slot, tokens: Sequence[int]) -> None:
        end = state.position + len(tokens)
        if end > len(state.blocks) * self.block_size:
            raise self._breach(plan, slot, f"writes up to token {end}, its {len(state.blocks)} blocks are too few")
        if end > self.max_model_len:
            raise self._breach(plan, slot, f"writes token {end}; the model ends at {self.max_model_len}")
        first, last = state.position // self.block_size, (end - 1) // self.block_size
        if state.known:
            state.content.extend(tokens)
        for index in range(first, last + 1):
            block = state.blocks[index]
            if self._holders[block] > 1:
                raise self._breach(plan, slot, f"writes into block {block}, which another slot shares")
            self._written[block] = min(end - index * self.block_size, self.block_size)
            if state.known and self._written[block] == self.block_size:
                self._content[block] = self._chain(state, index)
        state.position = end

    def _sample(self, plan: StepPlan, slot: int, tokens: list[int], finished: list[tuple[int, FinishReason]]) -> None:
        state = self._slots[slot]
        index, script = state.emitted, state.script
        state.emitted += 1
        past = index - len(script.tokens)
        if past < 0:
            token = script.tokens[index]
        elif script.stops and past < self.depth - 1:
            token = PAST_THE_STOP
        else:
            raise self._breach(plan, slot, f"computes output {index} of a script of {len(script.tokens)}")
        if script.stops and past == -1:
            finished.append((len(tokens), FinishReason.STOP))
        tokens.append(token)

    def _chain(self, state: _Slot, index: int) -> int:
        """Identity of everything up to the end of block `index`, which must be full."""
        while len(state.chains) <= index:
            at = len(state.chains) * self.block_size
            before = state.chains[-1] if state.chains else 0
            state.chains.append(hash((before, *state.content[at : at + self.block_size])))
        return state.chains[index]

    def _live(self, plan: StepPlan, slot: int) -> _Slot:
        state = self._slots.get(slot)
        if state is None:
            raise self._breach(plan, slot, "is scheduled, but nobody joined it")
        return state

    def _computing(self, plan: StepPlan, slot: int) -> _Slot:
        """The slot, if its KV is there to compute on."""
        state = self._live(plan, slot)
        if state.restored_in == plan.step:
            raise self._breach(plan, slot, "computes in the step that swaps it in")
        return state

    def _breach(self, plan: StepPlan, slot: int, what: str) -> PlanError:
        state = self._slots.get(slot)
        name = f" ({state.request_id})" if state else ""
        return PlanError(f"step {plan.step}: slot {slot}{name} {what}")


def _bad_copy(plan: StepPlan, copy: Copy, what: str) -> PlanError:
    return PlanError(f"step {plan.step}: request {copy.request_id} {what}")


class StepFormula:
    """The length of a step as a formula, such as "10 + 0.5*decodes + 0.02*prefill_tokens".

    Knows numbers, + - * / and parentheses, and three names: `decodes`, `prefill_tokens` and their sum
    `tokens`. The unit of the value is the caller's. Raises InputError for anything else.
    """

    NAMES = ("tokens", "decodes", "prefill_tokens")
    _OPERATORS: ClassVar[dict[type[ast.operator], Callable[[float, float], float]]] = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
    }

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError:
            raise InputError(f"step formula {text!r} is not an expression") from None
        self(0, 0)

    def __call__(self, decodes: int, prefill_tokens: int) -> float:
        """The value for a step of so many decodes and prefill tokens; a negative one counts as 0."""
        names = {"tokens": decodes + prefill_tokens, "decodes": decodes, "prefill_tokens": prefill_tokens}
        return max(0.0, self._value(self._tree, names))

    def _value(self, node: ast.expr, names: dict[str, int]) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return float(number)
            case ast.Name(id=name) if name in names:
                return float(names[name])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in self._OPERATORS:
                try:
                    return self._OPERATORS[type(op)](self._value(left, names), self._value(right, names))
                except ZeroDivisionError:
                    raise InputError(f"step formula {self.text!r} divides by zero") from None
        raise InputError(
            f"step formula {self.text!r}: {ast.unparse(node)!r} is not understood; "
            f"use numbers, + - * / and {', '.join(self.NAMES)}"
        )
