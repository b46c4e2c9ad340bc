"""The ledger: counts that are right after any order of events, and what engines are learned to be like."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.routing.views import TOKEN_S, replica, replicas, request, route, sent_to
from tidegate.routing.health import Failure
from tidegate.routing.ledger import Ledger
from tidegate.routing.speed import Speed
from tidegate.routing.view import Facts, ReplicaView, RouteView


def counts(c: ReplicaView) -> tuple[int, ...]:
    return c.outstanding, c.decoding, c.pending_tokens, c.held_tokens


def test_the_ledger_counts_what_a_gateway_sees() -> None:
    ledger, c = Ledger(), replica("0")
    a, b = request(1000), request(500)
    ledger.sent(a, sent_to(c, 300), 1.0)
    ledger.sent(b, sent_to(c), 1.0)
    assert counts(c) == (2, 0, 1200, 1500)
    assert (c.sent, len(ledger)) == (2, 2)
    ledger.first_token(a.id, 2.0)
    ledger.first_token(a.id, 3.0)
    assert counts(c) == (2, 1, 500, 1500)
    assert c.computed_tokens == 700
    ledger.tokens(a.id, 3.0, 40)
    assert c.held_tokens == 1540
    ledger.ended(a.id, 6.0)
    assert counts(c) == (1, 0, 500, 500)
    assert c.service_s == 4.0
    ledger.ended(b.id, 9.0, complete=False)  # cancelled before its first token
    ledger.ended(b.id, 9.5)
    assert counts(c) == (0, 0, 0, 0)
    assert (c.service_s, len(ledger)) == (4.0, 0)


def test_a_request_is_out_once_and_may_be_sent_again_after_it_failed() -> None:
    ledger, (a, b) = Ledger(), replicas(2)
    r = request(100)
    ledger.sent(r, sent_to(a), 0.0)
    with pytest.raises(ValueError, match="was sent before and has not ended"):
        ledger.sent(r, sent_to(b), 0.0)
    ledger.failed(r.id, 0.1, Failure.RESET)
    ledger.sent(r, sent_to(b), 0.2)
    ledger.ended(r.id, 1.0)
    assert counts(a) == counts(b) == (0, 0, 0, 0)
    assert (a.health.recent_failures(0.1), b.health.recent_failures(1.0)) == (1.0, 0.0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["send", "send unseen", "first", "tokens", "end", "cancel", "fail", "away"]),
            st.integers(0, 11),
            st.floats(0.0, 3.0),
        ),
        max_size=150,
    )
)
def test_no_order_of_events_makes_a_count_negative_or_leaks(events: list[tuple[str, int, float]]) -> None:
    ledger, there, now = Ledger(), replicas(3, seats=4, kv_tokens=3000), 0.0
    out: dict[str, ReplicaView] = {}
    for kind, n, seconds in events:
        now += seconds
        name, c = str(n), there[n % 3]
        if kind.startswith("send"):
            if name not in out:
                r = RouteView(name, "interactive", 100 * n + 1, streams=kind == "send")
                ledger.sent(r, sent_to(c, 50 * n), now)
                out[name] = c
        elif kind == "first":
            ledger.first_token(name, now)
        elif kind == "tokens":
            ledger.tokens(name, now, n)
        else:
            out.pop(name, None)
            if kind == "fail":
                ledger.failed(name, now, list(Failure)[n % 5])
            elif kind == "away":
                ledger.turned_away(name, now)
            else:
                ledger.ended(name, now, complete=kind == "end")
        for view in there:
            assert min(counts(view)) >= 0
            assert view.outstanding == sum(c is view for c in out.values())
            assert view.decoding <= view.outstanding
            assert view.speed.base_s >= 0 <= view.speed.token_s
            assert view.speed.output_s >= 0 <= view.speed.stall_s
    for name in list(out):
        ledger.ended(name, now)
    assert [counts(view) for view in there] == [(0, 0, 0, 0)] * 3
    assert len(ledger) == 0


def test_an_unseen_first_token_is_presumed_when_it_was_predicted() -> None:
    ledger, c = Ledger(), replica("0")
    whole = request(5000, streams=False)
    ledger.sent(whole, sent_to(c), 0.0)  # half a second
    ledger.presume(0.4)
    assert (c.pending_tokens, c.decoding) == (5000, 0)
    ledger.presume(0.6)
    assert (c.pending_tokens, c.decoding) == (0, 1)
    assert c.speed.seen == 0  # which teaches nothing
    ledger.ended(whole.id, 9.0)
    assert (c.outstanding, c.decoding) == (0, 0)


def test_what_is_kept_of_unseen_first_tokens_is_bounded_by_what_is_out() -> None:
    ledger, c = Ledger(), replica("0", seats=1, service_s=1e6, outstanding=9)
    for _ in range(5000):
        r = request(10, streams=False)
        ledger.sent(r, sent_to(c), 0.0)  # its first token is predicted in weeks
        ledger.ended(r.id, 0.0, complete=False)
    assert len(ledger._unseen) < 200


@dataclass
class Engine:
    """An engine that computes prompts one after the other at its own speed."""

    view: ReplicaView
    token_s: float
    base_s: float = 0.05
    free_at: float = 0.0

    def first_token_at(self, tokens: int, now: float) -> float:
        self.free_at = max(self.free_at, now) + self.token_s * tokens
        return self.free_at + self.base_s


def serve(ledger: Ledger, engine: Engine, prompt: int, now: float, outputs: int = 0) -> float:
    r = request(prompt)
    ledger.sent(r, sent_to(engine.view), now)
    at = engine.first_token_at(prompt, now)
    ledger.first_token(r.id, at)
    if outputs:
        ledger.tokens(r.id, at, 1)
        ledger.tokens(r.id, at + 0.03 * (outputs - 1), outputs - 1)
    ledger.ended(r.id, at + 1.0)
    return at


def test_engines_of_different_speed_get_different_costs() -> None:
    ledger, there = Ledger(), replicas(2)
    fast, slow = Engine(there[0], 5e-5), Engine(there[1], 4e-4)
    for n in range(60):
        for engine in (fast, slow):
            serve(ledger, engine, 500 + 100 * (n % 20), n * 10.0, outputs=50)
    assert there[0].speed.token_s == pytest.approx(5e-5, rel=0.1)
    assert there[1].speed.token_s == pytest.approx(4e-4, rel=0.1)
    assert there[1].speed.base_s == pytest.approx(0.05, rel=0.3)
    assert there[0].speed.output_s == pytest.approx(0.03, rel=0.05)
    chooser = route("joint")
    choice = chooser.choose(request(1000), there, 1000.0)
    assert choice.replica is there[0]
    assert [c.cost for c in choice.candidates] == pytest.approx([0.1, 0.45], rel=0.15)


def test_one_outlier_teaches_little_and_a_changed_engine_is_noticed() -> None:
    ledger, c = Ledger(), replica("0")
    engine = Engine(c, 1e-4)
    for n in range(60):
        serve(ledger, engine, 500 + 100 * (n % 20), n * 10.0)
    for late, at in ((60.0, 1000.0), (0.6, 2000.0)):  # where 0.15 s are usual
        r = request(1000)
        ledger.sent(r, sent_to(c), at)
        ledger.first_token(r.id, at + late)
        ledger.ended(r.id, at + late)
        assert c.speed.base_s + 1000 * c.speed.token_s == pytest.approx(0.15, rel=0.02)
    engine.token_s, engine.free_at = 3e-4, 0.0
    for n in range(200):
        serve(ledger, engine, 500 + 100 * (n % 20), 3000 + n * 10.0)
    assert c.speed.token_s == pytest.approx(3e-4, rel=0.25)


def test_the_delay_of_decodes_by_prompts_is_learned() -> None:
    ledger, c = Ledger(), replica("0")
    now = 0.0
    for n in range(80):
        long, other = request(10), request(1000 + 500 * (n % 4))
        ledger.sent(long, sent_to(c), now)
        ledger.tokens(long.id, now + 0.1, 1)
        ledger.sent(other, sent_to(c), now + 0.2)
        ledger.first_token(other.id, now + 0.5)
        ledger.tokens(long.id, now + 0.1 + 0.02 * 99 + 2e-4 * other.prompt_tokens, 99)
        ledger.ended(long.id, now + 5)
        ledger.ended(other.id, now + 5)
        now += 10
    assert c.speed.stall_s == pytest.approx(2e-4, rel=0.1)
    assert c.speed.output_s == pytest.approx(0.02, rel=0.1)


def test_a_wait_for_a_seat_does_not_count_as_slowness() -> None:
    ledger, c = Ledger(), replica("0", seats=2, outstanding=5)
    r = request(1000)
    ledger.sent(r, sent_to(c), 0.0)
    ledger.first_token(r.id, 30.0)
    assert c.speed.seen == 0


def test_a_stall_or_a_restart_loses_the_cache_and_an_error_does_not_until_it_opens_the_breaker() -> None:
    lost: list[str] = []
    ledger, c = Ledger(lambda view: lost.append(view.name)), replica("x")

    def fail(kind: Failure) -> None:
        r = request(10)
        ledger.sent(r, sent_to(c), 0.0)
        ledger.failed(r.id, 0.0, kind)

    fail(Failure.ERROR)
    fail(Failure.CUT)
    assert lost == []
    fail(Failure.ERROR)
    assert lost == ["x"]  # opened
    c = replica("y")
    for kind in (Failure.STALL, Failure.RESET):
        fail(kind)
    assert lost == ["x", "y", "y"]


def test_turned_away_is_back_pressure_and_4xx_is_neutral() -> None:
    ledger, c = Ledger(), replica("0")
    r = request(10)
    for _ in range(10):
        ledger.sent(r, sent_to(c), 0.0)
        ledger.ended(r.id, 0.0, complete=False)
    ledger.sent(r, sent_to(c), 0.0)
    ledger.turned_away(r.id, 0.0, 3.0)
    assert (c.health.state(0.0), c.health.recent_failures(0.0)) == ("closed", 0.0)
    assert [c.health.allows(now) for now in (2.9, 3.0)] == [False, True]


def test_an_engine_that_fails_fast_does_not_draw_the_load() -> None:
    """It never has anybody outstanding, so by load alone it would look best for ever."""
    for name in ("joint", "least-loaded"):
        chooser, ledger, there, now = route(name), Ledger(), replicas(4), 0.0
        bad, tried, out = there[0], 0, []
        for _ in range(400):
            now += 0.005
            r = request(1000)
            choice = chooser.choose(r, [c for c in there if c.health.allows(now)], now)
            ledger.sent(r, choice, now)
            if choice.replica is bad:
                tried += 1
                ledger.failed(r.id, now + 0.001, Failure.RESET)
            else:
                out.append(r.id)
            if len(out) > 40:
                ledger.ended(out.pop(0), now)
        assert tried <= 6, name  # three, and a probe now and then


def test_others_are_what_an_engine_counts_beyond_ours() -> None:
    ledger, c = Ledger(), replica("0")
    for _ in range(3):
        ledger.sent(request(100), sent_to(c), 0.0)
    c.told(Facts(0.0, running=4, waiting=5))
    assert (c.others, c.others_waiting) == (6, 2)
    c.told(Facts(1.0, running=1, waiting=0))
    assert (c.others, c.others_waiting) == (0, 0)


def test_a_newcomer_is_taken_to_be_as_the_others_are() -> None:
    typical = Speed()
    old = [ReplicaView(str(n), speed=Speed(typical)) for n in range(3)]
    ledger = Ledger()
    for n in range(60):
        for view in old:
            serve(ledger, Engine(view, 8e-4, free_at=0.0), 500 + 100 * (n % 20), n * 10.0)
    new = ReplicaView("new", speed=Speed(typical))
    assert new.speed.token_s == pytest.approx(8e-4, rel=0.1)
    chooser, sent = route("joint"), []
    for _ in range(40):  # all at once: nobody has answered yet
        r = request(1000)
        choice = chooser.choose(r, [*old, new], 1000.0)
        ledger.sent(r, choice, 1000.0)
        sent.append(choice.replica.name)
    assert 8 <= sent.count("new") <= 12  # its quarter: neither starved nor flooded
    assert new.speed.token_s != TOKEN_S
