"""Whatever is wrong with a request: a clear 4xx in OpenAI's shape, and the server lives."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.scripted_model import ScriptedModel, goes_on, says
from tests.server.serving import Served, serving

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ScriptedModel(says("fine"))) as server:
        yield server


def fault(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of an answer that must have this status."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def lives(served: Served) -> bool:
    answer = served.http.post(COMPLETIONS, json={"prompt": "still there?"})
    return answer.status_code == 200 and answer.json()["choices"][0]["text"] == "fine"


BAD_BODIES = {
    "malformed": (b'{"prompt": "x"', "not JSON"),
    "no JSON at all": (b"prompt=x", "not JSON"),
    "not UTF-8": (b'{"prompt": "\xff\xfe"}', "not UTF-8"),
    "nested too deeply": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "a number without end": (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "not JSON"),
    "NaN": (b'{"prompt": "x", "temperature": NaN}', "temperature"),
    "infinity": (b'{"prompt": "x", "top_p": Infinity}', "top_p"),
    "too large a float": (b'{"prompt": "x", "temperature": 1e999}', "temperature"),
    "half a surrogate pair": (b'{"prompt": "\\ud83d"}', "prompt"),
    "a list": (b"[]", "the body"),
    "null": (b"null", "body"),
    "nothing": (b"", "the body is missing"),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_bodies_that_are_no_request(served: Served, name: str) -> None:
    body, says_what = BAD_BODIES[name]
    answer = served.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert says_what in fault(answer, 400)["message"]
    assert lives(served)


BAD_COMPLETIONS: dict[str, tuple[dict[str, Any], str]] = {
    "prompt missing": ({}, "prompt"),
    "prompt empty": ({"prompt": ""}, "prompt"),
    "prompt of no prompts": ({"prompt": []}, "prompt"),
    "prompt of no tokens": ({"prompt": [[]]}, "prompt.0"),
    "prompt of the wrong type": ({"prompt": 5}, "prompt"),
    "prompt of mixed types": ({"prompt": ["x", 5]}, "prompt.1"),
    "token id that the model lacks": ({"prompt": [5, 100_000]}, "prompt"),
    "token id below 0": ({"prompt": [-1]}, "prompt.0"),
    "temperature of the wrong type": ({"prompt": "x", "temperature": "hot"}, "temperature"),
    "temperature out of range": ({"prompt": "x", "temperature": 100.5}, "temperature"),
    "temperature below 0": ({"prompt": "x", "temperature": -0.1}, "temperature"),
    "temperature that overflows": ({"prompt": "x", "temperature": 1e-39}, "temperature"),
    "min_p out of range": ({"prompt": "x", "min_p": 1.1}, "min_p"),
    "repetition_penalty that overflows": ({"prompt": "x", "repetition_penalty": 1e-39}, "repetition_penalty"),
    "repetition_penalty out of range": ({"prompt": "x", "repetition_penalty": 101}, "repetition_penalty"),
    "presence_penalty out of range": ({"prompt": "x", "presence_penalty": 2.1}, "presence_penalty"),
    "frequency_penalty out of range": ({"prompt": "x", "frequency_penalty": -2.1}, "frequency_penalty"),
    "logit_bias out of range": ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias.5"),
    "top_p out of range": ({"prompt": "x", "top_p": 0}, "top_p"),
    "n of 0": ({"prompt": "x", "n": 0}, "n"),
    "n of a truth value": ({"prompt": "x", "n": True}, "n"),
    "max_tokens of 0": ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    "max_tokens that cannot be": ({"prompt": "x", "max_tokens": 512}, "max_tokens"),
    "min_tokens over max_tokens": ({"prompt": "x", "min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    "too many sequences": ({"prompt": ["x"] * 100, "n": 2}, "n"),
    "too many logprobs": ({"prompt": "x", "logprobs": 21}, "logprobs"),
    "an empty stop string": ({"prompt": "x", "stop": ""}, "stop"),
    "stream_options without stream": ({"prompt": "x", "stream_options": {"include_usage": True}}, None),
    "a parameter of nobody": ({"prompt": "x", "temprature": 1}, "temprature"),
    "suffix": ({"prompt": "x", "suffix": "y"}, "suffix"),
    "best_of": ({"prompt": "x", "best_of": 2}, "best_of"),
    "echo": ({"prompt": "x", "echo": True}, "echo"),
    "logit_bias of no token": ({"prompt": "x", "logit_bias": {"the": 1.0}}, "logit_bias"),
    "logit_bias of a token the model lacks": ({"prompt": "x", "logit_bias": {"99999": 1.0}}, "logit_bias"),
    "stop_token_ids that the model lacks": ({"prompt": "x", "stop_token_ids": [99_999]}, "stop_token_ids"),
    "unknown class": ({"prompt": "x", "metadata": {"slo_class": "vip"}}, "metadata.slo_class"),
    "unknown tier": ({"prompt": "x", "service_tier": "gold"}, "service_tier"),
    "class and tier at odds": (
        {"prompt": "x", "service_tier": "flex", "metadata": {"slo_class": "interactive"}},
        "service_tier",
    ),
    "ignore_eos with a grammar": (
        {"prompt": "x", "ignore_eos": True, "response_format": {"type": "json_object"}},
        "ignore_eos",
    ),
    "a schema that is none": (
        {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "banana"}}}},
        "response_format",
    ),
}


@pytest.mark.parametrize("name", BAD_COMPLETIONS)
def test_completions_that_cannot_be(served: Served, name: str) -> None:
    body, param = BAD_COMPLETIONS[name]
    error = fault(served.http.post(COMPLETIONS, json=body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert lives(served)


RESPONSE_FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "no type": ({}, "response_format"),
    "an unknown type": ({"type": "xml"}, "response_format"),
    "no schema at all": ({"type": "json_schema"}, "response_format.json_schema"),
    "an empty schema": ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.schema"),
    "a schema of the wrong type": (
        {"type": "json_schema", "json_schema": {"schema": 3}},
        "response_format.json_schema.schema",
    ),
    "one field too many": ({"type": "json_object", "schema": {}}, "response_format.schema"),
}


@pytest.mark.parametrize("name", RESPONSE_FORMATS)
def test_the_fault_of_a_format_has_its_place(served: Served, name: str) -> None:
    format, param = RESPONSE_FORMATS[name]
    error = fault(served.http.post(COMPLETIONS, json={"prompt": "x", "response_format": format}), 400)
    assert error["param"] == param


def test_a_path_that_nobody_would_read_is_cut(served: Served) -> None:
    error = fault(served.http.post(COMPLETIONS, json={"prompt": "x", "y" * 5000: 1}), 400)
    assert error["param"] == "y" * 199 + "…"
    assert len(error["message"]) < 300
    error = fault(served.http.post(COMPLETIONS, json={"prompt": "x", "logit_bias": {"z" * 5000: 1000}}), 400)
    assert len(error["message"]) < 300
    error = fault(served.http.post(COMPLETIONS, json={"prompt": "x", "logit_bias": {"z" * 5000: 1}}), 400)
    assert len(error["message"]) < 300
    error = fault(served.http.get("/v1/models/" + "m" * 5000), 404)
    assert len(error["message"]) < 300


BAD_CHATS: dict[str, tuple[dict[str, Any], str | None]] = {
    "no messages": ({"messages": []}, "messages"),
    "unknown role": ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
    "tool messages": ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages.0.role"),
    "tools": ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools"),
    "audio": ({"messages": MESSAGES, "modalities": ["text", "audio"]}, "modalities"),
    "top_logprobs alone": ({"messages": MESSAGES, "top_logprobs": 2}, None),
    "two limits": ({"messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 6}, None),
}


@pytest.mark.parametrize("name", BAD_CHATS)
def test_chats_that_cannot_be(served: Served, name: str) -> None:
    body, param = BAD_CHATS[name]
    assert fault(served.http.post(CHAT, json=body), 400)["param"] == param
    assert lives(served)


def test_images_are_refused_by_name(served: Served) -> None:
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    error = fault(served.http.post(CHAT, json={"messages": [{"role": "user", "content": content}]}), 400)
    assert error["param"] == "messages.0.content.0.type"
    assert "text" in error["message"]


def test_values_that_ask_for_nothing_are_no_error(served: Served) -> None:
    body = {"messages": MESSAGES, "tools": [], "store": False, "stop": None, "n": None, "parallel_tool_calls": True}
    assert served.http.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0, "repetition_penalty": 0.01},
        {"temperature": 1e-5, "repetition_penalty": 100, "presence_penalty": -2, "frequency_penalty": 2},
        {"temperature": 100, "top_p": 1e-9, "min_p": 1, "logit_bias": {"5": 100, "6": -100}},
    ],
)
def test_sampling_at_its_bounds_is_taken(served: Served, sampling: dict[str, Any]) -> None:
    assert served.http.post(COMPLETIONS, json={"prompt": "x", **sampling}).status_code == 200


def test_a_temperature_between_greedy_and_the_least_is_told_both(served: Served) -> None:
    message = fault(served.http.post(COMPLETIONS, json={"prompt": "x", "temperature": 9e-6}), 400)["message"]
    assert "0 (greedy)" in message
    assert "1e-05" in message


def test_an_over_long_prompt_is_told_with_numbers(served: Served) -> None:
    error = fault(served.http.post(COMPLETIONS, json={"prompt": [5] * 600}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "600" in error["message"]
    assert "512" in error["message"]
    error = fault(served.http.post(COMPLETIONS, json={"prompt": "tide " * 500_000}), 400)
    assert error["code"] == "context_length_exceeded"


def test_an_impossible_max_tokens_says_what_is_possible(served: Served) -> None:
    error = fault(served.http.post(COMPLETIONS, json={"prompt": [5] * 12, "max_tokens": 501}), 400)
    assert "at most 500" in error["message"]


def test_unknown_classes_are_told_the_known_ones(served: Served) -> None:
    body = {"prompt": "x", "metadata": {"slo_class": "vip"}}
    message = fault(served.http.post(COMPLETIONS, json=body), 400)["message"]
    assert all(name in message for name in ("interactive", "completion", "offline", "batch"))


def test_unknown_models_methods_and_paths(served: Served) -> None:
    error = fault(served.http.post(COMPLETIONS, json={"model": "gpt-17", "prompt": "x"}), 404)
    assert error["code"] == "model_not_found"
    fault(served.http.get(COMPLETIONS), 405)
    fault(served.http.get("/v1/nothing"), 404)
    error = fault(served.http.get("/v1/scheduler/explain/cmpl-nobody"), 404)
    assert error["code"] == "request_not_found"


@pytest.mark.parametrize("value", ["soon", "-5", "0", "nan", "inf", "1e-323", "1_0"])
def test_promises_that_are_no_times(served: Served, value: str) -> None:
    answer = served.http.post(COMPLETIONS, json={"prompt": "x"}, headers={"x-slo-ttft-ms": value})
    assert fault(answer, 400)["param"] == "x-slo-ttft-ms"


def test_100_megabytes_are_refused_before_they_are_sent(served: Served) -> None:
    with socket.create_connection((urlsplit(served.url).hostname, urlsplit(served.url).port)) as sock:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Content-Length: {100 << 20}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert b" 413 " in answer.splitlines()[0]
    assert b"max_body_bytes" in answer
    assert lives(served)


def test_100_megabytes_of_unknown_length_are_refused_while_they_are_read(served: Served) -> None:
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        yield b'{"prompt": "'
        while sent < 100 << 20:
            sent += 1 << 16
            yield b"x" * (1 << 16)

    try:
        answer = served.http.post(COMPLETIONS, content=chunks(), headers={"content-type": "application/json"})
        fault(answer, 413)
    except httpx.WriteError:
        assert sent < 100 << 20  # the server answered and hung up in the middle
    assert lives(served)


def test_a_body_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.server.app.STALL_SECONDS", 0.05)
    with serving(ScriptedModel(says("fine"))) as served:
        with socket.create_connection((urlsplit(served.url).hostname, urlsplit(served.url).port)) as sock:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            sock.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
        assert b" 408 " in answer.splitlines()[0]
        assert b"body_stalled" in answer
        assert lives(served)


def test_an_answer_may_take_longer_than_a_body_may_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.server.app.STALL_SECONDS", 0.05)
    model = ScriptedModel(says("fine"))
    with serving(model) as served:
        model.gate.clear()
        release = threading.Timer(0.3, model.gate.set)
        release.start()
        assert lives(served)
        release.join()


def test_a_full_queue_is_429_with_a_time_to_come_back() -> None:
    model = ScriptedModel(goes_on, max_num_seqs=1)
    with serving(model, {"scheduler": {"max_num_seqs": 1, "max_waiting": 2}}) as served:
        model.gate.clear()
        with httpx.Client(base_url=served.url, timeout=20) as client:
            body = {"prompt": ["one", "two", "three"], "max_tokens": 2, "stream": True}
            streams = [client.stream("POST", COMPLETIONS, json={**body, "prompt": p}) for p in ("one", "two", "three")]
            entered = [stream.__enter__() for stream in streams]
            answer = client.post(COMPLETIONS, json={**body, "prompt": "four", "stream": False})
            error = fault(answer, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert int(answer.headers["retry-after"]) >= 1
            told = client.get(f"/v1/scheduler/explain/{answer.headers['x-request-id']}")
            assert told.status_code in (200, 404)
            assert client.get("/health").json() == {"status": "busy"}
            model.gate.set()
            assert all("[DONE]" in response.read().decode() for response in entered)
            for stream in streams:
                stream.__exit__(None, None, None)
            assert client.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("body", "param"),
    [({"prompt": "x", "n": 6}, "n"), ({"prompt": ["x"] * 2, "n": 3}, "n"), ({"prompt": ["x"] * 6}, "prompt")],
)
def test_what_never_fits_into_the_queue_is_not_told_to_come_back(body: dict[str, Any], param: str) -> None:
    with serving(ScriptedModel(says("fine")), {"scheduler": {"max_waiting": 5, "max_num_seqs": 2}}) as served:
        answer = served.http.post(COMPLETIONS, json=body)
        error = fault(answer, 400)
        assert error["param"] == param
        assert "scheduler.max_waiting" in error["message"]
        assert "only 5 may wait" in error["message"]
        assert "retry-after" not in answer.headers
        assert served.http.post(COMPLETIONS, json={"prompt": "x", "n": 5}).status_code == 200


def test_errors_inside_json_keep_their_place(served: Served) -> None:
    answer = served.http.post(COMPLETIONS, content=b'{"prompt": }', headers={"content-type": "application/json"})
    assert "character 11" in fault(answer, 400)["message"]
    assert json.loads(answer.content)["error"]["type"] == "invalid_request_error"


def test_json_that_calls_itself_something_else_is_told_how_to_call_itself(served: Served) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    answer = served.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
    assert "Content-Type: application/json" in fault(answer, 400)["message"]
