"""One request: what was asked, what has been done, and the table of legal status changes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

from tidegate.core.slo import NO_SLO, Slo
from tidegate.errors import IllegalTransition

if TYPE_CHECKING:
    from tidegate.core.decodes import DecodeSet
    from tidegate.core.hashing import BlockHash
    from tidegate.core.kv import Lease
    from tidegate.core.policy import Key


class Status(Enum):
    """Where a request stands. There is no prefill or decode status: that follows from its counters."""

    NEW = "new"
    PARKED = "parked"
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"

    followers: tuple[Status, ...]


class FinishReason(Enum):
    """Why a request ended. Every request ends with exactly one of these."""

    STOP = "stop"
    LENGTH = "length"
    LENGTH_KV = "length_kv"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    DEPENDENCY_TIMEOUT = "dependency_timeout"
    SHED = "shed"
    DISPLACED = "displaced"
    REFUSED = "refused"
    ERROR = "error"


UNSERVED = frozenset({FinishReason.TIMEOUT, FinishReason.DEPENDENCY_TIMEOUT, FinishReason.SHED, FinishReason.DISPLACED})
"""Ends of requests that waited and never computed a token."""


class Rejection(Enum):
    """Why the door refused a request."""

    KV_CAPACITY = "kv_capacity"
    QUEUE_FULL = "queue_full"
    DEADLINE = "deadline"
    TOO_LONG = "too_long"
    BAD_REQUEST = "bad_request"


LEGAL: dict[Status, tuple[Status, ...]] = {
    Status.NEW: (Status.PARKED, Status.WAITING, Status.FINISHED),
    Status.PARKED: (Status.WAITING, Status.FINISHED),
    Status.WAITING: (Status.RUNNING, Status.FINISHED),
    Status.RUNNING: (Status.PREEMPTED, Status.FINISHED),
    Status.PREEMPTED: (Status.RUNNING, Status.FINISHED),
    Status.FINISHED: (),
}
for _status, _followers in LEGAL.items():
    _status.followers = _followers  # on the member itself: hashing an enum member runs Python code


class Request:
    """What was asked, and counters of what has been done. Satisfies `core.view.RequestView`.

    Give either `token_ids` (prompt token ids) or, where the host keeps none, `prompt_tokens` alone.
    `max_tokens` is the declared number of outputs; None means until the pool or the model ends.
    `block_hashes` are the chained hashes of the prompt's full blocks (see core/hashing.py); the
    scheduler fills them in from `token_ids` where they are absent and caching is on.
    `not_before` (seconds) keeps a request from being scheduled earlier; `oracle_tokens` is the true
    number of outputs where a simulation knows it.
    `queue_ttl` is how long it may wait to be admitted, in seconds since its arrival; None is for ever.
    `resource` names what it needs beside a seat, such as an adapter; see core/lanes.py.

    Four counters, all KV or output tokens, told apart so that a step may be planned while the one
    before it still runs. While a request decodes they are *derived* from its decode set's clock, so
    that a steady decode costs nothing to count:

    While it is swapped out, its first `host_tokens` KV tokens lie in the `host` blocks; `copying` says that
    they are on their way back.

    planned:  KV tokens whose computation is planned or done
    computed: KV tokens computed by applied steps
    sampled:  outputs planned or done
    emitted:  outputs delivered by applied steps
    """

    __slots__ = (
        "_computed",
        "_emitted",
        "_planned",
        "_sampled",
        "admitted_at",
        "arrival",
        "block_hashes",
        "cache_salt",
        "cached_tokens",
        "clip",
        "copying",
        "decode_set",
        "finish_reason",
        "first_token_at",
        "footprint",
        "gaps",
        "handle",
        "host",
        "host_tokens",
        "id",
        "in_flight",
        "joined_clock",
        "key",
        "last_clock",
        "last_token_at",
        "lease",
        "lost",
        "max_tokens",
        "not_before",
        "oracle_tokens",
        "preempted_at",
        "preempted_wait",
        "preemptions",
        "priority",
        "prompt_tokens",
        "queue_ttl",
        "recomputed_tokens",
        "resource",
        "seq",
        "slo",
        "slo_class",
        "slot",
        "status",
        "swapped_blocks",
        "target",
        "tenant",
        "tier",
        "token_ids",
        "version",
    )

    def __init__(
        self,
        id: str,
        *,
        token_ids: Sequence[int] | None = None,
        prompt_tokens: int | None = None,
        max_tokens: int | None = None,
        arrival: float = 0.0,
        tenant: str = "default",
        slo_class: str = "interactive",
        priority: int = 0,
        slo: Slo = NO_SLO,
        cache_salt: str = "",
        block_hashes: Sequence[BlockHash] = (),
        not_before: float = 0.0,
        queue_ttl: float | None = None,
        resource: str | None = None,
        oracle_tokens: int | None = None,
        handle: object = None,
    ) -> None:
        if token_ids is None and prompt_tokens is None:
            raise ValueError("a request needs token_ids or prompt_tokens")
        self.id = id
        self.token_ids: list[int] | None = None if token_ids is None else list(token_ids)
        self.prompt_tokens: int = len(token_ids) if token_ids is not None else int(prompt_tokens or 0)
        self.max_tokens = max_tokens
        self.arrival = arrival
        self.tenant = tenant
        self.slo_class = slo_class
        self.priority = priority
        self.slo = slo
        self.cache_salt = cache_salt
        self.block_hashes: list[BlockHash] = list(block_hashes)
        self.not_before = not_before
        self.queue_ttl = queue_ttl
        self.resource = resource
        self.oracle_tokens = oracle_tokens
        self.handle = handle

        self.status = Status.NEW
        self.seq = -1
        self.key: Key | None = None
        self.tier = 0
        self.version = 0

        self.slot = -1
        self.lease: Lease | None = None
        self.decode_set: DecodeSet | None = None
        self.joined_clock = 0
        self.last_clock = 0
        self.target = 0
        self.footprint = 0
        self.in_flight = 0
        self.clip = False
        self._planned = 0
        self._computed = 0
        self._sampled = 0
        self._emitted = 0

        self.host: list[int] = []
        self.host_tokens = 0
        self.copying = False

        self.preemptions = 0
        self.lost = 0
        self.swapped_blocks = 0
        self.recomputed_tokens = 0
        self.cached_tokens = 0
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.finish_reason: FinishReason | None = None

        self.last_token_at: float | None = None
        self.gaps = array("d")  # seconds between its tokens
        self.preempted_at: float | None = None
        self.preempted_wait = 0.0

    # Derived counters. A member of a decode set adds the clock's advance since it joined; a step that
    # was in flight when it joined is not its own, hence the max().

    @property
    def planned(self) -> int:
        """KV tokens whose computation is planned or done."""
        d = self.decode_set
        return self._planned if d is None else self._planned + d.clock - self.joined_clock

    @property
    def sampled(self) -> int:
        """Output tokens planned or done."""
        d = self.decode_set
        return self._sampled if d is None else self._sampled + d.clock - self.joined_clock

    @property
    def computed(self) -> int:
        """KV tokens computed by applied steps."""
        d = self.decode_set
        return self._computed if d is None else self._computed + max(0, d.applied - self.joined_clock)

    @property
    def emitted(self) -> int:
        """Output tokens delivered by applied steps."""
        d = self.decode_set
        return self._emitted if d is None else self._emitted + max(0, d.applied - self.joined_clock)

    @property
    def known_tokens(self) -> int:
        """Tokens known now: the prompt and the outputs delivered so far."""
        return self.prompt_tokens + (self._emitted if self.decode_set is None else self.emitted)

    @property
    def waiting_since(self) -> float | None:
        """When its wait began (seconds): its arrival, or its last preemption; None while it runs."""
        if self.status is Status.RUNNING:
            return None
        return self.arrival if self.preempted_at is None else self.preempted_at

    def enter(self, decodes: DecodeSet, clock: int, last_clock: int) -> None:
        """Derive the counters from `decodes` from now on. Only core/decodes.py calls this."""
        self.joined_clock = clock
        self.last_clock = last_clock
        self.decode_set = decodes

    def freeze(self) -> None:
        """Derive the counters no more; they stand as they are. Only core/decodes.py calls this."""
        d = self.decode_set
        assert d is not None
        self.decode_set = None
        planned, applied = d.clock - self.joined_clock, d.applied - self.joined_clock
        self._planned += planned
        self._sampled += planned
        if applied > 0:
            self._computed += applied
            self._emitted += applied

    def count(self, planned: int = 0, sampled: int = 0, computed: int = 0, emitted: int = 0) -> None:
        """Add to the counters: a chunk planned or applied, a token that was in flight when `r` left."""
        self._planned += planned
        self._sampled += sampled
        self._computed += computed
        self._emitted += emitted

    def rewind(self, cached: int) -> None:
        """Start over with `cached` KV tokens in place. Tokens already emitted stay emitted."""
        self._planned = self._computed = cached
        self._sampled = self._emitted

    def move(self, status: Status) -> None:
        """Change the status. Only core/lifecycle.py calls this.

        Raises IllegalTransition for a change that is not in the table.
        """
        if status not in self.status.followers:
            raise IllegalTransition(f"request {self.id}: {self.status.value} -> {status.value}")
        self.status = status

    def __repr__(self) -> str:
        return f"<Request {self.id} {self.status.value} {self.computed}/{self.known_tokens} tokens>"
