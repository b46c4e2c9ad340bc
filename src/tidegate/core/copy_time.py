"""How long it takes to move a KV block between device and host, learned from the copies that were made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CopyTime:
    """Seconds a block, one way: `memory` for the host's memory, `disk` for the second tier.

    Both are first guesses until an executor reports what its copies took; each report moves them by
    `weight` of the difference, so that one slow copy does not decide much and a changed machine is noticed.
    """

    memory: float = 1e-4
    disk: float = 1e-3
    weight: float = 0.2

    def observe(self, blocks: int, seconds: float, disk: bool) -> None:
        """`blocks` blocks of one tier were moved one way in `seconds`."""
        if blocks < 1 or not seconds > 0:
            return
        if disk:
            self.disk += self.weight * (seconds / blocks - self.disk)
        else:
            self.memory += self.weight * (seconds / blocks - self.memory)
