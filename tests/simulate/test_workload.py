"""How workloads are cut and scaled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import InputError
from tidegate.simulate.workload import Workload, WorkloadRequest


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0.01, 100), st.integers(1, 40))
def test_reshaping_keeps_order_and_everything_but_time(arrivals: list[float], factor: float, count: int) -> None:
    workload = Workload("w", tuple(WorkloadRequest(t, i + 1, 2) for i, t in enumerate(sorted(arrivals))))
    scaled = workload.rate_scaled(factor).limited(count)
    assert len(scaled) == min(count, len(workload))
    assert [r.prompt_tokens for r in scaled] == [r.prompt_tokens for r in workload][:count]
    times = [r.arrival_s for r in scaled]
    assert times == sorted(times)
    assert scaled.duration_s == pytest.approx(workload.limited(count).duration_s / factor)


@pytest.mark.parametrize("factor", [0, -1, float("nan")])
def test_a_rate_scale_must_be_positive(factor: float) -> None:
    with pytest.raises(InputError, match="above 0"):
        Workload("w", ()).rate_scaled(factor)
