"""What of the Ray integration needs no Ray: calling an application in its process, and what is said without Ray."""

from __future__ import annotations

import asyncio
import json
from importlib import util

import pytest

from tests.server.scripted_model import ScriptedModel, goes_on
from tests.server.serving import Served, serving
from tidegate.errors import MissingExtra
from tidegate.integrations import ray
from tidegate.integrations.ray.call import Call
from tidegate.integrations.ray.inprocess import answer
from tidegate.routing.view import RouteView


def call(path: str, body: bytes = b"", method: str = "POST") -> Call:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    return Call(RouteView("r", "", 1), method, path, b"", headers, body)


def is_idle(served: Served) -> bool:
    text = served.http.get("/metrics").text.splitlines()
    return all(line.endswith(" 0.0") for line in text if line.startswith("tidegate_requests_running"))


async def test_an_answer_in_process_is_the_one_over_http() -> None:
    body = b'{"prompt": "The tide", "max_tokens": 20}'
    with serving(ScriptedModel(goes_on)) as served:
        over_http = await asyncio.to_thread(served.http.post, "/v1/completions", json=json.loads(body))
        (status, headers), *parts = [part async for part in answer(served.app, call("/v1/completions", body))]  # type: ignore[misc]
        assert status == 200
        assert int(dict(headers)[b"content-length"]) == sum(map(len, parts))
        assert json.loads(b"".join(parts))["choices"] == over_http.json()["choices"]  # type: ignore[arg-type]
        [(missing, _), _] = [part async for part in answer(served.app, call("/nowhere", method="GET"))]  # type: ignore[misc]
        assert missing == 404


async def test_a_stream_comes_in_parts_and_closing_it_frees_the_seat() -> None:
    body = b'{"prompt": "The tide", "max_tokens": 200, "stream": true}'
    with serving(ScriptedModel(goes_on, num_blocks=100, step_seconds=0.01)) as served:
        parts = answer(served.app, call("/v1/completions", body))
        status, _ = await anext(parts)  # type: ignore[misc]
        assert status == 200
        assert [bytes(await anext(parts)).startswith(b"data: {") for _ in range(3)] == [True] * 3  # type: ignore[arg-type]
        assert not await asyncio.to_thread(is_idle, served)
        await parts.aclose()
        while not await asyncio.to_thread(is_idle, served):
            await asyncio.sleep(0.01)


async def test_what_an_application_raises_is_raised() -> None:
    async def broken(scope: object, receive: object, send: object) -> None:
        raise RuntimeError("the application broke")

    with pytest.raises(RuntimeError, match="the application broke"):
        [part async for part in answer(broken, call("/"))]


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "find_spec", lambda name: None if name == "ray" else util.find_spec(name))
    for name in ray.__all__:
        with pytest.raises(MissingExtra, match=r"pip install 'tidegate\[ray\]'"):
            getattr(ray, name)
    with pytest.raises(AttributeError):
        _ = ray.nothing
