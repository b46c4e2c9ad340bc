"""How much of each waiting request's prompt is cached, kept right by events.

A waiting request is filed under the hash of the *first missing* block of its prompt: only when that
very block appears does its cached prefix grow, so a commit concerns only those who wait for it.
Evictions are not followed one by one: a request may be taken for warmer than it is until it comes
first, when the queue's head is looked at again before anything is planned (`overrated`). Outputs that a
finished request leaves unhashed are seen by those who arrive later, not by those who wait already.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from tidegate.core.hashing import BlockHash
from tidegate.core.kv import KvCache
from tidegate.core.request import Request
from tidegate.core.running import hashes_of
from tidegate.core.view import RequestView


class Affinity:
    """Cached prefixes of those who wait. `tokens` is `PolicyContext.cached`."""

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        self._blocks: dict[Request, int] = {}
        self._filed: dict[Request, dict[Request, None]] = {}  # the drawer each lies in
        self._missing: dict[BlockHash, dict[Request, None]] = {}
        self._names: dict[Request, BlockHash] = {}
        self._grown: deque[dict[Request, None]] = deque()
        kv.watched = self._missing

    def tokens(self, r: RequestView) -> int:
        """Tokens of `r`'s known prefix that are cached; from now on `r` is watched while it waits."""
        assert isinstance(r, Request)
        matched, missing = self._match(r)
        self._kv.ranks = True
        if r.lease is None:
            self.forget(r)
            if matched or missing is not None:
                self._blocks[r] = matched
            if missing is not None:
                self._names[r] = missing
                self._filed[r] = drawer = self._missing.setdefault(missing, {})
                drawer[r] = None
        return matched * self._kv.block_size

    def known(self, r: Request) -> int:
        """Tokens of the waiting `r` that were cached when its key was made."""
        return self._blocks.get(r, 0) * self._kv.block_size

    def forget(self, r: Request) -> None:
        """`r` waits no more."""
        if self._blocks.pop(r, None) is None:
            return
        drawer = self._filed.pop(r, None)
        name = self._names.pop(r, None)
        if drawer is not None:
            drawer.pop(r, None)
            if not drawer and name is not None and self._missing.get(name) is drawer:
                del self._missing[name]

    def grown(self, limit: int) -> list[Request]:
        """Up to `limit` of those whose first missing block has appeared; the others follow in later calls."""
        for name in self._kv.take_appeared():
            drawer = self._missing.pop(name, None)
            if drawer:
                self._grown.append(drawer)
        found: list[Request] = []
        while self._grown and len(found) < limit:
            drawer = self._grown[0]
            found += islice(drawer, limit - len(found))
            for r in found:
                drawer.pop(r, None)
            if not drawer:
                self._grown.popleft()
        return found

    @property
    def waits_to_tell(self) -> bool:
        """Whether the prefix of somebody who waits has grown."""
        return bool(self._grown or self._kv.appeared)

    def warm(self, r: Request) -> bool:
        """Whether `r` was found to have a cached prefix, which evictions can shorten."""
        return self._blocks.get(r, 0) > 0

    def overrated(self, r: Request) -> bool:
        """Whether less of `r`'s prefix is cached than when its key was made."""
        known = self._blocks.get(r)
        return known is not None and known > 0 and self._match(r)[0] < known

    def _match(self, r: Request) -> tuple[int, BlockHash | None]:
        """(cached blocks of `r`'s prefix, the hash of the first that is missing)."""
        hashes = hashes_of(r, self._kv)
        if not hashes:
            return 0, None
        known = r.known_tokens + r.sampled - r.emitted  # a token in flight is known before `r` can start
        limit = min(len(hashes), (known - 1) // self._kv.block_size)
        if not limit:
            return 0, None
        matched = self._kv.match(hashes, limit).blocks
        return matched, hashes[matched] if matched < limit else None
