"""Chained hashes of blocks: equal hash, equal prefix.

The hash of a block covers everything before it, so one lookup answers for a whole prefix. blake2b is
collision resistant, which matters because a collision would show one client another's cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import TypeAlias

BlockHash: TypeAlias = bytes | int

DIGEST_BYTES = 16


@lru_cache(maxsize=1024)
def root(salt: str) -> bytes:
    """The parent of the first block. Requests with different salts never share a block."""
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=b"tidegate-salt").digest()


def block_hashes(
    tokens: Sequence[int], block_size: int, salt: str = "", known: Sequence[BlockHash] = ()
) -> list[BlockHash]:
    """Hashes of the full blocks of `tokens`; `known` are those of its first blocks, computed here before."""
    hashes = list(known)
    start = len(hashes) * block_size
    return hashes + continue_hashes(hashes[-1] if hashes else root(salt), tokens[start:], block_size)


def continue_hashes(parent: BlockHash, tokens: Sequence[int], block_size: int) -> list[BlockHash]:
    """Hashes of the full blocks of `tokens` that follow the block with hash `parent`."""
    if isinstance(parent, int):
        raise TypeError("hashes that a host made up cannot be continued from token ids; give one or the other")
    hashes: list[BlockHash] = []
    width = 4 * block_size
    content = array("I", tokens).tobytes()
    for end in range(width, len(content) + 1, width):
        parent = blake2b(parent + content[end - width : end], digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)
    return hashes
