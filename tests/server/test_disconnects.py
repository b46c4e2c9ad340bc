"""Clients that leave, engines that fail: nobody waits for ever, nothing stays held."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.server.scripted_model import ScriptedModel, goes_on
from tests.server.serving import Served, serving
from tidegate.core.events import Event, Finished
from tidegate.core.plan import StepPlan
from tidegate.core.request import FinishReason

BODY = {"prompt": "The tide", "max_tokens": 200, "stream": True}


class Ends:
    """An observer that remembers how requests ended."""

    def __init__(self) -> None:
        self.reasons: list[FinishReason] = []

    def events(self, events: Any) -> None:
        event: Event
        for event in events:
            if isinstance(event, Finished):
                self.reasons.append(event.reason)

    def step(self, plan: StepPlan, seconds: float) -> None:
        pass


def is_empty(served: Served) -> bool:
    """Once the steps in flight are through, no request, seat or block is held."""
    for _ in range(300):
        text = served.http.get("/metrics").text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        held = [v for k, v in values.items() if k.startswith(("tidegate_requests_queued", "tidegate_requests_running"))]
        if not any(map(float, [*held, values["tidegate_kv_used_blocks"]])):
            return True
        time.sleep(0.02)
    return False


async def test_200_streams_with_random_disconnects_leak_nothing() -> None:
    dice = random.Random(7)
    ends = Ends()
    with serving(ScriptedModel(goes_on, num_blocks=200, max_num_seqs=16, step_seconds=0.002)) as served:
        served.engine.observers.append(ends)

        async def client(session: httpx.AsyncClient, index: int, leaves_after: int | None) -> str:
            body = {**BODY, "prompt": f"client {index}", "max_tokens": dice.randrange(100, 250)}
            async with session.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                events = 0
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        return "done"
                    events += bool(line)
                    if leaves_after is not None and events > leaves_after:
                        return "left"
            return "cut"

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=served.url, limits=limits, timeout=60) as session:
            leaving = [dice.randrange(20) if dice.random() < 0.5 else None for _ in range(200)]
            fates = await asyncio.gather(*(client(session, i, n) for i, n in enumerate(leaving)))
        assert "cut" not in fates
        assert all(fate == "done" for fate, n in zip(fates, leaving, strict=True) if n is None)
        assert is_empty(served)
        served.scheduler.kv.check()
        assert len(ends.reasons) == 200
        assert ends.reasons.count(FinishReason.CANCELLED) > 50


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_its_first_token_is_never_computed(stream: bool) -> None:
    ends = Ends()
    with serving(ScriptedModel(goes_on, max_num_seqs=1)) as served:
        served.engine.observers.append(ends)
        served.model.gate.clear()
        address = (urlsplit(served.url).hostname, urlsplit(served.url).port)
        payload = json.dumps({**BODY, "stream": stream, "max_tokens": 5}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(payload)}\r\n\r\n"
        with socket.create_connection(address) as first, socket.create_connection(address) as second:
            first.sendall(head.encode() + payload)
            while served.http.get("/metrics").text.count('requests_running{class="interactive"} 1.0') == 0:
                time.sleep(0.01)
            second.sendall(head.encode() + payload)
            while served.http.get("/metrics").text.count('requests_queued{class="interactive"} 1.0') == 0:
                time.sleep(0.01)
            second.close()
            while not ends.reasons:
                time.sleep(0.01)
            assert ends.reasons == [FinishReason.CANCELLED]
            served.model.gate.set()
            assert b"200 OK" in first.recv(65536)
        assert is_empty(served)
        assert "tidegate_prompt_tokens_total 2.0" in served.http.get("/metrics").text


def test_when_the_engine_fails_streams_end_with_an_error_and_health_says_so() -> None:
    with serving(ScriptedModel(goes_on, step_seconds=0.001)) as served:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0) as client:
            stream = client.completions.create(model="scripted", prompt="x", max_tokens=400, stream=True)
            next(stream)
            served.model.fail = RuntimeError("out of memory")
            with pytest.raises(openai.APIError, match="out of memory"):
                for _ in stream:
                    pass
            with pytest.raises(openai.InternalServerError, match="out of memory"):
                client.completions.create(model="scripted", prompt="x")
        health = served.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "dead")
        assert "out of memory" in health.json()["error"]["message"]
        assert "tidegate_engine_up 0.0" in served.http.get("/metrics").text


def test_when_the_engine_fails_an_answer_that_is_waited_for_is_a_503() -> None:
    with serving(ScriptedModel(goes_on)) as served:
        served.model.fail = RuntimeError("out of memory")
        answer = served.http.post("/v1/completions", json={**BODY, "stream": False})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_dead"


def test_tokens_are_not_collected_by_the_network() -> None:
    """Nagle's algorithm is off on accepted connections: it would bunch tokens by 40 ms."""
    with serving(ScriptedModel(goes_on)) as served, socket.socket() as probe:
        probe.connect((urlsplit(served.url).hostname, urlsplit(served.url).port))
        probe.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in probe.recv(4096)
        accepted = [t for t in served.transports() if t.get_extra_info("peername") == probe.getsockname()]
        nodelay = accepted[0].get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert nodelay
