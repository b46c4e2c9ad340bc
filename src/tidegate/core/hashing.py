"""Chained hashes of blocks: equal hash, equal prefix.

The hash of a block covers everything before it, so one lookup answers for a whole prefix. blake2b is
collision resistant, which matters because a collision would show one client another's cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16


def root(salt: str) -> bytes:
    """The parent of the first block. Requests with different salts never share a block."""
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=b"tidegate-salt").digest()


def link(parent: bytes, chunk: bytes) -> bytes:
    """The hash of a block whose content is `chunk` and whose prefix is `parent`."""
    return blake2b(parent + chunk, digest_size=DIGEST_BYTES).digest()


def block_hashes(tokens: Sequence[int], block_size: int, salt: str = "", known: Sequence[bytes] = ()) -> list[bytes]:
    """Hashes of the full blocks of `tokens`; `known` are those of its first blocks, computed before."""
    hashes = list(known)
    parent = hashes[-1] if hashes else root(salt)
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        parent = link(parent, array("q", tokens[start : start + block_size]).tobytes())
        hashes.append(parent)
    return hashes
