"""vLLM's real engine with a real model: the same tokens as stock, and a server that says who comes first."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

HERE = Path(__file__).parent
CACHE = Path(
    os.environ.get("TIDEGATE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tidegate"
)
MODEL = CACHE / "smollm2-135m"
NEAR_TIE = 1e-3
ENV = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "INFO"}

pytestmark = pytest.mark.timeout(1300)


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """What stock and ours gave, and the folder of ours' logs."""
    folder = tmp_path_factory.mktemp("ours")
    config = folder / "tidegate.toml"
    config.write_text(
        '[scheduler]\npolicy = "joint"\n[observe]\n'
        f'decisions = "{folder}/decisions.jsonl"\nrecords = "{folder}/records.jsonl"\nsteps = "{folder}/steps.jsonl"\n'
    )
    ours = ["tidegate.integrations.vllm.TidegateAsyncScheduler", str(config)]
    return _generate([]), _generate(ours), folder


def _generate(scheduler: list[str]) -> dict:
    command = [sys.executable, str(HERE / "generate.py"), str(MODEL), *scheduler]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENV, timeout=600)
    told = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert told, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(told[0][6:])


def test_everybody_gets_the_same_tokens(generated):
    stock, ours, _ = generated
    for mine, theirs in zip(ours["clients"], stock["clients"], strict=True):
        assert mine[1] == theirs[1]
        for sample, expected in zip(mine[0], theirs[0], strict=True):
            for (token, _), (wanted, gap) in zip(sample, expected, strict=True):
                if token != wanted:
                    assert gap < NEAR_TIE
                    break


def test_some_were_preempted(generated):
    stock, ours, folder = generated
    assert stock["preemptions"] > 0
    assert ours["preemptions"] > 0
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    assert sum(r["preemptions"] for r in records) == ours["preemptions"]
    assert {r["finish_reason"] for r in records} <= {"stop", "length", "cancelled"}
    assert len({r["request_id"] for r in records}) == len(records) == 31


def test_every_preemption_is_explained(generated):
    *_, folder = generated
    lines = [json.loads(line) for line in (folder / "decisions.jsonl").read_text().splitlines()]
    preempted = [line for line in lines if line["event"] == "preempted"]
    assert preempted
    assert all("wanted by" in line["reason"] for line in preempted)
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert sum(step["preempted"] for step in steps) == len(preempted)


# The server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """`vllm serve` with the flags of docs/vllm.md, on a port of its own."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "metrics").mkdir()
    config = folder / "tidegate.toml"
    config.write_text(f'[scheduler]\nmax_waiting = 2\n[observe]\nrecords = "{folder}/records.jsonl"\n')
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        [
            str(Path(sys.executable).parent / "vllm"), "serve", str(MODEL), "--served-model-name", "m",
            "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "1024",
            "--max-num-seqs", "1", "--enforce-eager",
            "--scheduler-cls", "tidegate.integrations.vllm.TidegateAsyncScheduler",
            "--middleware", "tidegate.integrations.vllm.headers",
            "--additional-config", json.dumps({"tidegate": str(config)}),
        ],
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**ENV, "PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics")},
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            try:
                httpx.get(f"{url}/health", timeout=2)
                break
            except httpx.TransportError:
                time.sleep(0.5)
        yield url, folder
    finally:
        process.terminate()
        process.wait(60)


def complete(url: str, headers: dict[str, str] | None = None, **body) -> httpx.Response:
    body = {"model": "m", "prompt": "The tide comes", "temperature": 0, **body}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)


def test_headers_reach_the_scheduler(server):
    url, folder = server
    complete(url, {"x-tenant": "acme", "x-slo-ttft-ms": "5"}, max_tokens=4)
    complete(url, service_tier="flex", max_tokens=4)
    seen: list[dict] = []
    for _ in range(50):
        seen = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
        if len(seen) >= 2:
            break
        time.sleep(0.1)
    assert [(r["tenant"], r["slo_class"]) for r in seen] == [("acme", "interactive"), ("default", "batch")]
    assert not seen[0]["slo_met"]


def test_a_header_that_says_nothing_is_a_400(server):
    refused = complete(server[0], {"x-slo-ttft-ms": "soon"}, max_tokens=4)
    assert refused.status_code == 400
    told = refused.json()["error"]["message"]
    assert told == "x-slo-ttft-ms must be a number of milliseconds above 0, not 'soon'"


def test_a_full_queue_ends_cleanly(server):
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda n: complete(server[0], max_tokens=60, ignore_eos=True), range(8)))
    choices = [answer.json()["choices"][0] for answer in answers]
    ends = [choice["finish_reason"] for choice in choices]
    assert ends.count("abort") >= 1
    assert set(ends) == {"abort", "length"}
    told = next(choice for choice in choices if choice["finish_reason"] == "abort")
    assert "queue_full: the queue is full" in told["stop_reason"]


def test_metrics_stand_beside_vllms_own(server):
    text = httpx.get(f"{server[0]}/metrics", timeout=30).text
    assert "vllm:num_requests_running" in text
    assert 'tidegate_requests_finished_total{class="batch",reason="length"} 1.0' in text
    assert "tidegate_ttft_seconds_bucket" in text
