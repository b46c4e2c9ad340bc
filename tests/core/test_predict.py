"""Output lengths: the history against a slow twin, what it forgets, and errors made on purpose."""

from __future__ import annotations

from collections import OrderedDict
from math import exp, log
from statistics import mean, median, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.harness import Run
from tidegate.core.limits import Limits
from tidegate.core.policy import PolicyContext
from tidegate.core.predict import MAX_ERROR, HistoryPredictor, NoisyPredictor, OraclePredictor, Predictor, StepTime
from tidegate.core.presets import PRESETS, build_policy
from tidegate.core.request import Request
from tidegate.core.scheduler import Scheduler
from tidegate.core.slo import Slo
from tidegate.core.view import RequestView
from tidegate.errors import ConfigError


def asked(name: str = "a", prompt: int = 100, declared: int | None = None, **known: object) -> Request:
    return Request(name, prompt_tokens=prompt, max_tokens=declared, **known)  # type: ignore[arg-type]


class SortingHistory:
    """The twin: keeps lengths as they came and sorts them for every prediction."""

    def __init__(self, depth: int, keys: int, default: int) -> None:
        self.depth, self.keys, self.default = depth, keys, default
        self.groups: OrderedDict[object, list[int]] = OrderedDict()

    def output_quantile(self, r: Request, share: float) -> float:
        predicted = r.max_tokens if r.max_tokens is not None else self.default
        for group in self.groups_of(r):
            lengths = sorted(self.groups.get(group, ()))
            if lengths:
                predicted = lengths[min(len(lengths) - 1, int(share * len(lengths)))]
                break
        return float(max(1, predicted if r.max_tokens is None else min(predicted, r.max_tokens)))

    def observe(self, r: Request, outputs: int) -> None:
        for group in self.groups_of(r):
            self.groups[group] = [*self.groups.pop(group, ()), outputs][-self.depth :]
        while len(self.groups) > self.keys:
            self.groups.popitem(last=False)

    @staticmethod
    def groups_of(r: Request) -> tuple[object, object]:
        return (r.tenant, r.slo_class, r.prompt_tokens.bit_length()), r.slo_class


shown = st.builds(
    asked,
    prompt=st.sampled_from([1, 3, 4, 1000]),
    declared=st.none() | st.integers(1, 30),
    tenant=st.sampled_from("xyz"),
    slo_class=st.sampled_from(["interactive", "batch"]),
)
shares = st.floats(0, 1)


@given(
    events=st.lists(st.tuples(shown, st.none() | st.integers(1, 40), shares), max_size=60),
    depth=st.integers(1, 6),
    keys=st.integers(1, 8),
)
def test_the_history_is_the_one_that_sorts(
    events: list[tuple[Request, int | None, float]], depth: int, keys: int
) -> None:
    fast, slow = HistoryPredictor(0.5, depth, keys, default=17), SortingHistory(depth, keys, default=17)
    for r, outputs, share in events:
        if outputs is not None:
            fast.observe(r, outputs)
            slow.observe(r, outputs)
        assert fast.output_quantile(r, share) == slow.output_quantile(r, share)
        assert fast.output_tokens(r) == slow.output_quantile(r, 0.5)
        assert list(fast._history) == list(slow.groups)


def test_more_than_the_share_of_the_remembered_lengths_fit() -> None:
    history = HistoryPredictor()
    for outputs in range(10, 110, 10):
        history.observe(asked(), outputs)
    assert [history.output_quantile(asked(), q) for q in (0.0, 0.5, 0.89, 0.9, 1.0)] == [10, 60, 90, 100, 100]
    assert HistoryPredictor(0.9).output_tokens(asked(declared=7)) == 7


def test_a_length_leaves_after_depth_further_ones() -> None:
    history = HistoryPredictor(depth=8)
    history.observe(asked(), 1000)
    for further in range(1, 9):
        assert history.output_quantile(asked(), 1.0) == 1000, f"still remembered after {further - 1}"
        history.observe(asked(), 10)
    assert history.output_quantile(asked(), 1.0) == 10


def test_a_group_leaves_when_others_are_fed() -> None:
    history = HistoryPredictor(keys=3)
    history.observe(asked(tenant="old"), 1000)
    history.observe(asked(tenant="new"), 10)
    assert history.output_tokens(asked(tenant="old")) == 1000
    history.observe(asked(tenant="newer"), 10)
    assert history.output_quantile(asked(tenant="old"), 0.5) == 10, "its class answers"


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), max_size=300))
def test_memory_is_bounded_by_keys_and_depth(fed: list[tuple[int, int]]) -> None:
    history = HistoryPredictor(depth=3, keys=5)
    for tenant, outputs in fed:
        history.observe(asked(tenant=f"t{tenant}"), outputs)
        groups = history._history.values()
        assert len(groups) <= 5
        assert all(len(g._by_age) == len(g._by_rank) <= 3 for g in groups)
        assert all(g._by_rank == sorted(g._by_age) for g in groups)


@pytest.mark.parametrize("wrong", [{"depth": 0}, {"keys": 0}, {"quantile": 1.1}])
def test_a_history_that_could_tell_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="a history needs"):
        HistoryPredictor(**wrong)  # type: ignore[arg-type]


def fed_history() -> HistoryPredictor:
    history = HistoryPredictor()
    for outputs in (5, 50, 500):
        history.observe(asked(), outputs)
    return history


@pytest.mark.parametrize("inner", [OraclePredictor(), HistoryPredictor(), fed_history()], ids=["oracle", "new", "fed"])
@pytest.mark.parametrize("noise", [0.0, 2.0])
@given(r=shown, low=shares, high=shares)
def test_a_quantile_is_from_one_to_what_was_declared_and_grows(
    inner: Predictor, noise: float, r: Request, low: float, high: float
) -> None:
    predictor = NoisyPredictor(inner, noise) if noise else inner
    low, high = sorted((low, high))
    smaller, larger = predictor.output_quantile(r, low), predictor.output_quantile(r, high)
    assert 1 <= smaller <= larger
    assert r.max_tokens is None or larger <= r.max_tokens
    assert predictor.output_tokens(r) >= 1


def test_the_oracle_reserves_the_truth() -> None:
    assert OraclePredictor().output_quantile(asked(declared=9, oracle_tokens=4), 0.9) == 4
    assert OraclePredictor().output_quantile(asked(declared=9, oracle_tokens=40), 0.9) == 9


def test_the_same_request_always_meets_the_same_error() -> None:
    r = asked("r1", oracle_tokens=100)
    told = NoisyPredictor(OraclePredictor(), 0.5, seed=3).output_tokens(r)
    again = NoisyPredictor(OraclePredictor(), 0.5, seed=3)
    assert told == again.output_tokens(r) == again.output_tokens(asked("r1", 7, oracle_tokens=100))
    assert told == pytest.approx(264.987, abs=0.001), "in every process and every version"
    assert told != NoisyPredictor(OraclePredictor(), 0.5, seed=4).output_tokens(r)
    assert told != again.output_tokens(asked("r2", oracle_tokens=100))
    again.output_tokens(asked("lone surrogate \udc80", oracle_tokens=1))


@pytest.mark.parametrize("error", [0.25, 1.0])
def test_the_error_is_log_normal_with_its_sigma(error: float) -> None:
    noisy = NoisyPredictor(OraclePredictor(), error, seed=1)
    logs = [log(noisy.factor(f"request-{n}")) for n in range(20_000)]
    assert mean(logs) == pytest.approx(0.0, abs=0.03 * error)
    assert stdev(logs) == pytest.approx(error, rel=0.02)
    assert median(map(exp, logs)) == pytest.approx(1.0, rel=0.03)
    within = sum(abs(x) < error for x in logs) / len(logs)
    assert within == pytest.approx(0.683, abs=0.01)


def test_an_order_sees_errors_beyond_what_was_declared_and_a_reservation_does_not() -> None:
    noisy = NoisyPredictor(OraclePredictor(), 1.0)
    r = next(r for n in range(99) if noisy.output_tokens(r := asked(f"r{n}", declared=100, oracle_tokens=100)) > 150)
    assert noisy.output_quantile(r, 0.9) == 100


def test_without_error_the_noisy_predictor_is_the_inner_one_and_it_learns() -> None:
    noisy = NoisyPredictor(HistoryPredictor(), 0.0)
    noisy.observe(asked(), 33)
    assert (noisy.output_tokens(asked()), noisy.output_quantile(asked(), 0.9)) == (33, 33)


@pytest.mark.parametrize("error", [-0.1, MAX_ERROR + 1, float("nan")])
def test_an_error_without_sense_is_refused(error: float) -> None:
    with pytest.raises(ConfigError, match="the error of a noisy predictor"):
        NoisyPredictor(OraclePredictor(), error)


class Asked(OraclePredictor):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.times = 0

    def output_tokens(self, r: RequestView) -> float:
        self.times += 1
        return super().output_tokens(r)

    def output_quantile(self, r: RequestView, share: float) -> float:
        self.times += 1
        return super().output_quantile(r, share)


@pytest.mark.parametrize("name", PRESETS)
def test_who_asks_for_predicted_lengths(name: str) -> None:
    """Under pressure on seats and memory, with promises of every kind: no other policy can be harmed by an error."""
    predictor = Asked()
    policy = build_policy(name, {"max_waiting": 40})
    limits = Limits(num_blocks=14, max_num_seqs=4, max_num_batched_tokens=64, headroom="none")
    run = Run(Scheduler(policy, limits, PolicyContext(predictor, StepTime())))
    for n in range(12):
        promised = Slo(ttft=20.0, tpot=2.0, e2e=90.0) if n % 2 else Slo()
        run.add(
            Request(
                f"r{n}",
                prompt_tokens=40,
                max_tokens=40,
                priority=n % 3,
                tenant=f"t{n % 2}",
                slo=promised,
                oracle_tokens=40,
            )
        )
        run.steps(2)
    run.until_idle()
    assert run.preemptions()
    assert (predictor.times > 0) == (name in {"sjf", "sla", "joint"})
