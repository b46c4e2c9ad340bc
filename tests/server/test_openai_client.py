"""The official OpenAI client against a real server on a loopback port."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.server.scripted_model import ScriptedModel, says, small_tokenizer
from tests.server.serving import Served, serving

TEXT = "The tide comes in. 漢字 and 😀 take more than one byte."
TOKENS = len(says(TEXT)([], None))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ScriptedModel(says(TEXT))) as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").id == "scripted"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-17")


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="The tide", max_tokens=100)
    assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == ("text_completion", TEXT, "stop")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, TOKENS)
    assert answer.usage.total_tokens == 2 + TOKENS


def test_a_completion_ends_by_length(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="The tide", max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_several_prompts_times_n_in_the_order_asked(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt=["one", "two two"], n=2, max_tokens=100)
    assert [(c.index, c.text) for c in answer.choices] == [(i, TEXT) for i in range(4)]
    assert answer.usage is not None
    tokenizer = small_tokenizer()
    assert answer.usage.prompt_tokens == len(tokenizer.encode("one")) + len(tokenizer.encode("two two"))
    assert answer.usage.completion_tokens == 4 * TOKENS


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8]]])
def test_prompts_of_token_ids(client: openai.OpenAI, prompt: list[int]) -> None:
    answer = client.completions.create(model="scripted", prompt=prompt, max_tokens=100)
    assert {choice.text for choice in answer.choices} == {TEXT}


def test_a_streamed_completion(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="scripted", prompt="x", max_tokens=100, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == TOKENS
    assert all(c.usage is None for c in chunks[:-1])


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="scripted",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "When does "}, {"type": "text", "text": "it open?"}]},
        ],
    )
    assert answer.object == "chat.completion"
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", TEXT)
    assert answer.choices[0].finish_reason == "stop"


def test_a_streamed_chat_names_the_role_once_and_ends_with_done(client: openai.OpenAI, served: Served) -> None:
    messages = [{"role": "user", "content": "hi"}]
    chunks = list(client.chat.completions.create(model="scripted", messages=messages, stream=True, n=2))  # type: ignore[call-overload]
    for index in range(2):
        own = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(c.delta.content or "" for c in own) == TEXT
        assert [c.delta.role for c in own] == ["assistant"] + [None] * (len(own) - 1)
        assert [c.finish_reason for c in own if c.finish_reason] == ["stop"]
    raw = served.http.post("/v1/chat/completions", json={"messages": messages, "stream": True})
    assert raw.headers["content-type"].startswith("text/event-stream")
    events = raw.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])


def test_an_answer_can_be_sent_back_as_the_next_turn(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hi"}])
    again = client.chat.completions.create(
        model="scripted",
        messages=[
            {"role": "user", "content": "hi"},
            first.choices[0].message.model_dump(),  # type: ignore[list-item]
            {"role": "user", "content": "and?"},
        ],
    )
    assert again.choices[0].message.content == TEXT


def test_a_stop_string_is_cut_over_token_borders(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="x", max_tokens=100, stop=["字 an", "never"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT[: TEXT.index("字 an")], "stop")
    chunks = client.completions.create(model="scripted", prompt="x", max_tokens=100, stop="字 an", stream=True)
    assert "".join(c.choices[0].text for c in chunks) == TEXT[: TEXT.index("字 an")]


def test_logprobs_of_a_completion(client: openai.OpenAI) -> None:
    logprobs = client.completions.create(model="scripted", prompt="x", max_tokens=100, logprobs=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or ()) == len(logprobs.text_offset or ()) == TOKENS - 1
    assert [len(top) for top in logprobs.top_logprobs] == [2] * (TOKENS - 1)


def test_logprobs_of_a_chat_carry_the_exact_bytes(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert b"".join(bytes(entry.bytes or ()) for entry in logprobs.content) == TEXT.encode()
    assert {len(entry.top_logprobs) for entry in logprobs.content} == {3}


def test_cached_tokens_are_told(client: openai.OpenAI) -> None:
    prompt = [9] * 40
    client.completions.create(model="scripted", prompt=prompt, max_tokens=1)
    answer = client.completions.create(model="scripted", prompt=prompt, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 32
    salted = client.completions.create(model="scripted", prompt=prompt, max_tokens=1, extra_body={"cache_salt": "x"})
    assert salted.usage is not None
    assert salted.usage.prompt_tokens_details is not None
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_the_request_id_explains_the_request(client: openai.OpenAI, served: Served) -> None:
    raw = client.completions.with_raw_response.create(
        model="scripted", prompt="x", user="acme", extra_body={"service_tier": "flex"}
    )
    id = raw.headers["x-request-id"]
    answer = raw.parse()
    assert answer.id == id
    assert answer.model_extra == {"service_tier": "flex"}
    told = served.http.get(f"/v1/scheduler/explain/{id}").json()
    assert (told["status"], told["class"], told["tenant"], told["priority"]) == ("finished", "batch", "acme", 10)
    several = client.completions.with_raw_response.create(model="scripted", prompt="x", n=3)
    told = served.http.get(f"/v1/scheduler/explain/{several.headers['x-request-id']}").json()
    assert len(told["sequences"]) == 3


def test_copies_with_a_seed_are_told_apart() -> None:
    model = ScriptedModel(lambda prompt, seed: [(seed or 0) + 20] * 5)
    with serving(model) as served, openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused") as client:
        answer = client.completions.create(model="scripted", prompt="x", n=3, seed=7, max_tokens=4)
        assert len({choice.text for choice in answer.choices}) == 3
