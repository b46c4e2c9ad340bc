"""What Prometheus reads of a gateway, and that nobody outside can make it grow."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.backends import backends
from tests.gateway.engines import job
from tests.gateway.gateways import Running, gateway
from tidegate.config import resolve
from tidegate.gateway.attempt import How
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.gateway.proxy import End
from tidegate.routing.choice import Choice
from tidegate.routing.view import ReplicaView


async def read(running: Running) -> dict[tuple[str, tuple[str, ...]], float]:
    """Samples by name and the values of their labels."""
    async with running.http.get(f"{running.url}/metrics") as answer:
        assert answer.status == 200
        families = list(text_string_to_metric_families(await answer.text()))
    samples = [sample for family in families for sample in family.samples]
    return {(s.name.removeprefix("tidegate_gateway_"), tuple(s.labels.values())): s.value for s in samples}


async def test_what_happened_is_counted() -> None:
    keys = [{"key": "sk-a", "tenant": "a", "requests_per_minute": 6}]
    async with backends(2) as behind, gateway(behind, api_keys=keys) as running:
        assert (await running.stream()).status == 401
        running.http.headers["authorization"] = "Bearer sk-a"
        for _ in range(3):
            assert (await running.stream()).complete
        assert (await running.stream(service_tier="flex")).complete
        behind[0].mode = behind[1].mode = "400"
        assert (await running.stream()).status == 400
        behind[0].mode = behind[1].mode = "cut"
        assert not (await running.stream()).complete
        assert (await running.stream()).status == 429
        told = await read(running)
    assert told["requests_total", ("interactive", "done")] == 3
    assert told["requests_total", ("batch", "done")] == 1
    assert told["requests_total", ("interactive", "rejected")] == 1
    assert told["requests_total", ("interactive", "cut")] == 1
    assert told["door_refusals", ("invalid_api_key",)] == 1
    assert told["door_refusals", ("rate_limit_exceeded",)] == 1
    assert told["ttft_seconds_count", ("interactive",)] >= 3
    assert told["e2e_seconds_count", ("batch",)] == 1
    assert told["held_seconds_count", ("interactive",)] == 5
    assert sum(value for (name, _), value in told.items() if name == "sent_total") == 6
    assert sum(value for (name, labels), value in told.items() if name == "failures_total" and "cut" in labels) == 1
    assert told["tokens_total", ("output", "a")] >= 20
    for one in behind:
        assert told["replica_state", (one.name, "draining")] == 0
        assert told["outstanding", (one.name,)] == 0


async def test_what_is_believed_cached_is_counted() -> None:
    long = "a" * 2048 + "and so on"
    async with backends(1) as behind, gateway(behind, route="joint") as running:
        assert (await running.stream(prompt=long)).complete
        assert (await read(running))["cached_tokens_total", (behind[0].name,)] == 0
        assert (await running.stream(prompt=long)).complete
        assert (await read(running))["cached_tokens_total", (behind[0].name,)] > 0


async def test_what_is_held_shows() -> None:
    async with backends(1, first=0.3) as behind, gateway(behind, in_flight=1) as running:
        asked = [asyncio.create_task(running.stream()) for _ in range(3)]
        while running.service.dispatch.waiting < 2:
            await asyncio.sleep(0.005)
        told = await read(running)
        assert told["requests_held", ("interactive",)] == 2
        assert told["requests_held", ("batch",)] == 0
        assert told["oldest_wait_seconds", ("interactive",)] > 0
        assert told["outstanding", ("backend-0",)] == 1
        await asyncio.gather(*asked)
        assert (await read(running))["requests_held", ("interactive",)] == 0


async def test_a_replica_that_is_gone_takes_its_labels_along() -> None:
    async with backends(2) as behind, gateway(behind[:1]) as running:
        await running.stream()
        assert ("outstanding", ("backend-0",)) in await read(running)
        replicas = [{"name": behind[1].name, "url": behind[1].url}]
        running.service.apply(resolve({"gateway": {"route": "least-loaded", "replicas": replicas}}))
        await running.stream()
        names = {labels[0] for (_, labels) in await read(running) if labels}
        assert "backend-1" in names
        assert "backend-0" not in names


async def test_of_two_replicas_with_one_name_the_one_that_stays_shows() -> None:
    """One at another address took its name; the old one has a stream of ours to finish."""
    async with backends(2) as behind:
        behind[0].mode = "stall"
        replicas = [[{"name": "one", "url": one.url}] for one in behind]
        async with gateway([], replicas=replicas[0]) as running:
            streaming = asyncio.create_task(running.stream())
            while not running.ends.first_tokens:
                await asyncio.sleep(0.005)
            running.service.apply(resolve({"gateway": {"route": "least-loaded", "replicas": replicas[1]}}))
            told = await read(running)
            assert told["outstanding", ("one",)] == 0
            assert told["replica_state", ("one", "draining")] == 0
            assert told["replica_state", ("one", "closed")] == 1
            behind[0].kill()
            await streaming


def test_what_clients_send_makes_no_labels_without_end() -> None:
    classes: dict[str, Any] = {f"class-{i}": {} for i in range(50)}
    metrics = GatewayMetrics(resolve({"classes": classes, "server": {"tenant_labels": 5}}))
    replica = ReplicaView("a")
    for i in range(200):
        one = job(f"{i}", f"class-{i % 50}", f"tenant-{i}")
        metrics.sent(one, Choice(replica, 0), 1, 0.0)
        metrics.ended(one, End(200, How.DONE, "a", 1, 0.5, 7, 3, ""), 1.0)
    families = list(metrics.registry.collect())
    labels = {name: set[str]() for name in ("class", "tenant", "replica")}
    for family in families:
        for sample in family.samples:
            for name, seen in labels.items():
                seen |= {sample.labels[name]} if name in sample.labels else set()
    assert len(labels["class"]) <= 5
    assert len(labels["tenant"]) <= 5
    assert labels["replica"] == {"a"}
    assert not metrics._predicted


def test_predictions_are_compared_with_what_came() -> None:
    metrics = GatewayMetrics(resolve({}))
    replica = ReplicaView("a")
    names = ["base", "queue", "seat", "prefill"]
    choice = Choice(replica, 0, [replica], names, [[0.1, 0.0, 0.0, 0.2]])
    one = job("1")
    metrics.sent(one, choice, 1, 10.0)
    metrics.ended(one, End(200, How.DONE, "a", 1, 10.5, 7, 3, ""), 11.0)
    total = metrics.registry.get_sample_value("tidegate_gateway_ttft_error_seconds_sum", {"replica": "a"})
    assert total is not None
    assert abs(total - 0.2) < 1e-9
