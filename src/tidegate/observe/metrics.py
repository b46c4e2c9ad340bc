"""Prometheus metrics of one engine, folded from its events. Names begin with `tidegate_`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tidegate.core.events import Admitted, Arrived, Emitted, Event, Finished, Preempted, Rejected, Restored
from tidegate.core.plan import StepPlan
from tidegate.core.request import UNSERVED, FinishReason, Request
from tidegate.core.scheduler import Snapshot

C = TypeVar("C", Counter, Gauge, Histogram)

OTHER = "other"
MAX_CLASS_LABELS = 5

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAPS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Labels:
    """A bounded set of label values: the first `limit - 1` names keep their own, the rest is `other`.

    Names given at the start count first, so that what a client sends cannot push them out.
    """

    def __init__(self, limit: int, first: Sequence[str] = ()) -> None:
        if limit < 1:
            raise ValueError(f"at least one label value is needed, for {OTHER!r}; got a limit of {limit}")
        self._room = limit - 1
        self._own: set[str] = set(first[: self._room])
        self._other = False

    @property
    def seen(self) -> list[str]:
        """The label values in use."""
        return [*sorted(self._own), *([OTHER] if self._other else [])]

    def __call__(self, name: str) -> str:
        if name in self._own:
            return name
        if len(self._own) < self._room:
            self._own.add(name)
            return name
        self._other = True
        return OTHER


class Metrics:
    """An engine `Observer` that keeps counters and histograms in `registry`, or in one of its own.

    `classes` are the configured class names in order; with `other` at most five class labels appear.
    `tenants` caps the tenant labels, `other` included.
    """

    def __init__(self, classes: Sequence[str], tenants: int = 20, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._collectors: list[Counter | Gauge | Histogram] = []
        self._class = Labels(MAX_CLASS_LABELS, classes)
        self._tenant = Labels(tenants)
        self._per_class()
        self._of_engine()
        self.up.set(1)

    def _per_class(self) -> None:
        kind = ("class",)
        self.submitted = self._counter("requests_submitted", "Requests that came to the door", kind)
        self.refused = self._counter("requests_refused", "Requests that the door refused", (*kind, "reason"))
        self.finished = self._counter("requests_finished", "Requests that ended", (*kind, "reason"))
        self.preempted = self._counter("preemptions", "Running requests that had to give way", (*kind, "mode"))
        self.slo_met = self._counter("slo_met", "Ended requests that kept every promise (cancelled ones aside)", kind)
        self.slo_missed = self._counter("slo_missed", "Promises broken by ended requests", (*kind, "promise"))
        self.queue_wait = self._histogram("queue_wait_seconds", "Arrival to first admission", _SECONDS, kind)
        self.ttft = self._histogram("ttft_seconds", "Arrival to first token", _SECONDS, kind)
        self.tpot = self._histogram("tpot_seconds", "Mean gap between the tokens of a request", _GAPS, kind)
        self.e2e = self._histogram("e2e_seconds", "Arrival to end", _SECONDS, kind)
        self.preempted_wait = self._histogram(
            "preempted_wait_seconds", "Time that a request which was preempted waited to return", _SECONDS, kind
        )
        self.queued = self._gauge("requests_queued", "Requests that wait now, preempted ones included", kind)
        self.running = self._gauge("requests_running", "Requests that hold a seat now", kind)
        self.oldest = self._gauge("oldest_wait_seconds", "How long the longest waiting request waits", kind)

    def _of_engine(self) -> None:
        tenant = ("tenant",)
        self.tenant_requests = self._counter("tenant_requests", "Requests by tenant", tenant)
        self.tenant_tokens = self._counter("tenant_tokens", "Prompt and output tokens by tenant", (*tenant, "kind"))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests")
        self.cached_tokens = self._counter("cached_tokens", "Tokens found in the prefix cache")
        self.recomputed_tokens = self._counter("recomputed_tokens", "Tokens computed again after a preemption")
        self.generation_tokens = self._counter("generation_tokens", "Output tokens")
        self.steps = self._histogram("step_seconds", "How long the executor was busy with a step", _STEPS)
        self.step_tokens = self._histogram("step_tokens", "Tokens computed in a step", _TOKENS)
        self.kv_blocks = self._gauge("kv_blocks", "KV blocks in all")
        self.kv_used = self._gauge("kv_used_blocks", "KV blocks that requests hold")
        self.kv_cached = self._gauge("kv_cached_blocks", "KV blocks that nobody holds and that the prefix cache keeps")
        self.up = self._gauge("engine_up", "1 while the engine lives")

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return self._known(Counter(f"tidegate_{name}", text, labels, registry=self.registry))

    def _gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        # Engines in several processes of one server: their loads add up.
        return self._known(Gauge(f"tidegate_{name}", text, labels, registry=self.registry, multiprocess_mode="livesum"))

    def _histogram(self, name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
        return self._known(Histogram(f"tidegate_{name}", text, labels, buckets=buckets, registry=self.registry))

    def _known(self, collector: C) -> C:
        self._collectors.append(collector)
        return collector

    def unregister(self) -> None:
        """Take everything out of the registry. Idempotent."""
        while self._collectors:
            self.registry.unregister(self._collectors.pop())

    # The engine's thread ------------------------------------------------------------------------------

    def events(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Emitted():
                    self._emitted(event)
                case Arrived(request=request) | Rejected(request=request):
                    self._came(request)
                    if isinstance(event, Rejected):
                        self.refused.labels(self._class(request.slo_class), event.reason.value).inc()
                case Admitted():
                    self._admitted(event)
                case Preempted():
                    self.preempted.labels(self._class(event.request.slo_class), event.mode).inc()
                case Restored():
                    self.cached_tokens.inc(event.cached)
                    self.recomputed_tokens.inc(event.recompute)
                case Finished():
                    self._finished(event)

    def step(self, plan: StepPlan, seconds: float) -> None:
        self.steps.observe(seconds)
        self.step_tokens.observe(plan.num_tokens)

    def _came(self, request: Request) -> None:
        self.submitted.labels(self._class(request.slo_class)).inc()
        self.tenant_requests.labels(self._tenant(request.tenant)).inc()

    def _admitted(self, event: Admitted) -> None:
        request = event.request
        self.prompt_tokens.inc(request.prompt_tokens)
        self.cached_tokens.inc(event.cached)
        self.queue_wait.labels(self._class(request.slo_class)).observe(event.now - request.arrival)
        self.tenant_tokens.labels(self._tenant(request.tenant), "prompt").inc(request.prompt_tokens)

    def _emitted(self, event: Emitted) -> None:
        self.generation_tokens.inc(len(event.requests))
        for request in event.first:
            self.ttft.labels(self._class(request.slo_class)).observe(event.now - request.arrival)

    def _finished(self, event: Finished) -> None:
        request, timing = event.request, event.timing
        kind = self._class(request.slo_class)
        self.finished.labels(kind, event.reason.value).inc()
        self.tenant_tokens.labels(self._tenant(request.tenant), "output").inc(request.emitted)
        if request.preemptions:
            self.preempted_wait.labels(kind).observe(timing.preempted)
        if event.reason is FinishReason.CANCELLED:
            return
        for promise in event.missed:
            self.slo_missed.labels(kind, promise).inc()
        if event.reason in UNSERVED:
            return
        self.e2e.labels(kind).observe(timing.e2e)
        if timing.tpot is not None:
            self.tpot.labels(kind).observe(timing.tpot)
        if not event.missed:
            self.slo_met.labels(kind).inc()

    # Whoever is asked for the metrics -----------------------------------------------------------------

    def render(self, snapshot: Snapshot | None) -> bytes:
        """The text that Prometheus reads. `snapshot` is the load now; None if the engine is dead."""
        self.up.set(0 if snapshot is None else 1)
        if snapshot is not None:
            self.load(snapshot)
        return generate_latest(self.registry)

    def load(self, now: Snapshot) -> None:
        """Set the gauges to the load now."""
        self.kv_blocks.set(now.num_blocks)
        self.kv_used.set(now.num_blocks - now.available_blocks)
        self.kv_cached.set(now.available_blocks - now.free_blocks)
        for gauge, values in ((self.queued, now.waiting_by_class), (self.running, now.running_by_class)):
            self._set(gauge, values, lambda old, new: old + new)
        self._set(self.oldest, now.oldest_wait_by_class, max)

    def _set(self, gauge: Gauge, by_class: Mapping[str, float], join: Callable[[float, float], float]) -> None:
        """Every class label, 0 where nobody is; classes that share the label `other` are joined."""
        values = dict.fromkeys(self._class.seen, 0.0)
        for name, value in by_class.items():
            label = self._class(name)
            values[label] = join(values.get(label, 0.0), value)
        for label, value in values.items():
            gauge.labels(label).set(value)
