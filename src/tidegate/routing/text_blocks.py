"""Names of a text's blocks, and how many tokens they probably are: a prefix as a gateway sees it, for any engine."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

BLOCK_BYTES = 512
"""Bytes of a block: short enough that little of a shared prefix is lost, long enough that names cost little."""
BYTES_A_TOKEN = 4.0
"""English text in today's vocabularies. Code and other scripts have fewer."""
RECENT = 0.02
REMEMBERED_SALTS = 256
LONGEST_REMEMBERED = 2048
"""Characters of all salts of one request: they are the clients', and may not fill the memory."""


def text_blocks(pieces: Iterable[bytes], *salts: str) -> list[int]:
    """Names of the full blocks of a prompt's text, each chained to those before it and to all of `salts`.

    pieces: the text in UTF-8, in any cut; where one piece ends and another begins makes no difference
    salts:  whose prefixes must not be found by others: the tenant, the client's cache salt, the model

    Names are the first 8 bytes of a running BLAKE2b: equal names, equal texts from the start and equal salts.
    """
    short = sum(map(len, salts)) <= LONGEST_REMEMBERED
    running = _remembered(*salts).copy() if short else _begun(*salts)
    text = b"".join(pieces)
    names = []
    for end in range(BLOCK_BYTES, len(text) + 1, BLOCK_BYTES):
        running.update(text[end - BLOCK_BYTES : end])
        names.append(int.from_bytes(running.digest(), "big"))
    return names


def _begun(*salts: str) -> blake2b:
    running = blake2b(len(salts).to_bytes(8, "big"), digest_size=8)
    for salt in salts:
        encoded = salt.encode("utf-8", "surrogatepass")
        running.update(len(encoded).to_bytes(8, "big") + encoded)
    return running


_remembered = lru_cache(REMEMBERED_SALTS)(_begun)  # of many requests few differ


class BytesPerToken:
    """How many bytes of text a token has, learned from answers that say how many tokens a prompt was."""

    def __init__(self) -> None:
        self.ratio = BYTES_A_TOKEN

    @property
    def block_tokens(self) -> float:
        """Tokens of a block."""
        return BLOCK_BYTES / self.ratio

    def tokens(self, text_bytes: int) -> int:
        """Tokens that a text of so many bytes probably has; at least 1."""
        return max(1, round(text_bytes / self.ratio))

    def observe(self, text_bytes: int, tokens: int) -> None:
        """A prompt of so many bytes had so many tokens. Tiny ones, which are mostly template, do not count."""
        if text_bytes >= BLOCK_BYTES and tokens > 0:
            self.ratio += RECENT * (min(max(text_bytes / tokens, 1.0), 16.0) - self.ratio)
