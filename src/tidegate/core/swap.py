"""Who lies swapped out, and the copies under way.

A copy is planned in one step and known to be done when that step's result comes; until then neither its
host blocks nor the KV it brings may be relied on, and both stay as they are.
"""

from __future__ import annotations

from typing import NamedTuple

from tidegate.core.copy_time import CopyTime
from tidegate.core.host import HostPool
from tidegate.core.plan import Copy
from tidegate.core.request import Request, Status
from tidegate.core.view import HostView


class Transfer(NamedTuple):
    """A copy under way.

    inward:  whether it brings KV back to the device
    host:    the host blocks that come free when an inward copy is done
    prefix:  KV tokens that are in place even if an inward copy fails
    seconds: what the copy is expected to take
    """

    request: Request
    copy: Copy
    inward: bool
    host: list[int]
    prefix: int
    seconds: float


class Swap:
    """Moves requests' KV between the device and the host's two tiers. Sizes are blocks."""

    def __init__(self, memory: int, disk: int, block_size: int, times: CopyTime) -> None:
        self.pool = HostPool(memory, disk)
        self._block_size = block_size
        self._times = times
        self._queued = 0.0

    def view(self) -> HostView:
        """What a restore policy may look at."""
        pool, times = self.pool, self._times
        return HostView(pool.free_memory, pool.free_disk, self._queued, times.memory, times.disk)

    def out(self, r: Request) -> Transfer:
        """Keep on the host what `r` has computed and what steps in flight compute of it. It holds its blocks still.

        Raises KvError where the host has no room.
        """
        assert r.lease is not None
        blocks = r.lease.table[: -(-r.planned // self._block_size)]
        r.host = self.pool.take(len(blocks))
        r.host_tokens = r.planned
        r.swapped_blocks += len(blocks)
        return self._begin(Transfer(r, Copy(r.id, blocks, r.host), False, [], 0, self._seconds(r.host)))

    def into(self, r: Request, prefix: int) -> Transfer | None:
        """Bring back what `r` left on the host beyond its cached prefix of `prefix` tokens, into its new blocks.

        None where the cache holds it all.
        """
        assert r.lease is not None
        host, start = r.host, prefix // self._block_size
        r.host, r.host_tokens = [], 0
        if start >= len(host):
            self.pool.give_back(host)
            return None
        r.copying = True
        copy = Copy(r.id, r.lease.table[start : len(host)], host[start:])
        return self._begin(Transfer(r, copy, True, host, prefix, self._seconds(copy.host)))

    def done(self, transfer: Transfer, failed: bool) -> None:
        """The step of this copy was computed. What a failed one was to bring or keep is computed again."""
        r, ended = transfer.request, transfer.request.status is Status.FINISHED
        self._queued -= transfer.seconds
        if transfer.inward:
            self.pool.give_back(transfer.host)
            r.copying = False
            if failed and not ended:
                r.recomputed_tokens += r.planned - transfer.prefix
                r.rewind(transfer.prefix)
        elif failed or ended:
            self.pool.give_back(transfer.copy.host)
            r.host, r.host_tokens = [], 0

    def drop(self, r: Request) -> None:
        """`r` ended while it lay on the host; a copy under way keeps its blocks until it is done."""
        if r.host and not r.in_flight:
            self.pool.give_back(r.host)
            r.host, r.host_tokens = [], 0

    def observe(self, transfers: list[Transfer], seconds: float) -> None:
        """All of these took `seconds` together: shared out as they were expected to share."""
        expected = sum(t.seconds for t in transfers)
        for t in transfers:
            blocks = t.copy.host
            if blocks and expected > 0:
                self._times.observe(len(blocks), seconds * t.seconds / expected, self._on_disk(blocks))

    def _begin(self, transfer: Transfer) -> Transfer:
        self._queued += transfer.seconds
        return transfer

    def _seconds(self, host: list[int]) -> float:
        return len(host) * (self._times.disk if self._on_disk(host) else self._times.memory)

    def _on_disk(self, host: list[int]) -> bool:
        return bool(host) and host[0] >= self.pool.memory
