"""Token ids to text: the pieces add up to what decoding all of them gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from tests.server.scripted_model import small_tokenizer
from tidegate.engine.detokenize import Detokenizer, TokenTable

TOKENIZER = small_tokenizer().backend_tokenizer


def text_of(tokenizer: Tokenizer, ids: list[int], prompt: list[int] = []) -> str:  # noqa: B006 - never changed
    stream = Detokenizer(tokenizer, prompt)
    return "".join(stream.feed(i) for i in ids) + stream.flush()


@given(st.text(), st.text(max_size=8))
def test_text_comes_back_whatever_characters_it_has(text: str, prompt: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    before = TOKENIZER.encode(prompt, add_special_tokens=False).ids
    assert text_of(TOKENIZER, ids, before) == TOKENIZER.decode(ids)


@given(st.text(alphabet="a😀漢é ", max_size=12))
def test_no_piece_shows_half_a_character(text: str) -> None:
    stream = Detokenizer(TOKENIZER)
    shown = [stream.feed(i) for i in TOKENIZER.encode(text, add_special_tokens=False).ids]
    assert not any("\ufffd" in piece for piece in shown)


def test_a_character_of_several_tokens_appears_with_its_last_one() -> None:
    ids = TOKENIZER.encode("🜛", add_special_tokens=False).ids
    assert len(ids) > 1
    stream = Detokenizer(TOKENIZER)
    assert [stream.feed(i) for i in ids] == [""] * (len(ids) - 1) + ["🜛"]


def test_an_unfinished_character_is_shown_as_such_at_the_end() -> None:
    ids = TOKENIZER.encode("ok 🜛", add_special_tokens=False).ids
    assert text_of(TOKENIZER, ids[:-1]) == "ok \ufffd"


def test_bytes_that_never_become_text_do_not_pile_up() -> None:
    lonely = TOKENIZER.token_to_id(sorted(ByteLevel.alphabet())[-1])
    stream = Detokenizer(TOKENIZER)
    shown = [stream.feed(lonely) for _ in range(64)]
    assert sum(map(len, shown)) == 64
    assert text_of(TOKENIZER, [lonely] * 20 + TOKENIZER.encode("then text").ids) == "\ufffd" * 20 + "then text"


def test_special_tokens_have_no_text() -> None:
    ids = TOKENIZER.encode("one<|im_end|>two").ids
    assert text_of(TOKENIZER, ids) == "onetwo"


def test_the_prompt_gives_the_first_word_its_leading_space() -> None:
    tokenizer = Tokenizer(models.WordLevel({"▁tide": 0, "▁gate": 1}, unk_token="▁tide"))
    tokenizer.decoder = decoders.Metaspace()
    assert text_of(tokenizer, [1], prompt=[0]) == " gate"
    assert text_of(tokenizer, [1]) == "gate"


@pytest.mark.parametrize("text", ["plain", " spaced", "é", "漢", "🜛"])
def test_token_bytes_add_up_to_the_text(text: str) -> None:
    table = TokenTable(TOKENIZER)
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert b"".join(table(i)[1] for i in ids) == text.encode()


def test_byte_fallback_tokens_are_the_byte_they_name() -> None:
    tokenizer = Tokenizer(models.BPE({"<0xE6>": 0, "<0xBC>": 1, "<0xA2>": 2, "a": 3}, [], byte_fallback=True))
    tokenizer.decoder = decoders.ByteFallback()
    table = TokenTable(tokenizer)
    assert b"".join(table(i)[1] for i in range(3)) == "漢".encode()
    assert table(3) == ("a", b"a")
