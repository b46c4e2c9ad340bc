"""Two engines with a real model behind a gateway: the same tokens, caches that are used, and one that dies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.gateway.gateways import Running, gateway
from tests.gateway.real_engines import Engine, real_engines

ASKED = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def engines() -> Iterator[Sequence[Engine]]:
    with real_engines(2) as started:
        yield started


async def whole(running: Running, url: str, **body: Any) -> dict[str, Any]:
    async with running.http.post(f"{url}/v1/completions", json={**ASKED, **body}) as answer:
        assert answer.status == 200
        return await answer.json()


async def streamed(running: Running, url: str, **body: Any) -> list[dict[str, Any]]:
    """Its events, the last one an error or a `[DONE]`, which is left out."""
    async with running.http.post(f"{url}/v1/completions", json={**ASKED, **body, "stream": True}) as answer:
        assert answer.status == 200
        parts = (await answer.read()).split(b"\n\n")
    return [json.loads(part[6:]) for part in parts if part and part != b"data: [DONE]"]


def text(events: Sequence[dict[str, Any]]) -> str:
    return "".join(event["choices"][0]["text"] for event in events if event.get("choices"))


async def test_answers_are_those_of_the_engine_token_for_token(engines: Sequence[Engine]) -> None:
    async with gateway(engines, route="round-robin") as running:
        for prompt in ("The tide rises because", "A scheduler decides"):
            own = await whole(running, engines[0].url, prompt=prompt, logprobs=0)
            for _ in range(2):  # each of the two engines
                passed = await whole(running, running.url, prompt=prompt, logprobs=0)
                assert passed["choices"] == own["choices"]
                assert passed["usage"]["completion_tokens"] == ASKED["max_tokens"]
            assert text(await streamed(running, running.url, prompt=prompt)) == own["choices"][0]["text"]
        assert set(running.ends.sent_to) == {"engine-0", "engine-1"}
        assert [end.how for end in running.ends.ends] == ["done"] * 6


async def test_requests_go_where_their_prefix_is_cached(engines: Sequence[Engine]) -> None:
    async with gateway(engines, route="joint") as running:
        beginnings = [f"Rule {i}: " + f"the {i}th sea has its own tides and its own moon. " * 30 for i in range(4)]
        for turn in range(3):
            answers = [await whole(running, running.url, prompt=f"{b} {turn}?", max_tokens=2) for b in beginnings]
            cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
            total = [a["usage"]["prompt_tokens"] for a in answers]
            if turn:
                assert all(c > 0.8 * t for c, t in zip(cached, total, strict=True)), (cached, total)
        went = running.ends.sent_to
        assert all(went[i] == went[i + 4] == went[i + 8] for i in range(4))


async def test_of_an_engine_that_is_killed_only_its_streams_end(engines: Sequence[Engine]) -> None:
    """Last: nobody starts it again."""
    async with gateway(engines, route="least-loaded") as running:
        asked = [streamed(running, running.url, prompt=f"{i} tides", max_tokens=200) for i in range(6)]
        tasks = [asyncio.create_task(one) for one in asked]
        while len(running.ends.first_tokens) < 6:
            assert not any(task.done() for task in tasks)
            await asyncio.sleep(0.01)
        engines[0].process.kill()
        answers = await asyncio.gather(*tasks)
        errors = [events[-1]["error"]["code"] for events in answers if "error" in events[-1]]
        assert errors == ["cut"] * running.ends.sent_to.count("engine-0") == ["cut"] * 3
        assert [end.how for end in running.ends.ends if end.replica == "engine-1"] == ["done"] * 3
        after = [await streamed(running, running.url, prompt=f"{i} tides", max_tokens=2) for i in range(6)]
        assert not any("error" in events[-1] for events in after)
