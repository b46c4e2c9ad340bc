"""The shipped traces are what their sources were, row for row."""

from importlib.resources import files

import numpy as np
import pytest

from tidegate.errors import InputError
from tidegate.simulate.traces import MOONCAKE_TICK_S, TRACES, load_workload, spread

# Counted in the original files: rows, prompt tokens, output tokens, seconds from first to last stamp.
ORIGINAL = {
    "azure-conv": (19_366, 22_361_870, 4_088_665, 3_501.721937),
    "azure-code": (8_819, 18_059_974, 245_896, 3_435.948056),
    "mooncake-conversation": (12_031, 144_793_823, 4_122_048, 3_537.0),
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
    assert {name: load_workload(name).requests[0].slo_class for name in TRACES} == {
        "azure-conv": "interactive",
        "azure-code": "completion",
        "mooncake-conversation": "interactive",
    }


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
