"""What counts as a prompt's text, and that an image's bytes do not."""

from __future__ import annotations

import json
from base64 import b64encode
from random import Random

import pytest

from tests.gateway.backends import backends
from tests.gateway.gateways import gateway
from tidegate.gateway.lookin import all_text, look_in

WORDS = "Why do tides come twice a day? " * 40


def image(seed: int, size: int = 300_000) -> str:
    return f"data:image/png;base64,{b64encode(Random(seed).randbytes(size)).decode()}"


def chat(url: str, words: str = WORDS) -> bytes:
    parts = [{"type": "text", "text": words}, {"type": "image_url", "image_url": {"url": url}}]
    return json.dumps({"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]}).encode()


def text(body: bytes) -> bytes:
    return b"".join(look_in(body).text)


@pytest.mark.parametrize("escaped", [False, True])
def test_of_an_image_a_digest_is_left(escaped: bool) -> None:
    one, same, other = chat(image(1)), chat(image(1)), chat(image(2))
    if escaped:  # as PHP writes it
        one, same, other = (body.replace(b"/", b"\\/") for body in (one, same, other))
    assert len(text(one)) < len(WORDS) + 300
    assert text(one) == text(same)
    assert text(one) != text(other)  # another prompt, of which no engine holds more than the beginning
    assert text(one).endswith(b'"text": "?')
    assert not all_text(look_in(one).text)


def spoken(seed: int, spaces: bool) -> bytes:
    sound = {"data": b64encode(Random(seed).randbytes(300_000)).decode(), "format": "wav"}
    content = [{"type": "text", "text": WORDS}, {"type": "input_audio", "input_audio": sound}]
    body = {"messages": [{"role": "user", "content": content}]}
    return json.dumps(body, separators=None if spaces else (",", ":")).encode()


@pytest.mark.parametrize("spaces", [False, True])
def test_of_sound_a_digest_is_left(spaces: bool) -> None:
    one, same, other = (spoken(seed, spaces) for seed in (1, 1, 2))
    assert len(text(one)) < len(WORDS) + 300
    assert text(one) == text(same)
    assert text(one) != text(other)
    assert not all_text(look_in(one).text)


def test_what_only_looks_like_an_image_is_text() -> None:
    for words in ("a;base64," + WORDS, '"data:image/png;base64, ' + WORDS, '"input_audio": {"data": "' + "a" * 900):
        body = chat("https://a/b.png", words)
        assert len(text(body)) > 900
    assert all_text(look_in(chat("https://a/b.png")).text)


async def test_nothing_is_learned_of_a_prompt_that_is_not_all_text() -> None:
    """The engine counts an image's tokens as well, and nobody knows how many of them that is."""
    async with backends(1) as behind, gateway(behind) as running:
        for body, learns in ((chat(image(1)), False), (chat("https://a/b.png"), True)):
            async with running.http.post(f"{running.url}/v1/chat/completions", data=body) as answer:
                assert answer.status == 200
            assert (running.service.app._bytes_per_token[""].ratio != 4.0) == learns
