"""S58: numbers per class with bounded labels, whatever clients call themselves. The scenario is told in words."""

import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.observe.counted import Host, host, samples, total
from tests.scenarios.drawn import few
from tidegate.core.request import Request
from tidegate.core.slo import DEFAULT_CLASSES, Slo
from tidegate.errors import RequestRefused
from tidegate.observe.metrics import MAX_CLASS_LABELS, OTHER


def crowd(at: Host, count: int, tenants: int, strange_classes: int, seed: int) -> int:
    """`count` requests of all priorities arrive, of so many tenants and unknown classes; how many were refused."""
    dice = random.Random(seed)
    classes = [*DEFAULT_CLASSES, *(f"class-{i}" for i in range(strange_classes))]
    refused = 0
    for i in range(count):
        request = Request(
            f"r{i}",
            prompt_tokens=dice.randrange(1, 40),
            max_tokens=3,
            tenant=f"tenant-{dice.randrange(tenants)}",
            slo_class=dice.choice(classes),
            priority=dice.randrange(-7, 8),
            slo=Slo(ttft=20.0),
        )
        try:
            at.scheduler.add(request, at.now)
        except RequestRefused:
            refused += 1
    at.step()
    return refused


@pytest.fixture
def crowded() -> tuple[Host, int]:
    """The scenario's load, at the end of its first step."""
    at = host(max_waiting=900)
    return at, crowd(at, 1000, 10_000, 30, 58)


def labels_of(at: Host) -> dict[str, set[str]]:
    """Every value of every label."""
    labels = defaultdict(set)
    for by_labels in samples(at.metrics, at.scheduler, at.now).values():
        for name, value in (pair for labelled in by_labels for pair in labelled):
            labels[name].add(value)
    return labels


@pytest.mark.expects("S58", 0)
def test_s58_every_number_is_told_by_class(crowded):
    at, refused = crowded
    waiting = samples(at.metrics, at.scheduler, at.now)
    assert total(waiting, "tidegate_requests_queued") == 900 - 16
    at.scheduler.add(Request("urgent", prompt_tokens=8, max_tokens=3, priority=-9, slo=Slo(ttft=20.0)), at.now)
    at.run()
    found = samples(at.metrics, at.scheduler, at.now)
    assert total(found, "tidegate_requests_submitted_total") == 1001
    assert total(found, "tidegate_requests_refused_total", reason="queue_full") == refused > 0
    assert total(found, "tidegate_requests_finished_total") == 1001 - refused
    assert total(found, "tidegate_requests_queued") == 0
    for name in ("queue_wait", "ttft", "e2e"):
        assert total(found, f"tidegate_{name}_seconds_count") == 1001 - refused
    kept, broken = (total(found, f"tidegate_slo_{name}_total") for name in ("met", "missed"))
    assert kept + broken == 1001 - refused
    assert kept
    assert broken
    for name in ("submitted", "finished"):
        by_class = {dict(key)["class"] for key in found[f"tidegate_requests_{name}_total"]}
        assert by_class == {*DEFAULT_CLASSES, OTHER}
    evicted = found["tidegate_preemptions_total"]
    assert sum(evicted.values()) >= 1
    assert all(dict(key)["class"] in {*DEFAULT_CLASSES, OTHER} for key in evicted)


@pytest.mark.expects("S58", 1)
def test_s58_at_most_five_classes(crowded):
    at, _ = crowded
    at.run()
    labels = labels_of(at)
    assert labels["class"] == {*DEFAULT_CLASSES, OTHER}
    assert len(labels["class"]) == MAX_CLASS_LABELS == 5
    assert "priority" not in labels


@pytest.mark.expects("S58", 2)
def test_s58_tenants_are_capped(crowded):
    at, _ = crowded
    at.run()
    labels = labels_of(at)
    assert len(labels["tenant"]) == 20
    assert OTHER in labels["tenant"]
    found = samples(at.metrics, at.scheduler, at.now)
    assert total(found, "tidegate_tenant_requests_total") == 1000


@given(
    count=st.integers(1, 120),
    tenants=st.integers(1, 500),
    strange=st.integers(0, 40),
    max_waiting=st.integers(1, 200),
    seed=st.integers(0, 99),
)
@few
def test_s58_as_a_kind(count, tenants, strange, max_waiting, seed):
    """However many of whatever name come: nobody is lost from the numbers, and labels do not grow with names."""
    at = host(max_waiting=max_waiting)
    refused = crowd(at, count, tenants, strange, seed)
    at.run()
    labels, found = labels_of(at), samples(at.metrics, at.scheduler, at.now)
    assert labels["class"] <= {*DEFAULT_CLASSES, OTHER}
    assert len(labels["tenant"]) <= 20
    assert total(found, "tidegate_requests_submitted_total") == count
    assert total(found, "tidegate_requests_refused_total") == refused
    assert total(found, "tidegate_requests_finished_total") == count - refused
    assert total(found, "tidegate_tenant_requests_total") == count
