"""Which engine probably holds which prefix: remembered from where requests were sent, never asked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixMemory:
    """The blocks last sent to each engine, at most `tokens` of each; the longest unused are forgotten, tails first.

    Approximate: the engine may have evicted a block that stands here, or hold one that does not.
    """

    def __init__(self, tokens: int) -> None:
        self._bound = tokens
        self._held: dict[str, OrderedDict[int, None]] = {}
        self._holders: dict[int, set[str]] = {}

    def __len__(self) -> int:
        """Blocks remembered, each once for every engine."""
        return sum(map(len, self._held.values()))

    def matches(self, blocks: Sequence[int]) -> dict[str, int]:
        """How many of `blocks`, from the first on, each engine probably holds; those that hold none are left out."""
        found: dict[str, int] = {}
        follow: set[str] = set()  # those that hold all before
        depth = 0
        for block in blocks:
            holders = self._holders.get(block)
            if holders is None:
                break
            still = follow & holders if depth else holders
            if len(still) < len(follow):
                found |= dict.fromkeys(follow - still, depth)
                if not still:
                    return found
            follow = still
            depth += 1
        if depth:
            found |= dict.fromkeys(follow, depth)
        return found

    def sent(self, replica: str, blocks: Sequence[int], block_tokens: float = 1, tokens: int | None = None) -> None:
        """A prompt of these blocks, of `block_tokens` tokens each, goes to `replica`, which holds `tokens` in all.

        None where nobody knows that; the bound is meant for those.
        """
        held = self._held.setdefault(replica, OrderedDict())
        for block in reversed(blocks):  # so that the first block is the last to be forgotten
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = None
                self._holders.setdefault(block, set()).add(replica)
        bound = self._bound if tokens is None else tokens
        while len(held) * block_tokens > bound:
            self._drop(replica, held.popitem(last=False)[0])

    def forget(self, replica: str) -> None:
        """`replica` lost its cache."""
        for block in self._held.pop(replica, ()):
            self._drop(replica, block)

    def _drop(self, replica: str, block: int) -> None:
        holders = self._holders[block]
        holders.discard(replica)
        if not holders:
            del self._holders[block]
