"""What every executor must do with plans that move KV to the host and back, at pipeline depth 1 and 2.

The plans are built by hand, without a scheduler, and keep the contract of `core/plan.py`.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.executors.driver import Driver, Handle
from tests.executors.reference import assert_greedy, tiny_pair
from tests.executors.swapping import BLOCK, LONGEST, POOL, SEATS, Ask, Lives
from tidegate.engine.executor import Executor
from tidegate.executors.scripted import Script, ScriptedExecutor
from tidegate.executors.torch import swap
from tidegate.executors.torch.executor import TorchExecutor
from tidegate.executors.torch.swapfile import SwapFile

MEMORY, FILE = 6, 20
SIZES = {"num_blocks": POOL, "block_size": BLOCK, "max_num_seqs": SEATS, "max_model_len": LONGEST}


class Candidate:
    """One kind of executor: how to make it, what to hang on a request, and whether its outputs are right."""

    def handle(self, outputs: int) -> object:
        raise NotImplementedError

    def make(self, depth: int, failing: bool = False) -> Executor:
        """With `failing`, no copy to the host succeeds."""
        raise NotImplementedError

    def check(self, prompt: list[int], outputs: list[int]) -> None:
        raise NotImplementedError


class Scripted(Candidate):
    def handle(self, outputs: int) -> object:
        return Script(range(400, 400 + outputs))

    def make(self, depth: int, failing: bool = False) -> Executor:
        fails = (lambda copy, out: out) if failing else ()
        return ScriptedExecutor(**SIZES, depth=depth, host_blocks=MEMORY, disk_blocks=FILE, fail_copies=fails)

    def check(self, prompt: list[int], outputs: list[int]) -> None:
        assert outputs == list(range(400, 400 + len(outputs)))


class FullDisk(SwapFile):
    def write(self, block: int, content: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Torch(Candidate):
    def __init__(self) -> None:
        self.plain, self.loaded = tiny_pair("llama")

    def handle(self, outputs: int) -> object:
        return Handle()

    def make(self, depth: int, failing: bool = False) -> Executor:
        host = 0 if failing else MEMORY
        with pytest.MonkeyPatch.context() as patch:
            if failing:
                patch.setattr(swap, "SwapFile", FullDisk)
            return TorchExecutor(self.loaded, **SIZES, threads=1, host_blocks=host, disk_blocks=MEMORY + FILE - host)

    def check(self, prompt: list[int], outputs: list[int]) -> None:
        assert_greedy(self.plain, prompt, outputs)


@pytest.fixture(scope="module", params=[Scripted, Torch])
def candidate(request: pytest.FixtureRequest) -> Candidate:
    made: Candidate = request.param()
    return made


@pytest.fixture(params=[1, 2], ids=["depth 1", "depth 2"])
def depth(request: pytest.FixtureRequest) -> int:
    return int(request.param)


Make = Callable[..., Executor]


@pytest.fixture
def make(candidate: Candidate, depth: int) -> Iterator[Make]:
    made: list[Executor] = []

    def make(failing: bool = False) -> Executor:
        made.append(candidate.make(depth, failing))
        return made[-1]

    yield make
    for executor in made:
        executor.close()


PROMPT = [(11 * i) % 300 + 3 for i in range(13)]


def test_it_says_how_many_host_blocks_there_are(make: Make) -> None:
    executor = make()
    assert executor.host_blocks + executor.disk_blocks == MEMORY + FILE


@pytest.mark.parametrize("first", [0, MEMORY - 2, MEMORY], ids=["memory", "both", "file"])
def test_a_decode_goes_on_where_it_was(candidate: Candidate, make: Make, depth: int, first: int) -> None:
    """Another request takes its blocks in the very step that copies them, and computes there."""
    driver = Driver(make(), list(range(POOL)), depth)
    work = driver.add("goes", PROMPT, 9, candidate.handle(9))
    for _ in range(4):
        driver.step({"goes": 20})
    held = list(work.blocks)
    driver.swap_out(work, list(range(first, first + 5)))
    driver.free += [driver.free.pop(driver.free.index(block)) for block in held]
    other = driver.add("other", PROMPT[::-1], 4, candidate.handle(4))
    assert set(other.blocks) <= set(held)
    driver.step({"other": 20})
    driver.drain()
    driver.swap_in(work)
    driver.run()
    for each in (work, other):
        assert len(each.outputs) == each.max_tokens
        candidate.check(each.tokens[: each.prompt], each.outputs)


def test_a_step_may_copy_and_compute_nothing(candidate: Candidate, make: Make, depth: int) -> None:
    driver = Driver(make(), list(range(POOL)), depth)
    work = driver.add("a", PROMPT, 5, candidate.handle(5))
    driver.step({"a": 7})
    driver.swap_out(work, list(range(4)))
    driver.step()
    driver.swap_in(work)
    driver.step()
    driver.drain()
    assert work.outputs == []
    assert not work.lost
    driver.run()
    candidate.check(PROMPT, work.outputs)


def test_a_failed_copy_is_named_and_the_step_goes_on(candidate: Candidate, make: Make, depth: int) -> None:
    """Whoever stays gets its token in that step; whoever was to go is computed anew, to the same tokens."""
    driver = Driver(make(failing=True), list(range(POOL)), depth)
    stays = driver.add("stays", PROMPT, 9, candidate.handle(9))
    goes = driver.add("goes", PROMPT[2:], 9, candidate.handle(9))
    driver.step({"stays": 20, "goes": 20})
    driver.swap_out(goes, list(range(8)))
    driver.step()
    driver.drain()
    assert goes.lost
    assert len(stays.outputs) == 2
    driver.resume(goes)
    driver.run()
    for work in (stays, goes):
        candidate.check(work.tokens[: work.prompt], work.outputs)


def test_what_never_reached_the_host_fails_to_come_back(candidate: Candidate, make: Make, depth: int) -> None:
    """At depth 2 the way back may be planned before the way out is known to have failed."""
    driver = Driver(make(failing=True), list(range(POOL)), depth)
    work = driver.add("a", PROMPT, 9, candidate.handle(9))
    driver.step({"a": 7})
    driver.drain()
    driver.swap_out(work, list(range(8)))
    driver.step()
    if depth == 2:
        driver.swap_in(work)
        driver.step()
        driver.drain()
        assert work.lost
        driver.preempt(work)
    driver.resume(work)
    driver.run()
    candidate.check(PROMPT, work.outputs)


lengths = st.lists(st.tuples(st.integers(1, 26), st.integers(1, 12)), min_size=1, max_size=5)


@given(lengths=lengths, seed=st.integers(0, 1 << 32))
@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_any_mix_of_chunks_decodes_and_copies(
    candidate: Candidate, make: Make, depth: int, lengths: list[tuple[int, int]], seed: int
) -> None:
    rng = random.Random(seed)
    asks = [Ask(tuple(rng.choices(range(3, 320), k=p)), o, candidate.handle(o)) for p, o in lengths]
    executor = make()
    works = Lives(executor, asks, rng, depth).run()
    executor.close()
    assert [len(work.outputs) for work in works] == [o for _, o in lengths]
    for work in works:
        candidate.check(work.tokens[: work.prompt], work.outputs)
