"""The shipped traces are what their sources were, row for row."""

from collections import Counter
from hashlib import sha256
from importlib.resources import files

import numpy as np
import pytest

from tidegate.errors import InputError
from tidegate.simulate.shipped import MOONCAKE_TICK_S, TIERMIX_CLASSES, TRACES, spread
from tidegate.simulate.traces import load_workload

# Counted in the original files: rows, prompt tokens, output tokens, seconds from first to last stamp.
ORIGINAL = {
    "azure-conv": (19_366, 22_361_870, 4_088_665, 3_501.721937),
    "azure-code": (8_819, 18_059_974, 245_896, 3_435.948056),
    "mooncake-conversation": (12_031, 144_793_823, 4_122_048, 3_537.0),
    "tiermix": (10_974, 18_920_477, 1_794_037, 1_199.748791),
    "vtc-real": (1_500, 204_398, 384_297, 600.0),
    "vtc-overload": (2_700, 2_700 * 256, 2_700 * 256, 599.6667),
    "adaserve-multislo": (1_400, 339_165, 1_400 * 256, 360.0),
}


@pytest.mark.parametrize("name", ORIGINAL)
def test_nothing_was_lost_in_packing(name: str) -> None:
    workload = load_workload(name)
    rows, prompts, outputs, seconds = ORIGINAL[name]
    assert (len(workload), sum(r.prompt_tokens for r in workload), sum(r.output_tokens for r in workload)) == (
        rows,
        prompts,
        outputs,
    )
    assert workload.duration_s == pytest.approx(seconds, abs=MOONCAKE_TICK_S if "mooncake" in name else 1e-6)
    arrivals = [r.arrival_s for r in workload]
    assert arrivals == sorted(arrivals)
    assert min(arrivals) >= 0


def test_every_shipped_trace_is_checked_and_carries_its_licence() -> None:
    assert set(TRACES) == set(ORIGINAL)
    for trace in TRACES.values():
        folder = files("tidegate.simulate") / "data" / trace.file.partition("/")[0]
        assert "Licence" in (folder / "ATTRIBUTION.md").read_text(encoding="utf-8")


def test_classes_follow_what_the_trace_is() -> None:
    assert {name: Counter(r.slo_class for r in load_workload(name)) for name in TRACES} == {
        "azure-conv": {"interactive": 19_366},
        "azure-code": {"completion": 8_819},
        "mooncake-conversation": {"interactive": 12_031},
        "tiermix": {"interactive": 5_985, "completion": 3_628, "offline": 961, "batch": 400},
        "vtc-real": {"interactive": 1_500},
        "vtc-overload": {"interactive": 2_700},
        "adaserve-multislo": {"coding": 833, "chat": 278, "summary": 289},
    }


def test_tiermix_is_its_file_to_the_byte() -> None:
    number = {name: index for index, name in enumerate(TIERMIX_CLASSES)}
    lines = [
        f"{r.arrival_s:.7f},{number[r.slo_class]},{r.prompt_tokens},{r.output_tokens}\n"
        for r in load_workload("tiermix")
    ]
    text = "t,class,prompt,output\n" + "".join(lines)
    assert sha256(text.encode()).hexdigest() == "9f12a616d7d0ff1108b1b9fcf0a153bb5a5a6d3d3f3db2d96508e2efc75a74a3"


def test_vtc_keeps_its_clients_as_tenants() -> None:
    real = Counter(r.tenant for r in load_workload("vtc-real"))
    assert len(real) == 27
    assert real.most_common(2) == [("client-2", 296), ("client-10", 262)]
    assert Counter(r.tenant for r in load_workload("vtc-overload")) == {"client-0": 900, "client-1": 1_800}


def test_mooncake_arrivals_stay_in_their_tick_and_keep_their_order() -> None:
    ticks = np.array([0.0] * 50 + [3.0] * 3 + [9.0] * 200)
    spreaded = spread(ticks, 3.0)
    assert np.array_equal(np.floor(spreaded / 3.0) * 3.0, ticks)
    assert np.all(np.diff(spreaded) >= 0)
    assert np.array_equal(spreaded, spread(ticks, 3.0))
    assert len(set(spreaded.tolist())) == len(ticks)


def test_mooncake_shares_as_many_blocks_as_its_paper_says() -> None:
    """36.6 % of all blocks were seen before, in an unbounded cache of whole prefixes."""
    seen: set[int] = set()
    hits = total = 0
    for request in load_workload("mooncake-conversation"):
        total += len(request.hash_ids)
        hits += next((i for i, h in enumerate(request.hash_ids) if h not in seen), len(request.hash_ids))
        seen.update(request.hash_ids)
    assert hits / total == pytest.approx(0.366, abs=0.001)


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(InputError, match="azure-conv, azure-code, mooncake-conversation"):
        load_workload("azure")
