"""A scheduler stepped by hand, and the metrics that it is counted by."""

from __future__ import annotations

from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families

from tidegate.core.limits import Limits
from tidegate.core.plan import StepPlan, StepResult
from tidegate.core.presets import build_policy
from tidegate.core.scheduler import Scheduler
from tidegate.core.slo import DEFAULT_CLASSES
from tidegate.observe.metrics import Metrics

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def samples(metrics: Metrics, scheduler: Scheduler, now: float) -> Samples:
    """Every sample by name and labels."""
    found: Samples = defaultdict(dict)
    for family in text_string_to_metric_families(metrics.render(scheduler.snapshot(now)).decode()):
        for sample in family.samples:
            found[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
    return found


def total(found: Samples, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels."""
    return sum(value for at, value in found[name].items() if labels.items() <= dict(at).items())


class Host:
    """Steps a scheduler by hand, one second a step, and tells the metrics."""

    def __init__(self, metrics: Metrics, scheduler: Scheduler) -> None:
        self.metrics = metrics
        self.scheduler = scheduler
        self.now = 0.0

    def step(self) -> None:
        plan: StepPlan = self.scheduler.plan(self.now)
        self.now += 1.0
        if plan:
            self.scheduler.apply(plan, StepResult([7] * len(plan.emitting())), self.now)
            self.metrics.step(plan, 1.0)
        self.metrics.events(self.scheduler.take_events())

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()


def host(max_waiting: int | None = None, num_blocks: int = 256, max_num_seqs: int = 16, **classes: int) -> Host:
    policy = build_policy("priority", {"max_waiting": max_waiting})
    limits = Limits(num_blocks, max_num_seqs=max_num_seqs, headroom="none")
    return Host(Metrics([*DEFAULT_CLASSES, *classes], tenants=20), Scheduler(policy, limits))
