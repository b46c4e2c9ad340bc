"""The host's KV blocks: where a swapped-out request keeps its KV. Two tiers, memory before disk.

Only ids are kept here; an executor holds what they mean. A request's copy lies in one tier, so that what
bringing it back costs is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.errors import KvError


class HostPool:
    """Ids 0 .. memory-1 lie in host memory, memory .. memory+disk-1 in the second tier. Sizes are blocks."""

    def __init__(self, memory: int, disk: int) -> None:
        self.memory = memory
        self.disk = disk
        self._free_memory = list(range(memory - 1, -1, -1))
        self._free_disk = list(range(memory + disk - 1, memory - 1, -1))
        self._taken: set[int] = set()

    @property
    def free_memory(self) -> int:
        """Blocks of host memory that hold nothing."""
        return len(self._free_memory)

    @property
    def free_disk(self) -> int:
        """Blocks of the second tier that hold nothing."""
        return len(self._free_disk)

    @property
    def used(self) -> int:
        """Blocks of both tiers that hold something."""
        return len(self._taken)

    def take(self, blocks: int) -> list[int]:
        """Ids of `blocks` blocks of one tier, memory where they fit. Raises KvError where neither has as many."""
        free = self._free_memory if blocks <= len(self._free_memory) else self._free_disk
        if blocks > len(free):
            raise KvError(
                f"{blocks} host blocks wanted, {self.free_memory} in memory and {self.free_disk} on disk free"
            )
        taken = free[len(free) - blocks :]
        del free[len(free) - blocks :]
        self._taken.update(taken)
        return taken

    def give_back(self, ids: Sequence[int]) -> None:
        """These hold nothing any more. Raises KvError for one that was not taken."""
        for block in ids:
            if block not in self._taken:
                raise KvError(f"host block {block} was given back twice")
            self._taken.discard(block)
            (self._free_memory if block < self.memory else self._free_disk).append(block)
