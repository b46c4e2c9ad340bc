"""Turns a workload's requests into the scheduler's, one by one as they arrive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from tidegate.core.hashing import BlockHash
from tidegate.core.request import Request
from tidegate.core.slo import SloClass
from tidegate.errors import InputError
from tidegate.routing.view import RouteView
from tidegate.simulate.workload import WorkloadRequest

_CHAIN_BITS = (1 << 52) - 1  # of a block's name; what is left of 63 bits numbers the pool's blocks in it


def incoming(
    workload: Iterable[WorkloadRequest],
    classes: Mapping[str, SloClass],
    block_size: int,
    declared: int | None = None,
) -> Iterator[tuple[Request, RouteView]]:
    """The requests of `workload`, whose ids are their numbers, in order of arrival, as engines and routes see them.

    Each knows its true number of outputs (`oracle_tokens`) and declares it, or `declared` tokens where that is
    more. Raises InputError for a class that there is not, and for a workload that is not in order.
    """
    before = 0.0
    for number, w in enumerate(workload):
        slo_class = classes.get(w.slo_class)
        if slo_class is None:
            raise InputError(f"request {number} is of class {w.slo_class!r}; there are: {', '.join(sorted(classes))}")
        if w.arrival_s < before:
            raise InputError(f"request {number} arrives at {w.arrival_s:g} s, before the one ahead of it")
        before = w.arrival_s
        chains = chained(w.hash_ids) if w.hash_ids else ()
        route = RouteView(str(number), w.slo_class, w.prompt_tokens, chains, w.hash_block_tokens)
        r = Request(
            route.id,
            prompt_tokens=w.prompt_tokens,
            max_tokens=w.output_tokens if declared is None else max(declared, w.output_tokens),
            arrival=w.arrival_s,
            tenant=w.tenant,
            slo_class=w.slo_class,
            priority=slo_class.priority if w.priority is None else w.priority,
            slo=slo_class.slo,
            block_hashes=prefix_hashes(w, chains, block_size) if chains else (),
            queue_ttl=slo_class.queue_ttl,
            oracle_tokens=w.output_tokens,
        )
        yield r, route


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
