"""Finds parameters of a policy with which a workload fares better, and judges them on requests they were not chosen by.

The search is Optuna's tree-structured Parzen estimator (Bergstra and others, "Algorithms for Hyper-Parameter
Optimization", NeurIPS 2011), seeded, so that the same call finds the same parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from tidegate.config import AgingConfig, Config, idle
from tidegate.core.policies.adaptive import AdaptiveBudget
from tidegate.core.policy import Policy
from tidegate.core.presets import Preset, defaults
from tidegate.core.slo import NO_SLO
from tidegate.custom import find_policy
from tidegate.errors import ConfigError, InputError, MissingExtra
from tidegate.observe.records import Record
from tidegate.simulate.reshape import rows
from tidegate.simulate.run import EngineSetup, FleetSetup, simulate
from tidegate.simulate.workload import Workload

if TYPE_CHECKING:
    import optuna

DIGITS = 4
"""Significant digits of a number that the search proposes, so that a file of them can be read."""


@dataclass(frozen=True, slots=True)
class Range:
    """Between which values a parameter is looked for.

    log:   whether its order of magnitude is looked for, rather than its size
    whole: whether it is a whole number
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def including(self, value: float) -> Range:
        """The same with `value` in it; where that has no order of magnitude, of sizes."""
        return Range(min(self.low, value), max(self.high, value), self.log and value > 0, self.whole)

    def suggest(self, trial: optuna.Trial, name: str) -> float:
        """What the search proposes next."""
        if self.whole:
            return trial.suggest_int(name, int(self.low), int(self.high), log=self.log)
        return float(f"{trial.suggest_float(name, self.low, self.high, log=self.log):.{DIGITS}g}")


ORDERS: Mapping[str, Range] = {
    "aging_window": Range(5.0, 600.0, log=True),
    "urgent_slack": Range(0.01, 2.0, log=True),
    "w_wait": Range(0.1, 10.0, log=True),
    "w_cache": Range(0.01, 60.0, log=True),
    "patience": Range(10.0, 3000.0, log=True),
    "levels": Range(2, 8, whole=True),
    "quantum": Range(64, 8192, log=True, whole=True),
    "ratio": Range(2, 4, whole=True),
    "promote": Range(1.0, 300.0, log=True),
    "beta": Range(64.0, 65536.0, log=True),
    "age": Range(1.0, 4096.0, log=True),
}
"""Parameters of the orders that ship. Another number of an order is looked for from a tenth of its default to ten
times that."""

MEANING = frozenset({"w_in", "w_out"})
"""Numbers that say what is fair: others would not serve the same end better, but another end."""

SHARE = Range(0.1, 1.0)

ADAPTIVE: Mapping[str, Range] = {
    "margin": Range(0.0, 0.5),
    "floor": Range(16, 512, log=True, whole=True),
    "max_stride": Range(1, 8, whole=True),
}
"""Parameters of the adaptive budget."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number that a policy takes: what the configuration says of it, and where others are looked for."""

    value: float
    range: Range


def tunable(settings: Config) -> dict[str, Parameter]:
    """The numbers that the policy of `settings` takes and that do something beside the rest of it.

    Raises InputError for a policy that takes none.
    """
    name = settings.scheduler.policy
    preset = find_policy(name)
    if isinstance(preset, Policy):
        raise InputError(f"policy {name} is whole: it was composed in Python and has no parameters to tune")
    said = defaults(preset) | settings.policy.get(name, {})
    if settings.aging.window is not None:
        said["aging_window"] = settings.aging.window
    ranges = {**_order_ranges(preset), "share": SHARE, **(ADAPTIVE if said["budget"] == "adaptive" else {})}
    if said.get("aging_window") is not None:
        ranges["aging_window"] = ORDERS["aging_window"]
    own: dict[str, Any] = {f.name: f.default for f in fields(AdaptiveBudget)}
    values: dict[str, Any] = {option: own.get(option) if said[option] is None else said[option] for option in ranges}
    nothing = idle(settings)
    return {
        option: Parameter(value, ranges[option].including(value))
        for option, value in values.items()
        if f"policy.{name}.{option}" not in nothing
    }


def _order_ranges(preset: Preset) -> dict[str, Range]:
    """Where numbers of a preset's order are looked for. One that has to be given is left as it was given."""
    ranges = {}
    for f in fields(preset.order):  # type: ignore[arg-type]
        default: Any = f.default
        if f.name in MEANING or isinstance(default, bool) or not isinstance(default, int | float):
            continue
        whole, known = isinstance(default, int), ORDERS.get(f.name)
        if known is not None and known.whole == whole:
            ranges[f.name] = known
        elif default > 0:
            low, high = (max(1, default // 10), default * 10) if whole else (default / 10, default * 10)
            ranges[f.name] = Range(low, high, log=True, whole=whole)
    return ranges


def with_parameters(settings: Config, values: Mapping[str, float]) -> Config:
    """`settings` with these parameters of its policy, each where a configuration says it."""
    name, own = settings.scheduler.policy, dict(values)
    window = own.pop("aging_window", None)
    aging = settings.aging if window is None else AgingConfig(float(window), settings.aging.rate)
    return replace(settings, policy={**settings.policy, name: {**settings.policy.get(name, {}), **own}}, aging=aging)


@dataclass(frozen=True, slots=True)
class Score:
    """How a workload fared.

    goodput:    requests that met their SLO, a second from the first arrival to the last. It is not divided by the time
                to the last result: of a short workload that is the length of its last request
    attainment: by class with a promise, the share of its requests that met it
    """

    goodput: float
    attainment: Mapping[str, float]

    def of(self, objective: str) -> float:
        """What is to be large: "goodput", or "attainment", which is that of the class that fares worst."""
        return self.goodput if objective == "goodput" else min(self.attainment.values())


OBJECTIVES = ("goodput", "attainment")


@dataclass(frozen=True, slots=True)
class Trials:
    """On what candidates are tried: `engine` makes one of a configuration, `fleet` says how many there are."""

    engine: Callable[[Config], EngineSetup]
    fleet: FleetSetup
    declared: int | None = None

    def score(self, workload: Workload, settings: Config) -> Score:
        """How `workload` fares. Raises InputError where no class of it was promised anything."""
        classes = settings.slo_classes
        all_of: Counter[str] = Counter()
        met: Counter[str] = Counter()

        def count(records: list[Record]) -> None:
            for r in records:
                all_of[r.slo_class] += 1
                met[r.slo_class] += r.slo_met

        setup = self.engine(settings)
        simulate(workload, setup, count, fleet=self.fleet, classes=classes, declared=self.declared)
        promised = sorted(name for name in all_of if classes[name].slo != NO_SLO)
        if not promised:
            raise InputError(f"{workload.name}: no class of it was promised anything, so nothing can be kept better")
        return Score(met.total() / (workload.duration_s or 1.0), {name: met[name] / all_of[name] for name in promised})


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a search found. `before` and `after` are values of parameters by name; each pair of scores is of the
    configuration as it was and with what was found, on the requests that were searched and on those held out."""

    config: Config
    before: Mapping[str, float]
    after: Mapping[str, float]
    searched: tuple[Score, Score]
    held_out: tuple[Score, Score]

    def gain(self, objective: str) -> float:
        """By how much the objective is larger on the requests that were held out."""
        old, new = self.held_out
        return new.of(objective) - old.of(objective)


def split(workload: Workload, hold_out: float) -> tuple[Workload, Workload]:
    """The first requests, and the last ones, `hold_out` of all; those begin at 0 in an empty engine.

    Raises InputError where either would be nothing.
    """
    if not 0 < hold_out < 1:
        raise InputError(f"{hold_out:g} is no share to hold out: it must be above 0 and below 1")
    at = round(len(workload) * (1 - hold_out))
    if not 0 < at < len(workload):
        raise InputError(f"{workload.name}: {len(workload)} requests cannot be split at {1 - hold_out:.0%}")
    return rows(workload, 0, at), rows(workload, at, None)


def tune(
    settings: Config,
    workload: Workload,
    trials: Trials,
    *,
    objective: str = "goodput",
    count: int = 50,
    hold_out: float = 0.3,
    seed: int = 0,
    on_trial: Callable[[], None] = lambda: None,
) -> Tuned:
    """The best of `count` settings of the policy's parameters, the first of which are those of `settings`.

    Where no other is better on the requests that are searched, it is those. Raises MissingExtra without Optuna.
    """
    optuna = _optuna()
    first, later = split(workload, hold_out)
    parameters = tunable(settings)
    before = {name: p.value for name, p in parameters.items()}
    baseline, held_out = trials.score(first, settings), trials.score(later, settings)
    if held_out.attainment.keys() != baseline.attainment.keys():
        apart = ", ".join(sorted(held_out.attainment.keys() ^ baseline.attainment.keys()))
        raise InputError(f"{apart} occurs only before or only after {1 - hold_out:.0%} of the requests; cut otherwise")

    def attempt(values: Mapping[str, float]) -> float | None:
        try:
            candidate = with_parameters(settings, values)
            return baseline.of(objective) if values == before else trials.score(first, candidate).of(objective)
        except ConfigError:  # values that do not go together
            return None

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    found = _best(study, parameters, attempt, count, on_trial)
    best = with_parameters(settings, found)
    scored = trials.score(first, best)
    if scored.of(objective) <= baseline.of(objective):
        return Tuned(settings, before, before, (baseline, baseline), (held_out, held_out))
    return Tuned(best, before, found, (baseline, scored), (held_out, trials.score(later, best)))


def _best(
    study: optuna.Study,
    parameters: Mapping[str, Parameter],
    attempt: Callable[[Mapping[str, float]], float | None],
    count: int,
    on_trial: Callable[[], None],
) -> dict[str, float]:
    """Of `count` proposals, the values for which `attempt` answers the most; it answers None to what is none."""
    from optuna import TrialPruned

    study.enqueue_trial({name: p.value for name, p in parameters.items()})

    def one(trial: optuna.Trial) -> float:
        values = {name: p.range.suggest(trial, name) for name, p in parameters.items()}
        trial.set_user_attr("values", values)
        answer = attempt(values)
        on_trial()
        if answer is None:
            raise TrialPruned
        return answer

    study.optimize(one, n_trials=count)
    found: dict[str, float] = study.best_trial.user_attrs["values"]
    return found


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as e:
        raise MissingExtra("tuning needs Optuna: pip install 'tidegate[tune]'") from e
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
