"""How much load a fleet carries: the search on functions whose answer is known, and on small workloads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from math import inf
from random import Random
from typing import Any, cast

import pytest

from tidegate.core.limits import Limits
from tidegate.core.presets import build_policy
from tidegate.core.slo import DEFAULT_CLASSES, Slo, SloClass
from tidegate.errors import InputError
from tidegate.executors.sim.cost import CostModel
from tidegate.executors.sim.hardware import find_hardware
from tidegate.executors.sim.models import find_model
from tidegate.routing.route import build_route
from tidegate.simulate.capacity import (
    LEAST,
    MOST,
    MOST_ENGINES,
    Case,
    allowances,
    drawn,
    largest_load,
    search,
    shares_of,
    smallest,
    smallest_fleet,
)
from tidegate.simulate.run import EngineSetup, FleetSetup
from tidegate.simulate.traces import load_workload
from tidegate.simulate.workload import Workload, WorkloadRequest

CHAT = "poisson:rate=20,count=150,prompt=1000,output=60"


def case(policy: str = "joint", **changed: Any) -> Case:
    limits = Limits(num_blocks=20_000, max_num_seqs=64, max_num_batched_tokens=2048, block_size=16)
    cost = CostModel(find_hardware("h100"), find_model("llama-3.1-8b"))
    return Case(EngineSetup(build_policy(policy), limits, cost), {"interactive": 0.9}, **changed)


# The search


@pytest.mark.parametrize("precision", [0.02, 0.2])
@pytest.mark.parametrize("most", [LEAST, 0.0513, 0.7, 1.0, 1.0001, 3.3, 700.0])
def test_the_last_load_that_passes_is_found_to_the_precision(most: float, precision: float) -> None:
    tried: list[float] = []

    def passes(load: float) -> bool:
        tried.append(load)
        return load <= most

    found = search(passes, precision=precision)
    assert found in tried
    assert found <= most
    assert any(found < load <= found * (1 + precision) for load in tried if load > most)
    assert len(tried) == len(set(tried)) < 30


@pytest.mark.parametrize("start", [0.2, 1.0, 40.0])
def test_where_the_search_starts_changes_the_answer_by_no_more_than_the_precision(start: float) -> None:
    assert search(lambda load: load <= 2.5, start=start, ratio=1.15) == pytest.approx(2.5, rel=0.02)


def test_nothing_passes_and_everything_passes() -> None:
    tried: list[float] = []
    assert search(lambda load: bool(tried.append(load))) == 0
    assert min(tried) == LEAST
    assert search(lambda load: not tried.append(load)) == max(tried)
    assert MOST / 1.5 < max(tried) <= MOST


def test_a_grid_with_a_first_load_is_not_walked_below_it() -> None:
    tried: list[float] = []
    assert search(lambda load: bool(tried.append(load)), start=0.05, ratio=1.15, least=0.05) == 0
    assert tried == [0.05]


@pytest.mark.parametrize("most", [0.04, 0.05, 0.3, 0.611, 1.0, 2.4, 9.9])
def test_upwards_it_is_the_last_pass_before_the_first_failure_then_bisected(most: float) -> None:
    good, bad = 0.0, 0.05
    while bad <= most:
        good, bad = bad, bad * 1.15
    while good and bad / good > 1.02:
        middle = math.sqrt(good * bad)
        good, bad = (middle, bad) if middle <= most else (good, middle)
    assert search(lambda load: load <= most, start=0.05, ratio=1.15, precision=0.02, least=0.05) == good


@pytest.mark.parametrize("needed", [1, 2, 3, 7, 8, 9, 100, 255, MOST_ENGINES])
def test_the_smallest_number_is_found(needed: int) -> None:
    tried: list[int] = []
    assert smallest(lambda n: not tried.append(n) and n >= needed) == needed
    assert len(tried) <= 2 * MOST_ENGINES.bit_length()
    assert len(tried) == len(set(tried))


def test_no_number_is_enough() -> None:
    assert smallest(lambda n: n > MOST_ENGINES) is None


# What has to be attained


@pytest.mark.parametrize(("count", "share", "may_miss"), [(10, 0.9, 1), (100, 0.99, 1), (99, 0.99, 0), (7, 1.0, 0)])
def test_a_share_says_how_many_may_miss(count: int, share: float, may_miss: int) -> None:
    load = Workload("w", tuple(WorkloadRequest(float(n), 10, 1) for n in range(count)))
    assert allowances(load, {"interactive": share}) == {"interactive": may_miss}


def test_every_promised_class_of_the_workload_has_a_share() -> None:
    load = load_workload(["steady:rate=1,count=3,prompt=9,output=1,batch", "steady:rate=1,count=3,prompt=9,output=1"])
    assert shares_of(load, DEFAULT_CLASSES, 0.99, {}) == {"interactive": 0.99}
    assert shares_of(load, DEFAULT_CLASSES, 0.99, {"interactive": 0.5}) == {"interactive": 0.5}


@pytest.mark.parametrize(
    ("own", "attain", "message"),
    [
        ({"batch": 0.9}, 0.9, "class batch was promised nothing; classes with a promise are: interactive"),
        ({"completion": 0.9}, 0.9, "class completion does not occur in the workload"),
        ({"interactive": 1.1}, 0.9, "1.1 is no share"),
        ({}, 0.0, "0 is no share"),
    ],
)
def test_a_share_that_means_nothing_is_refused(own: dict[str, float], attain: float, message: str) -> None:
    load = load_workload(["steady:rate=1,count=3,prompt=9,output=1,batch", "steady:rate=1,count=3,prompt=9,output=1"])
    with pytest.raises(InputError, match=message):
        shares_of(load, DEFAULT_CLASSES, attain, own)


def test_a_workload_without_promises_has_no_capacity() -> None:
    with pytest.raises(InputError, match="no class of it was promised anything"):
        shares_of(load_workload(f"{CHAT},batch"), DEFAULT_CLASSES, 0.99, {})


# Samples


def test_a_sample_is_other_requests_at_the_same_rate() -> None:
    load = load_workload("azure-conv:first=5000")
    one, same, other = drawn(load, (0, 1, 0)), drawn(load, (0, 1, 0)), drawn(load, (0, 2, 0))
    assert one == same != other
    for sample in (one, other):
        assert len(sample) == pytest.approx(4500, rel=0.02)
        assert sample.rate == pytest.approx(load.rate, rel=0.02)


def test_no_sample_is_drawn_from_next_to_nothing() -> None:
    load = Workload("w", (WorkloadRequest(0.0, 10, 1),))
    with pytest.raises(InputError, match="too few requests to draw a sample from"):
        [drawn(load, (0, n, 0)) for n in range(100)]


# On simulated engines


def test_a_run_ends_when_a_class_is_out_of_reach() -> None:
    taken = 0

    class Counting:
        """Many requests, of which it is known how many were taken the second time, by the simulation."""

        name = "counting"

        def __init__(self) -> None:
            self.times = 0

        def __iter__(self) -> Iterator[WorkloadRequest]:
            nonlocal taken
            self.times += 1
            for n in range(5000):
                taken += self.times == 2
                yield WorkloadRequest(n * 1.0, 4000, 5)

    never = {"interactive": SloClass("interactive", Slo(ttft=1e-6))}
    hopeless = Case(case().setup, {"interactive": 0.999}, classes=never)
    assert hopeless.missed_class(cast(Workload, Counting())) == "interactive"
    assert 5 < taken < 20  # five may miss


def test_the_largest_load_attains_what_a_little_more_does_not() -> None:
    load, joint = load_workload(CHAT), case()
    answer = largest_load(joint, load)
    assert answer.limited_by == "interactive"
    assert joint.missed_class(load.rate_scaled(answer.value)) is None
    beyond = [answer.value * (1 + 0.001 * n) for n in range(1, 22)]
    assert any(joint.missed_class(load.rate_scaled(more)) == "interactive" for more in beyond)


def test_a_load_without_end_is_limited_by_nobody() -> None:
    load = Workload("w", (WorkloadRequest(0.0, 10, 1), WorkloadRequest(1.0, 10, 1)))
    answer = largest_load(case(), load)
    assert MOST / 1.5 < answer.value <= MOST
    assert answer.limited_by is None


def test_attempts_are_told() -> None:
    told: list[float] = []
    answer = largest_load(case(), load_workload(CHAT), precision=0.5, on_try=told.append)
    assert told[0] == 1.0
    assert answer.value in told


def test_engines_that_a_load_needs() -> None:
    load = load_workload(CHAT)
    fleet = FleetSetup((("", 2),), lambda: build_route("joint", random=Random(0)), "joint")
    joint = case(fleet=fleet)
    one = largest_load(joint.with_engines(1), load).value
    two = largest_load(joint.with_engines(2), load).value
    assert two > 1.5 * one
    assert smallest_fleet(joint, load.rate_scaled(one)).value == 1
    needed = smallest_fleet(joint, load.rate_scaled(1.2 * one))
    assert (needed.value, needed.limited_by) == (2, "interactive")


def test_no_number_of_engines_helps_against_a_promise_that_no_engine_keeps() -> None:
    never = {"interactive": SloClass("interactive", Slo(ttft=1e-6))}
    fleet = FleetSetup((("", 2),), lambda: build_route("joint", random=Random(0)), "joint")
    assert smallest_fleet(case(fleet=fleet, classes=never), load_workload(CHAT)).value == inf
