"""The engine: what clients get from it, and what it leaves behind, whatever happens to them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tests.server.scripted_model import Answer, ScriptedModel, goes_on, says, small_tokenizer
from tidegate.config import resolve
from tidegate.core.events import Event, Finished
from tidegate.core.plan import StepPlan
from tidegate.core.request import FinishReason, Request
from tidegate.core.scheduler import Scheduler
from tidegate.core.step_time import LearnedStepTime
from tidegate.engine import loop
from tidegate.engine.loop import Engine
from tidegate.engine.output import Delta, OutputState
from tidegate.engine.sampling import SamplingParams
from tidegate.engine.stream import Stream
from tidegate.errors import EngineDead, RequestRefused

EOS = small_tokenizer().eos_token_id
BACKEND = small_tokenizer().backend_tokenizer


class Ends:
    """An observer that counts ends and steps."""

    def __init__(self) -> None:
        self.reasons: list[FinishReason] = []
        self.steps = 0

    def events(self, events: Sequence[Event]) -> None:
        self.reasons += [e.reason for e in events if isinstance(e, Finished)]

    def step(self, plan: StepPlan, seconds: float) -> None:
        assert seconds >= 0
        self.steps += 1


@contextmanager
def engine_over(model: Any, depth: int = 2, **scheduler: Any) -> Iterator[Engine]:
    config = resolve({"scheduler": {"max_num_seqs": model.max_num_seqs, "headroom": "none", **scheduler}})
    limits = config.limits(model.num_blocks, model.max_model_len)
    engine = Engine(Scheduler(config.build_policy(), limits), model, depth=depth, observers=[Ends()])
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def ask(engine: Engine, name: str, prompt: Sequence[int] = (11, 12, 13), max_tokens: int = 8, **params: Any) -> Request:
    handle = OutputState(SamplingParams(**params), BACKEND, [EOS], list(prompt))
    now = engine.clock.now()
    return Request(name, token_ids=prompt, max_tokens=max_tokens, arrival=now, handle=handle)


async def read(stream: Stream) -> list[Delta]:
    outputs = [Delta() for _ in stream.request_ids]
    async for index, delta in stream:
        outputs[index].absorb(delta)
    return outputs


async def nothing_left(engine: Engine) -> bool:
    """Once the steps in flight are through, no request, seat or block is held."""
    for _ in range(200):
        now = await engine.snapshot()
        if (now.waiting, now.running, now.available_blocks) == (0, 0, now.num_blocks):
            return True
        await asyncio.sleep(0.01)
    return False


@pytest.mark.parametrize("depth", [1, 2])
async def test_every_stream_gets_its_own_tokens_in_order_through_preemptions(depth: int) -> None:
    answer: Answer = lambda prompt, seed: [(prompt[0] * i) % 200 + 20 for i in range(1, 40)] + [EOS]  # noqa: E731
    model = ScriptedModel(answer, num_blocks=8, max_num_seqs=4, depth=depth)
    with engine_over(model, depth) as engine:
        stream = await engine.submit([ask(engine, f"r{i}", [i + 3] * (5 + i), 40) for i in range(12)])
        for i, output in enumerate(await read(stream)):
            assert output.token_ids == answer([i + 3], None)
            assert output.finish_reason is FinishReason.STOP
            assert output.usage is not None
            assert output.usage.completion_tokens == 40
        assert await nothing_left(engine)
        explained = [await engine.explain(f"r{i}") for i in range(12)]
        assert sum(e["preemptions"] for e in explained if e) > 0


@pytest.mark.parametrize("short", [0, 1_000_000], ids=["in a thread", "at once"])
async def test_prompts_are_hashed_before_they_come_to_the_engines_thread(
    monkeypatch: pytest.MonkeyPatch, short: int
) -> None:
    monkeypatch.setattr(loop, "SHORT_PROMPT", short)
    hashed: list[int] = []
    add = Scheduler.add
    monkeypatch.setattr(Scheduler, "add", lambda self, r, now: (hashed.append(len(r.block_hashes)), add(self, r, now)))
    with engine_over(ScriptedModel(says("the tide"))) as engine:
        await read(await engine.submit([ask(engine, "a", range(10, 60))]))
    assert hashed == [50 // 16]


async def test_requests_submitted_together_share_a_stream() -> None:
    model = ScriptedModel(lambda prompt, seed: [seed or 0] * 3 + [EOS])
    with engine_over(model) as engine:
        stream = await engine.submit([ask(engine, f"s-{i}", seed=30 + i) for i in range(5)])
        assert [o.token_ids[:3] for o in await read(stream)] == [[30 + i] * 3 for i in range(5)]


async def test_a_slow_reader_gets_everything_merged() -> None:
    with engine_over(ScriptedModel(says("the tide comes in"))) as engine:
        stream = await engine.submit([ask(engine, "slow", max_tokens=64)])
        assert await nothing_left(engine)
        deltas = [delta async for _, delta in stream]
        assert [d.text for d in deltas] == ["the tide comes in"]


async def test_a_step_is_handed_over_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ScriptedModel(goes_on)
    with engine_over(model) as engine:
        model.gate.clear()
        streams = [await engine.submit([ask(engine, f"r{i}", max_tokens=50)]) for i in range(8)]
        loop = asyncio.get_running_loop()
        original, calls = loop.call_soon_threadsafe, []

        def counted(callback: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(callback)
            return original(callback, *args, **kwargs)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        model.gate.set()
        outputs = await asyncio.gather(*map(read, streams))
        assert all(len(o[0].token_ids) == 50 for o in outputs)
        assert 1 <= len(calls) <= engine.observers[0].steps  # type: ignore[attr-defined]


@pytest.mark.parametrize("depth", [1, 2])
async def test_an_abort_frees_seat_and_blocks_and_says_so(depth: int) -> None:
    model = ScriptedModel(goes_on, max_num_seqs=1, step_seconds=0.001, depth=depth)
    with engine_over(model, depth) as engine:
        first = await engine.submit([ask(engine, "first", max_tokens=400)])
        queued = await engine.submit([ask(engine, "queued", max_tokens=400)])
        last = await engine.submit([ask(engine, "last", max_tokens=4)])
        await anext(first)
        queued.abort()
        first.abort()
        assert (await read(first))[0].finish_reason is FinishReason.CANCELLED
        never = (await read(queued))[0]
        assert (never.token_ids, never.finish_reason) == ([], FinishReason.CANCELLED)
        assert len((await read(last))[0].token_ids) == 4
        first.abort()
        assert await nothing_left(engine)


async def test_a_group_is_taken_whole_or_not_at_all() -> None:
    model = ScriptedModel(goes_on, max_num_seqs=2)
    with engine_over(model, max_waiting=4) as engine:
        model.gate.clear()
        running = [await engine.submit([ask(engine, f"r{i}", max_tokens=4)]) for i in range(2)]
        with pytest.raises(RequestRefused, match="wait") as refusal:
            await engine.submit([ask(engine, f"g-{i}") for i in range(7)])
        assert refusal.value.reason == "queue_full"
        assert refusal.value.retry_after is not None
        model.gate.set()
        await asyncio.gather(*map(read, running))
        assert await nothing_left(engine)


async def test_giving_up_while_the_door_decides_leaves_nothing_behind() -> None:
    model = ScriptedModel(goes_on, step_seconds=0.002)
    with engine_over(model) as engine:
        for i in range(50):
            waiting = asyncio.ensure_future(engine.submit([ask(engine, f"r{i}", max_tokens=400)]))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert await nothing_left(engine)


async def test_a_parked_request_starts_by_itself() -> None:
    with engine_over(ScriptedModel(says("now"))) as engine:
        request = ask(engine, "parked", max_tokens=16)
        request.not_before = engine.clock.now() + 0.05
        outputs = await read(await engine.submit([request]))
        assert outputs[0].text == "now"
        assert engine.clock.now() >= request.not_before


@pytest.mark.parametrize("depth", [1, 2])
async def test_when_a_step_fails_every_waiting_client_hears_of_it(depth: int) -> None:
    model = ScriptedModel(goes_on, max_num_seqs=2, step_seconds=0.001, depth=depth)
    with engine_over(model, depth) as engine:
        streams = [await engine.submit([ask(engine, f"r{i}", max_tokens=400)]) for i in range(4)]
        await anext(streams[0])
        model.fail = RuntimeError("the device fell off the bus")
        for stream in streams:
            with pytest.raises(EngineDead, match="fell off the bus"):
                await read(stream)
        assert engine.health == "dead"
        with pytest.raises(EngineDead):
            await engine.submit([ask(engine, "late")])
        with pytest.raises(EngineDead):
            await engine.explain("r0")


async def test_when_the_scheduler_fails_every_waiting_client_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("a bug")

    with engine_over(ScriptedModel(goes_on, step_seconds=0.001)) as engine:
        stream = await engine.submit([ask(engine, "r", max_tokens=400)])
        await anext(stream)
        monkeypatch.setattr(engine._scheduler, "apply", broken)
        with pytest.raises(EngineDead, match="a bug"):
            await read(stream)


async def test_a_used_id_kills_nobody() -> None:
    with engine_over(ScriptedModel(goes_on, step_seconds=0.001)) as engine:
        stream = await engine.submit([ask(engine, "same", max_tokens=20)])
        with pytest.raises(ValueError, match="in use"):
            await engine.submit([ask(engine, "same")])
        assert len((await read(stream))[0].token_ids) == 20


async def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    model = ScriptedModel(goes_on, max_num_seqs=1, step_seconds=0.001)
    with engine_over(model) as engine:
        streams = [await engine.submit([ask(engine, f"r{i}", max_tokens=20)]) for i in range(3)]
        draining = asyncio.ensure_future(engine.drain(20))
        await asyncio.sleep(0)
        assert engine.health == "draining"
        with pytest.raises(RequestRefused) as refusal:
            await engine.submit([ask(engine, "late")])
        assert refusal.value.reason == "draining"
        assert [len((await read(s))[0].token_ids) for s in streams] == [20] * 3
        assert await draining


async def test_draining_has_an_end() -> None:
    with engine_over(ScriptedModel(goes_on, step_seconds=0.01)) as engine:
        stream = await engine.submit([ask(engine, "long", max_tokens=500)])
        assert not await engine.drain(0.05)
        with pytest.raises(EngineDead, match="shut down"):
            await read(stream)
        assert await nothing_left(engine)


async def test_an_idle_engine_drains_at_once() -> None:
    with engine_over(ScriptedModel(goes_on)) as engine:
        assert await engine.drain(20)


async def test_stopping_ends_every_stream() -> None:
    with engine_over(ScriptedModel(goes_on, step_seconds=0.001)) as engine:
        stream = await engine.submit([ask(engine, "r", max_tokens=400)])
        await anext(stream)
    with pytest.raises(EngineDead, match="stopped"):
        await read(stream)


async def clients_that_leave(engine: Engine, dice: random.Random, count: int) -> AsyncIterator[tuple[Stream, int]]:
    for i in range(count):
        yield await engine.submit([ask(engine, f"c{i}", [i % 50 + 3] * dice.randrange(1, 60), 60)]), dice.randrange(40)


@pytest.mark.parametrize("depth", [1, 2])
async def test_every_request_ends_once_and_no_block_leaks_when_clients_leave_at_random(depth: int) -> None:
    dice = random.Random(depth)
    model = ScriptedModel(goes_on, num_blocks=24, max_num_seqs=6, depth=depth)

    async def leave_after(stream: Stream, tokens: int) -> None:
        seen = 0
        async for _, delta in stream:
            seen += len(delta.token_ids)
            if seen >= tokens:
                stream.abort()

    with engine_over(model, depth) as engine:
        left = [asyncio.ensure_future(leave_after(*c)) async for c in clients_that_leave(engine, dice, 120)]
        await asyncio.gather(*left)
        assert await nothing_left(engine)
        engine._scheduler.kv.check()
        assert len(engine.observers[0].reasons) == 120  # type: ignore[attr-defined]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("told", [None, 7.0])
async def test_the_scheduler_learns_how_long_steps_take(depth: int, told: float | None) -> None:
    """From the executor's own word, or from the clock where it says nothing."""
    model = ScriptedModel(goes_on, step_seconds=0.005, depth=depth)
    if told is not None:
        model.checker.seconds_of = lambda _: told
    with engine_over(model, depth) as engine:
        await read(await engine.submit([ask(engine, "r", max_tokens=60)]))
        learned = engine._scheduler.ctx.step_time
        assert learned.decode != LearnedStepTime().decode
        assert (learned.decode > 3.0) == (told is not None)
