"""What passes between the scheduler and whoever computes: a `StepPlan` out, a `StepResult` back.

A plan is a persistent set of decodes plus what changed since the plan before it. `decodes` is the
*same list object* in consecutive plans while nobody joins or leaves, so an executor may key packed
arrays by its identity. An executor applies a plan in this order: `left`, `swapped_out`, `joined`,
`swapped_in`, `growth`, then it computes `chunks` and `decodes`. Plans are executed in the order in which
they were made; a device block that an older plan still uses may therefore appear in a newer one. Host
blocks are freed only once the result of the copy that used them is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from tidegate.core.request import FinishReason


class Join(NamedTuple):
    """A request takes a slot.

    handle:  opaque; whoever added the request owns its meaning (sampling state).
    tokens:  every token id known now, prompt first, then the outputs emitted so far; empty where the
             host keeps no token ids. The list belongs to the scheduler: read it, never change it.
    cached:  KV tokens of it that lie computed in `blocks` already (whole blocks), or will once the
             `swapped_in` copies of this plan are done (then any number).
    outputs: how many of `tokens` are outputs; the next sampled token has this index.
    blocks:  block ids in order; block `i` holds KV positions `i*block_size ..`.
    """

    slot: int
    request_id: str
    handle: object
    tokens: Sequence[int]
    cached: int
    outputs: int
    blocks: list[int]


class Chunk(NamedTuple):
    """Compute `length` known tokens of a slot from KV position `start`; sample after it if `emits`."""

    slot: int
    start: int
    length: int
    emits: bool


# (slot, block): a decode crosses into a new block; append it to the slot's block table.
Growth: TypeAlias = tuple[int, int]


class Copy(NamedTuple):
    """KV blocks of one request that move between device and host: `device[i]` and `host[i]` belong together.

    Host ids below the executor's `host_blocks` lie in memory, those from there on in the second tier. What
    is swapped in may be computed on from the next plan that is made after this one's result; where that copy failed,
    the request is computed again, in the blocks it has, from the first block that the copy was to bring.
    """

    request_id: str
    device: list[int]
    host: list[int]


class Preemption(NamedTuple):
    """A request gives its blocks back and waits again."""

    request_id: str
    mode: str
    reason: str


@dataclass(slots=True)
class StepPlan:
    """One step's work. Sizes are tokens; `now` is seconds on the scheduler's clock.

    An empty plan (`not plan`) has step -1, is never executed or applied, and `held_back_by` says why;
    it may still have preempted somebody, and seats given up are told by the next plan that is not empty.
    `held_back_by` in a non-empty plan names the constraint that kept somebody waiting although
    budget, seats or blocks were left; None if nobody was held back that way.
    `context` is how many KV tokens the decodes read, those included that they write in this step.
    `draft_tokens` is how many tokens every decode computes beside its own; a result has one token a decode.
    """

    step: int
    now: float
    decodes: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    joined: list[Join] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)
    swapped_out: list[Copy] = field(default_factory=list)
    swapped_in: list[Copy] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)
    held_back_by: str | None = None
    context: int = 0
    draft_tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks or self.swapped_out or self.swapped_in)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step: one per decode, its draft tokens, and every chunk."""
        return len(self.decodes) * (1 + self.draft_tokens) + sum(c.length for c in self.chunks)

    def emitting(self) -> list[int]:
        """Slots that emit a token, in the order of `StepResult.tokens`: decodes, then ending chunks."""
        return self.decodes + [c.slot for c in self.chunks if c.emits]


@dataclass(slots=True)
class StepResult:
    """What a step produced.

    tokens:   one sampled token id per entry of `StepPlan.emitting()`, in that order.
    finished: (index into `tokens`, reason) of requests that end with that token (a stop token, a stop
              string, a completed grammar). Ends by length are the scheduler's to know.
    details:  opaque per-token extras by index into `tokens` (log-probabilities); the scheduler ignores them.
    failed_copies: ids of the requests whose `Copy` in this plan failed; the KV it was to bring is not there.
    copy_seconds: seconds that this plan's copies took, those included that ran beside its compute; 0 where nobody
        measured.
    seconds:  how long the step kept the device busy; None where nobody measured it.
    """

    tokens: Sequence[int]
    finished: Sequence[tuple[int, FinishReason]] = ()
    details: dict[int, object] = field(default_factory=dict)
    failed_copies: Sequence[str] = ()
    copy_seconds: float = 0.0
    seconds: float | None = None
