"""Two embedded engines and a gateway on loopback, a mixed load, and what became of it: `make gateway-demo`."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

import aiohttp

ENGINES, REQUESTS = 2, 48
TIDEGATE = [sys.executable, "-m", "tidegate"]
# Class, requests of a hundred, and outputs.
MIX = (("interactive", 50, 16), ("completion", 20, 8), ("offline", 10, 24), ("batch", 20, 24))
DOCUMENTS = [f"Report {n}. " + "The tide at this place rises and falls twice a day. " * 20 for n in range(4)]


@dataclass
class Served:
    """One request: its class, where it was served, and how. `first` and `whole` are seconds."""

    slo_class: str
    replica: str
    status: int
    first: float
    whole: float
    cached: int
    prompt: int


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command of ours, which drains and stops when the block ends."""
    process = subprocess.Popen([*TIDEGATE, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def address(process: subprocess.Popen[str]) -> str:
    """Where it listens, once it says that it is ready."""
    line = process.stdout.readline() if process.stdout is not None else ""
    if " ready at " not in line:
        raise SystemExit("a server did not start; what it said stands above")
    print(line, end="")
    return line.split(" ready at ")[1].split()[0]


async def one(http: aiohttp.ClientSession, url: str, slo_class: str, outputs: int, prompt: str) -> Served:
    """Stream one answer and ask the gateway where it came from."""
    body = {"prompt": prompt, "max_tokens": outputs, "stream": True, "stream_options": {"include_usage": True}}
    begin, first, usage = time.perf_counter(), 0.0, {}
    async with http.post(f"{url}/v1/completions", json={**body, "metadata": {"slo_class": slo_class}}) as answer:
        async for line in answer.content:
            first = first or time.perf_counter() - begin
            if line.startswith(b"data: {"):
                usage = json.loads(line[6:]).get("usage") or usage
        id, status = answer.headers["x-request-id"], answer.status
    async with http.get(f"{url}/v1/gateway/explain/{id}") as why:
        replica = (await why.json())["attempts"][-1]["replica"]
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    whole = time.perf_counter() - begin
    return Served(slo_class, replica, status, first, whole, cached, usage.get("prompt_tokens", 0))


async def load(url: str) -> list[Served]:
    """A mix of classes about a few documents, arriving at random."""
    random = Random(0)
    async with aiohttp.ClientSession() as http:
        tasks = []
        for n in range(REQUESTS):
            slo_class, _, outputs = random.choices(MIX, [share for _, share, _ in MIX])[0]
            prompt = f"{random.choice(DOCUMENTS)}Question {n}: when is high tide?"
            tasks.append(asyncio.create_task(one(http, url, slo_class, outputs, prompt)))
            await asyncio.sleep(random.expovariate(6))
        return await asyncio.gather(*tasks)


def show(served: list[Served]) -> None:
    """A line for each class at each engine."""
    found = defaultdict(list)
    for request in served:
        found[request.slo_class, request.replica].append(request)
    print(f"\n{'class':14}{'engine':22}{'requests':>9}{'failed':>8}{'TTFT p50':>10}{'whole p50':>11}{'cached':>9}")
    for (slo_class, replica), some in sorted(found.items()):
        failed = sum(r.status != 200 for r in some)
        cached = sum(r.cached for r in some) / max(1, sum(r.prompt for r in some))
        first, whole = median(r.first for r in some), median(r.whole for r in some)
        print(f"{slo_class:14}{replica:22}{len(some):>9}{failed:>8}{first:>9.2f}s{whole:>10.2f}s{cached:>9.0%}")


def main() -> None:
    with ExitStack() as stack, TemporaryDirectory() as where:
        print(f"starting {ENGINES} engines with one thread each")
        engine = ("serve", "--port", "0", "--threads", "1", "--kv-memory", "256MiB")
        engines = [stack.enter_context(started(*engine)) for _ in range(ENGINES)]
        urls = [address(process) for process in engines]
        config = Path(where) / "gateway.toml"
        replicas = "".join(f'[[gateway.replicas]]\nname = "engine-{n}"\nurl = "{url}"\n' for n, url in enumerate(urls))
        config.write_text(replicas)
        gateway = stack.enter_context(started("gateway", "--config", str(config), "--port", "0"))
        url = address(gateway)
        print(f"sending {REQUESTS} requests about {len(DOCUMENTS)} documents")
        show(asyncio.run(load(url)))
        print("\nstopping")


if __name__ == "__main__":
    main()
