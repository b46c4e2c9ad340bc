"""What a client hears of the queue: refusals with a time to come back, and requests that end in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from tests.server.scripted_model import ScriptedModel, goes_on
from tests.server.serving import Served, serving

COMPLETIONS = "/v1/completions"


@contextmanager
def busy(**config: Any) -> Iterator[tuple[Served, Any]]:
    """A server of one seat that is taken, with steps that stand still; (it, a function that posts in a thread)."""
    model = ScriptedModel(goes_on, max_num_seqs=1)
    raw = {**config, "scheduler": {"max_num_seqs": 1, **config.get("scheduler", {})}}
    with serving(model, raw) as served, ThreadPoolExecutor(8) as clients:
        model.gate.clear()

        def post(**body: Any) -> Any:
            return clients.submit(served.http.post, COMPLETIONS, json={"prompt": "x", "max_tokens": 4, **body})

        first = post(max_tokens=8)
        while not waits(served, running=1):
            pass
        try:
            yield served, post
        finally:
            model.gate.set()
            assert first.result().status_code == 200


def waits(served: Served, running: int = 1, waiting: int = 0) -> bool:
    return len(served.scheduler.running) == running and len(served.scheduler.waiting) == waiting


def fault(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_a_request_that_may_wait_no_longer_is_504() -> None:
    with busy() as (served, post):
        error = fault(post(queue_ttl=0.05).result(10), 504)
        assert (error["type"], error["code"]) == ("server_error", "timeout")
        assert "queue_ttl" in error["message"]
        assert "timeout" in served.http.get("/metrics").text


def test_the_class_says_how_long_and_a_request_may_only_say_less() -> None:
    with busy(classes={"batch": {"queue_ttl": 0.05}}) as (_, post):
        batch = {"metadata": {"slo_class": "batch"}}
        assert fault(post(**batch).result(10), 504)["code"] == "timeout"
        assert fault(post(**batch, queue_ttl=50).result(10), 504)["code"] == "timeout"


def test_a_stream_that_never_begins_ends_with_an_error_event() -> None:
    with busy() as (served, _):
        body = {"prompt": "x", "max_tokens": 4, "stream": True, "queue_ttl": 0.05}
        with served.http.stream("POST", COMPLETIONS, json=body) as answer:
            events = [line for line in answer.iter_lines() if line]
        assert len(events) == 1
        error = json.loads(events[0].removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "timeout")


def test_openais_client_understands_it() -> None:
    with busy() as (served, _):
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0)
        with pytest.raises(openai.APIStatusError) as told:
            client.completions.create(model="scripted", prompt="x", extra_body={"queue_ttl": 0.05})
        assert told.value.status_code == 504
        with pytest.raises(openai.APIError, match="queue_ttl"):
            list(client.completions.create(model="scripted", prompt="x", stream=True, extra_body={"queue_ttl": 0.05}))


@pytest.mark.parametrize("ttl", [0, -1, "soon", 1e9])
def test_a_time_to_wait_that_is_none_is_400(ttl: Any) -> None:
    with serving(ScriptedModel(goes_on)) as served:
        answer = served.http.post(COMPLETIONS, json={"prompt": "x", "queue_ttl": ttl})
        assert fault(answer, 400)["param"] == "queue_ttl"


def test_whoever_is_displaced_is_told_so() -> None:
    with busy(scheduler={"max_waiting": 1, "displace_waiting": True}) as (served, post):
        batch = post(metadata={"slo_class": "batch"})
        while not waits(served, waiting=1):
            pass
        chat = post()
        error = fault(batch.result(10), 503)
        assert (error["type"], error["code"]) == ("server_error", "displaced")
        served.model.gate.set()
        assert chat.result(10).status_code == 200


def test_work_that_waits_has_an_end_and_the_time_to_come_back_is_computed() -> None:
    with busy(scheduler={"max_waiting_tokens": 200}) as (served, post):
        waiting = post(prompt=[5] * 150, max_tokens=30)
        while not waits(served, waiting=1):
            pass
        answer = post(prompt=[6] * 100, max_tokens=200).result(10)
        error = fault(answer, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert "max_waiting_tokens" in error["message"]
        assert int(answer.headers["retry-after"]) == 1  # 150 tokens at 0.1 ms and 29 at 20 ms, rounded up
        served.model.gate.set()
        assert waiting.result(10).status_code == 200


def test_a_class_may_have_fewer_places() -> None:
    with busy(classes={"batch": {"max_waiting": 1}}) as (served, post):
        batch = {"metadata": {"slo_class": "batch"}}
        waiting = post(**batch)
        while not waits(served, waiting=1):
            pass
        assert fault(post(**batch).result(10), 429)["code"] == "queue_full"
        error = fault(post(**batch, n=2).result(10), 400)
        assert "classes.batch.max_waiting" in error["message"]
        served.model.gate.set()
        assert waiting.result(10).status_code == 200


def test_a_hopeless_promise_is_429_with_a_time_to_come_back() -> None:
    with busy(scheduler={"refuse_hopeless": True, "policy": "fcfs"}) as (served, post):  # who came first is ahead
        ahead = [post(prompt=[7 + n] * 100, max_tokens=300, metadata={"slo_class": "batch"}) for n in range(3)]
        while not waits(served, waiting=3):
            pass
        answer = post().result(10)  # interactive: 0.5 s to the first token
        error = fault(answer, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "deadline")
        assert int(answer.headers["retry-after"]) > 10
        served.model.gate.set()
        assert all(one.result(20).status_code == 200 for one in ahead)
