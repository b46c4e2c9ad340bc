"""Counters and histograms that are counted at every request: an addition each, and Prometheus's families when it asks.

prometheus_client's own take a lock for each and look through all buckets, which is right for threads and costs a tenth
of a request here, where one event loop counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Values = tuple[str, ...]
"""Of the labels, in their order."""


class Counts(Collector):
    """A counter for each combination of values: `counts[values] += n`, with `n` not below 0."""

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._about = name, text
        self._labels = labels
        self.counts: defaultdict[Values, float] = defaultdict(float)
        registry.register(self)

    def remove_by_labels(self, labels: Mapping[str, str]) -> None:
        """Forget those that have these values."""
        for values in _having(self.counts, self._labels, labels):
            del self.counts[values]

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(*self._about, labels=self._labels)
        for values, n in self.counts.items():
            family.add_metric(values, n)
        yield family


class Spreads(Collector):
    """A histogram for each combination of values; `bounds` are the upper ends of its buckets, ascending."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._about = name, text
        self._labels = labels
        self._bounds = bounds
        self._names = [floatToGoString(bound) for bound in (*bounds, float("inf"))]
        self._buckets: dict[Values, list[int]] = {}
        self._sums: defaultdict[Values, float] = defaultdict(float)
        registry.register(self)

    def observe(self, values: Values, x: float) -> None:
        """`x` was seen."""
        buckets = self._buckets.get(values)
        if buckets is None:
            buckets = self._buckets[values] = [0] * len(self._names)
        buckets[bisect_left(self._bounds, x)] += 1
        self._sums[values] += x

    def remove_by_labels(self, labels: Mapping[str, str]) -> None:
        """Forget those that have these values."""
        for values in _having(self._buckets, self._labels, labels):
            del self._buckets[values], self._sums[values]

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(*self._about, labels=self._labels)
        for values, buckets in self._buckets.items():
            up_to = list(zip(self._names, accumulate(buckets), strict=True))
            family.add_metric(values, up_to, self._sums[values])
        yield family


def _having(known: Iterable[Values], labels: Sequence[str], wanted: Mapping[str, str]) -> list[Values]:
    return [values for values in known if wanted.items() <= dict(zip(labels, values, strict=True)).items()]
