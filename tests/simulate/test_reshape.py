"""Cutting, thinning, shifting, labelling and merging keep what they promise to keep."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import InputError
from tidegate.simulate.closed_loop import ClosedLoop
from tidegate.simulate.reshape import between, delayed, labelled, merged, rows, thinned, unticked
from tidegate.simulate.workload import Workload, WorkloadRequest

TIMES = st.lists(st.floats(0, 1e6), max_size=30)
SHARES = st.floats(0, 1)


def workload(arrivals: list[float], name: str = "w", ids: int = 0) -> Workload:
    """Requests that their prompt lengths tell apart; each with `ids` hash ids, of which the first is 0."""
    return Workload(
        name,
        tuple(
            WorkloadRequest(t, 512 * 4 + i, 2, hash_ids=(0, *range(i + 1, i + ids))[:ids])
            for i, t in enumerate(sorted(arrivals))
        ),
    )


def identities(load: Workload) -> list[int]:
    return [r.prompt_tokens for r in load]


@given(st.lists(TIMES, min_size=2, max_size=4))
def test_merging_loses_nobody_and_keeps_order_and_each_parts_order(parts: list[list[float]]) -> None:
    loads = [labelled(workload(times, f"w{n}"), slo_class=f"c{n}") for n, times in enumerate(parts)]
    whole = merged([(n, load) for n, load in enumerate(loads)])
    assert len(whole) == sum(map(len, parts))
    arrivals = [r.arrival_s for r in whole]
    assert arrivals == sorted(arrivals)
    for n, load in enumerate(loads):
        assert tuple(r for r in whole if r.slo_class == f"c{n}") == load.requests


@given(TIMES)
def test_merging_one_part_or_an_empty_one_changes_nothing(times: list[float]) -> None:
    load = workload(times)
    assert merged([("a", load)]) is load
    assert merged([("a", load), ("b", Workload("none", ()))]).requests == load.requests


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0]), max_size=20), st.lists(st.sampled_from([0.0, 1.0]), max_size=20))
def test_of_those_that_arrive_at_once_the_earlier_parts_go_first(one: list[float], two: list[float]) -> None:
    whole = merged([(1, labelled(workload(one), tenant="1")), (2, labelled(workload(two), tenant="2"))])
    assert [(r.arrival_s, r.tenant) for r in whole] == sorted((r.arrival_s, r.tenant) for r in whole)


@given(TIMES, SHARES, SHARES, st.integers(0, 99))
def test_thinning_is_by_seed_and_nested(times: list[float], a: float, b: float, seed: int) -> None:
    load = workload(times)
    less, more = (thinned(load, share, (seed, 0)) for share in sorted((a, b)))
    assert less == thinned(load, min(a, b), (seed, 0))
    assert not set(less) - set(more)
    assert not set(more) - set(load)
    assert thinned(load, 1.0, (seed,)) == load
    assert len(thinned(load, 0.0, (seed,))) == 0


def test_thinning_keeps_about_its_share() -> None:
    load = workload([float(i) for i in range(10_000)])
    kept = thinned(load, 0.3, (0,))
    assert len(kept) == pytest.approx(3_000, rel=0.05)
    assert identities(kept) != identities(thinned(load, 0.3, (1,)))


@given(TIMES, st.floats(0, 1e6), st.floats(0, 1e6))
def test_slices_next_to_each_other_are_the_whole(times: list[float], a: float, b: float) -> None:
    load = workload(times)
    cuts = [0.0, *sorted((a, b)), float("inf")]
    slices = [between(load, start, end) for start, end in pairwise(cuts)]
    assert [identity for piece in slices for identity in identities(piece)] == identities(load)
    for start, piece in zip(cuts, slices, strict=False):
        back = [r.arrival_s + start for r in piece]
        assert back == pytest.approx([r.arrival_s for r in load if r.prompt_tokens in set(identities(piece))])
        assert all(r.arrival_s >= 0 for r in piece)


@given(TIMES, st.integers(0, 40), st.integers(0, 40))
def test_rows_are_those_of_a_list(times: list[float], start: int, end: int) -> None:
    load = workload(times)
    kept = rows(load, start, end)
    assert identities(kept) == identities(load)[start:end]
    if kept.requests and start:
        assert kept.requests[0].arrival_s == 0
    assert kept.duration_s == pytest.approx(replace(load, requests=load.requests[start:end]).duration_s)


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(0, 9))
def test_spreading_leaves_everybody_in_his_tick_and_place(ticks: list[int], seed: int) -> None:
    load = workload([3.0 * tick for tick in ticks])
    spread = unticked(load, 3.0, (seed,))
    assert identities(spread) == identities(load)
    assert [r.arrival_s // 3 for r in spread] == sorted(ticks)
    arrivals = [r.arrival_s for r in spread]
    assert arrivals == sorted(arrivals)
    assert spread == unticked(load, 3.0, (seed,))


@given(TIMES, st.floats(0, 1e3), st.floats(0.1, 10))
def test_delay_and_scale_change_times_alone(times: list[float], delay: float, factor: float) -> None:
    load = workload(times)
    later = delayed(load.rate_scaled(factor), delay)
    assert [r.arrival_s for r in later] == pytest.approx([r.arrival_s / factor + delay for r in load])
    assert [replace(r, arrival_s=0.0) for r in later] == [replace(r, arrival_s=0.0) for r in load]


def test_parts_of_different_sources_share_no_prefix_and_those_of_one_do() -> None:
    a, b = workload([0, 1, 2], "a", ids=3), workload([0.5, 1.5], "b", ids=4)
    whole = merged([("a", a), ("b", b), ("a", labelled(a, tenant="again"))])
    assert whole.name == "a+b"
    of_b = {i for r in whole if len(r.hash_ids) == 4 for i in r.hash_ids}
    of_a = {i for r in whole if len(r.hash_ids) == 3 for i in r.hash_ids}
    assert not of_a & of_b
    assert len({r.hash_ids[0] for r in whole}) == 2
    assert Counter(r.hash_ids for r in whole if len(r.hash_ids) == 3) == {r.hash_ids: 2 for r in a}


def test_a_closed_loop_is_labelled_and_delayed_but_neither_cut_nor_scaled() -> None:
    loop = ClosedLoop(2, (WorkloadRequest(0.0, 3, 4),) * 5, (1.0,) * 5)
    load = labelled(delayed(Workload("closed", (), (loop,)), 7.0), slo_class="batch", tenant="t")
    assert [(r.arrival_s, r.slo_class, r.tenant) for r in load.loops[0].start().first()] == [(8.0, "batch", "t")] * 2
    assert (len(load), load.total) == (0, 5)
    assert merged([("a", load), ("b", workload([1.0]))]).total == 6
    for change in (
        lambda: load.limited(1),
        lambda: load.rate_scaled(2),
        lambda: between(load, 0, 1),
        lambda: rows(load, 0, 1),
        lambda: thinned(load, 0.5, (0,)),
        lambda: unticked(load, 1.0, (0,)),
    ):
        with pytest.raises(InputError, match="a closed loop cannot be"):
            change()
    assert load.rate_scaled(1) is load
