"""Rates: what may come in a minute, and when to come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.gateway.rates import Bucket, Charge, Rate, Rates, TooMuch


def charged(rates: Rates, rate: Rate, tokens: int, now: float) -> Charge:
    found = rates.charge([rate], tokens, now)
    assert isinstance(found, Charge), found
    return found


def refused(rates: Rates, rate: Rate, tokens: int, now: float) -> TooMuch:
    found = rates.charge([rate], tokens, now)
    assert isinstance(found, TooMuch), found
    return found


def test_a_minutes_worth_may_come_at_once_and_then_evenly() -> None:
    rates, rate = Rates(), Rate("acme", requests=6)
    for _ in range(6):
        charged(rates, rate, 1, 100.0)
    assert refused(rates, rate, 1, 100.0) == TooMuch(rate, "requests", 10.0)
    assert refused(rates, rate, 1, 104.0).seconds == pytest.approx(6.0)
    charged(rates, rate, 1, 110.0)
    assert refused(rates, rate, 1, 110.0).seconds == pytest.approx(10.0)


def test_tokens_are_estimated_and_corrected() -> None:
    rates, rate = Rates(), Rate("acme", tokens=600)
    first = charged(rates, rate, 500, 0.0)
    assert refused(rates, rate, 200, 0.0).seconds == pytest.approx(10.0)
    first.settle(100, 0.0)
    first.settle(0, 0.0)  # once only
    second = charged(rates, rate, 500, 0.0)
    second.settle(1100, 0.0)  # far more than foreseen: 600 in debt
    assert refused(rates, rate, 60, 0.0) == TooMuch(rate, "tokens", pytest.approx(66.0))


def test_more_than_a_minutes_worth_waits_for_a_full_bucket_and_is_not_refused_for_ever() -> None:
    rates, rate = Rates(), Rate("acme", tokens=60)
    charged(rates, rate, 1000, 0.0)
    assert refused(rates, rate, 1000, 0.0).seconds == pytest.approx(1000.0)
    charged(rates, rate, 1000, 1000.0)


def test_whoever_is_refused_by_one_rate_is_charged_by_none() -> None:
    rates = Rates()
    narrow, wide = Rate("key", requests=1), Rate("tenant", requests=2, tokens=100)
    assert isinstance(rates.charge([wide, narrow], 10, 0.0), Charge)
    for _ in range(5):
        assert isinstance(rates.charge([wide, narrow], 10, 0.0), TooMuch)
    charged(rates, wide, 90, 0.0)


def test_the_longest_of_several_waits_is_told() -> None:
    rates = Rates()
    charged(rates, Rate("a", requests=60), 1, 0.0)
    slow, quick = Rate("slow", requests=1), Rate("quick", requests=60, tokens=10)
    assert isinstance(rates.charge([slow, quick], 10, 0.0), Charge)
    found = rates.charge([quick, slow], 1, 0.0)
    assert found == TooMuch(slow, "requests", 60.0)


def test_names_that_clients_choose_do_not_grow_memory() -> None:
    rates = Rates(remembered=100)
    for i in range(1000):
        charged(rates, Rate(f"tenant-{i}", requests=5, tokens=5), 1, i / 1000)
    assert len(rates) == 100


def test_a_new_limit_holds_for_a_bucket_in_use() -> None:
    rates = Rates()
    charged(rates, Rate("acme", requests=1), 1, 0.0)
    assert refused(rates, Rate("acme", requests=1), 1, 0.0).seconds == pytest.approx(60.0)
    assert refused(rates, Rate("acme", requests=60), 1, 0.0).seconds == pytest.approx(1.0)


@given(
    per_minute=st.integers(1, 1000),
    asked=st.lists(st.tuples(st.floats(0, 120), st.integers(1, 1000), st.integers(0, 2000)), max_size=60),
)
def test_over_any_span_no_more_is_used_than_its_share_and_a_minutes_worth(
    per_minute: int, asked: list[tuple[float, int, int]]
) -> None:
    """What was admitted until any time is bounded, whatever is foreseen, and a wait that is told is enough."""
    bucket, now, used, largest = Bucket(per_minute, 0.0), 0.0, 0.0, 0.0
    for pause, foreseen, really in asked:
        now += pause
        wait = bucket.wait(foreseen, now)
        assert bucket.wait(foreseen, now + wait) <= 1e-6
        if wait > 0:
            continue
        bucket.take(foreseen, now)
        bucket.take(really - foreseen, now)
        used, largest = used + really, max(largest, float(really))
        assert used <= per_minute * (1 + now / 60) + largest + 1e-6
