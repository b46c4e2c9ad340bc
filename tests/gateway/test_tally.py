"""The gateway's own counters beside prometheus_client's, their slow twins: what Prometheus reads is the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram

from tidegate.gateway.tally import Counts, Spreads

BOUNDS = (0.005, 0.1, 1.0, 30.0)
LABELS = ("class", "replica")
values = st.tuples(st.sampled_from("ab"), st.sampled_from(["x", "y", 'a "quoted"\nname']))
seconds = st.sampled_from(BOUNDS) | st.floats(0, 100)


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """All that is told, but for the times of creation, which are told by the twins alone."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(st.lists(st.tuples(values, seconds)), st.sampled_from([None, *"ab"]))
def test_what_is_read_is_what_prometheus_would_have_counted(
    seen: list[tuple[tuple[str, str], float]], gone: str | None
) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counts, spreads = Counts("n", "so many", LABELS, ours), Spreads("s", "so long", LABELS, BOUNDS, ours)
    counter = Counter("n", "so many", LABELS, registry=theirs)
    histogram = Histogram("s", "so long", LABELS, registry=theirs, buckets=BOUNDS)
    for of, x in seen:
        counts.counts[of] += x
        spreads.observe(of, x)
        counter.labels(*of).inc(x)
        histogram.labels(*of).observe(x)
    if gone is not None:
        for metric in (counts, spreads, counter, histogram):
            metric.remove_by_labels({"class": gone})
    told = samples(ours)
    assert told == samples(theirs)
    assert bool(told) == any(of[0] != gone for of, _ in seen)
