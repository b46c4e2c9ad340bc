"""Replay against a real HTTP server in this process that streams as OpenAI does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tidegate.core.slo import Slo, SloClass
from tidegate.errors import InputError
from tidegate.observe.records import read_records
from tidegate.simulate.replay import Replay, Target, prompt_ids
from tidegate.simulate.traces import load_workload
from tidegate.simulate.workload import Workload, WorkloadRequest

Answer = Callable[[web.Request, dict[str, Any], web.StreamResponse], Awaitable[None]]


async def send(stream: web.StreamResponse, event: Any) -> None:
    await stream.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())


def chunk(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], "usage": None}


async def complete(_: web.Request, body: dict[str, Any], stream: web.StreamResponse) -> None:
    """`max_tokens` tokens, the end with the last of them, then the usage."""
    for i in range(body["max_tokens"]):
        await send(stream, chunk(f" {i}", "length" if i == body["max_tokens"] - 1 else None))
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
    await send(stream, {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 16}}})
    await send(stream, "[DONE]")


class Server:
    """The server: keeps every body it got, and answers by `answer`."""

    def __init__(self, answer: Answer = complete) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.now = self.most = 0
        self.app = web.Application()
        self.app.add_routes([web.get("/v1/models", self.models), web.post("/v1/completions", self.completions)])

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if body["max_tokens"] == 429:
                return web.json_response({"error": {"message": "the queue is full"}}, status=429)
            if body["max_tokens"] == 500:
                return web.Response(text="oops", status=500)
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await stream.prepare(request)
            await self.answer(request, body, stream)
            return stream
        finally:
            self.now -= 1


async def replayed(workload: Workload, server: Server, **target: Any) -> Replay:
    async with TestServer(server.app) as listening:
        replay = Replay(workload, Target(url=str(listening.make_url("")).rstrip("/"), **target))
        await replay.run()
        return replay


def workload(*requests: WorkloadRequest) -> Workload:
    return Workload("w", requests)


async def test_the_server_gets_exactly_what_the_workload_says() -> None:
    server = Server()
    asked = (
        WorkloadRequest(5.0, 700, 3, tenant="acme", slo_class="batch", priority=7, hash_ids=(1, 2)),
        WorkloadRequest(5.01, 600, 2, hash_ids=(1, 3)),
        WorkloadRequest(5.02, 40, 1),
    )
    await replayed(workload(*asked), server, api_key="secret", seed=4)
    bodies = sorted(server.bodies, key=lambda b: -b["max_tokens"])
    assert [(len(b["prompt"]), b["max_tokens"]) for b in bodies] == [(700, 3), (600, 2), (40, 1)]
    first, second, third = bodies
    assert first["prompt"][:512] == second["prompt"][:512]
    assert first["prompt"][512:600] != second["prompt"][512:600]
    assert all(b["model"] == "tiny" and b["ignore_eos"] and b["stream"] and b["temperature"] == 0 for b in bodies)
    assert (first["user"], first["metadata"], first["priority"]) == ("acme", {"slo_class": "batch"}, 7)
    assert "priority" not in third
    assert set(server.keys) == {"Bearer secret"}


async def test_records_say_what_the_client_saw() -> None:
    classes = {"batch": SloClass("batch", Slo(), 10), "interactive": SloClass("interactive", Slo(ttft=1e-9), 0)}
    asked = (WorkloadRequest(0.0, 30, 5, slo_class="batch"), WorkloadRequest(0.02, 20, 1))
    replay = await replayed(workload(*asked), Server(), classes=classes)
    long, short = sorted(replay.records, key=lambda r: r.request_id)
    assert (long.request_id, long.prompt_tokens, long.output_tokens, long.cached_tokens) == ("w-0", 30, 5, 16)
    assert (long.priority, long.slo_met, long.finish_reason) == (10, True, "length")
    assert (short.priority, short.slo_met, short.tpot_s, short.max_gap_s) == (0, False, None, None)
    assert long.arrival_s == 0.0
    assert short.arrival_s == pytest.approx(0.02)
    assert long.first_token_s is not None
    assert long.ttft_s is not None
    assert long.tpot_s is not None
    assert long.max_gap_s is not None
    assert long.p99_gap_s == long.max_gap_s
    assert long.finish_s == pytest.approx(long.first_token_s + 4 * long.tpot_s)
    assert long.e2e_s == pytest.approx(long.finish_s - long.arrival_s)
    assert 0 < long.ttft_s <= long.e2e_s
    assert long.max_gap_s >= long.tpot_s
    assert (long.admitted_s, long.preemptions, long.recomputed_tokens) == (None, None, None)
    assert not replay.failures


async def cut(_: web.Request, body: dict[str, Any], stream: web.StreamResponse) -> None:
    """Breaks in the way that the wanted length names."""
    await send(stream, chunk("a"))
    match body["max_tokens"]:
        case 2:  # ends without an end
            await send(stream, "[DONE]")
        case 3:
            await send(stream, {"error": {"message": "the engine failed"}})
        case 4:
            await send(stream, "{")
        case 5:
            await send(stream, {"choices": 3})
        case 6:
            raise ConnectionResetError
        case 7:
            await send(stream, {"error": {"message": "it waited too long", "code": "timeout"}})
        case _:
            await send(stream, chunk("", "stop"))


async def test_failures_become_rows_and_hurt_nobody_else() -> None:
    server = Server(cut)
    lengths = (429, 500, 2, 3, 4, 5, 6, 7, 1)
    replay = await replayed(workload(*(WorkloadRequest(0.0, 8, n) for n in lengths)), server)
    reasons = {int(r.request_id.removeprefix("w-")): r.finish_reason for r in replay.records}
    assert [reasons[i] for i in range(len(lengths))] == ["refused", *["error"] * 6, "timeout", "stop"]
    assert not any(r.slo_met for r in replay.records if r.finish_reason != "stop")
    assert sum(replay.failures.values()) == 8
    assert {"HTTP 429: the queue is full", "HTTP 500: oops", "the stream ended before the answer did"} <= set(
        replay.failures
    )
    assert any("the engine failed" in message for message in replay.failures)


async def test_an_end_without_text_is_no_token() -> None:
    async def answer(_: web.Request, body: dict[str, Any], stream: web.StreamResponse) -> None:
        await send(stream, chunk("a"))
        await send(stream, chunk("", None))  # a token whose text is held back
        await send(stream, chunk("", "stop"))
        await send(stream, "[DONE]")

    replay = await replayed(workload(WorkloadRequest(0.0, 8, 9)), Server(answer))
    assert replay.records[0].output_tokens == 2


async def test_concurrency_bounds_what_is_outstanding() -> None:
    together = asyncio.Event()

    async def answer(request: web.Request, body: dict[str, Any], stream: web.StreamResponse) -> None:
        if server.now == 3:
            together.set()
        await together.wait()
        await complete(request, body, stream)

    server = Server(answer)
    replay = await replayed(workload(*(WorkloadRequest(0.0, 8, 2) for _ in range(9))), server, concurrency=3)
    assert server.most == 3
    assert len(replay.records) == 9
    assert [r.arrival_s == 0.0 for r in replay.records].count(True) == 3  # the others were due when a place was free


async def slowly(request: web.Request, body: dict[str, Any], stream: web.StreamResponse) -> None:
    await asyncio.sleep(0.02)
    await complete(request, body, stream)


async def test_clients_of_a_closed_loop_wait_for_their_answers() -> None:
    server = Server(slowly)
    load = load_workload(
        ["closed:clients=3,count=12,think=10ms,tenants=3,prompt=10,output=2,batch", "burst:count=2,prompt=9,output=1"],
        closed_loops=True,
    )
    replay = await replayed(load, server)
    assert server.most <= 3 + 2
    assert sorted(int(r.request_id.rpartition("-")[2]) for r in replay.records) == list(range(14))
    loop = [r for r in replay.records if r.slo_class == "batch"]
    assert len(loop) == 12
    for tenant in ("tenant-0", "tenant-1", "tenant-2"):
        own = sorted((r for r in loop if r.tenant == tenant), key=lambda r: r.arrival_s)
        assert all(later.arrival_s >= earlier.finish_s + 0.01 for earlier, later in pairwise(own))
    assert max(len(b["prompt"]) for b in server.bodies) == 10
    assert len({tuple(b["prompt"]) for b in server.bodies}) == 14


async def test_concurrency_bounds_closed_loops_too() -> None:
    server = Server(slowly)
    load = load_workload("closed:clients=6,count=20,prompt=10,output=2", closed_loops=True)
    replay = await replayed(load, server, concurrency=2)
    assert (len(replay.records), server.most) == (20, 2)


async def test_no_server_is_one_clear_sentence() -> None:
    listening = TestServer(web.Application())
    await listening.start_server()
    url = str(listening.make_url("")).rstrip("/")
    await listening.close()
    with pytest.raises(InputError, match=f"no server answers at {url}"):
        await Replay(workload(WorkloadRequest(0.0, 8, 2)), Target(url=url)).run()
    with pytest.raises(InputError, match="no http:// address"):
        await Replay(workload(WorkloadRequest(0.0, 8, 2)), Target(url="localhost")).run()


def test_prompts_follow_seed_and_shared_blocks() -> None:
    a = WorkloadRequest(0.0, 1_000, 1, hash_ids=(5,))
    assert prompt_ids(a, 0, 1, (10, 20)) == prompt_ids(a, 0, 1, (10, 20))
    assert prompt_ids(a, 0, 1, (10, 20)) != prompt_ids(a, 0, 2, (10, 20))
    assert prompt_ids(a, 0, 1, (10, 20))[:512] == prompt_ids(a, 1, 1, (10, 20))[:512]
    assert prompt_ids(a, 0, 1, (10, 20))[512:] != prompt_ids(a, 1, 1, (10, 20))[512:]
    assert {10, 19} <= set(prompt_ids(a, 0, 1, (10, 20))) <= set(range(10, 20))
    assert len(prompt_ids(WorkloadRequest(0.0, 513, 1, hash_ids=(5, 6)), 0, 0, (0, 9))) == 513


async def command(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tidegate", "replay", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": "src"},
    )  # fmt: skip


def test_a_conversations_next_prompt_begins_with_its_last_one() -> None:
    asked = load_workload("sessions:rate=1,count=1,turns=4,think=1s,prompt=30,output=20,system=10").requests
    prompts = [prompt_ids(r, n, 0, (1_000, 30_000)) for n, r in enumerate(asked)]
    assert [len(p) for p in prompts] == [40, 90, 140, 190]
    for earlier, later in pairwise(prompts):
        assert later[: len(earlier)] == earlier


async def test_the_command_writes_records_and_a_stable_summary(tmp_path: Path) -> None:
    load = tmp_path / "load.csv"
    load.write_text("arrival_s,prompt_tokens,output_tokens\n0,8,2\n10,8,3\n10,8,429\n20,8,3\n", encoding="utf-8")
    out = tmp_path / "records.parquet"
    async with TestServer(Server().app) as listening:
        url = str(listening.make_url("/v1"))
        process = await command(
            str(load), "--url", url, "--limit", "3", "--rate-scale", "1000", "--out", str(out), "--json"
        )
        printed, complaint = await process.communicate()
    assert (process.returncode, complaint) == (0, b"")
    summary = json.loads(printed)
    assert (summary["workload"], summary["model"], summary["requests"], summary["recorded"]) == ("load", "tiny", 3, 3)
    assert summary["failures"] == {"HTTP 429: the queue is full": 1}
    assert summary["interrupted"] is False
    assert set(summary["classes"]) == {"interactive", "all"}
    assert set(summary["classes"]["all"]) == {
        "requests", "completed", "cancelled", "attainment", "goodput", "output_tokens_s", "ttft_s", "tpot_s", "e2e_s",
        "preemptions", "recompute_share", "cache_hit",
    }  # fmt: skip
    assert sorted(r.finish_reason for r in read_records(out)) == ["length", "length", "refused"]


async def test_an_interrupted_command_writes_what_there_is(tmp_path: Path) -> None:
    hanging = asyncio.Event()

    async def answer(request: web.Request, body: dict[str, Any], stream: web.StreamResponse) -> None:
        if body["max_tokens"] == 2:
            await complete(request, body, stream)
            return
        await send(stream, chunk("a"))
        hanging.set()
        await asyncio.Event().wait()

    load = tmp_path / "load.csv"
    load.write_text("arrival_s,prompt_tokens,output_tokens\n0,8,2\n0.1,8,3\n9999,8,2\n", encoding="utf-8")
    out = tmp_path / "records.jsonl"
    async with TestServer(Server(answer).app) as listening:
        process = await command(str(load), "--url", str(listening.make_url("")), "--out", str(out))
        await hanging.wait()
        process.send_signal(signal.SIGINT)
        printed, complaint = await process.communicate()
    assert process.returncode == 130
    assert complaint.splitlines() == [b"tidegate: interrupted"]
    assert b"interactive" in printed
    assert [r.finish_reason for r in read_records(out)] == ["length", "cancelled"]


async def test_a_command_without_a_server_exits_with_2(tmp_path: Path) -> None:
    load = tmp_path / "load.csv"
    load.write_text("arrival_s,prompt_tokens,output_tokens\n0,8,2\n", encoding="utf-8")
    process = await command(str(load), "--url", "http://127.0.0.1:9")
    printed, complaint = await process.communicate()
    assert (process.returncode, printed) == (2, b"")
    assert complaint.startswith(b"tidegate: no server answers at http://127.0.0.1:9 (")
    assert complaint.count(b"\n") == 1


async def test_a_command_of_which_nothing_completed_exits_with_1(tmp_path: Path) -> None:
    load, out = tmp_path / "load.csv", tmp_path / "records.jsonl"
    load.write_text("arrival_s,prompt_tokens,output_tokens\n0,8,429\n0,8,500\n", encoding="utf-8")
    async with TestServer(Server().app) as listening:
        process = await command(str(load), "--url", str(listening.make_url("")), "--out", str(out))
        printed, complaint = await process.communicate()
    assert (process.returncode, complaint) == (1, b"tidegate: none of 2 requests completed\n")
    assert b"1 failed: HTTP 429: the queue is full" in printed
    assert sorted(r.finish_reason for r in read_records(out)) == ["error", "refused"]


async def test_a_model_that_the_server_does_not_list_exits_with_2(tmp_path: Path) -> None:
    load, server = tmp_path / "load.csv", Server()
    load.write_text("arrival_s,prompt_tokens,output_tokens\n0,8,2\n", encoding="utf-8")
    async with TestServer(server.app) as listening:
        process = await command(str(load), "--url", str(listening.make_url("")), "--model", "huge")
        printed, complaint = await process.communicate()
    assert (process.returncode, printed, server.bodies) == (2, b"", [])
    assert complaint.endswith(b" has no model 'huge'; it has tiny\n")
    assert complaint.count(b"\n") == 1
