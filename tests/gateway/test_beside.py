"""What runs beside the requests, on a whole gateway: discovery, facts, traces, and a configuration that changes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.backends import Backend, backends
from tests.gateway.engine_pages import page, served
from tests.gateway.gateways import Running, gateway
from tests.gateway.test_facts import SGLANG
from tidegate.config import resolve
from tidegate.errors import ConfigError
from tidegate.gateway.trace import valid


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def replicas(*behind: Backend) -> list[dict[str, str]]:
    return [{"name": b.name, "url": b.url} for b in behind]


def config(*behind: Backend, **options: Any) -> Any:
    return resolve({"gateway": {"route": "least-loaded", "replicas": replicas(*behind), **options}})


def names(running: Running) -> set[str]:
    return {replica.name for replica in running.service.fleet if not replica.draining}


async def test_engines_in_a_file_come_and_go_and_streams_go_on(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    async with backends(3, gap=0.05) as behind:
        path.write_text(json.dumps({"replicas": replicas(behind[1])}))
        source = {"source": "file", "path": str(path), "seconds": 0.01}
        async with gateway(behind[:1], discovery=[source]) as running:
            await until(lambda: names(running) == {"backend-0", "backend-1"})
            streams = [asyncio.create_task(running.stream()) for _ in range(2)]
            await until(lambda: set(running.ends.sent_to) == {"backend-0", "backend-1"})
            path.write_text(json.dumps({"replicas": replicas(behind[2])}))
            await until(lambda: names(running) == {"backend-0", "backend-2"})
            assert all(answer.complete for answer in await asyncio.gather(*streams))
            await until(lambda: {r.name for r in running.service.fleet} == {"backend-0", "backend-2"})


async def test_what_an_engine_says_of_itself_reaches_its_view() -> None:
    async with served(lambda path, head: page(SGLANG)) as engine, gateway([]) as running:
        raw = {"gateway": {"replicas": [{"name": "e", "url": engine.url}], "route": "least-loaded"}}
        running.service.apply(resolve(raw))
        (replica,) = running.service.fleet
        await until(lambda: replica.view.facts is not None)
        assert (replica.kind, replica.view.kv_tokens, replica.view.facts.waiting) == ("sglang", 471_258, 4)


async def test_a_new_configuration_drops_no_stream_and_holds_for_what_comes() -> None:
    async with backends(2, gap=0.05) as behind, gateway(behind[:1], in_flight=1) as running:
        stream = asyncio.create_task(running.stream())
        await until(lambda: running.ends.choices)
        waits = asyncio.create_task(running.stream())
        await until(lambda: running.service.dispatch.waiting == 1)
        running.service.apply(config(behind[1], api_keys=["sk-new"]))
        assert (await waits).complete
        assert (await stream).complete
        assert running.ends.sent_to == ["backend-0", "backend-1"]
        assert (await running.stream()).status == 401
        running.http.headers["authorization"] = "Bearer sk-new"
        assert (await running.stream()).complete


async def test_seats_that_are_no_longer_said_are_not_known_any_more() -> None:
    async with backends(1) as behind, gateway(behind) as running:
        (replica,) = running.service.fleet
        for seats in (4, 1, None):
            one = replicas(*behind)[0] | ({"seats": seats} if seats else {})
            running.service.apply(resolve({"gateway": {"route": "least-loaded", "replicas": [one]}}))
            assert replica.view.seats == seats


async def test_a_configuration_that_cannot_hold_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    async with backends(2) as behind, gateway(behind[:1]) as running:
        lacks = {**replicas(behind[1])[0], "api_key_env": "NO_SUCH_KEY"}
        raw = {"gateway": {"replicas": [lacks], "api_keys": ["sk-new"]}}
        with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
            running.service.apply(resolve(raw))
        assert (await running.stream()).complete
        assert names(running) == {"backend-0"}


async def test_the_key_of_an_engine_reaches_it_and_the_clients_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", "sk-engine")
    async with backends(1) as behind, gateway([], api_keys=["sk-client"]) as running:
        of_engine = {**replicas(behind[0])[0], "api_key_env": "ENGINE_KEY"}
        running.service.apply(resolve({"gateway": {"replicas": [of_engine], "api_keys": ["sk-client"]}}))
        running.http.headers["authorization"] = "Bearer sk-client"
        assert (await running.stream(service_tier="flex")).complete
        (received,) = behind[0].requests
        assert received.headers["authorization"] == "Bearer sk-engine"
        assert received.headers["x-slo-class"] == "batch"
        assert "sk-client" not in str(received)


async def test_traces_pass_and_begin_where_asked_for() -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    async with backends(1) as behind, gateway(behind, traces="create") as running:
        running.http.headers["traceparent"] = parent
        await running.stream()
        running.http.headers["traceparent"] = "nonsense"
        await running.stream()
        passed, begun = (received.headers["traceparent"] for received in behind[0].requests)
    assert passed == parent
    assert valid(begun.encode())


async def test_pools_keep_classes_apart() -> None:
    async with backends(2) as behind, gateway([]) as running:
        engines = [{**one, "pool": pool} for one, pool in zip(replicas(*behind), ("chat", "bulk"), strict=True)]
        pools = {"mode": "isolated", "classes": {"interactive": "chat", "batch": "bulk"}}
        running.service.apply(resolve({"gateway": {"replicas": engines, "pools": pools, "route": "least-loaded"}}))
        for _ in range(3):
            await running.stream()
            await running.stream(service_tier="flex")
        assert running.ends.sent_to == ["backend-0", "backend-1"] * 3


async def test_a_pool_that_gets_another_name_keeps_its_jobs() -> None:
    def named(pool: str) -> dict[str, Any]:
        engines = [{**one, "pool": p, "seats": 1} for one, p in zip(replicas(*behind), (pool, "bulk"), strict=True)]
        pools = {"mode": "isolated", "classes": {"interactive": pool, "batch": "bulk"}}
        return {"replicas": engines, "pools": pools, "route": "least-loaded"}

    async with backends(2, gap=0.02) as behind, gateway([], **named("chat")) as running:
        streams = [asyncio.create_task(running.stream()) for _ in range(2)]
        await until(lambda: running.service.dispatch.waiting == 1)
        running.service.apply(resolve({"gateway": named("talk")}))
        assert all(answer.complete for answer in await asyncio.gather(*streams))
        assert running.ends.sent_to == ["backend-0"] * 2


async def test_second_tries_are_remembered_through_a_new_configuration() -> None:
    async with backends(2, mode="502") as behind, gateway(behind, hold_seconds=0.05, retry_share=0.0) as running:
        budget = running.service.proxy.budget
        while budget.take(asyncio.get_running_loop().time()):
            pass
        running.service.apply(config(*behind, retry_share=0.0))
        await running.stream()
        assert [end.attempts for end in running.ends.ends] == [1]
        running.service.apply(config(*behind, retry_share=1.0))
        assert budget.share == 1.0
