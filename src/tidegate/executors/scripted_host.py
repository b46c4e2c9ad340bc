"""What the host blocks of the scripted executor hold, tracked by what was last written to each.

The scheduler frees host blocks without telling the executor, so writing one anew is always right; reading
one that holds something else than what the reader swapped out never is.
"""

from __future__ import annotations

from typing import NamedTuple


class Saved(NamedTuple):
    """What one block holds.

    owner:  id of the request it was swapped out of
    place:  its index in that request's block table
    tokens: KV tokens that are computed in it
    before: identity of everything before it, and
    ids:    the token ids in it; 0 and empty where plans carry none
    """

    owner: str
    place: int
    tokens: int
    before: int
    ids: tuple[int, ...]

    def serves(self, wanted: Saved) -> bool:
        """Whether this holds at least what is `wanted`. Without token ids only its own request may want it."""
        if (self.place, self.before) != (wanted.place, wanted.before) or self.tokens < wanted.tokens:
            return False
        if wanted.ids or self.ids:
            return self.ids[: len(wanted.ids)] == wanted.ids
        return self.owner == wanted.owner


class HostBlocks:
    """Host blocks 0 .. size-1 by content. A copy that failed leaves its blocks empty."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._saved: dict[int, Saved] = {}
        self._lost: dict[int, int] = {}

    def put(self, block: int, saved: Saved) -> None:
        """`block` holds this now, whatever it held."""
        self._saved[block] = saved
        self._lost.pop(block, None)

    def lose(self, block: int, step: int) -> None:
        """The copy into `block` failed in `step`: it holds nothing."""
        self._saved.pop(block, None)
        self._lost[block] = step

    def get(self, block: int) -> Saved | None:
        """What was last written to `block`; None if nothing was, or the copy failed."""
        return self._saved.get(block)

    def lost_after(self, block: int, step: int) -> bool:
        """Whether the last copy into `block` failed, later than in `step`."""
        return self._lost.get(block, step) > step
