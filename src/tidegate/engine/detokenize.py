"""Token ids back to text, one token at a time, and to bytes."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from tokenizers.pre_tokenizers import ByteLevel

_REPLACEMENT = "\ufffd"
_CONTEXT = 4  # a UTF-8 character has at most four bytes, so four tokens end every unfinished one
_PATIENCE = 16  # tokens without any text before they are shown as they are


class Detokenizer:
    """Incremental detokenisation: a character split over several tokens appears when its last one came.

    `prompt` gives the first output its context, so that tokenizers which write a leading space into the
    word do not lose it. Special tokens have no text. Bytes that never become a character are shown as
    U+FFFD, at the latest after 16 tokens: waiting longer would make each token dearer than the last.
    """

    __slots__ = ("_context", "_pending", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        context = list(prompt[-_CONTEXT:])
        self._context = [] if self._text(context).endswith(_REPLACEMENT) else context
        self._pending: list[int] = []
        self._stream = self._open()

    def feed(self, token: int) -> str:
        """The text that is complete now that `token` came; often empty."""
        text = self._stream.step(self._tokenizer, token)
        self._pending.append(token)
        if text is None:
            return self.flush() if len(self._pending) >= _PATIENCE else ""
        self._context, self._pending = self._pending[-_CONTEXT:], []
        return text

    def flush(self) -> str:
        """What is left at the end: an unfinished character appears as U+FFFD."""
        if not self._pending:
            return ""
        text = self._text(self._context + self._pending)[len(self._text(self._context)) :]
        self._context, self._pending = [], []
        self._stream = self._open()
        return text

    def _open(self) -> DecodeStream:
        return DecodeStream(self._context, skip_special_tokens=True)

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class TokenTable:
    """The text and the exact bytes of single tokens, as log-probabilities show them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = _byte_level_alphabet()
        self._seen: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token: int) -> tuple[str, bytes]:
        """(text, bytes) of one token; the text of an unfinished character is U+FFFD."""
        entry = self._seen.get(token)
        if entry is None:
            entry = self._seen[token] = self._look_up(token)
        return entry

    def _look_up(self, token: int) -> tuple[str, bytes]:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if _REPLACEMENT not in text:
            return text, text.encode()
        written = self._tokenizer.id_to_token(token) or ""
        if len(written) == 6 and written.startswith("<0x"):
            return text, bytes([int(written[3:5], 16)])
        if all(c in self._bytes for c in written):
            return text, bytes(self._bytes[c] for c in written)
        return text, text.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Bytes that are printable in Latin-1 stand for themselves; the others, in order, were moved to the
    code points from 256 on.
    """
    letters = sorted(ByteLevel.alphabet())
    own = {c: ord(c) for c in letters if ord(c) < 256}
    moved = (c for c in letters if ord(c) >= 256)
    others = (b for b in range(256) if chr(b) not in own)
    return own | dict(zip(moved, others, strict=True))
