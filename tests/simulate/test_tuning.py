"""Tuning: what is searched, what is found, and by which requests it is judged."""

from __future__ import annotations

import sys
import tomllib
from functools import partial

import pytest

from tidegate.cli.engine_options import cost_model, engine_setup
from tidegate.config import Config, load_config, resolve, to_toml
from tidegate.core.presets import PRESETS
from tidegate.errors import InputError, MissingExtra
from tidegate.simulate.run import FleetSetup
from tidegate.simulate.traces import load_workload
from tidegate.simulate.tuning import Range, Score, Trials, Tuned, split, tunable, tune, with_parameters

BUSY = load_workload(
    ["poisson:rate=24,count=120,prompt=1500,output=100", "poisson:rate=6,count=30,prompt=6000,output=100,batch"]
)


def settings(name: str = "joint", **sections: dict[str, object]) -> Config:
    return load_config(None, {"scheduler": {"policy": name}, **sections})


def trials() -> Trials:
    return Trials(partial(engine_setup, cost=cost_model("h100", "llama-3.1-8b", 1, 0.0, "formula")), FleetSetup())


# What is searched


@pytest.mark.parametrize("policy", PRESETS)
def test_every_parameter_has_a_range_whose_ends_a_configuration_accepts(policy: str) -> None:
    given = settings(policy)
    parameters = tunable(given)
    assert "share" in parameters
    for end in ("low", "high"):
        values = {name: getattr(p.range, end) for name, p in parameters.items()}
        changed = with_parameters(given, values)
        assert resolve(tomllib.loads(to_toml(changed))) == changed
        assert {name: p.value for name, p in tunable(changed).items()} == values
    for p in parameters.values():
        assert p.range.low <= p.value <= p.range.high
        assert p.range.low < p.range.high


def test_numbers_of_joint_and_its_budget_are_searched() -> None:
    assert {name: p.value for name, p in tunable(settings()).items()} == {
        "aging_window": 60.0, "urgent_slack": 0.5, "w_wait": 1.0, "w_cache": 0.5,
        "share": 0.5, "margin": 0.05, "floor": 64, "max_stride": 4,
    }  # fmt: skip


def test_what_the_configuration_says_is_where_the_search_begins() -> None:
    given = settings(policy={"joint": {"w_cache": 0.0, "floor": 2000}}, aging={"window": 7.0})
    found = tunable(given)
    assert (found["w_cache"].value, found["floor"].value, found["aging_window"].value) == (0.0, 2000, 7.0)
    assert found["w_cache"].range == Range(0.0, 60.0)
    assert found["floor"].range == Range(16, 2000, log=True, whole=True)


def test_what_is_fair_is_not_searched() -> None:
    assert set(tunable(settings("vtc"))) == {"share"}


def test_ageing_is_searched_where_there_is_some() -> None:
    assert "aging_window" not in tunable(settings("priority"))
    assert tunable(settings("priority", aging={"window": 30.0}))["aging_window"].value == 30.0


# By what it is judged


def test_the_last_requests_are_held_out_and_begin_at_once() -> None:
    first, later = split(BUSY, 0.3)
    assert (len(first), len(later)) == (105, 45)
    assert first.requests == BUSY.requests[:105]
    assert later.requests[0].arrival_s == 0
    assert later.duration_s == pytest.approx(BUSY.requests[-1].arrival_s - BUSY.requests[105].arrival_s)


@pytest.mark.parametrize("hold_out", [0.0, 1.0, -1.0, 0.001])
def test_something_is_searched_and_something_held_out(hold_out: float) -> None:
    with pytest.raises(InputError):
        split(BUSY, hold_out)


def test_a_class_that_only_one_part_has_is_refused() -> None:
    pytest.importorskip("optuna")
    load = load_workload(
        ["steady:rate=9,count=20,prompt=9,output=2", "steady:rate=9,count=20,prompt=9,output=2,completion,at=9s"]
    )
    with pytest.raises(InputError, match="completion, interactive occurs only before or only after 50%"):
        tune(settings(), load, trials(), hold_out=0.5, count=1)


def test_without_promises_there_is_nothing_to_keep() -> None:
    with pytest.raises(InputError, match="no class of it was promised anything"):
        trials().score(load_workload("steady:rate=9,count=5,prompt=9,output=2,batch"), settings())


def test_an_objective_is_of_all_or_of_the_worst_class() -> None:
    score = Score(3.0, {"a": 0.5, "b": 0.9})
    assert (score.of("goodput"), score.of("attainment")) == (3.0, 0.5)
    other = Score(2.0, {"a": 0.6, "b": 0.7})
    tuned = Tuned(settings(), {}, {}, (score, score), (score, other))
    assert tuned.gain("goodput") == -1.0
    assert tuned.gain("attainment") == pytest.approx(0.1)


# What is found


def test_the_same_seed_finds_the_same_and_never_worse_than_before() -> None:
    pytest.importorskip("optuna")
    tried: list[None] = []
    one = tune(settings(), BUSY, trials(), objective="attainment", count=8, seed=3, on_trial=lambda: tried.append(None))
    assert len(tried) == 8
    again = tune(settings(), BUSY, trials(), objective="attainment", count=8, seed=3)
    other = tune(settings(), BUSY, trials(), objective="attainment", count=8, seed=4)
    assert one == again
    assert one.after != other.after
    for found in (one, other):
        before, after = found.searched
        assert after.of("attainment") > before.of("attainment")
        assert found.config == with_parameters(settings(), found.after)
        assert trials().score(split(BUSY, 0.3)[1], found.config) == found.held_out[1]


def test_where_nothing_is_better_all_stays() -> None:
    pytest.importorskip("optuna")
    quiet = load_workload("steady:rate=2,count=20,prompt=100,output=5")
    found = tune(settings(), quiet, trials(), objective="attainment", count=5)
    assert found.config == settings()
    assert found.before == found.after
    assert found.gain("attainment") == 0


def test_the_first_trial_is_what_was_there() -> None:
    pytest.importorskip("optuna")
    assert tune(settings(), BUSY, trials(), count=1).after == {n: p.value for n, p in tunable(settings()).items()}


def test_without_optuna_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtra, match=r"pip install 'tidegate\[tune\]'"):
        tune(settings(), BUSY, trials())
