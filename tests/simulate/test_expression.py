"""Workload expressions: parts, items in their order, and errors that name the part and the nearest key."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidegate.errors import InputError
from tidegate.simulate.traces import load_workload

POISSON = "poisson:rate=4,count=200,prompt=10..99,output=1"


def test_parts_are_merged_each_with_its_class() -> None:
    both = load_workload(["azure-conv:batch", "azure-code:completion,tenant=code,priority=3"])
    assert both.name == "azure-conv+azure-code"
    assert len(both) == 19_366 + 8_819
    code = [r for r in both if r.slo_class == "completion"]
    assert (len(code), {(r.tenant, r.priority) for r in code}) == (8_819, {("code", 3)})
    assert {r.slo_class for r in both} == {"batch", "completion"}


def test_items_act_in_the_order_in_which_they_stand() -> None:
    cut_then_scaled = load_workload("azure-conv:slice=10m..20m,scale=2")
    scaled_then_cut = load_workload("azure-conv:scale=2,slice=5m..10m")
    assert [r.arrival_s for r in cut_then_scaled] == pytest.approx([r.arrival_s for r in scaled_then_cut], abs=1e-9)
    assert (
        len(load_workload("azure-conv:first=100,thin=0.5")) < len(load_workload("azure-conv:thin=0.5,first=100")) == 100
    )
    assert load_workload("azure-conv:rows=10..20,at=1m").requests[0].arrival_s == 60.0
    assert len(load_workload("azure-conv:slice=..1m,slice=30s..")) < len(load_workload("azure-conv:slice=..1m"))


def test_tiermix_can_be_made_of_its_parts() -> None:
    made = load_workload(
        [
            "azure-conv:slice=..20m",
            "azure-code:slice=..20m",
            "burst:count=200,prompt=4000,output=256,at=60,batch",
            "burst:count=200,prompt=4000,output=256,at=660,batch",
        ]
    )
    shipped = [r for r in load_workload("tiermix") if r.slo_class != "offline"]
    assert [(round(r.arrival_s, 6), r.slo_class, r.prompt_tokens) for r in made] == [
        (round(r.arrival_s, 6), r.slo_class, r.prompt_tokens) for r in shipped
    ]


def test_later_parts_draw_from_streams_of_their_own_unless_they_name_a_seed() -> None:
    first = load_workload(POISSON)
    twice = load_workload([f"{POISSON},tenant=a", f"{POISSON},tenant=b"])
    arrivals = {tenant: [r.arrival_s for r in twice if r.tenant == tenant] for tenant in "ab"}
    assert arrivals["a"] == [r.arrival_s for r in first]
    assert arrivals["b"] != arrivals["a"]
    named = load_workload([f"{POISSON},tenant=a", f"{POISSON},tenant=b,seed=0"])
    assert [r.arrival_s for r in named if r.tenant == "b"] == arrivals["a"]


def test_thinning_twice_is_by_two_lots() -> None:
    assert len(load_workload("azure-conv:thin=0.5,thin=0.5")) == pytest.approx(19_366 / 4, rel=0.05)


def test_parts_of_one_trace_share_its_prefixes_and_others_do_not() -> None:
    one = load_workload("mooncake-conversation:first=50")
    both = load_workload(["mooncake-conversation:first=50", "mooncake-conversation:first=50,batch"])
    assert {r.hash_ids for r in both} == {r.hash_ids for r in one}
    other = load_workload(
        ["mooncake-conversation:first=50", "families:rate=1,count=9,families=2,prefix=64,prompt=1,output=1"]
    )
    families = {i for r in other if r.hash_block_tokens == 16 for i in r.hash_ids}
    assert not families & {i for r in one for i in r.hash_ids}


def test_a_file_takes_items_a_map_and_a_colon_in_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "a:b"
    folder.mkdir()
    path = folder / "x:y.csv"
    path.write_text("ts,in,out\n5000,7,2\n6000,8,3\n", encoding="utf-8")
    mapped = f"{path}:map.arrival_s=ts,map.prompt_tokens=in,map.output_tokens=out,unit=ms,batch"
    workload = load_workload(mapped)
    assert [(r.arrival_s, r.prompt_tokens, r.slo_class) for r in workload] == [(0.0, 7, "batch"), (1.0, 8, "batch")]
    columns = {"arrival_s": "ts", "prompt_tokens": "in", "output_tokens": "out"}
    assert load_workload([f"{path}:batch", "azure-conv:first=1"], columns=columns, unit="ms").total == 3
    assert load_workload(str(path), columns=columns, unit="ms").requests[1].arrival_s == 1.0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("azure-conv:thn=0.5", "azure-conv:thn=0.5: unknown key 'thn'; did you mean 'thin'"),
        ("azure-conv:thin=2", "azure-conv:thin=2: thin: 2 is not a share between 0 and 1"),
        ("azure-conv:thin=x", "thin: 'x' is no number"),
        ("azure-conv:scale=0", "scale: a rate scale must be above 0, not 0"),
        ("azure-conv:scale=inf", "scale: inf is not a number of 0 or more"),
        ("azure-conv:slice=5", "slice: '5' is no range: write 10..20, 10.. or ..20"),
        ("azure-conv:slice=9m..5m", "slice: the range 9m..5m is empty"),
        ("azure-conv:slice=5h..", "azure-conv:slice=5h..: no request is left"),
        ("azure-conv:rows=1.5..", "rows: "),
        ("azure-conv:priority=low", "priority: 'low' is no whole number"),
        ("azure-conv:seed=x", "azure-conv:seed=x: seed: 'x' is no whole number"),
        ("azure-conv:batch,offline", "class is given twice"),
        ("azure-conv:thin0.5", "'thin0.5' is neither key=value nor a class's name"),
        ("azure-conv:batch,", "'' is neither key=value nor a class's name"),
        ("azure-conv:class=", "'class=' is neither key=value nor"),
        ("azure-conv:unit=ms", "map. and unit= concern files, and azure-conv is none"),
        ("azure-cov", "no workload 'azure-cov': name a .jsonl or .csv file, .*; did you mean 'azure-conv'"),
        ("closed:clients=2,count=3,prompt=1,output=1", "a closed loop has no arrivals of its own"),
        ("none.csv:batch", "cannot read none.csv"),
        ("x.csv:map.arival_s=t", "no field 'arival_s'; did you mean 'arrival_s'"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(text: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint) as told:
        load_workload(text)
    assert "\n" not in str(told.value)


WORDS = (
    "poisson closed vtc-real x.csv slice= thin= rows= prompt= rate=1 count=2 map.tenant=a lognormal 1..2 .. : , = .5 "
    f"-1 inf nan {'9' * 30} unit= seed= é ( /"
).split()


@given(st.lists(st.sampled_from([*WORDS, " "]), max_size=9).map("".join))
@example("x" * 5000)
@example("x.csv:map.tenant=" + "y" * 5000)
@example("poisson:rate=1,count=2,prompt=" + "y" * 5000 + ",output=1")
def test_whatever_is_written_is_a_workload_or_one_line(text: str) -> None:
    try:
        told = None if load_workload(text, closed_loops=True).total > 0 else "an empty workload"
    except InputError as e:
        told = str(e) if "\n" in str(e) else None
    assert told is None


def test_a_map_without_a_file_and_no_part_at_all_are_refused() -> None:
    with pytest.raises(InputError, match="a map of columns or a unit needs a file, and azure-conv names none"):
        load_workload("azure-conv", columns={"tenant": "user"})
    with pytest.raises(InputError, match="no workload is named"):
        load_workload([])
