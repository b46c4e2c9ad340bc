"""KV that went to the host and came back: tokens are those of plain transformers, and a failure harms only its own."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from transformers.modeling_utils import PreTrainedModel

from tests.executors.driver import Driver, Handle, Work
from tests.executors.reference import assert_greedy, tiny_pair
from tests.executors.swapping import BLOCK, LONGEST, POOL, SEATS, Ask, Lives
from tidegate.core.plan import Copy, StepPlan
from tidegate.errors import ConfigError
from tidegate.executors.torch import swap
from tidegate.executors.torch.executor import TorchExecutor
from tidegate.executors.torch.kvcache import KvShape, PagedKv
from tidegate.executors.torch.link import CudaLink, allocate
from tidegate.executors.torch.model import LoadedModel
from tidegate.executors.torch.swap import HostPool
from tidegate.executors.torch.swapfile import SwapFile

MEMORY, FILE = 8, 24
CPU = torch.device("cpu")
SHAPE = KvShape(layers=3, kv_heads=2, head_dim=4, block_size=4, dtype=torch.float32)


@pytest.fixture(scope="module")
def tiny() -> tuple[PreTrainedModel, LoadedModel]:
    return tiny_pair("llama")


def make_executor(loaded: LoadedModel, directory: Path | None = None, **given: object) -> TorchExecutor:
    sizes = {"block_size": BLOCK, "num_blocks": POOL, "max_num_seqs": SEATS, "max_model_len": LONGEST, "threads": 1}
    tiers = {"host_blocks": MEMORY, "disk_blocks": FILE, "disk_path": directory}
    return TorchExecutor(loaded, **{**sizes, **tiers, **given})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def executor(tiny: tuple[PreTrainedModel, LoadedModel]) -> Iterator[TorchExecutor]:
    made = make_executor(tiny[1])
    yield made
    made.close()


prompts = st.lists(st.integers(3, 319), min_size=1, max_size=26).map(tuple)
asks = st.lists(st.builds(Ask, prompts, st.integers(1, 16), st.builds(Handle)), min_size=1, max_size=5)


def check_tokens(plain: PreTrainedModel, works: list[Work], asks: list[Ask]) -> None:
    assert len(works) == len(asks)
    for work in works:
        assert len(work.outputs) == work.max_tokens
        assert_greedy(plain, work.tokens[: work.prompt], work.outputs)


@given(asks=asks, seed=st.integers(0, 1 << 32), depth=st.sampled_from([1, 2]))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_tokens_are_the_same_through_any_mix_of_copies(
    tiny: tuple[PreTrainedModel, LoadedModel], asks: list[Ask], seed: int, depth: int
) -> None:
    """Chunks of any size from anywhere, decodes, blocks filled in part, other requests in the blocks that were left."""
    executor = make_executor(tiny[1])
    try:
        lives = Lives(executor, asks, random.Random(seed), depth)
        check_tokens(tiny[0], lives.run(), asks)
        assert lives.events["lost"] == 0
    finally:
        executor.close()
    event(f"swapped: {min(lives.events['in'], 2)} times or more")


@given(asks=asks, seed=st.integers(0, 1 << 32), depth=st.sampled_from([1, 2]))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_disk_that_fails_now_and_then_costs_no_token(
    tiny: tuple[PreTrainedModel, LoadedModel], asks: list[Ask], seed: int, depth: int
) -> None:
    coin = random.Random(~seed)

    class Flaky(SwapFile):
        def write(self, block: int, content: object) -> None:
            if coin.random() < 0.2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().write(block, content)  # type: ignore[arg-type]

        def read(self, block: int, content: object) -> None:
            if coin.random() < 0.2:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().read(block, content)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swap, "SwapFile", Flaky)
        executor = make_executor(tiny[1], host_blocks=2)
    try:
        lives = Lives(executor, asks, random.Random(seed), depth)
        check_tokens(tiny[0], lives.run(), asks)
    finally:
        executor.close()
    event(f"lost: {lives.events['lost'] > 0}")


def test_the_random_lives_do_what_they_are_for(tiny: tuple[PreTrainedModel, LoadedModel]) -> None:
    """A fixed load reaches every case that the properties above speak of."""
    rng = random.Random(5)
    load = [Ask(tuple(rng.choices(range(3, 320), k=rng.randint(5, 26))), 20, Handle()) for _ in range(12)]
    executor = make_executor(tiny[1])
    lives = Lives(executor, load, rng, depth=2)
    check_tokens(tiny[0], lives.run(), load)
    executor.close()
    assert all(lives.events[what] > 2 for what in ("in", "token in flight", "block filled in part", "in prefill"))
    assert executor.copied_bytes > 0
    assert executor.copy_seconds > 0


@pytest.mark.parametrize("numba", [True, False])
@pytest.mark.parametrize("start", [3, 4, 13, 14])
def test_a_chunk_may_start_in_the_middle_of_a_block(
    tiny: tuple[PreTrainedModel, LoadedModel], numba: bool, start: int
) -> None:
    """Prefill is cut at `start`, goes to the host and back into other blocks, and goes on from there."""
    executor = make_executor(tiny[1], numba_attention=numba)
    driver = Driver(executor, list(range(POOL)))
    prompt = [(11 * i) % 300 + 3 for i in range(21)]
    work = driver.add("a", prompt, 6)
    driver.step({"a": start})
    before = list(work.blocks)
    driver.swap_out(work, list(range(MEMORY)))
    driver.step()
    driver.swap_in(work)
    driver.step()
    assert set(work.blocks).isdisjoint(before)
    driver.run(chunk=5)
    executor.close()
    assert_greedy(tiny[0], prompt, work.outputs)


def filled_pool(host: int, disk: int, directory: Path | None = None, blocks: int = 6) -> tuple[PagedKv, HostPool]:
    kv = PagedKv(SHAPE, blocks, CPU)
    kv.data.copy_(torch.randn(kv.data.shape, generator=torch.Generator().manual_seed(0)))
    return kv, HostPool(kv, host, disk, directory)


def copy_out(pool: HostPool, *copies: Copy) -> list[str]:
    pool.start(StepPlan(0, 0.0, swapped_out=list(copies)))
    return pool.finish().failed


def copy_in(pool: HostPool, *copies: Copy) -> list[str]:
    pool.start(StepPlan(0, 0.0, swapped_in=list(copies)))
    return pool.finish().failed


@pytest.mark.parametrize(("host", "disk"), [(5, 0), (0, 5), (2, 3)])
@pytest.mark.parametrize("bounce", [1, 2, 100])
def test_blocks_come_back_bit_for_bit(host: int, disk: int, bounce: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through memory, the file, or both at once; pieces smaller than the copy; other blocks stay as they are."""
    monkeypatch.setattr(swap, "BOUNCE_BYTES", bounce * SHAPE.block_bytes)
    kv, pool = filled_pool(host, disk)
    before = kv.data.clone()
    assert copy_out(pool, Copy("a", [4, 0, 2], [3, 1, 4])) == []
    kv.data[:, :, [0, 2, 4]] = 7.0
    assert copy_in(pool, Copy("a", [1, 5, 3], [3, 1, 4])) == []
    assert torch.equal(kv.data[:, :, [1, 5, 3]], before[:, :, [4, 0, 2]])
    assert (kv.data[:, :, [0, 2, 4]] == 7.0).all()
    assert pool.copied_bytes == 6 * SHAPE.block_bytes
    pool.close()


def test_a_bfloat16_pool_is_copied_as_well() -> None:
    shape = KvShape(layers=2, kv_heads=1, head_dim=2, block_size=3, dtype=torch.bfloat16)
    kv = PagedKv(shape, 4, CPU)
    kv.data.copy_(torch.randn(kv.data.shape))
    pool = HostPool(kv, 2, 2)
    assert copy_out(pool, Copy("a", [0, 1], [1, 2])) == []
    assert copy_in(pool, Copy("a", [3, 2], [1, 2])) == []
    assert torch.equal(kv.data[:, :, [3, 2]], kv.data[:, :, [0, 1]])
    pool.close()


class Device:
    """Stands in for torch.cuda: everything runs at once, and `told` is the order of what would order it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        self.made = 0
        patch.setattr(torch.cuda, "Stream", lambda _device: self)
        patch.setattr(torch.cuda, "Event", self.event)
        patch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda _device: self)

    def event(self, enable_timing: bool = False) -> Event:
        self.made += 1
        return Event(self, ("began", "ended", "gathered")[self.made - 1])

    def wait_stream(self, _stream: object) -> None:
        self.told.append("copies wait for compute")

    def wait_event(self, event: Event) -> None:
        self.told.append(f"compute waits for {event.name}")

    def synchronize(self) -> None:
        self.told.append("host waits")


class Event:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def record(self, _stream: object) -> None:
        self.device.told.append(self.name)

    def synchronize(self) -> None:
        self.device.told.append(f"host waits for {self.name}")

    def elapsed_time(self, _other: Event) -> float:
        return 250.0


@pytest.mark.parametrize("piece", [1, 2, 100])
def test_the_way_to_a_gpu_moves_the_right_blocks(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indices, shapes, and what is told to wait for what; that a device then does so is tested nowhere."""
    device = Device(monkeypatch)
    monkeypatch.setattr(CudaLink, "PIECE_BYTES", piece * SHAPE.block_bytes)
    data = torch.randn(SHAPE.layers, 2, 6, 4, 2, 4)
    before = data.clone()
    link, memory = CudaLink(data), allocate(5, data)
    link.start()
    link.out([4, 0, 2], [3, 1, 4], memory)
    assert device.told[:2] == ["copies wait for compute", "began"]
    assert device.told[2:] == ["gathered"] * -(-3 // piece) + ["compute waits for gathered"]
    data[:, :, [0, 2, 4]] = 7.0
    link.back([1, 5, 3], [3, 1, 4], memory)
    assert link.finish() == 0.25
    assert device.told[-2:] == ["ended", "host waits for ended"]
    assert torch.equal(data[:, :, [1, 5, 3]], before[:, :, [4, 0, 2]])
    assert (data[:, :, [0, 2, 4]] == 7.0).all()


def test_a_full_disk_fails_one_copy_and_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The copy that met it is named with its reason; the next works, and what never arrived is never brought back."""
    kv, pool = filled_pool(2, 3)
    before = kv.data.clone()
    real = os.pwrite

    def full(fd: int, data: memoryview, offset: int) -> int:
        if offset >= SHAPE.block_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with caplog.at_level(logging.WARNING):
        failed = copy_out(pool, Copy("bad", [0, 1], [2, 3]), Copy("good", [2, 3], [0, 1]))
    assert failed == ["bad"]
    assert "request bad to the host failed: [Errno 28]" in caplog.text
    monkeypatch.setattr(os, "pwrite", real)
    assert copy_in(pool, Copy("bad", [4, 5], [2, 3]), Copy("good", [0, 1], [0, 1])) == ["bad"]
    assert torch.equal(kv.data[:, :, [0, 1]], before[:, :, [2, 3]])
    assert torch.equal(kv.data[:, :, [4, 5]], before[:, :, [4, 5]])
    assert copy_out(pool, Copy("again", [2], [3])) == []
    monkeypatch.setattr(os, "pwrite", full)
    assert copy_out(pool, Copy("over it", [4], [3])) == ["over it"]  # what was there before is half overwritten
    assert copy_in(pool, Copy("over it", [5], [3])) == ["over it"]
    pool.close()


def test_short_reads_and_writes_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may take and give less than a block at once; an early end is a failed copy."""
    kv, pool = filled_pool(0, 2)
    before = kv.data.clone()
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:100], at))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: read(fd, [buffers[0][:70]], at))
    assert copy_out(pool, Copy("a", [0, 1], [1, 0])) == []
    assert copy_in(pool, Copy("a", [3, 4], [1, 0])) == []
    assert torch.equal(kv.data[:, :, [3, 4]], before[:, :, [0, 1]])
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: 0)
    assert copy_in(pool, Copy("a", [3, 4], [1, 0])) == ["a"]
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)
    assert copy_out(pool, Copy("a", [0, 1], [1, 0])) == ["a"]
    pool.close()


def test_a_failed_copy_is_reported_with_the_tokens_of_the_others(
    tiny: tuple[PreTrainedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(tiny[1], host_blocks=0)
    driver = Driver(executor, list(range(POOL)))
    stays, goes = driver.add("stays", [5, 6, 7, 8, 9], 8), driver.add("goes", [9, 8, 7, 6, 5], 8)
    driver.step({"stays": 9, "goes": 9})

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(SwapFile, "write", fails)
    driver.swap_out(goes, list(range(8)))
    driver.step()
    assert goes.lost
    assert len(stays.outputs) == 2
    driver.resume(goes)
    driver.run()
    executor.close()
    for work in (stays, goes):
        assert_greedy(tiny[0], work.tokens[: work.prompt], work.outputs)


def test_a_plan_that_swaps_needs_a_pool(tiny: tuple[PreTrainedModel, LoadedModel]) -> None:
    without = make_executor(tiny[1], host_blocks=0, disk_blocks=0)
    with pytest.raises(ValueError, match="step 0 swaps, and there is no host pool"):
        without.submit(StepPlan(0, 0.0, swapped_out=[Copy("a", [0], [0])])).result(timeout=60)
    without.close()


def test_a_host_block_that_is_not_there_is_a_fault_and_no_failed_copy() -> None:
    _, pool = filled_pool(2, 0)
    with pytest.raises(IndexError):
        copy_out(pool, Copy("a", [0], [2]))
    pool.close()


def test_sizes_in_bytes_and_what_is_counted(tiny: tuple[PreTrainedModel, LoadedModel]) -> None:
    block = KvShape(tiny[1].layers, tiny[1].kv_heads, tiny[1].head_dim, BLOCK, torch.float32).block_bytes
    made = make_executor(tiny[1], host_kv_bytes=5 * block + 1, disk_kv_bytes=7 * block)
    assert (made.host_blocks, made.disk_blocks) == (5, 7)
    assert made._host is not None
    assert made._host.nbytes == (5 + 7) * block  # the bounce buffer holds the whole of so small a file
    made.close()
    made.close()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"host_kv_bytes": 10}, "host_kv_memory of 10 bytes holds no block"),
        ({"disk_kv_bytes": 10}, "disk_kv_memory of 10 bytes holds no block"),
        ({"host_kv_bytes": 900 << 40}, r"lower host_kv_memory \(or host_blocks\)"),
        ({"disk_blocks": 1 << 60}, r"has no room for .* GiB of KV .*: lower disk_kv_memory \(or disk_blocks\)"),
        ({"disk_path": Path("/does/not/exist")}, "disk_kv_path /does/not/exist: no file can be made there"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    tiny: tuple[PreTrainedModel, LoadedModel], given: dict[str, object], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        make_executor(tiny[1], **given)  # type: ignore[arg-type]


def test_memory_that_the_device_pool_was_promised_is_not_given_away_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU both pools lie in the same memory, of which nothing is used before it is written."""
    monkeypatch.setattr(swap, "available_memory", lambda _device: 10 * SHAPE.block_bytes)
    filled_pool(4, 0)[1].close()
    with pytest.raises(ConfigError, match=r"beside 0\.0 GiB of KV"):
        filled_pool(5, 0)


def test_the_file_is_private_has_no_name_and_takes_its_space_at_once(tmp_path: Path) -> None:
    file = SwapFile(4, 1 << 16, tmp_path)
    told = os.fstat(file.fileno())
    assert stat.S_IMODE(told.st_mode) == 0o600
    assert told.st_nlink == 0
    assert told.st_size == 4 << 16
    assert told.st_blocks * 512 >= 4 << 16
    assert list(tmp_path.iterdir()) == []
    file.close()
    file.close()


HOLDER = """
import sys, time
from pathlib import Path
from tidegate.executors.torch.swapfile import SwapFile
file = SwapFile(4, 1 << 16, Path(sys.argv[1]))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_file_goes_with_the_process_however_it_ends(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        held = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert any(str(tmp_path) in target for target in held)
        process.send_signal(number)
        assert process.wait(timeout=30) == -number
    assert list(tmp_path.iterdir()) == []
