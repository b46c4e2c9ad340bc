"""The executor by hand-built plans: shared blocks, preemption, the pipeline, its sizes and its errors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers.modeling_utils import PreTrainedModel

from tests.executors.driver import Driver, Handle
from tests.executors.reference import assert_greedy, tiny_pair
from tidegate.core.plan import Chunk, Join, StepPlan
from tidegate.errors import ConfigError
from tidegate.executors.torch import hardware, kvcache
from tidegate.executors.torch.executor import TorchExecutor
from tidegate.executors.torch.hardware import native_dtype, read_cpu_info
from tidegate.executors.torch.kvcache import KvShape
from tidegate.executors.torch.model import LoadedModel, choose_dtype

PROMPT = [(11 * i) % 300 + 3 for i in range(29)]


@pytest.fixture(scope="module")
def tiny() -> tuple[PreTrainedModel, LoadedModel]:
    return tiny_pair("llama")


@pytest.fixture(scope="module")
def executor(tiny: tuple[PreTrainedModel, LoadedModel]) -> Iterator[TorchExecutor]:
    made = TorchExecutor(tiny[1], block_size=4, num_blocks=64, max_num_seqs=6, max_model_len=128, threads=1)
    yield made
    made.close()


def shuffled(seed: int) -> list[int]:
    return random.Random(seed).sample(range(64), 64)


def test_a_prefix_block_is_shared_by_requests_that_run_at_once(
    tiny: tuple[PreTrainedModel, LoadedModel], executor: TorchExecutor
) -> None:
    """Five blocks are computed by the first request and read by two more, which compute only their own tails."""
    driver = Driver(executor, shuffled(1), depth=2)
    first = driver.add("first", PROMPT, 20)
    driver.step({"first": 100})
    shared = first.blocks[:5]
    others = [driver.add(str(i), [*PROMPT[:20], 40 + i, 50 + i], 20, shared=list(shared)) for i in range(2)]
    driver.run()
    for work in (first, *others):
        assert_greedy(tiny[0], work.tokens[: work.prompt], work.outputs)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_request_resumes_where_it_was(
    tiny: tuple[PreTrainedModel, LoadedModel], executor: TorchExecutor, depth: int
) -> None:
    driver = Driver(executor, shuffled(2), depth)
    works = [driver.add(str(i), PROMPT[i:], 24) for i in range(3)]
    for _ in range(9):
        driver.step({w.id: 10 for w in works})
    driver.drain()
    victim = works[1]
    assert 0 < len(victim.outputs) < 24
    driver.preempt(victim)
    driver.step()
    driver.drain()
    driver.resume(victim)
    driver.run(chunk=6)
    for work in works:
        assert len(work.outputs) == 24
        assert_greedy(tiny[0], work.tokens[: work.prompt], work.outputs)


def test_a_steady_decode_reuses_its_packed_slots(executor: TorchExecutor) -> None:
    """While `plan.decodes` is the same list, the executor keys its arrays by that."""
    driver = Driver(executor, shuffled(3))
    driver.add("a", PROMPT, 9)
    driver.add("b", PROMPT, 9)
    driver.step({"a": 100, "b": 100})
    driver.step()
    packed = executor._slots._slots
    driver.step()
    assert executor._slots._slots is packed
    driver.run()


def test_every_step_says_how_long_it_took(executor: TorchExecutor) -> None:
    driver = Driver(executor, shuffled(2))
    work = driver.add("a", PROMPT, 3)
    driver.run()
    assert all(result.seconds is not None and 0 < result.seconds < 60 for result in work.results)


def test_bfloat16_runs_on_both_attentions() -> None:
    """The decode kernel on bfloat16 bits and plain torch operations agree, but for rounding far along."""
    _, half = tiny_pair("llama", dtype=torch.bfloat16)
    outputs = []
    for numba in (True, False):
        made = TorchExecutor(half, num_blocks=16, max_num_seqs=2, max_model_len=64, threads=1, numba_attention=numba)
        driver = Driver(made, list(range(16)))
        work = driver.add("a", PROMPT, 6)
        driver.run()
        outputs.append(work.outputs)
        made.close()
    assert outputs[0][:3] == outputs[1][:3]


def test_the_pool_is_sized_by_bytes_or_by_blocks(tiny: tuple[PreTrainedModel, LoadedModel]) -> None:
    loaded = tiny[1]
    shape = KvShape(loaded.layers, loaded.kv_heads, loaded.head_dim, 4, torch.float32)
    assert shape.block_bytes == 2 * 4 * 4 * 2 * 16 * 4
    made = TorchExecutor(loaded, block_size=4, kv_bytes=10 * shape.block_bytes + 5, threads=1)
    assert (made.num_blocks, made.max_model_len, made.vocab_size) == (10, 512, 320)
    assert made._slots.kv.data.nbytes == 10 * shape.block_bytes
    made.close()
    made.close()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "num_blocks or as kv_bytes"),
        ({"num_blocks": 4, "kv_bytes": 4}, "num_blocks or as kv_bytes"),
        ({"kv_bytes": 10}, "kv_memory of 10 bytes holds no block"),
        ({"kv_bytes": 900 << 40}, r"takes 921,600\.0 GiB, and .* GiB are free: lower kv_memory \(or num_blocks\)"),
        ({"kv_bytes": 99_999_999 << 40}, "lower kv_memory"),
        ({"num_blocks": 1 << 70}, "num_blocks"),
        ({"num_blocks": 4, "max_model_len": 10_000}, "more than the model's 512"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    tiny: tuple[PreTrainedModel, LoadedModel], arguments: dict[str, int], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        TorchExecutor(tiny[1], threads=1, **arguments)


def test_number_formats_by_name() -> None:
    cpu = torch.device("cpu")
    assert choose_dtype("bfloat16", cpu) is torch.bfloat16
    assert choose_dtype("auto", cpu) is native_dtype(read_cpu_info())
    assert choose_dtype("auto", torch.device("cuda")) is torch.bfloat16
    with pytest.raises(ConfigError, match="float16"):
        choose_dtype("float16", cpu)


@pytest.mark.parametrize("blocks", [1 << 40, 1 << 70])
def test_an_allocation_that_fails_is_told_in_one_sentence(
    tiny: tuple[PreTrainedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    """Where nobody can tell what is free, the allocator itself refuses."""
    monkeypatch.setattr(kvcache, "available_memory", lambda _device: None)
    with pytest.raises(ConfigError, match="cannot be allocated: lower kv_memory"):
        TorchExecutor(tiny[1], num_blocks=blocks, threads=1)


@pytest.mark.parametrize(("limit", "expected"), [("max", 5000 * 1024), ("4096", 4096), (None, 5000 * 1024)])
def test_available_memory_is_the_kernels_word_within_the_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, expected: int
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 5000 kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
    monkeypatch.setattr(hardware, "MEMORY_INFO", tmp_path / "meminfo")
    monkeypatch.setattr(hardware, "CGROUP_MEMORY", tmp_path / "memory.max")
    assert hardware.available_memory(torch.device("cpu")) == expected


@pytest.mark.parametrize(
    ("cpu_info", "dtype"),
    [
        ("model name\t: AMD\nflags\t\t: fpu avx2 avx512f avx512_bf16 vaes\n", torch.bfloat16),
        ("flags\t\t: fpu avx2 amx_tile amx_bf16\n", torch.bfloat16),
        ("processor\t: 0\nFeatures\t: fp asimd i8mm bf16\n", torch.bfloat16),
        ("processor\t: 0\nFeatures\t: fp asimd asimddp\n", torch.float32),
        ("model name\t: bf16 avx512_bf16\nflags\t\t: fpu avx2 f16c avx512f\nbugs\t\t: spectre_v1\n", torch.float32),
        ("", torch.float32),
    ],
)
def test_auto_is_bfloat16_where_the_cpu_has_instructions_for_it(cpu_info: str, dtype: torch.dtype) -> None:
    assert native_dtype(cpu_info) is dtype


def test_what_a_step_raises_its_future_raises(executor: TorchExecutor) -> None:
    """A token id outside the vocabulary fails the step, and nothing hangs."""
    join = Join(0, "bad", Handle(), [3, 10_000], 0, 0, [0])
    future = executor.submit(StepPlan(0, 0.0, chunks=[Chunk(0, 0, 2, True)], joined=[join]))
    with pytest.raises(IndexError):
        future.result(timeout=60)
