"""Synthetic workloads: what their seeds promise, and that they are what their names say."""

from itertools import pairwise

import numpy as np
import pytest

from tidegate.errors import InputError
from tidegate.simulate.profile import profile
from tidegate.simulate.traces import KINDS, load_workload
from tidegate.simulate.workload import Workload

LENGTHS = "prompt=100..200,output=lognormal:50:1:400"
EXAMPLES = {
    "poisson": f"poisson:rate=4,count=400,{LENGTHS}",
    "steady": f"steady:rate=4,count=400,{LENGTHS}",
    "gamma": f"gamma:rate=4,cv=3,count=400,{LENGTHS}",
    "onoff": f"onoff:rate=20,on=2s,off=exponential:8s,count=400,{LENGTHS}",
    "burst": f"burst:count=400,{LENGTHS}",
    "families": f"families:rate=4,count=400,families=8,prefix=1000,{LENGTHS}",
    "sessions": f"sessions:rate=1,count=100,turns=1..7,think=1s..9s,{LENGTHS}",
}


def arrivals(workload: Workload) -> list[float]:
    return [r.arrival_s for r in workload]


def test_every_kind_has_an_example() -> None:
    assert set(EXAMPLES) | {"closed"} == set(KINDS)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_seed_decides_everything(kind: str) -> None:
    text = EXAMPLES[kind]
    assert load_workload(text) == load_workload(text) == load_workload(f"{text},seed=0")
    assert load_workload(text, seed=5) == load_workload(f"{text},seed=5")
    assert load_workload(text, seed=5).requests != load_workload(text).requests
    assert arrivals(load_workload(text)) == sorted(arrivals(load_workload(text)))


@pytest.mark.parametrize("kind", EXAMPLES)
def test_lengths_stay_in_their_bounds(kind: str) -> None:
    workload = load_workload(EXAMPLES[kind])
    assert all(1 <= r.output_tokens <= 400 for r in workload)
    if kind not in ("families", "sessions"):
        prompts = {r.prompt_tokens for r in workload}
        assert (min(prompts), max(prompts)) == pytest.approx((100, 200), abs=4)
        assert np.median([r.output_tokens for r in workload]) == pytest.approx(50, rel=0.2)


def test_another_rate_keeps_the_lengths() -> None:
    slow, fast = (load_workload(f"poisson:rate={rate},count=50,{LENGTHS}") for rate in (1, 10))
    assert [(r.prompt_tokens, r.output_tokens) for r in slow] == [(r.prompt_tokens, r.output_tokens) for r in fast]


@pytest.mark.parametrize(
    ("kind", "cv"), [("poisson", 1.0), ("steady", 0.0), ("gamma:cv=3", 3.0), ("gamma:cv=0.5", 0.5)]
)
def test_rate_and_burstiness_are_as_asked(kind: str, cv: float) -> None:
    name, _, keys = kind.partition(":")
    shown = profile(load_workload(f"{name}:rate=5,count=40000,prompt=1,output=1" + (f",{keys}" if keys else "")))
    assert shown.rate_s == pytest.approx(5, rel=0.05)
    assert shown.gap_cv == pytest.approx(cv, rel=0.05, abs=1e-6)


def test_an_end_in_time_and_one_in_number() -> None:
    by_time = load_workload("poisson:rate=5,duration=10m,prompt=1,output=1")
    assert by_time.requests[-1].arrival_s < 600
    assert len(by_time) == pytest.approx(3000, rel=0.1)
    assert len(load_workload("poisson:rate=5,duration=10m,count=7,prompt=1,output=1")) == 7
    rare = load_workload("gamma:rate=0.01,cv=5,duration=10h,prompt=1,output=1")
    assert rare.requests[-1].arrival_s < 36_000


def test_on_and_off_take_turns() -> None:
    workload = load_workload("onoff:rate=50,on=2s,off=8s,duration=60s,prompt=1,output=1")
    assert {int(t // 10) for t in arrivals(workload)} == set(range(6))
    assert all(t % 10 < 2 for t in arrivals(workload))
    assert len(workload) == pytest.approx(6 * 2 * 50, rel=0.2)


def test_lengths_of_a_trace_come_in_pairs_or_alone() -> None:
    pairs = {(r.prompt_tokens, r.output_tokens) for r in load_workload("azure-code")}
    drawn = load_workload("poisson:rate=4,count=500,lengths=azure-code")
    assert all((r.prompt_tokens, r.output_tokens) in pairs for r in drawn)
    alone = load_workload("poisson:rate=4,count=500,prompt=azure-code,output=7")
    assert {r.output_tokens for r in alone} == {7}
    assert {r.prompt_tokens for r in alone} <= {prompt for prompt, _ in pairs}


def test_families_share_their_prefix_by_whole_blocks() -> None:
    workload = load_workload("families:rate=4,count=400,families=8,prefix=1000,prompt=50,output=1")
    assert {r.prompt_tokens for r in workload} == {1050}
    families = {r.hash_ids for r in workload}
    assert len(families) == 8
    assert all(len(ids) == 1000 // 16 for ids in families)
    assert len({i for ids in families for i in ids}) == 8 * (1000 // 16)
    asked = sorted((sum(r.hash_ids == ids for r in workload) for ids in families), reverse=True)
    assert asked[0] / asked[-1] == pytest.approx(8, rel=0.5)
    even = load_workload("families:rate=4,count=4000,families=2,zipf=0,prefix=160,prompt=50,output=1")
    assert sum(r.hash_ids[0] == 0 for r in even) == pytest.approx(2000, rel=0.1)


def conversations(workload: Workload, system_blocks: int) -> dict[int, list[int]]:
    """Prompt lengths by conversation, which its first own block names."""
    found: dict[int, list[int]] = {}
    for r in workload:
        found.setdefault(r.hash_ids[system_blocks], []).append(r.prompt_tokens)
    return found


def test_each_turn_holds_what_was_said_before() -> None:
    workload = load_workload(
        "sessions:rate=1,count=50,turns=2..6,think=4s,tpot=100ms,prompt=30,output=20,system=64,block=16"
    )
    spoken = conversations(workload, 4)
    assert len(spoken) == 50
    assert {len(prompts) for prompts in spoken.values()} == {2, 3, 4, 5, 6}
    assert all(prompts == [64 + 30 + 50 * n for n in range(len(prompts))] for prompts in spoken.values())
    assert {r.hash_ids[:4] for r in workload} == {(0, 1, 2, 3)}
    assert all(len(r.hash_ids) == -(-r.prompt_tokens // 16) for r in workload)
    one = [r.arrival_s for r in workload if r.hash_ids[4] == workload.requests[0].hash_ids[4]]
    assert [b - a for a, b in pairwise(one)] == pytest.approx([20 * 0.1 + 4] * (len(one) - 1))


def test_a_conversation_ends_where_its_context_does() -> None:
    workload = load_workload("sessions:rate=1,count=20,turns=9,think=1s,prompt=30,output=20,context=100")
    assert max(r.prompt_tokens + r.output_tokens for r in workload) == 100
    assert len(workload) == 40


def test_tenants_are_drawn() -> None:
    workload = load_workload("poisson:rate=4,count=3000,prompt=1,output=1,tenants=3")
    assert {r.tenant for r in workload} == {"tenant-0", "tenant-1", "tenant-2"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("poisson:rte=3", "unknown key 'rte'; did you mean 'rate'"),
        ("poisson:prompt=1,output=1,count=3", "rate= is missing"),
        ("poisson:rate=3,count=3", "give prompt= and output=, or lengths="),
        ("poisson:rate=3,count=3,lengths=azure-conv,prompt=3", "give prompt= and output=, or lengths="),
        ("poisson:rate=3,prompt=1,output=1", "give count= or duration="),
        ("poisson:rate=0,count=3,prompt=1,output=1", "rate: must be greater than or equal to .*, not 0"),
        ("poisson:rate=fast,count=3,prompt=1,output=1", "rate: must be a valid number, not fast"),
        ("poisson:rate=3,count=0,prompt=1,output=1", "count: must be greater than or equal to 1, not 0"),
        ("poisson:rate=3,duration=5x,prompt=1,output=1", "duration: '5x' is no time: write 90, 90s, 250ms"),
        ("poisson:rate=3,count=3,prompt=lognormal:3,output=1", "prompt: lognormal:3 is no distribution"),
        ("poisson:rate=3,count=3,prompt=normal:3:1,output=1", "prompt: normal:3:1 is no distribution"),
        ("poisson:rate=3,count=3,prompt=lognormal:3:99,output=1", "prompt: lognormal:3:99 is no distribution"),
        ("poisson:rate=3,count=3,prompt=0,output=1", "prompt: '0' is no whole number from 1 to 10000000"),
        ("poisson:rate=4:count=9", "rate: must be a valid number, not 4:count=9"),
        ("poisson:rate=3,count=3,prompt=9..3,output=1", "prompt: the range 9..3 ends below its start"),
        ("poisson:rate=3,count=3,prompt=-4,output=1", "prompt: '-4' is neither a distribution"),
        ("poisson:rate=3,count=3,prompt=azure,output=1", "prompt: 'azure' is neither a distribution"),
        ("poisson:rate=1e6,duration=1h,prompt=1,output=1", "3.6e.09 requests are more than the 10000000"),
        ("poisson:rate=0.001,duration=1s,prompt=1,output=1", "no request is left"),
        ("sessions:rate=1,count=9999,turns=9999999,think=1,prompt=1,output=1", "1e.11 requests are more than"),
        ("gamma:rate=3,count=3,prompt=1,output=1", "cv= is missing"),
        ("gamma:rate=3,cv=nan,count=3,prompt=1,output=1", "cv: must be "),
        ("onoff:rate=3,on=0,off=3,count=3,prompt=1,output=1", "on= is always 0"),
        (
            "sessions:rate=1,count=3,turns=azure-conv,think=1,prompt=1,output=1",
            "turns: 'azure-conv' is no distribution",
        ),
        ("poisson:map.tenant=x,rate=3,count=3,prompt=1,output=1", "map. and unit= concern files"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(text: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint) as told:
        load_workload(text)
    assert str(told.value).startswith(text)
    assert "\n" not in str(told.value)
