"""Swap against recompute: known sizes, and a break-even that really is the crossing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import InputError
from tidegate.executors.sim.cost import CostModel
from tidegate.executors.sim.hardware import HARDWARE, find_hardware
from tidegate.executors.sim.models import MODELS, find_model
from tidegate.executors.sim.swap import LONGEST, SwapOrRecompute

LIMIT = 3_000

links = st.floats(1e8, 2e11)
ways = st.builds(
    SwapOrRecompute,
    st.builds(CostModel, st.sampled_from([*HARDWARE.values()]), st.sampled_from([*MODELS.values()])),
    link_bandwidth=links,
    queue_s=st.sampled_from([0.0, 0.01, 0.5]),
    cached_share=st.sampled_from([0.0, 0.3, 0.9]),
    chunk=st.none() | st.integers(1, 2_048),
)


def between(model: str, hardware: str, gbps: float | None = None, tp: int = 1, **more: float) -> SwapOrRecompute:
    link = None if gbps is None else gbps * 1e9
    return SwapOrRecompute(CostModel(find_hardware(hardware), find_model(model), tp), link, **more)  # type: ignore[arg-type]


def test_the_case_that_is_often_quoted() -> None:
    """LLaMA-13B, 512 tokens, PCIe 4: about 400 MB, 12.5 ms one way, 2 KB of ids; an A100 recomputes in 60 ms."""
    price = between("llama-13b", "a100", 32).price(512)
    assert price.kv_bytes == price.host_bytes == pytest.approx(400e6, rel=0.05)
    assert price.swap_one_way_s == pytest.approx(12.5e-3, rel=0.05)
    assert price.swap_round_trip_s == 2 * price.swap_one_way_s
    assert price.token_id_bytes == 2048
    assert price.recompute_s == pytest.approx(60e-3, rel=0.05)
    assert price.cheaper == "swap"


def test_recompute_grows_no_slower_than_the_prompt_once_the_gpu_is_busy() -> None:
    """Less than linear while reading the weights dominates, more where attention does."""
    ways = between("llama-13b", "a100")
    assert ways.recompute_s(32) < 2 * ways.recompute_s(16)
    assert ways.recompute_s(4096) > 7.5 * ways.recompute_s(512)
    assert ways.recompute_s(65_536) > 2 * ways.recompute_s(32_768)


def test_a_long_request_of_a_large_model_is_more_than_10_gb() -> None:
    one, shared = between("llama-70b", "a100", tp=4), between("llama-70b", "a100", 32 / 4, tp=4)
    price = one.price(131_072)
    assert price.kv_bytes == pytest.approx(42.9e9, rel=0.01)
    assert price.swap_one_way_s == pytest.approx(42.9e9 / 4 / 32e9, rel=0.01)
    assert shared.one_way_s(131_072) == pytest.approx(4 * price.swap_one_way_s)


def test_more_gpus_than_kv_heads_copy_each_head_once() -> None:
    eight, sixteen = (between("llama-70b", "h100", tp=tp) for tp in (8, 16))
    assert eight.one_way_s(1000) == sixteen.one_way_s(1000)


@given(ways)
def test_break_even_is_the_crossing(ways: SwapOrRecompute) -> None:
    """Against looking at every length."""
    recomputed = [n for n in range(1, LIMIT + 1) if ways.recompute_s(n) <= ways.round_trip_s(n)]
    last = recomputed[-1] if recomputed else 0
    assert ways.break_even(LIMIT) == (None if last == LIMIT else last + 1)


def test_break_even_always_never_and_in_between() -> None:
    assert between("llama-13b", "a100", 32).break_even() == 1
    assert between("llama-13b", "b200", 1).break_even() is None
    tokens = (ways := between("llama-13b", "h100", 16)).break_even()
    assert tokens is not None
    assert 1 < tokens < LONGEST
    assert ways.price(tokens - 1).cheaper == "recompute"
    assert ways.price(tokens).cheaper == "swap"


@given(ways, st.integers(1, 500_000), st.floats(1, 10))
def test_a_faster_link_is_never_slower(ways: SwapOrRecompute, tokens: int, faster: float) -> None:
    better = SwapOrRecompute(ways.cost, ways.link * faster, ways.queue_s, ways.cached_share, ways.chunk)
    assert better.round_trip_s(tokens) <= ways.round_trip_s(tokens)
    assert (better.break_even() or LONGEST + 1) <= (ways.break_even() or LONGEST + 1)


@given(ways, st.integers(1, 500_000))
def test_a_longer_request_is_never_cheaper(ways: SwapOrRecompute, tokens: int) -> None:
    shorter, longer = ways.price(tokens), ways.price(tokens + 1)
    assert shorter.kv_bytes < longer.kv_bytes
    assert shorter.swap_round_trip_s < longer.swap_round_trip_s
    assert shorter.recompute_s <= longer.recompute_s * (1 + 1e-12)


def test_a_queue_delays_both_copies() -> None:
    idle, busy = between("llama-13b", "a100"), between("llama-13b", "a100", queue_s=0.1)
    assert busy.round_trip_s(512) - idle.round_trip_s(512) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"link_bandwidth": 0.0},
        {"link_bandwidth": float("nan")},
        {"queue_s": -1.0},
        {"cached_share": 1.0},
        {"chunk": 0},
    ],
)
def test_values_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    cost = between("llama-13b", "a100").cost
    with pytest.raises(InputError):
        SwapOrRecompute(cost, **wrong)  # type: ignore[arg-type]
