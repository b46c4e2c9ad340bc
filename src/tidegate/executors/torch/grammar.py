"""JSON schemas to masks over the vocabulary, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from tidegate.core.request import FinishReason
from tidegate.errors import ConfigError, InputError, MissingExtra

if TYPE_CHECKING:
    import llguidance


LAYOUT: dict[str, object] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One fixed layout: where white space is free, a small model fills its output with it."""


class Grammar:
    """The matcher of one request. It has consumed exactly the tokens that were emitted."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self.matcher = matcher

    @property
    def open(self) -> bool:
        """Whether it still constrains the next token."""
        return not self.matcher.is_stopped() and not self.matcher.is_error()

    def advance(self, token: int) -> FinishReason | None:
        """Consume a sampled token; the reason if the request ends with it.

        A step that was planned before the end was known may sample once more: that token counts for nothing.
        """
        if self.open:
            self.matcher.consume_token(token)
        if self.matcher.is_error():
            return FinishReason.ERROR
        return FinishReason.STOP if self.matcher.is_stopped() else None


class GrammarCompiler:
    """Makes grammars for one tokenizer. The tokenizer's table is built at the first use (a second or so)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab_size
        self._table: llguidance.LLTokenizer | None = None

    def check(self, schema: Mapping[str, object]) -> None:
        """Raise InputError unless `schema` can constrain an output."""
        import_llguidance()
        grammar = Grammar(self._matcher(schema))
        if grammar.matcher.is_error():
            raise InputError(f"the JSON schema cannot be used: {grammar.matcher.get_error().splitlines()[0]}")

    def grammar(self, schema: Mapping[str, object], outputs: Sequence[int]) -> Grammar:
        """The grammar of a request that emitted `outputs` already; a bad schema is an error at its next token."""
        matcher = self._matcher(schema)
        if not matcher.is_error():
            matcher.consume_tokens(list(outputs))
        return Grammar(matcher)

    def forbidden(self, grammars: Sequence[Grammar], vocab: int) -> torch.Tensor:
        """Which tokens may not come next, `[len(grammars), vocab]` bool on the CPU."""
        import llguidance.numpy

        allowed = llguidance.numpy.allocate_token_bitmask(len(grammars), self._vocab)
        for row, grammar in enumerate(grammars):
            if grammar.open:
                llguidance.numpy.fill_next_token_bitmask(grammar.matcher, allowed, row)
        bits = np.unpackbits(allowed.view(np.uint8), axis=1, bitorder="little")[:, :vocab]
        return torch.from_numpy(bits == 0)

    def _matcher(self, schema: Mapping[str, object]) -> llguidance.LLMatcher:
        import llguidance

        source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=LAYOUT)
        return llguidance.LLMatcher(self._tokenizer_table(), source)

    def _tokenizer_table(self) -> llguidance.LLTokenizer:
        import llguidance.hf

        if self._table is None:
            if self._tokenizer is None:
                raise ConfigError("a JSON schema needs the model's tokenizer, and this model has none")
            self._table = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=self._vocab)
        return self._table


def import_llguidance() -> None:
    """Raise MissingExtra where llguidance is not installed."""
    try:
        import llguidance  # noqa: F401 - whether it is there is the question
    except ImportError as error:
        raise MissingExtra("JSON schemas need llguidance: pip install 'tidegate[torch]'") from error
