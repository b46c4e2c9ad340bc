"""What engines say under /metrics, and that one which says nothing harms nobody."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tests.gateway.engine_pages import page, served
from tidegate.gateway import facts
from tidegate.gateway.discovery import Wanted
from tidegate.gateway.facts import EngineFacts, Scraper, facts_of
from tidegate.observe.metrics import Metrics

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 25.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="1000",say="\\"} x"} 1.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="1",num_gpu_blocks="1000",say=""} 1.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="m"} 0.0
"""
SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m"} 8
sglang:num_queue_reqs{model_name="m"} 4
sglang:token_usage{model_name="m"} 0.52
sglang:cache_hit_rate{model_name="m"} 0.28
sglang:max_total_num_tokens{model_name="m"} 471258
"""
LLAMA = """\
# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
llamacpp:requests_deferred 5
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (VLLM, EngineFacts("vllm", 7, 2, 0.375, 64_000, 0.25)),
        (SGLANG, EngineFacts("sglang", 8, 4, 0.52, 471_258, 0.28)),
        (LLAMA, EngineFacts("llama-server", 2, 5)),
        (
            VLLM.replace('num_gpu_blocks="1000"', 'num_gpu_blocks="None"'),
            EngineFacts("vllm", 7, 2, 0.375, None, 0.25),
        ),
        ("vllm:num_requests_running 1\nvllm:num_requests_waiting NaN\n", EngineFacts("vllm", 1)),
        (
            VLLM.replace('num_gpu_blocks="1000"', f'num_gpu_blocks="{"9" * 400}"'),
            EngineFacts("vllm", 7, 2, 0.375, None, 0.25),
        ),
        ("vllm:num_requests_running 1\nvllm:num_requests_waiting 1e308\n", EngineFacts("vllm", 1)),
        ('vllm:num_requests_running{a="0"} 1e308\nvllm:num_requests_running{a="1"} 1e308\n', EngineFacts("vllm")),
        ("", None),
        ("# TYPE process_cpu gauge\nprocess_cpu 3\n", None),
        ("<html>hello</html>", None),
    ],
)
def test_what_each_kind_of_engine_says(text: str, told: EngineFacts | None) -> None:
    assert facts_of(text) == told


def test_our_own_metrics_are_read() -> None:
    """By their names as they are, so that a renamed metric shows here."""
    metrics = Metrics(["interactive", "batch"])
    metrics.running.labels("interactive").set(3)
    metrics.running.labels("batch").set(1)
    metrics.queued.labels("batch").set(9)
    metrics.kv_blocks.set(100)
    metrics.kv_used.set(40)
    metrics.prompt_tokens.inc(200)
    metrics.cached_tokens.inc(50)
    text = generate_latest(metrics.registry).decode()
    assert facts_of(text) == EngineFacts("tidegate", 4, 9, 0.4, None, 0.25)


def test_only_what_is_asked_for_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    for i in range(200):
        Histogram(f"vllm:h{i}", "x", registry=registry).observe(1)
        Counter(f"vllm:c{i}", "x", registry=registry).inc()
    Gauge("vllm:num_requests_running", "x", registry=registry).set(5)
    parsed: list[str] = []
    real = facts.text_string_to_metric_families
    monkeypatch.setattr(facts, "text_string_to_metric_families", lambda text: real(parsed.append(text) or text))
    assert facts_of(generate_latest(registry).decode()) == EngineFacts("vllm", 5)
    assert parsed[0].count("\n") == 1


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_engines_are_asked_again_and_again_each_by_itself() -> None:
    told: dict[str, list[EngineFacts]] = {"good": [], "hangs": []}
    async with served(lambda path, head: page(SGLANG)) as good, served(lambda path, head: None) as hangs:
        scraper = Scraper(lambda name, found: told[name].append(found), 0.01)
        scraper.watch([Wanted("good", good.url), Wanted("hangs", hangs.url)])
        await until(lambda: len(told["good"]) >= 3)
        assert told["good"][0].running == 8
        assert told["hangs"] == []
        assert set(good.asked) == {"/metrics"}
        await scraper.close()


async def test_an_engine_that_is_no_longer_wanted_is_asked_no_more() -> None:
    told: list[str] = []
    async with served(lambda path, head: page(SGLANG)) as one, served(lambda path, head: page(LLAMA)) as other:
        scraper = Scraper(lambda name, found: told.append(name), 0.01)
        scraper.watch([Wanted("one", one.url), Wanted("other", other.url)])
        await until(lambda: {"one", "other"} <= set(told))
        scraper.watch([Wanted("other", other.url)])
        await asyncio.sleep(0)
        told.clear()
        await until(lambda: told.count("other") >= 3)
        assert "one" not in told
        await scraper.close()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (page("no", "404 Not Found"), "HTTP 404"),
        (page("hello"), "no metrics of an engine that is known"),
        (page(b"x" * 2**16), "more than 1024 bytes"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"400\r\n" + b"x" * 1024 + b"\r\n" * 2, ""),
        (b"garbage", ""),
        (b"", ""),
        (page(b"vllm:num_requests_running{ 3\n"), ""),
    ],
)
async def test_an_engine_with_nothing_to_say_is_logged_once_and_harms_nobody(
    answer: bytes, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(facts, "MAX_BYTES", 1024)
    monkeypatch.setattr(facts, "SELDOM", 1)
    caplog.set_level(logging.WARNING)
    told: list[EngineFacts] = []
    says = [answer]
    async with served(lambda path, head: says[0]) as engine:
        scraper = Scraper(lambda name, found: told.append(found), 0.01)
        scraper.watch([Wanted("odd", engine.url, api_key="sk-secret")])
        await until(lambda: len(engine.asked) >= 3)
        assert told == []
        assert len(caplog.records) == 1
        assert why in caplog.text
        assert "sk-secret" not in caplog.text
        says[0] = page(LLAMA)
        await until(lambda: told)
        await scraper.close()


async def test_an_engine_gets_its_key() -> None:
    heads: list[bytes] = []

    def answer(path: str, head: bytes) -> bytes:
        heads.append(head)
        return page(LLAMA)

    told: list[EngineFacts] = []
    async with served(answer) as engine:
        scraper = Scraper(lambda name, found: told.append(found), 0.01)
        scraper.watch([Wanted("a", engine.url, api_key="sk-engine")])
        await until(lambda: told)
        await scraper.close()
    assert b"Authorization: Bearer sk-engine" in heads[0]


async def test_an_engine_is_asked_again_whatever_became_of_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "SELDOM", 1)
    told: list[EngineFacts] = []

    def tell(name: str, found: EngineFacts) -> None:
        told.append(found)
        raise OverflowError

    async with served(lambda path, head: page(LLAMA)) as engine:
        scraper = Scraper(tell, 0.01)
        scraper.watch([Wanted("a", engine.url)])
        await until(lambda: len(told) > 1)
        await scraper.close()
