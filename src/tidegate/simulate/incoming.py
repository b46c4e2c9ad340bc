"""The requests of a simulated run, one by one as they arrive, as engines and routes see them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

from tidegate.core.hashing import BlockHash
from tidegate.core.request import Request
from tidegate.core.slo import SloClass
from tidegate.errors import InputError
from tidegate.routing.view import RouteView
from tidegate.simulate.workload import Workload, WorkloadRequest

if TYPE_CHECKING:
    from tidegate.simulate.closed_loop import Clients

_CHAIN_BITS = (1 << 52) - 1  # of a block's name; what is left of 63 bits numbers the pool's blocks in it


class Incoming:
    """A workload as it arrives, that of its closed loops included. Ids are numbers in the order of arrival.

    Each request knows its true number of outputs (`oracle_tokens`) and declares it, or `declared` tokens where that
    is more. Requests are made as they are taken, so a workload may be any iterable in order of arrival.

    loops: whether arrivals depend on ends, which then have to be told in order of time
    """

    def __init__(
        self,
        workload: Iterable[WorkloadRequest],
        classes: Mapping[str, SloClass],
        block_size: int,
        declared: int | None = None,
    ) -> None:
        self.taken = 0
        self._classes = classes
        self._block_size = block_size
        self._declared = declared
        self._rest = iter(workload)
        self._next = next(self._rest, None)
        self._asked: list[tuple[float, int, WorkloadRequest, Clients]] = []
        self._out: dict[str, tuple[WorkloadRequest, Clients]] = {}
        self._serial = 0
        loops = workload.loops if isinstance(workload, Workload) else ()
        self.loops = bool(loops)
        for clients in [loop.start() for loop in loops]:
            for w in clients.first():
                self._ask(w, clients)

    @property
    def next_arrival(self) -> float:
        """When the next one arrives (seconds), as far as that is known; inf if nobody does."""
        listed = inf if self._next is None else self._next.arrival_s
        return min(listed, self._asked[0][0]) if self._asked else listed

    def take(self) -> tuple[Request, RouteView]:
        """The next one; there must be one. Raises InputError for one that makes no sense."""
        w = self._next
        if self._asked and (w is None or self._asked[0][0] < w.arrival_s):
            _, _, w, clients = heapq.heappop(self._asked)
            self._out[str(self.taken)] = w, clients
        else:
            assert w is not None  # noqa: S101 - the caller has asked for `next_arrival`
            self._next = next(self._rest, None)
            if self._next is not None and self._next.arrival_s < w.arrival_s:
                raise InputError(
                    f"request {self.taken + 1} arrives at {self._next.arrival_s:g} s, before request {self.taken}"
                )
        made = self._made(str(self.taken), w)
        self.taken += 1
        return made

    def ended(self, request_id: str, now: float) -> None:
        """A request ended, however it did: its client, if it is one of a closed loop, may ask again."""
        if request_id in self._out:
            w, clients = self._out.pop(request_id)
            following = clients.after(w, now)
            if following is not None:
                self._ask(following, clients)

    def _ask(self, w: WorkloadRequest, clients: Clients) -> None:
        self._serial += 1
        heapq.heappush(self._asked, (w.arrival_s, self._serial, w, clients))

    def _made(self, name: str, w: WorkloadRequest) -> tuple[Request, RouteView]:
        slo_class = self._classes.get(w.slo_class)
        if slo_class is None:
            there = ", ".join(sorted(self._classes))
            raise InputError(
                f"request {name} is of class {w.slo_class!r}, of which nothing is configured; there are: {there}"
            )
        chains = chained(w.hash_ids) if w.hash_ids else ()
        declared, outputs = self._declared, w.output_tokens
        r = Request(
            name,
            prompt_tokens=w.prompt_tokens,
            max_tokens=outputs if declared is None or declared < outputs else declared,
            arrival=w.arrival_s,
            tenant=w.tenant,
            slo_class=w.slo_class,
            priority=slo_class.priority if w.priority is None else w.priority,
            slo=slo_class.slo,
            block_hashes=prefix_hashes(w, chains, self._block_size) if chains else (),
            queue_ttl=slo_class.queue_ttl,
            oracle_tokens=outputs,
        )
        return r, RouteView(name, w.slo_class, w.prompt_tokens, chains, w.hash_block_tokens, w.tenant)


def chained(names: Iterable[int]) -> list[int]:
    """Names of blocks, each with those before it: equal from the start as far as `names` are."""
    chain, chains = 0, []
    for name in names:
        chain = hash((chain, name)) & _CHAIN_BITS  # of whole numbers, so the same in every process
        chains.append(chain)
    return chains


def prefix_hashes(w: WorkloadRequest, chains: Sequence[int], block_size: int) -> Sequence[BlockHash]:
    """Hashes of the full blocks of a prompt from the chained names of its larger blocks; nothing is hashed.

    Raises InputError where the larger blocks are not made of whole blocks.
    """
    inside, rest = divmod(w.hash_block_tokens, block_size)
    if rest:
        raise InputError(f"hash ids name blocks of {w.hash_block_tokens} tokens, of which {block_size} is no divisor")
    hashes: list[BlockHash] = []
    for chain in chains:
        first = chain * inside
        hashes += range(first, first + inside)
    del hashes[w.prompt_tokens // block_size :]
    return hashes
