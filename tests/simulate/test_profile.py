"""What is measured of a workload, against numbers worked out by hand or another way."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.simulate.profile import prefix_hit, profile
from tidegate.simulate.traces import load_workload
from tidegate.simulate.workload import Workload, WorkloadRequest


def at(*arrivals: float) -> Workload:
    return Workload("w", tuple(WorkloadRequest(t, 10, 5) for t in arrivals))


def sharing(tokens: int, *ids: int, block: int = 10) -> WorkloadRequest:
    return WorkloadRequest(0.0, tokens, 1, hash_ids=ids, hash_block_tokens=block)


def test_rates_and_bursts() -> None:
    shown = profile(at(0, 1, 2, 3, 64, 64, 64, 64, 64, 120))
    assert (shown.requests, shown.duration_s, shown.rate_s) == (10, 120, 9 / 120)
    assert shown.peak_minute_rate_s == 5 / 60
    gaps = np.array([1, 1, 1, 61, 0, 0, 0, 0, 56])
    assert shown.gap_cv == pytest.approx(gaps.std() / gaps.mean())
    assert shown.window_s == math.ceil(120 / 9)
    assert sum(shown.arrivals_per_bin) == 10


def test_a_poisson_process_has_one_of_each() -> None:
    shown = profile(load_workload("poisson:rate=20,count=60000,prompt=1,output=1"))
    assert (shown.gap_cv, shown.dispersion) == pytest.approx((1, 1), rel=0.05)


def test_bursts_disperse_and_even_arrivals_do_not() -> None:
    on_off = profile(load_workload("onoff:rate=20,on=10s,off=30s,count=20000,prompt=1,output=1"))
    assert on_off.dispersion is not None
    assert on_off.dispersion > 10
    even = profile(load_workload("steady:rate=20,count=2000,prompt=1,output=1"))
    assert (even.gap_cv, even.dispersion) == pytest.approx((0, 0), abs=0.01)


@pytest.mark.parametrize("arrivals", [(0.0,), (3.0,), (3.0, 3.0, 3.0), (0.0, 1e-9), (0.0, 1e9)])
def test_few_and_far_arrivals_are_no_fault(arrivals: tuple[float, ...]) -> None:
    shown = profile(at(*arrivals))
    assert shown.requests == sum(shown.arrivals_per_bin) == len(arrivals)
    assert shown.rate_s is None or shown.rate_s > 0


@given(st.lists(st.tuples(st.integers(1, 10_000), st.integers(1, 5_000)), min_size=1, max_size=60))
def test_lengths_are_nearest_ranks_and_histograms_count_everybody(lengths: list[tuple[int, int]]) -> None:
    shown = profile(Workload("w", tuple(WorkloadRequest(0.0, p, o) for p, o in lengths)))
    prompts = sorted(p for p, _ in lengths)
    for percent, value in ((50, shown.prompt_tokens.p50), (90, shown.prompt_tokens.p90), (99, shown.prompt_tokens.p99)):
        assert value == prompts[math.ceil(percent / 100 * len(prompts)) - 1]
    assert (shown.prompt_tokens.min, shown.prompt_tokens.max) == (prompts[0], prompts[-1])
    assert shown.prompt_tokens.total == sum(prompts)
    assert sum(shown.output_histogram.values()) == len(lengths)
    for most, count in shown.prompt_histogram.items():
        assert count == sum(most // 2 < p <= most or p == most == 1 for p in prompts)


def test_classes_and_tenants_are_counted_the_largest_first() -> None:
    shown = profile(load_workload(["azure-conv:first=30,batch", "vtc-real:first=70"]))
    assert [(name, g.requests, g.share) for name, g in shown.classes.items()] == [
        ("interactive", 70, 0.7),
        ("batch", 30, 0.3),
    ]
    assert {name: sum(counts) for name, counts in shown.class_arrivals_per_bin.items()} == {
        "batch": 30,
        "interactive": 70,
    }
    counts = [g.requests for g in shown.tenants.values()]
    assert counts == sorted(counts, reverse=True)
    assert shown.tenants["default"].requests == 30
    assert sum(g.prompt_tokens for g in shown.tenants.values()) == shown.prompt_tokens.total


def test_mooncake_hits_what_its_paper_says() -> None:
    """36.6 % of blocks; in tokens a little more, as a prompt's last block, rarely shared, is seldom full."""
    hit = prefix_hit(load_workload("mooncake-conversation"))
    assert hit is not None
    assert hit.blocks == pytest.approx(0.366, abs=0.001)
    assert hit.tokens == pytest.approx(0.374, abs=0.001)


def test_no_hash_ids_say_nothing_of_sharing() -> None:
    assert prefix_hit(at(0, 1)) is None


def test_hits_end_at_the_first_unknown_block() -> None:
    hit = prefix_hit([sharing(30, 1, 2, 3), sharing(30, 1, 9, 3)])
    assert hit is not None
    assert (hit.tokens, hit.blocks) == (10 / 60, 1 / 6)


def test_of_a_block_that_grew_only_its_beginning_is_a_hit() -> None:
    hit = prefix_hit([sharing(15, 1, 2), sharing(40, 1, 2, 3, 4), sharing(12, 1, 2)])
    assert hit is not None
    assert hit.tokens == (15 + 12) / (15 + 40 + 12)
    assert hit.blocks == (1 + 2) / (2 + 4 + 2)


def test_ids_of_other_blocks_sizes_are_other_blocks_and_what_has_no_ids_is_own() -> None:
    hit = prefix_hit([sharing(40, 1), sharing(40, 1), sharing(40, 1, block=20)])
    assert hit is not None
    assert hit.tokens == 10 / 120
    assert hit.blocks == 1 / 10


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=20))
def test_hits_equal_the_longest_prefix_that_any_earlier_prompt_had(prompts: list[list[int]]) -> None:
    """Against a slow twin that compares whole prompts; ids are chained, as those of real traces are."""
    chained = [tuple(sum((d + 1) * 5**i for i, d in enumerate(p[: n + 1])) for n in range(len(p))) for p in prompts]
    hits = 0
    for n, ids in enumerate(chained):
        hits += max(
            (
                next((i for i, (a, b) in enumerate(zip(ids, e, strict=False)) if a != b), min(len(ids), len(e)))
                for e in chained[:n]
            ),
            default=0,
        )
    hit = prefix_hit([sharing(10 * len(ids), *ids) for ids in chained])
    assert hit is not None
    assert hit.blocks == hit.tokens == hits / sum(map(len, chained))
