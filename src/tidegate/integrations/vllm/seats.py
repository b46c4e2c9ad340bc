"""Who runs in vLLM, as the core's planner asks about it. Read from vLLM before each plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import compress, repeat
from math import inf
from operator import attrgetter, mod, not_
from typing import Any, NamedTuple

from tidegate.core.decode_load import DecodeLoad
from tidegate.core.expected import ExpectedGrowth
from tidegate.core.kv import KvCache, Lease
from tidegate.core.limits import Limits
from tidegate.core.policy import PolicyContext
from tidegate.core.request import Request
from tidegate.core.running import Running
from tidegate.integrations.vllm.hosted import HostedRequest
from tidegate.integrations.vllm.pool import Holding


class Crossing(NamedTuple):
    """Decodes whose next token needs a block."""

    members: list[Request]


class Decoding:
    """Those who decode in the step being planned. `clock` counts plans, `context` the KV tokens that they read.

    What is asked of each in every step is read from vLLM without a line of Python for each. Nobody gets more than one
    token a plan: where the sum has grown by one for each, everybody has got one, and who needs a block is known
    beforehand; and last tokens in flight are looked for when so many plans were made that there may be one.
    """

    __slots__ = (
        "_due", "_handles", "_joined", "_last_token_at", "_size", "clock", "context", "crossers", "members"
    )  # fmt: skip

    def __init__(self, block_size: int) -> None:
        self.clock = 0
        self.context = 0
        self.members: list[Request] = []
        self.crossers: list[Request] = []
        self._joined: dict[Request, None] = {}
        self._handles: list[Any] | None = None  # of the members; None: these are to be listed anew
        self._due: list[list[Request]] | None = None  # who needs a block at a clock, modulo the size of one
        self._size = block_size
        self._last_token_at = inf  # the clock at which somebody's last token may be in flight

    def __len__(self) -> int:
        return len(self.members)

    def join(self, r: Request) -> None:
        """`r` has computed its prompt: it decodes from the next refresh on."""
        self._joined[r] = None
        self._handles = None
        self._last_token_at = min(self._last_token_at, self.clock + 1 + _to_last(r))

    def leave(self, r: Request) -> None:
        """`r` decodes no more, in the step being planned neither."""
        if r not in self._joined:
            return
        del self._joined[r]
        self._handles = None
        if r in self.members:
            self.members = [m for m in self.members if m is not r]
            self.context -= r.planned + 1
        self.crossers = [c for c in self.crossers if c is not r]

    def refresh(self) -> None:
        """A step is to be planned: who of those that joined decodes in it, and who of them needs a block."""
        self.clock += 1
        if self.clock >= self._last_token_at:
            self._handles = None
        if self._handles is None:
            self._last_token_at = self.clock + min((max(1, _to_last(r)) for r in self._joined), default=inf)
            self.members = [r for r in self._joined if not _last_in_flight(r)]
            self._handles = [r.handle for r in self.members]
            self._due = None
            expected = -1
        else:
            expected = self.context + len(self._handles)
        computed = list(map(_COMPUTED, self._handles))
        self.context = sum(computed) + len(computed)
        if self.context != expected:
            self._due = None
            self.crossers = list(compress(self.members, map(not_, map(mod, computed, repeat(self._size)))))
            return
        if self._due is None:
            self._due = [[] for _ in range(self._size)]
            for r, tokens in zip(self.members, computed, strict=True):
                self._due[(self.clock - tokens) % self._size].append(r)
        self.crossers = self._due[self.clock % self._size]

    def crossing(self) -> Crossing:
        return Crossing(self.crossers)

    def ends(self) -> Iterator[tuple[int, int]]:
        """(clock of the last token, blocks at the peak) of each, by clock."""
        return iter(sorted((self.clock + r.target - r.sampled, r.footprint) for r in self.members))


def _to_last(r: Request) -> int:
    """Plans before the last token of `r` can be in flight, at the fastest."""
    handle: Any = r.handle
    return int(r.prompt_tokens + handle.max_tokens - 1 - handle.num_computed_tokens)


def _last_in_flight(r: Request) -> bool:
    """Whether the last token of `r` is in a step in flight: vLLM leaves it out then."""
    handle: Any = r.handle
    placed = handle.num_output_placeholders
    return bool(placed and r.prompt_tokens + handle.max_tokens <= handle.num_computed_tokens + 2 - placed)


_COMPUTED = attrgetter("num_computed_tokens")


class Expected(ExpectedGrowth):
    """An `ExpectedGrowth` that is summed up when it is asked for, over the `members` that hold blocks in vLLM."""

    def __init__(self, limits: Limits, ctx: PolicyContext) -> None:
        super().__init__(limits, ctx)
        self.members: Iterable[Request] = ()

    @property
    def total(self) -> int:
        return sum(self.left(r) for r in self.members)

    @total.setter
    def total(self, blocks: int) -> None:
        """Nothing is kept."""

    def left(self, r: Request) -> int:
        held = _held(r)
        return self.peak(r, held) - held


def _held(r: Request) -> int:
    """Blocks that `r` holds or was promised."""
    assert isinstance(r.lease, Holding)
    return max(len(r.lease.table), r.lease.wanted)


class VllmSeats(Running):
    """A `Running` whose members are those of vLLM's that were admitted by us."""

    decodes: Decoding  # type: ignore[assignment]

    def __init__(self, kv: KvCache, limits: Limits, engine: Any, expected: Expected | None = None) -> None:
        self.kv = kv
        self.expected = expected
        self.decodes = Decoding(limits.block_size)
        self.load = DecodeLoad((self.decodes,))
        self.cohorts = None
        self.turn = None
        self.members: dict[Request, None] = {}
        if expected is not None:
            expected.members = self.members
        self.prefilling: dict[Request, None] = {}
        self.stalled: dict[Request, None] = {}
        self.returned: dict[Request, None] = {}
        self.peak_blocks = 0
        self.version = 0
        self.service = None
        self.on_decode = None
        self._engine = engine
        self._max = limits.max_num_seqs
        self._tiers: dict[int, int] = {}
        self._others = 0

    def refresh(self) -> None:
        """A step is to be planned: who decodes, who has a prompt to compute, who takes a seat without our doing."""
        for r in list(self.prefilling):
            h: Any = r.handle
            if h.num_tokens + h.num_output_placeholders - h.num_computed_tokens <= 1:
                self._start_decoding(r)
        self.decodes.refresh()
        engine = self._engine
        self._others = max(0, len(engine.running) + engine.num_waiting_for_streaming_input - len(self.members))

    def _start_decoding(self, r: Request) -> None:
        del self.prefilling[r]
        self.decodes.join(r)
        self.load.add(r)
        if self.on_decode is not None:
            self.on_decode(r)

    @property
    def free_seats(self) -> int:
        return self._max - self._others - len(self.members)

    @property
    def outstanding(self) -> int:  # type: ignore[override]
        """Blocks by which all of them may still grow, as declared."""
        return sum(self.growth_left(r) for r in self.members)

    def growth_left(self, r: Request) -> int:
        return max(0, r.footprint - _held(r))

    def ending_within(self, steps: int) -> Iterator[Request]:
        return (r for r in self.decodes.members if r.target - r.sampled <= steps)

    def seat(self, r: Request, lease: Lease) -> None:
        """`r` is to be admitted by vLLM in this step."""
        r.lease = lease
        self.members[r] = None
        self.prefilling[r] = None
        if r.preemptions:
            self.returned[r] = None
        self._tiers[r.tier] = self._tiers.get(r.tier, 0) + 1
        self.peak_blocks += r.footprint
        self.version += 1

    def settle(self, r: HostedRequest) -> None:
        """vLLM has admitted `r`; what it computes for the first time is its tenant's."""
        if self.service is not None:
            self.service.seat(r.tenant, 0 if r.preemptions else r.prompt_tokens - r.cached_tokens)
            self.service.join(r.tenant, r)
            r.joined_clock = r.clock

    def unseat(self, r: Request) -> None:
        """vLLM has not admitted `r` after all: it waits on."""
        self._leave(r)
        r.rewind(0)

    def vacate(self, r: Request) -> None:
        """`r` gives its seat up: it was preempted, or it ended."""
        assert isinstance(r, HostedRequest)
        if self.service is not None:
            self.service.part(r.tenant, r, r.joined_clock)
            self.service.vacate(r.tenant)
        self.suspend(r)
        r.rewind(0)

    def suspend(self, r: Request) -> None:
        """Plan as if `r` did not run."""
        self._leave(r)
        self.decodes.leave(r)

    def _leave(self, r: Request) -> None:
        assert r.lease is not None
        if r not in self.prefilling:
            self.load.drop(r)
        self.peak_blocks -= r.footprint
        self.kv.release(r.lease)
        r.lease = None
        for members in (self.members, self.prefilling, self.returned):
            members.pop(r, None)
        self._count_out(r.tier)
        self.version += 1

    def move(self, r: Request, tier: int, key: Any) -> None:
        if r not in self.prefilling:
            self.load.drop(r)
        self._count_out(r.tier)
        r.tier, r.key = tier, key
        self._tiers[tier] = self._tiers.get(tier, 0) + 1
        if r not in self.prefilling:
            self.load.add(r)
        self.version += 1
