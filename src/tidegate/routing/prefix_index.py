"""Which engine holds how much of a prompt: exactly where the engine tells, else by what was sent to it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from tidegate.routing.kv_events import EngineBlocks, TokenBlocks
from tidegate.routing.prefixes import PrefixMemory
from tidegate.routing.text_blocks import BLOCK_BYTES
from tidegate.routing.view import RouteView

EXACT, ESTIMATED = "exact", "estimated"


class Held(NamedTuple):
    """Tokens of one prompt that each engine holds (those without any are left out), and of whom that is exact."""

    tokens: dict[str, int]
    exact: frozenset[str] = frozenset()


class PrefixIndex:
    """Remembers what was sent where, and follows the events of engines that tell of every block they store and drop.

    Such an engine speaks of token ids and a gateway has text. So somebody has prompts tokenised beside their way
    (`untranslated` says when that helps, `tokenised` takes the outcome), and whoever begins alike later is answered
    exactly for the text that is translated, and by what was sent where beyond it.

    remembered: tokens whose blocks are remembered of each engine that does not say how many it holds
    """

    def __init__(self, remembered: int) -> None:
        self._sent = PrefixMemory(remembered)
        self._engines = EngineBlocks()
        self._texts: TokenBlocks | None = None  # until an engine says how large its blocks are

    def held(self, r: RouteView) -> Held:
        """Who holds how much of `r`."""
        if not r.blocks:
            return Held({})
        tokens = {name: r.tokens(depth) for name, depth in self._sent.matches(r.blocks).items()}
        if self._texts is None:
            return Held(tokens)
        names, size = self._texts.known(r.blocks).names, self._texts.size
        if not names:
            return Held(tokens)
        told = self._engines.told(size)
        depths = self._engines.matches(names, size)
        for name in told:
            depth = depths.get(name, 0)
            if depth < len(names):
                tokens[name] = min(depth * size, r.prompt_tokens)
            else:
                tokens[name] = min(max(tokens.get(name, 0), depth * size), r.prompt_tokens)
        return Held({name: n for name, n in tokens.items() if n}, told)

    def sent(self, r: RouteView, replica: str, kv_tokens: int | None) -> None:
        """`r` goes to `replica`, which holds `kv_tokens` tokens in all, if anybody knows."""
        if r.blocks:
            self._sent.sent(replica, r.blocks, r.block_tokens, kv_tokens)

    def forget(self, replica: str) -> None:
        """`replica` lost its cache, or is gone."""
        self._sent.forget(replica)
        self._engines.lost(replica)

    def mode(self, replica: str) -> str:
        """ "exact" for an engine whose events are followed, "estimated" for any other."""
        texts = self._texts
        return EXACT if texts is not None and replica in self._engines.told(texts.size) else ESTIMATED

    # What an engine's events say

    def stored(
        self,
        replica: str,
        hashes: Sequence[Hashable],
        parent: Hashable | None,
        token_ids: Sequence[int],
        block_size: int,
        salt: str = "",
    ) -> None:
        """`replica` holds these blocks; see `EngineBlocks.stored`. Blocks must be as large at all engines that tell;
        those of another size go on being estimated, until nobody tells of the first one any more."""
        self._engines.stored(replica, hashes, parent, token_ids, block_size, salt)
        if self._texts is None or (self._texts.size != block_size and not self._engines.told(self._texts.size)):
            self._texts = TokenBlocks(block_size)

    def removed(self, replica: str, hashes: Sequence[Hashable]) -> None:
        """`replica` dropped these blocks."""
        self._engines.removed(replica, hashes)

    def cleared(self, replica: str) -> None:
        """`replica` dropped all its blocks."""
        self._sent.forget(replica)
        self._engines.cleared(replica)

    def lost(self, replica: str) -> None:
        """Events of `replica` were lost, or come no more: it is estimated again."""
        self._engines.lost(replica)

    # What its token ids mean

    def untranslated(self, r: RouteView) -> bool:
        """Whether it would help to have `r` tokenised: an engine tells its blocks, and not all of its text is known."""
        texts = self._texts
        return texts is not None and bool(self._engines) and texts.known(r.blocks).texts < len(r.blocks)

    def tokenised(self, r: RouteView, token_ids: Sequence[int], text_bytes: int, salt: str = "") -> None:
        """The prompt of `r`, a text of so many bytes, has these tokens; `salt` as in `stored`."""
        if self._texts is not None:
            self._texts.learn(r.blocks, token_ids, text_bytes, BLOCK_BYTES, salt)
