"""What a gateway adds to engines, beside sglang-router: time to the first token, CPU, bunched tokens; and affinity.

    python bench/gateway.py [--json] [--rounds 3] [--seconds 10] [--rate 100 --rate 500] [--closed 32]

Four fake engines (bench/fake_engine.py) and this client share one core, the gateway under test has another to itself.
Requests share 32 prefixes of 2 KB. Targets take turns in every round, the engines without a gateway among them; medians
of the rounds are printed. sglang-router comes from PyPI into an environment of its own, once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
import venv
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import httptools
import uvloop

from tidegate.cli.environment import cache_dir
from tidegate.core.timing import nearest_rank

ROOT = Path(__file__).parents[1]
ROUTER = "0.3.2"
ENGINES = 4
PREFIXES, PREFIX_BYTES = 32, 2048
TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
_ENGINE = re.compile(rb'"id": ?"(engine-\d+)"')


@dataclass
class Seen:
    """What a client saw of one load."""

    ttft: list[float] = field(default_factory=list)
    done: int = 0
    failed: int = 0
    events: int = 0
    bunched: int = 0
    by_engine: Counter[str] = field(default_factory=Counter)
    by_prefix: defaultdict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))


class Client(asyncio.Protocol):
    """One kept connection: a request at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)

    def ask(self, request: bytes, prefix: int, seen: Seen) -> asyncio.Future[None]:
        self._seen, self._prefix, self._first = seen, prefix, True
        self._sent = time.perf_counter()
        self._ended = self._loop.create_future()
        self._transport.write(request)
        return self._ended

    def data_received(self, data: bytes) -> None:
        self._read = 0
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        n = body.count(b"data: {")
        if n and self._first:
            self._first = False
            self._seen.ttft.append(time.perf_counter() - self._sent)
            found = _ENGINE.search(body)
            name = found[1].decode() if found else "?"
            self._seen.by_engine[name] += 1
            self._seen.by_prefix[self._prefix][name] += 1
        self._seen.events += n
        self._seen.bunched += max(0, min(n, self._read + n - 1))  # every event of a read but its first
        self._read += n

    def on_message_complete(self) -> None:
        self._seen.done += 1
        self._seen.failed += self._parser.get_status_code() != 200
        self._ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_exception(ConnectionError("closed under a request"))


class Load:
    """Requests over kept connections to one or several ports in turn."""

    def __init__(self, ports: Sequence[int], seed: int) -> None:
        self._ports = cycle(ports)
        self._idle: defaultdict[int, list[Client]] = defaultdict(list)
        self._random = Random(seed)
        self._n = 0
        self.seen = Seen()

    async def one(self) -> None:
        port = next(self._ports)
        idle = self._idle[port]
        if idle:
            client = idle.pop()
        else:
            _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
        prefix = self._random.randrange(PREFIXES)
        self._n += 1
        await client.ask(_request(prefix, self._n), prefix, self.seen)
        idle.append(client)

    async def open(self, rate: float, seconds: float) -> Seen:
        """Arrivals at random, `rate` a second."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        end = due + seconds
        async with asyncio.TaskGroup() as group:
            while (due := due + self._random.expovariate(rate)) < end:
                await asyncio.sleep(max(0.0, due - loop.time()))
                group.create_task(self.one())
        return self.seen

    async def closed(self, at_once: int, seconds: float) -> Seen:
        """The next when one has ended."""
        end = asyncio.get_running_loop().time() + seconds

        async def worker() -> None:
            while asyncio.get_running_loop().time() < end:
                await self.one()

        await asyncio.gather(*(worker() for _ in range(at_once)))
        return self.seen


def _request(prefix: int, n: int) -> bytes:
    text = (f"Document {prefix}: " + "tides come and go with the moon. " * 70)[:PREFIX_BYTES] + f" Question {n}?"
    body = json.dumps({"model": "m", "prompt": text, "max_tokens": 16, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


@dataclass
class Target:
    """What is measured: where it listens, and the process whose CPU time counts."""

    name: str
    ports: Sequence[int]
    pid: int | None = None

    def cpu_ms(self) -> float:
        """CPU time of the process so far, all threads."""
        if self.pid is None:
            return 0.0
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_MS


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def started(command: Sequence[str], core: int, env: dict[str, str] | None = None) -> Iterator[int]:
    """A process on one core, up until the block ends."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(
        ["taskset", "-c", str(core), *command], env=os.environ | (env or {}), stdout=quiet, stderr=quiet
    )
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def wait_for(port: int, path: str = "/health") -> None:
    """Until it answers with 200."""
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=1) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"nothing answers on port {port}")


def router() -> str:
    """The python of an environment with sglang-router, made once."""
    home = cache_dir() / f"sglang-router-{ROUTER}"
    python = home / "bin" / "python"
    if not (home / "bin" / "smg").exists():
        venv.create(home, with_pip=True)
        own = os.environ | {"PYTHONPATH": ""}  # what lies there it would not install
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"sglang-router=={ROUTER}"], check=True, env=own)
    return str(python)


def targets(stack: ExitStack, load_core: int, gateway_core: int, where: Path) -> list[Target]:
    """Engines, and both gateways before them."""
    ports = [free_port() for _ in range(ENGINES)]
    for n, port in enumerate(ports):
        engine = [sys.executable, str(ROOT / "bench" / "fake_engine.py"), str(port), f"engine-{n}"]
        stack.enter_context(started(engine, load_core))
    for port in ports:
        wait_for(port)
    replicas = "".join(f'[[gateway.replicas]]\nurl = "http://127.0.0.1:{port}"\n' for port in ports)
    config = where / "gateway.toml"
    config.write_text(replicas)
    ours, theirs = free_port(), free_port()
    command = [sys.executable, "-m", "tidegate", "gateway", "--config", str(config), "--port", str(ours)]
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    our_pid = stack.enter_context(started(command, gateway_core, {"PYTHONPATH": path}))
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    launch = [router(), "-m", "sglang_router.launch_router", "--policy", "cache_aware", "--log-level", "error"]
    launch += ["--port", str(theirs), "--prometheus-port", str(free_port()), "--worker-urls", *urls]
    their_pid = stack.enter_context(started(launch, gateway_core, {"PYTHONPATH": ""}))  # it has packages of its own
    wait_for(ours)
    wait_for(theirs)
    time.sleep(2)  # sglang-router finds its engines out a little later
    return [
        Target("engines", ports),
        Target("tidegate", [ours], our_pid),
        Target(f"sglang-router {ROUTER}", [theirs], their_pid),
    ]


async def measured(target: Target, run: Callable[[Load], Any], seed: int) -> dict[str, float]:
    """One load on one target."""
    load = Load(target.ports, seed)
    begin, cpu = time.perf_counter(), target.cpu_ms()
    seen: Seen = await run(load)
    used, took = target.cpu_ms() - cpu, time.perf_counter() - begin
    ttft = sorted(seen.ttft)
    most = [max(engines.values()) / sum(engines.values()) for engines in seen.by_prefix.values()]
    mean = sum(seen.by_engine.values()) / ENGINES
    return {
        "requests": seen.done,
        "failed": seen.failed,
        "requests_a_second": seen.done / took,
        "ttft_p50_ms": 1000 * (nearest_rank(ttft, 0.50) or 0.0),
        "ttft_p99_ms": 1000 * (nearest_rank(ttft, 0.99) or 0.0),
        "cpu_ms_a_request": used / seen.done,
        "bunched": seen.bunched / max(1, seen.events),
        "spread": max(seen.by_engine.values()) / mean,
        "affinity": statistics.mean(most),
    }


async def measure(args: argparse.Namespace, found: Sequence[Target]) -> list[dict[str, Any]]:
    """Rows by load and target: medians, and what is added to the engines' own time."""
    loads: dict[str, Callable[[Load], Any]] = {
        f"{rate:g}/s": (lambda load, rate=rate: load.open(rate, args.seconds)) for rate in args.rate
    }
    loads[f"{args.closed} at once"] = lambda load: load.closed(args.closed, args.seconds)
    rows = []
    for name, run in loads.items():
        runs: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
        for number in range(args.rounds):
            for target in found:
                runs[target.name].append(await measured(target, run, number))
        medians = {t.name: {k: statistics.median(r[k] for r in runs[t.name]) for k in runs[t.name][0]} for t in found}
        alone = medians["engines"]
        for target in found:
            row = medians[target.name]
            added = {f"added_{p}_ms": row[f"ttft_{p}_ms"] - alone[f"ttft_{p}_ms"] for p in ("p50", "p99")}
            rows.append({"load": name, "target": target.name, **row, **added})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load in each round")
    parser.add_argument("--rate", type=float, action="append", help="requests a second; 100 and 500")
    parser.add_argument("--closed", type=int, default=32, help="requests at once in the closed loop")
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--gateway-core", type=int, default=cores[0])
    parser.add_argument("--load-core", type=int, default=cores[-1])
    args = parser.parse_args()
    args.rate = args.rate or [100.0, 500.0]
    with ExitStack() as stack, TemporaryDirectory() as where:
        found = targets(stack, args.load_core, args.gateway_core, Path(where))
        os.sched_setaffinity(0, {args.load_core})
        rows = uvloop.run(measure(args, found))
    if args.json:
        print(json.dumps({"rounds": args.rounds, "seconds": args.seconds, "rows": rows}, indent=1))
        return
    shown = ("requests", "failed", "added_p50_ms", "added_p99_ms", "cpu_ms_a_request", "bunched", "spread", "affinity")
    print(f"{'load':12}{'target':22}" + "".join(f"{name:>18}" for name in shown))
    for row in rows:
        print(f"{row['load']:12}{row['target']:22}" + "".join(f"{row[name]:>18.3f}" for name in shown))


if __name__ == "__main__":
    main()
