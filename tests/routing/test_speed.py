"""What an engine's speed is learned to be, and what learning costs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random

import pytest

from tidegate.routing import speed
from tidegate.routing.speed import RARELY, SOON, Speed, TwoTerms


def observed(seed: int) -> Iterator[tuple[float, float, float]]:
    """0.02 s and 0.0002 s a token, off by up to a tenth."""
    random = Random(seed)
    while True:
        tokens = random.randrange(4000)
        yield 1.0, tokens, (0.02 + 0.0002 * tokens) * random.uniform(0.9, 1.1)


def fits(monkeypatch: pytest.MonkeyPatch) -> list[TwoTerms]:
    """Whose terms were fitted, each time."""
    told: list[TwoTerms] = []
    solve = TwoTerms._solve

    def counted(terms: TwoTerms) -> None:
        told.append(terms)
        solve(terms)

    monkeypatch.setattr(TwoTerms, "_solve", counted)
    return told


def test_what_changes_little_is_fitted_rarely_and_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    told = fits(monkeypatch)
    terms = TwoTerms(0.01, 1e-4)
    for seen in islice(observed(1), 400):
        terms.observe(*seen)
    assert terms.seen == 400
    assert len(told) == SOON + (400 - SOON) // RARELY
    monkeypatch.setattr(speed, "RARELY", 1)
    always = TwoTerms(0.01, 1e-4)
    for seen in islice(observed(1), 400):
        always.observe(*seen)
    assert (terms.a, terms.b) == pytest.approx((always.a, always.b), rel=0.02)
    assert (terms.a, terms.b) == pytest.approx((0.02, 0.0002), rel=0.1)


def test_what_engines_have_in_common_learns_from_a_part_of_what_each_sees() -> None:
    typical = Speed()
    one, other = Speed(typical), Speed(typical)
    for n, (_, tokens, seconds) in enumerate(islice(observed(2), 2 * SOON + 2 * 400)):
        (one if n % 2 else other).first_token(int(tokens), seconds)
    assert one.seen == other.seen == SOON + 400
    assert typical.seen == 2 * (SOON + 400 // RARELY)
    new = Speed(typical)
    assert (new.base_s, new.token_s) == (typical.base_s, typical.token_s) == pytest.approx((0.02, 0.0002), rel=0.1)


def test_an_engine_that_changes_is_learned_anew() -> None:
    terms = TwoTerms(0.01, 1e-4)
    for u, v, y in islice(observed(3), 400):
        terms.observe(u, v, y)
    for u, v, y in islice(observed(4), 200):
        terms.observe(u, v, 2 * y)
    assert terms.b == pytest.approx(0.0004, rel=0.15)
