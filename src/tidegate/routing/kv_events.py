"""What engines that publish their cache events hold, block by block; and which tokens a text block stands for.

Engines name blocks by hashes of their own making, of which nothing is known but that each follows a parent. So every
block gets the name that its token ids have here (`core.hashing`), from its event, which carries them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from tidegate.core.hashing import BlockHash, block_hashes, continue_hashes, root


class _Blocks:
    """One engine's."""

    __slots__ = ("copies", "names", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.names: dict[Hashable, BlockHash] = {}  # by the engine's hash
        self.copies: dict[BlockHash, int] = {}  # how many of the engine's blocks have a name


class EngineBlocks:
    """What each engine that tells of its blocks holds: bounded by what the engines can hold."""

    def __init__(self) -> None:
        self._of: dict[str, _Blocks] = {}
        self._holders: dict[BlockHash, set[str]] = {}
        self.orphans = 0
        """Blocks that were told after one that was not: whoever listens from the middle on cannot name them."""

    def __bool__(self) -> bool:
        return bool(self._of)

    def __contains__(self, replica: str) -> bool:
        return replica in self._of

    def blocks(self, replica: str) -> int:
        """Blocks that it holds, as far as they could be named."""
        return len(self._of[replica].names) if replica in self._of else 0

    def told(self, size: int) -> frozenset[str]:
        """Engines that tell of blocks of so many tokens."""
        return frozenset(name for name, own in self._of.items() if own.size == size)

    def stored(
        self,
        replica: str,
        hashes: Sequence[Hashable],
        parent: Hashable | None,
        token_ids: Sequence[int],
        block_size: int,
        salt: str = "",
    ) -> None:
        """`replica` holds these blocks, of `block_size` tokens each, the first of which follows `parent`.

        parent: the engine's hash of the block before them; None at the start of a prompt
        salt:   whatever else the engine made the hash of: a cache salt, an adapter's name; only asked at a start

        Raises ValueError where there are not as many token ids as blocks want, or a size that is not the engine's.
        """
        if len(token_ids) != len(hashes) * block_size or block_size < 1:
            raise ValueError(f"{len(hashes)} blocks of {block_size} tokens were told with {len(token_ids)} token ids")
        own = self._of.get(replica)
        if own is None or not own.names:  # it begins, perhaps anew, and perhaps with another size
            own = self._of[replica] = _Blocks(block_size)
        if own.size != block_size:
            raise ValueError(f"{replica} told of blocks of {own.size} tokens and now of {block_size}")
        before = root(salt) if parent is None else own.names.get(parent)
        if before is None:
            self.orphans += len(hashes)
            return
        for theirs, name in zip(hashes, continue_hashes(before, token_ids, block_size), strict=True):
            self._remove(replica, own, theirs)
            own.names[theirs] = name
            own.copies[name] = own.copies.get(name, 0) + 1
            self._holders.setdefault(name, set()).add(replica)

    def removed(self, replica: str, hashes: Sequence[Hashable]) -> None:
        """`replica` dropped these blocks; unknown ones are ignored."""
        own = self._of.get(replica)
        if own is not None:
            for theirs in hashes:
                self._remove(replica, own, theirs)

    def cleared(self, replica: str) -> None:
        """`replica` dropped all its blocks; it goes on telling."""
        own = self._of.get(replica)
        if own is not None:
            self.lost(replica)
            self._of[replica] = _Blocks(own.size)

    def lost(self, replica: str) -> None:
        """Nobody knows any more what `replica` holds, until it tells again."""
        own = self._of.pop(replica, None)
        if own is not None:
            for name in own.copies:
                self._drop(replica, name)

    def matches(self, names: Sequence[BlockHash], size: int) -> dict[str, int]:
        """How many of these blocks, of `size` tokens, each engine holds from the first on; none: left out."""
        found: dict[str, int] = {}
        follows = set(self.told(size))
        for depth, name in enumerate(names, 1):
            follows &= self._holders.get(name, set())
            if not follows:
                break
            for replica in follows:
                found[replica] = depth
        return found

    def _remove(self, replica: str, own: _Blocks, theirs: Hashable) -> None:
        name = own.names.pop(theirs, None)
        if name is None:
            return
        own.copies[name] -= 1
        if not own.copies[name]:
            del own.copies[name]
            self._drop(replica, name)

    def _drop(self, replica: str, name: BlockHash) -> None:
        holders = self._holders[name]
        holders.discard(replica)
        if not holders:
            del self._holders[name]


class Known(NamedTuple):
    """The first `texts` text blocks of a prompt are translated; `names` are the token blocks that end in them."""

    texts: int
    names: list[BlockHash]


class TokenBlocks:
    """Which token blocks, of `size` tokens, end in which text block: learned from prompts that were tokenised. At most
    `most` text blocks, the longest unused forgotten first.

    Where in the text a token block ends is taken in proportion, so near the end of a shared prefix it may be wrong by
    the tokens of about one text block; what an engine says of a token block is not.
    """

    def __init__(self, size: int, most: int = 100_000) -> None:
        self.size = size
        self._most = most
        self._of: OrderedDict[int, tuple[BlockHash, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of)

    def learn(
        self, blocks: Sequence[int], token_ids: Sequence[int], text_bytes: int, block_bytes: int, salt: str = ""
    ) -> None:
        """A prompt with these text blocks, of `block_bytes` bytes each of its `text_bytes`, has these tokens.

        salt: what the engine is told to keep its blocks apart by, as in `EngineBlocks.stored`
        """
        names = block_hashes(token_ids, self.size, salt)
        per_token = text_bytes / max(len(token_ids), 1)
        begin = 0
        for n, block in enumerate(blocks, 1):
            end = max(begin, min(len(names), int(n * block_bytes / per_token) // self.size))
            self._of[block] = tuple(names[begin:end])
            self._of.move_to_end(block)
            begin = end
        while len(self._of) > self._most:
            self._of.popitem(last=False)

    def known(self, blocks: Sequence[int]) -> Known:
        """The translation of a prompt's text blocks, as far as it is known from the first on."""
        names: list[BlockHash] = []
        for n, block in enumerate(blocks):
            found = self._of.get(block)
            if found is None:
                return Known(n, names)
            self._of.move_to_end(block)
            names += found
        return Known(len(blocks), names)
