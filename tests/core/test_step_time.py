"""The step-time model: what it finds in noisy steps, and what it says before it has seen any."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from math import isfinite
from random import Random
from statistics import median
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.core.harness import limits
from tidegate.core.plan import StepPlan
from tidegate.core.policy import PolicyContext
from tidegate.core.predict import OraclePredictor, StepTime
from tidegate.core.presets import build_policy
from tidegate.core.request import Request
from tidegate.core.scheduler import Scheduler
from tidegate.core.step_time import Coefficients, LearnedStepTime, _eliminate
from tidegate.executors.scripted import Script, ScriptedExecutor


class Measured(NamedTuple):
    prefill: int
    decodes: int
    context: int
    seconds: float


machines = st.builds(
    Coefficients,
    base=st.floats(0.001, 0.1),
    prefill=st.floats(1e-6, 2e-3),
    decode=st.floats(1e-5, 5e-3),
    context=st.floats(1e-9, 5e-7),
)


def true_seconds(machine: Coefficients, prefill: int, decodes: int, context: int) -> float:
    return machine.base + machine.prefill * prefill + machine.decode * decodes + machine.context * context


def steps(machine: Coefficients, n: int, seed: int, noise: float = 0.0, outliers: float = 0.0) -> list[Measured]:
    """Steps as an engine makes them: decodes that come and go, chunks in some, and a clock that hiccups."""
    random, found = Random(seed), []
    decodes, each = 16, 500
    for _ in range(n):
        decodes = min(128, max(0, decodes + random.choice((-6, -1, 0, 0, 1, 6))))
        each = min(8000, max(50, each + random.choice((-200, 1, 1, 150))))
        prefill = random.choice((0, 0, 0, 64, 512, 2048)) if decodes else random.randint(1, 2048)
        seconds = true_seconds(machine, prefill, decodes, decodes * each) * random.gauss(1.0, noise)
        if random.random() < outliers:
            seconds *= random.uniform(3, 50)
        found.append(Measured(prefill, decodes, decodes * each, max(1e-6, seconds)))
    return found


def taught(measured: Iterable[Measured]) -> LearnedStepTime:
    model = LearnedStepTime()
    for step in measured:
        model.observe(*step)
    return model


@given(machines, st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_a_known_formula_is_recovered_from_noisy_steps_with_outliers(machine: Coefficients, seed: int) -> None:
    model = taught(steps(machine, 1000, seed, noise=0.05, outliers=0.05))
    asked = steps(machine, 100, seed + 1)
    typical = median(step.seconds for step in asked)
    for step in asked:  # the shortest steps lie within the noise of the others
        assert model.step(*step[:3]) == pytest.approx(step.seconds, rel=0.1, abs=0.05 * typical)


@given(machines, st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_without_noise_it_comes_close(machine: Coefficients, seed: int) -> None:
    model = taught(steps(machine, 1000, seed))
    for step in steps(machine, 100, seed + 1):
        assert model.step(*step[:3]) == pytest.approx(step.seconds, rel=0.05)


@given(
    st.lists(
        st.builds(
            Measured,
            st.integers(0, 100_000),
            st.integers(0, 4096),
            st.integers(0, 100_000_000),
            st.floats(allow_nan=True, allow_infinity=True) | st.floats(1e-9, 1e6),
        ),
        max_size=80,
    ),
    st.builds(Measured, st.integers(0, 8192), st.integers(0, 512), st.integers(0, 10**6), st.just(0.0)),
)
@example([Measured(1, 1, 1, 1e-9), *[Measured(4, 0, 0, 1e-170)] * 2], Measured(0, 0, 0, 0.0))  # its square is 0
def test_whatever_it_is_told_it_stays_finite_and_never_says_that_more_takes_less(
    told: list[Measured], asked: Measured
) -> None:
    model = taught(told)
    assert all(0 <= c < float("inf") for c in model.coefficients)
    smaller = model.step(*asked[:3])
    assert smaller <= model.step(asked.prefill + 1, asked.decodes, asked.context)
    assert smaller <= model.step(asked.prefill, asked.decodes + 1, asked.context)


def test_a_pivot_that_rounding_swallowed_is_the_ridge() -> None:
    """1e14 and a ridge of 1e-4 is 1e14: by hand the second pivot is the ridge, by computing it is 0."""
    assert all(map(isfinite, _eliminate([[1e18, 1e16], [1e16, 1e14]], [1.0, 1.0], 1e-4)))


@given(machines, st.integers(1, 64), st.integers(0, 4000))
@settings(max_examples=15, deadline=None)
def test_collinear_steps_are_predicted_and_leave_the_rest_to_the_prior(
    machine: Coefficients, decodes: int, each: int
) -> None:
    """Nothing but the same decodes: base, decode and context cannot be told apart, and nothing diverges."""
    seconds = true_seconds(machine, 0, decodes, decodes * each)
    model = taught([Measured(0, decodes, decodes * each, seconds)] * 1000)
    assert model.step(0, decodes, decodes * each) == pytest.approx(seconds, rel=0.02)
    assert model.coefficients.prefill == pytest.approx(Coefficients().prefill, rel=1e-6)
    assert model.decode == pytest.approx(seconds, rel=0.02)


def test_the_prior_is_what_the_constants_are() -> None:
    model, constants = LearnedStepTime(), StepTime()
    assert model.service(300, 20) == pytest.approx(constants.service(300, 20))
    assert model.prefill(300) == pytest.approx(constants.prefill(300))
    assert model.decode == pytest.approx(constants.decode)
    with pytest.raises(ValueError, match="above 0"):
        LearnedStepTime(Coefficients(base=0.0))


def test_it_follows_a_machine_that_changes() -> None:
    slow, fast = Coefficients(0.05, 4e-4, 1e-3, 1e-7), Coefficients(0.005, 2e-5, 1e-4, 1e-8)
    model = taught([*steps(slow, 1500, 1, noise=0.03), *steps(fast, 2500, 2, noise=0.03)])
    for step in steps(fast, 100, 3):
        assert model.step(*step[:3]) == pytest.approx(step.seconds, rel=0.25)


def test_one_hiccup_changes_little() -> None:
    machine = Coefficients(0.01, 5e-5, 2e-4, 2e-8)
    model = taught(steps(machine, 300, 4, noise=0.02))
    before = model.step(1000, 32, 32_000)
    model.observe(1000, 32, 32_000, 100 * before)
    for step in steps(machine, LearnedStepTime.REFIT, 5, noise=0.02):
        model.observe(*step)
    assert model.step(1000, 32, 32_000) == pytest.approx(before, rel=0.03)


def test_a_first_step_that_compiled_something_is_soon_forgotten() -> None:
    machine = Coefficients(0.01, 5e-5, 2e-4, 2e-8)
    model = taught([Measured(500, 0, 0, 60.0), *steps(machine, 48, 9, noise=0.02)])
    for step in steps(machine, 50, 10):
        assert model.step(*step[:3]) == pytest.approx(step.seconds, rel=0.1)


def test_the_same_steps_teach_the_same() -> None:
    told = steps(Coefficients(), 500, 6, noise=0.1, outliers=0.1)
    assert taught(told).coefficients == taught(told).coefficients


def test_a_step_costs_the_same_however_many_came_before() -> None:
    def calls(model: LearnedStepTime) -> int:
        count = 0

        def note(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        told = steps(Coefficients(), 4 * LearnedStepTime.REFIT, 7)
        sys.setprofile(note)
        for step in told:
            model.observe(*step)
        sys.setprofile(None)
        return count

    early, late = taught(steps(Coefficients(), 64, 8)), taught(steps(Coefficients(), 6400, 8))
    assert calls(late) == calls(early)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_scheduler_teaches_it_what_each_step_held(depth: int) -> None:
    """Prefill tokens, decodes and the KV tokens that these read, whatever joins or ends beside the step."""
    told = []

    class Listening(StepTime):
        learns = True

        def observe(self, prefill_tokens: int, decodes: int, context_tokens: int, seconds: float) -> None:
            told.append((prefill_tokens, decodes, context_tokens, seconds))

    context = PolicyContext(OraclePredictor(), Listening())
    scheduler = Scheduler(build_policy("fcfs"), limits(), context)
    executor = ScriptedExecutor(num_blocks=64, max_num_seqs=8, depth=depth, seconds_of=lambda plan: plan.step + 0.5)
    for name, prompt, outputs in (("a", 20, 3), ("b", 50, 2)):
        scheduler.add(Request(name, prompt_tokens=prompt, max_tokens=outputs, handle=Script(range(outputs))), 0.0)
    in_flight: list[tuple[StepPlan, object]] = []
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        if plan:
            in_flight.append((plan, executor.submit(plan)))
        if len(in_flight) == depth or not plan:
            done, future = in_flight.pop(0)
            scheduler.apply(done, future.result(), 0.0)  # type: ignore[attr-defined]
    assert told == [(70, 0, 0, 0.5), (0, 2, 21 + 51, 1.5), (0, 1, 22, 2.5)]
