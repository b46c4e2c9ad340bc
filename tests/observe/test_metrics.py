"""Metrics: numbers per class, whatever clients call themselves, with a bounded number of labels."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tidegate.core.limits import Limits
from tidegate.core.plan import StepPlan, StepResult
from tidegate.core.presets import build_policy
from tidegate.core.request import Request
from tidegate.core.scheduler import Scheduler
from tidegate.core.slo import DEFAULT_CLASSES, Slo
from tidegate.errors import RequestRefused
from tidegate.observe.metrics import MAX_CLASS_LABELS, OTHER, Labels, Metrics

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


def test_s58_labels_stay_bounded_whatever_clients_call_themselves() -> None:
    dice = random.Random(58)
    at = host(max_waiting=900)
    classes = [*DEFAULT_CLASSES, *(f"class-{i}" for i in range(30))]
    refused = 0
    for i in range(1000):
        request = Request(
            f"r{i}",
            prompt_tokens=dice.randrange(1, 40),
            max_tokens=3,
            tenant=f"tenant-{dice.randrange(10_000)}",
            slo_class=dice.choice(classes),
            priority=dice.randrange(-7, 8),
        )
        try:
            at.scheduler.add(request, at.now)
        except RequestRefused:
            refused += 1
    at.step()
    waiting = samples(at.metrics, at.scheduler, at.now)
    assert total(waiting, "tidegate_requests_queued") == 900 - 16
    at.run()
    found = samples(at.metrics, at.scheduler, at.now)
    labels = defaultdict(set)
    for by_labels in found.values():
        for key, value in (pair for at_ in by_labels for pair in at_):
            labels[key].add(value)
    assert labels["class"] == {*DEFAULT_CLASSES, OTHER}
    assert len(labels["class"]) == MAX_CLASS_LABELS
    assert len(labels["tenant"]) == 20
    assert OTHER in labels["tenant"]
    assert "priority" not in labels
    assert total(found, "tidegate_requests_submitted_total") == 1000
    assert total(found, "tidegate_requests_refused_total", reason="queue_full") == refused > 0
    assert total(found, "tidegate_requests_finished_total") == 1000 - refused
    assert total(found, "tidegate_tenant_requests_total") == 1000
    assert total(found, "tidegate_requests_queued") == 0
    for name in ("queue_wait", "ttft", "e2e"):
        assert total(found, f"tidegate_{name}_seconds_count") == 1000 - refused
    assert total(found, "tidegate_slo_met_total") == 1000 - refused


def test_promises_kept_and_broken_are_counted_by_class() -> None:
    at = host()
    for name, slo in (("kept", Slo(ttft=10.0)), ("late", Slo(ttft=0.5, e2e=2.0)), ("none", Slo())):
        at.scheduler.add(Request(name, prompt_tokens=8, max_tokens=4, slo_class="batch", slo=slo), at.now)
    at.run()
    found = samples(at.metrics, at.scheduler, at.now)
    assert total(found, "tidegate_slo_met_total", **{"class": "batch"}) == 2
    assert total(found, "tidegate_slo_missed_total", **{"class": "batch", "promise": "ttft"}) == 1
    assert total(found, "tidegate_slo_missed_total", **{"class": "batch", "promise": "e2e"}) == 1


def test_preemptions_tokens_and_memory() -> None:
    at = host(num_blocks=6, max_num_seqs=2)
    at.scheduler.add(Request("slow", prompt_tokens=40, max_tokens=40, slo_class="batch", priority=10), at.now)
    at.step()
    assert samples(at.metrics, at.scheduler, at.now)["tidegate_kv_used_blocks"][()] == 3
    at.scheduler.add(Request("urgent", prompt_tokens=60, max_tokens=4), at.now)
    at.run()
    found = samples(at.metrics, at.scheduler, at.now)
    assert total(found, "tidegate_preemptions_total", **{"class": "batch"}) == 1
    assert total(found, "tidegate_preempted_wait_seconds_count", **{"class": "batch"}) == 1
    assert found["tidegate_prompt_tokens_total"][()] == 100
    assert found["tidegate_generation_tokens_total"][()] == 44
    assert found["tidegate_kv_used_blocks"][()] == 0
    assert found["tidegate_kv_blocks"][()] == 6
    assert found["tidegate_recomputed_tokens_total"][()] > 0
    assert found["tidegate_step_tokens_sum"][()] == 100 + 44 - 2 + found["tidegate_recomputed_tokens_total"][()]


def test_starvation_is_seen_while_it_happens() -> None:
    at = host(max_num_seqs=1)
    at.scheduler.add(Request("first", prompt_tokens=8, max_tokens=50), at.now)
    at.step()
    at.scheduler.add(Request("starved", prompt_tokens=8, max_tokens=4, arrival=at.now, slo_class="batch"), at.now)
    for _ in range(20):
        at.step()
    found = samples(at.metrics, at.scheduler, at.now)
    assert total(found, "tidegate_oldest_wait_seconds", **{"class": "batch"}) == 20
    at.run()
    found = samples(at.metrics, at.scheduler, at.now)
    assert total(found, "tidegate_oldest_wait_seconds") == 0


def test_cancelled_requests_broke_no_promise_and_met_none() -> None:
    at = host()
    at.scheduler.add(Request("left", prompt_tokens=8, max_tokens=50, slo=Slo(e2e=0.1)), at.now)
    at.step()
    at.scheduler.abort("left", at.now)
    at.step()
    found = samples(at.metrics, at.scheduler, at.now)
    assert total(found, "tidegate_requests_finished_total", reason="cancelled") == 1
    assert total(found, "tidegate_slo_met_total") == total(found, "tidegate_slo_missed_total") == 0


def test_a_dead_engine_is_down() -> None:
    at = host()
    assert b"tidegate_engine_up 1.0" in at.metrics.render(at.scheduler.snapshot(0.0))
    assert b"tidegate_engine_up 0.0" in at.metrics.render(None)


def test_configured_names_keep_their_labels() -> None:
    labels = Labels(3, ["a", "b", "c"])
    assert [labels(name) for name in ("z", "c", "b", "a")] == [OTHER, OTHER, "b", "a"]
    with pytest.raises(ValueError, match="limit of 0"):
        Labels(0)


def test_a_request_that_was_never_served_kept_no_promise() -> None:
    at = host(max_num_seqs=1)
    at.scheduler.add(Request("runs", prompt_tokens=16, max_tokens=20), at.now)
    at.step()
    late = Request("late", prompt_tokens=16, max_tokens=2, arrival=at.now, queue_ttl=3.0, slo_class="batch")
    at.scheduler.add(late, at.now)
    at.run()
    found = samples(at.metrics, at.scheduler, at.now)
    assert total(found, "tidegate_requests_finished_total", reason="timeout") == 1
    assert total(found, "tidegate_slo_met_total", **{"class": "batch"}) == 0
    assert total(found, "tidegate_e2e_seconds_count", **{"class": "batch"}) == 0
    assert total(found, "tidegate_e2e_seconds_count") == 1
