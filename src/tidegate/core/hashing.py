"""Chained hashes of blocks: equal hash, equal prefix.

The hash of a block covers everything before it, so one lookup answers for a whole prefix. blake2b is
collision resistant, which matters because a collision would show one client another's cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from tidegate.core.blocks import BlockHash

DIGEST_BYTES = 16


def root(salt: str) -> bytes:
    """The parent of the first block. Requests with different salts never share a block."""
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=b"tidegate-salt").digest()


def block_hashes(
    tokens: Sequence[int], block_size: int, salt: str = "", known: Sequence[BlockHash] = ()
) -> list[BlockHash]:
    """Hashes of the full blocks of `tokens`; `known` are those of its first blocks, computed here before."""
    hashes = list(known)
    parent = hashes[-1] if hashes else root(salt)
    if isinstance(parent, int):
        raise TypeError("hashes that a host made up cannot be continued from token ids; give one or the other")
    start, stop = len(hashes) * block_size, len(tokens) // block_size * block_size
    content = array("i", tokens[start:stop]).tobytes()
    width = 4 * block_size
    for at in range(0, len(content), width):
        parent = blake2b(parent + content[at : at + width], digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)
    return hashes
