"""Two real engines in a real Ray Serve: one model load each, so that the tests run in the order in which they stand."""

from __future__ import annotations

import asyncio
import json
import threading
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic, sleep
from typing import Any

import httpx
import pytest

from tests.ray.cluster import CONFIG, KEY, Cluster, running
from tidegate.cli.environment import cache_dir
from tidegate.config import resolve
from tidegate.server.assembly import assemble

pytestmark = pytest.mark.timeout(600)

REPLICA = "x-tidegate-replica"
RUNNING = "tidegate_requests_running"
CANCELLED = 'tidegate_requests_finished_total{class="interactive",reason="cancelled"'
PREFIXES = [f"Chapter {word}. " + f"The {word} tide rose and the {word} tide fell, and nobody saw it. " * 14
            for word in ("first", "second", "third", "fourth")]  # fmt: skip
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": PREFIXES[0], "temperature": 0, "logprobs": 1}),
    ("/v1/completions", {"prompt": "Two lines\nof prose", "temperature": 0.9, "seed": 7, "n": 2, "logprobs": 0}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Why do tides come?"}], "temperature": 0}),
]


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    """What one engine answers in this process, without Ray."""

    async def ask() -> list[Any]:
        served.engine.start()
        transport = httpx.ASGITransport(served.app)
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://plain", headers=headers) as http:
            return [(await http.post(path, json=body | {"max_tokens": 12})).json()["choices"] for path, body in BODIES]

    served = assemble(resolve(tomllib.loads(CONFIG)), cache_dir())
    try:
        return asyncio.run(ask())
    finally:
        served.close()


@pytest.fixture(scope="module")
def cluster(plain: list[Any]) -> Iterator[Cluster]:  # the plain engine is gone before Ray's come
    with running() as cluster:
        yield cluster


def test_answers_are_those_of_a_plain_engine(cluster: Cluster, plain: list[Any]) -> None:
    answers = [cluster.http.post(path, json=body | {"max_tokens": 12}) for path, body in BODIES]
    assert [answer.json()["choices"] for answer in answers] == plain
    assert {answer.headers[REPLICA] for answer in answers} <= set(cluster.replicas)


def test_streams_come_in_events_and_say_the_same(cluster: Cluster, plain: list[Any]) -> None:
    path, body = BODIES[0]
    with cluster.http.stream("POST", path, json=body | {"max_tokens": 12, "stream": True}) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events.pop() == "[DONE]"
    assert len(events) > 3
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == plain[0][0]["text"]


def test_a_prefix_goes_where_it_is_cached(cluster: Cluster) -> None:
    went: dict[str, set[str]] = {}
    cached = []
    for turn in range(3):
        for prefix in PREFIXES[1:]:
            answer = _complete(cluster, f"{prefix} And so, at last,{' and on' * turn}")
            went.setdefault(prefix, set()).add(answer.headers[REPLICA])
            if turn:
                cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert all(len(replicas) == 1 for replicas in went.values()), went
    assert min(cached) > 150, cached


def test_strangers_to_each_other_are_spread(cluster: Cluster) -> None:
    with ThreadPoolExecutor(8) as clients:
        prompts = [f"{number} is a number, and " * 12 for number in range(8)]
        answers = list(clients.map(lambda prompt: _complete(cluster, prompt, 16), prompts))
    counts = Counter(answer.headers[REPLICA] for answer in answers)
    assert all(answer.status_code == 200 for answer in answers)
    assert min(counts[replica] for replica in cluster.replicas) >= 3, counts


def test_errors_are_the_servers_own(cluster: Cluster) -> None:
    http = cluster.http
    wrong = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"Authorization": "Bearer no"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_api_key")
    large = http.post("/v1/completions", json={"prompt": "x" * 70_000, "max_tokens": 1})
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
    odd = http.post("/v1/completions", json={"prompt": "x", "nonsense": 1})
    assert (odd.status_code, odd.json()["error"]["param"]) == (400, "nonsense")
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/metrics").status_code == 400
    assert http.get("/metrics", headers={REPLICA: "nobody"}).status_code == 404


def test_a_client_that_leaves_frees_its_seat(cluster: Cluster) -> None:
    stream = _Stream(cluster, "Leaving early, ", 600)
    assert cluster.metric(stream.replica, RUNNING) == 1
    stream.leave()
    _until(lambda: cluster.metric(stream.replica, RUNNING) == 0)
    assert cluster.metric(stream.replica, CANCELLED) == 1


def test_a_client_that_does_not_wait_for_its_answer_frees_its_seat(cluster: Cluster) -> None:
    def running() -> float:
        return sum(cluster.metric(replica, RUNNING) for replica in cluster.replicas)

    with ThreadPoolExecutor(1) as clients, httpx.Client(base_url=cluster.http.base_url) as http:
        body = _long("Not waiting, ", 700) | {"stream": False}
        request = http.build_request("POST", "/v1/completions", json=body, headers=cluster.http.headers)
        answer = clients.submit(http.send, request, stream=True)
        _until(lambda: running() == 1)
        http.close()
        _until(lambda: running() == 0)
        assert answer.exception() is not None


def test_a_killed_replica_takes_only_its_own_streams(cluster: Cluster) -> None:
    """The stream of the one that is killed ends with an error, a request that it had not answered yet is served."""
    streams: list[_Stream] = []
    while {stream.replica for stream in streams} < set(cluster.replicas):
        streams.append(_Stream(cluster, f"{len(streams)} ebbs. " * 30))
        assert len(streams) < 8  # more than the seats of one
    lost, left = streams[-1].replica, next(r for r in cluster.replicas if r != streams[-1].replica)
    with ThreadPoolExecutor(4) as clients:
        held = cluster.metric(lost, RUNNING)
        waiting = [clients.submit(_complete, cluster, f"{n} waits. " * 20, 24) for n in range(4)]
        _until(lambda: cluster.metric(lost, RUNNING) > held)
        cluster.kill(lost)
        answers = [answer.result() for answer in waiting]
    for stream in streams:
        last = stream.rest()[-1]
        assert json.loads(last)["error"]["code"] == "engine_lost" if stream.replica == lost else last == "[DONE]"
    assert {answer.status_code for answer in answers} == {200}
    after = [_complete(cluster, f"{prefix} And after") for prefix in PREFIXES]
    assert {(a.status_code, a.headers[REPLICA]) for a in after} == {(200, left)}


def test_stopping_lets_streams_end(cluster: Cluster) -> None:
    from ray import serve

    stream = _Stream(cluster, "The last one, ", 40)
    stopping = threading.Thread(target=serve.delete, args=("default",))
    stopping.start()
    assert stream.rest()[-1] == "[DONE]"
    stopping.join()


class _Stream:
    """A stream whose first event has come."""

    def __init__(self, cluster: Cluster, prompt: str, tokens: int = 120) -> None:
        request = cluster.http.build_request("POST", "/v1/completions", json=_long(prompt, tokens))
        answer = cluster.http.send(request, stream=True)
        self.leave = answer.close
        self._lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        self.replica = answer.headers[REPLICA]
        next(self._lines)

    def rest(self) -> list[str]:
        return list(self._lines)


def _long(prompt: str, tokens: int = 400) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0, "ignore_eos": True}


def _complete(cluster: Cluster, prompt: str, tokens: int = 4) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return cluster.http.post("/v1/completions", json=body)


def _until(true: Any, seconds: float = 60.0) -> None:
    deadline = monotonic() + seconds
    while not true():
        assert monotonic() < deadline, "it did not come to that"
        sleep(0.05)
