"""Breakers: an engine that fails gets no requests, then one, and then, if that ends well, its share again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.routing.health import MOST_RETRY_AFTER, Breaker, Tolerance

T = Tolerance(in_a_row=3, share=0.2, least=5, window=10.0, first=1.0, longest=8.0, steady=5.0, penalty=1.0)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(T)
    assert [breaker.failed(now) for _ in range(3)] == [False, False, True]
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_starts_anew() -> None:
    breaker = Breaker(T)
    for _ in range(4):
        assert not breaker.failed(0.0)
        breaker.succeeded(0.0)
    assert breaker.state(0.0) == "closed"
    assert opened().state(0.5) == "open"


def test_a_share_of_failures_opens_it_though_successes_come_between() -> None:
    breaker = Breaker(T)
    outcomes = []
    for _ in range(10):
        outcomes.append(breaker.failed(0.0))
        breaker.succeeded(0.0)
        breaker.succeeded(0.0)
    assert outcomes.index(True) == 4
    rare = Breaker(T)
    for n in range(200):
        assert not rare.failed(n * 0.1)
        for _ in range(9):
            rare.succeeded(n * 0.1)


def test_half_open_lets_one_probe_through_and_its_end_decides() -> None:
    breaker = opened()
    assert not breaker.allows(0.99)
    assert breaker.state(1.0) == "half-open"
    assert breaker.allows(1.0)
    probe = breaker.sent(1.0)
    assert probe
    assert not breaker.allows(1.1)
    assert breaker.sent(1.1) == 0  # sent all the same, because nobody else was there: no second probe
    breaker.succeeded(1.2)  # one from before
    assert not breaker.allows(1.2)
    breaker.succeeded(1.3, probe)
    assert breaker.state(1.3) == "closed"
    assert breaker.penalty_s(1.3) == 0.0


def test_the_wait_doubles_up_to_its_bound_and_starts_anew_after_a_good_while() -> None:
    breaker, now, waits = opened(), 0.0, []
    for _ in range(6):
        waits.append(breaker.retry_at(now) - now)
        now = breaker.retry_at(now)
        assert breaker.failed(now, breaker.sent(now))
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    now = breaker.retry_at(now)
    breaker.succeeded(now, breaker.sent(now))
    assert [breaker.failed(now + 1) for _ in range(3)][-1]
    assert breaker.retry_at(now + 1) == now + 1 + 8.0  # it fails again at once: no better than before
    now = breaker.retry_at(now + 1)
    breaker.succeeded(now, breaker.sent(now))
    assert [breaker.failed(now + 9) for _ in range(3)][-1]
    assert breaker.retry_at(now + 9) == now + 9 + 1.0


def test_a_probe_that_says_nothing_makes_way_for_another() -> None:
    breaker = opened()
    probe = breaker.sent(1.0)
    breaker.released(probe)
    assert breaker.allows(1.1)
    assert breaker.sent(1.1) not in (0, probe)
    breaker.failed(1.2, probe)  # the first one's number is worth nothing any more
    assert breaker.state(1.2) == "half-open"


def test_a_probe_that_answers_steadily_closes_it_before_its_end() -> None:
    breaker = opened()
    probe = breaker.sent(1.0)
    breaker.answers(2.0, probe)
    assert not breaker.allows(6.9)
    assert breaker.allows(7.0)
    assert breaker.state(7.0) == "closed"
    assert not breaker.failed(8.0, probe)  # a failure as any other


def test_back_pressure_is_no_failure_and_ends() -> None:
    breaker = Breaker(T)
    breaker.busy(0.0, 5.0)
    breaker.busy(1.0, 1.0)  # the longer one holds
    assert [breaker.allows(now) for now in (0.0, 4.9, 5.0)] == [False, False, True]
    assert (breaker.state(1.0), breaker.penalty_s(1.0), breaker.retry_at(1.0)) == ("closed", 0.0, 5.0)
    breaker.busy(10.0, 1e9)
    assert breaker.retry_at(10.0) == 10.0 + MOST_RETRY_AFTER
    half = opened()
    half.busy(1.0, 0.5, half.sent(1.0))  # a probe that is turned away
    assert half.allows(1.5)


def test_a_failure_costs_seconds_that_fade() -> None:
    breaker = Breaker(T)
    breaker.failed(0.0)
    breaker.failed(0.0)
    assert breaker.penalty_s(0.0) == pytest.approx(2.0)
    assert breaker.penalty_s(10.0) == pytest.approx(2.0 / 2.718281828)
    assert breaker.penalty_s(1000.0) < 1e-6


@pytest.mark.parametrize("bad", [{"share": 0}, {"in_a_row": 0}, {"first": 9.0}, {"window": 0.0}])
def test_a_tolerance_that_makes_no_sense_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="at least"):
        Tolerance(**{"longest": 8.0, **bad})  # type: ignore[arg-type]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["send", "succeed", "fail", "release", "busy", "answer"]), st.floats(0.0, 4.0)),
    max_size=120,
)


@given(EVENTS)
def test_whatever_happens_there_is_one_probe_at_most_and_an_end_to_every_wait(events: list[tuple[str, float]]) -> None:
    breaker, now, out = Breaker(T), 0.0, []
    probes: set[int] = set()
    for kind, seconds in events:
        now += seconds
        if kind == "send" and breaker.allows(now):
            half = breaker.state(now) == "half-open"
            number = breaker.sent(now)
            assert bool(number) == half
            if number:
                assert not breaker.allows(now)  # the next one has to wait for this one's end
                probes.add(number)
            out.append(number)
        elif kind == "answer" and out:
            breaker.answers(now, out[0])
        elif out and kind != "send":
            number = out.pop(0)
            if kind == "succeed":
                breaker.succeeded(now, number)
            elif kind == "fail":
                breaker.failed(now, number)
            elif kind == "release":
                breaker.released(number)
            else:
                breaker.busy(now, seconds, number)
        assert breaker.retry_at(now) <= now + max(T.longest, MOST_RETRY_AFTER)
        assert breaker.penalty_s(now) >= 0.0
    for number in out:
        breaker.released(number)
    assert breaker.allows(breaker.retry_at(now) + 1e-6)  # nobody is locked out for ever
