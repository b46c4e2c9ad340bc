"""Turns a workload's requests into the scheduler's, one by one as they arrive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from tidegate.core.hashing import BlockHash
from tidegate.core.request import Request
from tidegate.core.slo import SloClass
from tidegate.errors import InputError
from tidegate.simulate.workload import WorkloadRequest

_CHAIN_BITS = (1 << 52) - 1  # of a block's name; what is left of 63 bits numbers the pool's blocks in it


def arrivals(
    workload: Iterable[WorkloadRequest],
    classes: Mapping[str, SloClass],
    block_size: int,
    declared: int | None = None,
) -> Iterator[Request]:
    """The requests of `workload`, whose ids are their numbers, in order of arrival.

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
        yield Request(
            str(number),
            prompt_tokens=w.prompt_tokens,
            max_tokens=w.output_tokens if declared is None else max(declared, w.output_tokens),
            arrival=w.arrival_s,
            tenant=w.tenant,
            slo_class=w.slo_class,
            priority=slo_class.priority if w.priority is None else w.priority,
            slo=slo_class.slo,
            block_hashes=prefix_hashes(w, block_size) if w.hash_ids else (),
            queue_ttl=slo_class.queue_ttl,
            oracle_tokens=w.output_tokens,
        )


def prefix_hashes(w: WorkloadRequest, block_size: int) -> Sequence[BlockHash]:
    """Chained hashes of the full blocks of a prompt, from the names of its larger blocks.

    Equal from the start as far as the names are; nothing is hashed but the names, each with those before it.
    Raises InputError where the larger blocks are not made of whole blocks.
    """
    inside, rest = divmod(w.hash_block_tokens, block_size)
    if rest:
        raise InputError(f"hash ids name blocks of {w.hash_block_tokens} tokens, of which {block_size} is no divisor")
    hashes: list[BlockHash] = []
    chain = 0
    for name in w.hash_ids:
        chain = hash((chain, name)) & _CHAIN_BITS
        first = chain * inside
        hashes += range(first, first + inside)
    del hashes[w.prompt_tokens // block_size :]
    return hashes
