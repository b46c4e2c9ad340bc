"""What engines say of themselves under /metrics: their load and their sizes.

Whatever is missing, stale or wrong here costs precision and nothing else: the gateway has counts of its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tidegate.config.gateway import Kind
from tidegate.gateway.bounded import read_whole
from tidegate.gateway.discovery import Wanted

MAX_BYTES = 4 * 2**20
"""What is read of one answer; the rest of a longer one is left."""

TIMEOUT_S = 2.0
"""Seconds for one answer. It passes unused while the engine computes: nobody waits for it."""

MOST = 2**53
"""What an engine counts at most; more is no count, and could not be reckoned with."""

SELDOM = 10
"""An engine that has nothing to say is asked so many times less often."""

_log = logging.getLogger(__name__)


class EngineFacts(NamedTuple):
    """What an engine says; None is what it does not.

    running, waiting: its requests, whoever sent them
    kv_used:          share of its KV memory that requests hold, 0 to 1
    kv_tokens:        KV tokens that it holds
    hit_rate:         share of prompt tokens that its cache held, 0 to 1
    """

    kind: Kind
    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None
    kv_tokens: int | None = None
    hit_rate: float | None = None


class Names(NamedTuple):
    """What one kind of engine calls it. A share is one number, or one by another; "" is what it does not tell."""

    running: str
    waiting: str
    kv_used: tuple[str, ...] = ()
    kv_tokens: str = ""
    hits: tuple[str, ...] = ()


NAMES: Mapping[Kind, Names] = {
    "vllm": Names(
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        ("vllm:kv_cache_usage_perc",),
        "",
        ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    ),
    "sglang": Names(
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        ("sglang:token_usage",),
        "sglang:max_total_num_tokens",
        ("sglang:cache_hit_rate",),
    ),
    "llama-server": Names("llamacpp:requests_processing", "llamacpp:requests_deferred"),
    "tidegate": Names(
        "tidegate_requests_running",
        "tidegate_requests_queued",
        ("tidegate_kv_used_blocks", "tidegate_kv_blocks"),
        "",
        ("tidegate_cached_tokens_total", "tidegate_prompt_tokens_total"),
    ),
}
_VLLM_CACHE = "vllm:cache_config_info"
_WANTED = {_VLLM_CACHE} | {
    name for n in NAMES.values() for name in (n.running, n.waiting, *n.kv_used, n.kv_tokens, *n.hits) if name
}


class Told(NamedTuple):
    """The samples that anybody asks for: sums over their labels, means of shares, and the labels of vLLM's sizes."""

    sums: dict[str, float]
    samples: dict[str, int]
    cache: list[Mapping[str, str]]


def facts_of(text: str) -> EngineFacts | None:
    """What an answer of /metrics says; None for no engine that we know. Raises ValueError for no metrics."""
    told = _read(text)
    for kind, names in NAMES.items():
        if names.running in told.sums:
            return EngineFacts(
                kind,
                running=_count(told, names.running),
                waiting=_count(told, names.waiting),
                kv_used=_share(told, names.kv_used),
                kv_tokens=_vllm_tokens(told) if kind == "vllm" else _count(told, names.kv_tokens),
                hit_rate=_share(told, names.hits),
            )
    return None


def _read(text: str) -> Told:
    """Only lines that somebody asks for are parsed: an engine's histograms are thousands."""
    kept = [line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] in _WANTED]
    told = Told({}, {}, [])
    for family in text_string_to_metric_families("\n".join([*kept, ""])):
        for sample in family.samples:
            if sample.name == _VLLM_CACHE:
                told.cache.append(sample.labels)
            if math.isfinite(sample.value):
                told.sums[sample.name] = told.sums.get(sample.name, 0.0) + sample.value
                told.samples[sample.name] = told.samples.get(sample.name, 0) + 1
    return told


def _count(told: Told, name: str) -> int | None:
    """Engines behind one address (data parallel ranks) add up."""
    found = told.sums.get(name, -1.0)
    return round(found) if 0 <= found <= MOST else None


def _share(told: Told, names: tuple[str, ...]) -> float | None:
    """A number between 0 and 1: the mean of one that is told by rank, or what two sums make."""
    if not names or any(name not in told.sums for name in names):
        return None
    whole = told.sums[names[1]] if len(names) == 2 else told.samples[names[0]]
    return min(1.0, max(0.0, told.sums[names[0]] / whole)) if whole > 0 else None


def _vllm_tokens(told: Told) -> int | None:
    found = [(labels.get("num_gpu_blocks", ""), labels.get("block_size", "")) for labels in told.cache]
    if not found or not all(blocks.isdigit() and size.isdigit() for blocks, size in found):
        return None
    whole = sum(float(blocks) * float(size) for blocks, size in found)
    return int(whole) if whole <= MOST else None


class Scraper:
    """Asks each engine for its metrics every `seconds`, each by itself, and calls `told(name, facts)`.

    An engine that says nothing is asked more seldom; the log says so once until it says something again.
    """

    def __init__(self, told: Callable[[str, EngineFacts], None], seconds: float) -> None:
        self._told = told
        self._seconds = seconds
        self._session: aiohttp.ClientSession | None = None
        self._watched: dict[str, tuple[Wanted, asyncio.Task[None]]] = {}

    def watch(self, engines: Iterable[Wanted]) -> None:
        """From now on ask these and no others."""
        coming = {wanted.name: wanted for wanted in engines}
        for name in [n for n, (known, _) in self._watched.items() if coming.get(n) != known]:
            self._watched.pop(name)[1].cancel()
        for name, wanted in coming.items():
            if name not in self._watched:
                self._watched[name] = wanted, asyncio.create_task(self._follow(wanted))

    async def close(self) -> None:
        """Ask nobody any more."""
        tasks = [task for _, task in self._watched.values()]
        self.watch(())
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _follow(self, wanted: Wanted) -> None:
        silent = False
        while True:
            why = ""
            try:
                facts = facts_of(await self._ask(wanted))
                if facts is None:
                    why = "it has no metrics of an engine that is known here"
                else:
                    self._told(wanted.name, facts)
            except Exception as e:  # noqa: BLE001 - whatever an engine says, it is asked again
                why = str(e) or type(e).__name__
            if why and not silent:
                _log.warning("engine %s: nothing to read at /metrics: %s", wanted.name, why)
            silent = bool(why)
            await asyncio.sleep(self._seconds * (SELDOM if silent else 1))

    async def _ask(self, wanted: Wanted) -> str:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        headers = {} if wanted.api_key is None else {"Authorization": f"Bearer {wanted.api_key}"}
        async with self._session.get(f"{wanted.url}/metrics", headers=headers, allow_redirects=False) as answer:
            if answer.status != 200:
                raise ValueError(f"HTTP {answer.status}")
            read = await read_whole(answer, MAX_BYTES)
        return read.decode("utf-8", "replace")
