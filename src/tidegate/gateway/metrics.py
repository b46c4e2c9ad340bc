"""Prometheus metrics of the gateway. Names begin with `tidegate_gateway_`; labels are bounded in number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from tidegate.config import Config
from tidegate.gateway.attempt import How
from tidegate.gateway.dispatch import Dispatch
from tidegate.gateway.fleet import Fleet
from tidegate.gateway.job import Job
from tidegate.gateway.proxy import End
from tidegate.gateway.tally import Counts, Spreads
from tidegate.observe.metrics import MAX_CLASS_LABELS, Labels
from tidegate.routing.choice import Choice
from tidegate.routing.prefix_index import PrefixIndex

M = TypeVar("M", Counts, Spreads, Gauge)

_PREFIX = "tidegate_gateway_"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_ERRORS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_STATES = ("closed", "open", "half-open", "draining")


class GatewayMetrics:
    """Counts what happens to jobs, as an `Observer` of the proxy; `render` adds how things stand.

    Classes and tenants have a bounded number of labels, "other" among them; a replica's go when it does.
    """

    def __init__(self, config: Config) -> None:
        self.registry = CollectorRegistry()
        self._class = Labels(MAX_CLASS_LABELS, list(config.classes))
        self._tenant = Labels(config.server.tenant_labels)
        self._predicted: dict[str, tuple[float, float | None]] = {}  # when it was sent, and the prediction then
        self._of_replica: list[Counts | Spreads | Gauge] = []
        self._known: set[str] = set()
        kind, replica = ("class",), ("replica",)
        self._ended = self._counts("requests", "Requests that ended, by how", (*kind, "how"))
        self._refused = self._gauge("door_refusals", "Requests refused at the door since the start", ("code",))
        self._held = self._spreads("held_seconds", "Arrival until an engine got it", kind)
        self._ttft = self._spreads("ttft_seconds", "Arrival to first token", kind)
        self._e2e = self._spreads("e2e_seconds", "Arrival to end, of those that were done", kind)
        self._tokens = self._counts("tokens", "Tokens by tenant, prompts estimated", ("tenant", "kind"))
        self._waiting = self._gauge("requests_held", "Requests that wait in the gateway", kind)
        self._oldest = self._gauge("oldest_wait_seconds", "How long the longest held one waits", kind)
        self._sent = self._counts("sent", "Requests sent to an engine, by attempt", (*replica, "attempt"))
        self._failed = self._counts("failures", "Attempts that an engine failed", (*replica, "how"))
        self._error = self._spreads(
            "ttft_error_seconds", "Predicted against actual time to first token", replica, _ERRORS
        )
        self._cached = self._counts("cached_tokens", "Prompt tokens believed cached where sent", replica)
        self._outstanding = self._gauge("outstanding", "Requests that an engine has of ours", replica)
        self._state = self._gauge("replica_state", "1 for the state an engine is in", (*replica, "state"))
        self._exact = self._gauge("prefixes_exact", "1 if an engine's own events are followed", replica)

    # An observer of the proxy

    def sent(self, job: Job, choice: Choice, attempt: int, now: float) -> None:
        name = choice.replica.name
        self._known.add(name)
        self._sent.counts[name, "first" if attempt == 1 else "again"] += 1
        self._cached.counts[(name,)] += choice.cached_tokens
        self._predicted[job.id] = now, choice.expected_s
        if attempt == 1:
            self._held.observe((self._class(job.claim.slo_class),), max(0.0, now - job.arrival))

    def failed(self, job: Job, replica: str, how: How, reason: str, now: float) -> None:
        self._failed.counts[replica, how.value] += 1
        self._predicted.pop(job.id, None)

    def first_token(self, job: Job, now: float) -> None:
        self._ttft.observe((self._class(job.claim.slo_class),), max(0.0, now - job.arrival))

    def ended(self, job: Job, end: End, now: float) -> None:
        kind = self._class(job.claim.slo_class)
        self._ended.counts[kind, end.how.value] += 1
        if end.how is How.DONE:
            self._e2e.observe((kind,), max(0.0, now - job.arrival))
        sent_at, predicted = self._predicted.pop(job.id, (0.0, None))
        if end.replica is None:
            return
        self._known.add(end.replica)
        if predicted is not None and end.first_token_at is not None:
            self._error.observe((end.replica,), abs(end.first_token_at - sent_at - predicted))
        tenant = self._tenant(job.claim.tenant)
        prompt = job.view.prompt_tokens if end.prompt_tokens is None else end.prompt_tokens
        self._tokens.counts[tenant, "prompt"] += prompt
        self._tokens.counts[tenant, "output"] += end.outputs

    # Whoever is asked for the metrics

    def render(
        self, fleet: Fleet, dispatch: Dispatch, prefixes: PrefixIndex, refused: Mapping[str, int], now: float
    ) -> bytes:
        """The text that Prometheus reads."""
        for code, n in refused.items():
            self._refused.labels(code).set(n)
        self._held_now(dispatch)
        there = {replica.name for replica in fleet}
        for name in self._known - there:
            self._forget(name)
        self._known &= there
        shown = {replica.name: replica for replica in reversed(list(fleet))}  # of two with one name the one that stays
        for replica in shown.values():
            self._known.add(replica.name)
            self._outstanding.labels(replica.name).set(replica.view.outstanding)
            self._exact.labels(replica.name).set(prefixes.mode(replica.name) == "exact")
            is_in = "draining" if replica.draining else replica.view.health.state(now)
            for state in _STATES:
                self._state.labels(replica.name, state).set(state == is_in)
        return generate_latest(self.registry)

    def _held_now(self, dispatch: Dispatch) -> None:
        held = dict.fromkeys(self._class.seen, (0, 0.0))
        for name, (n, longest) in dispatch.waits().items():
            label = self._class(name)
            before = held.get(label, (0, 0.0))
            held[label] = before[0] + n, max(before[1], longest)
        for label, (n, longest) in held.items():
            self._waiting.labels(label).set(n)
            self._oldest.labels(label).set(longest)

    def _forget(self, replica: str) -> None:
        """A replica is gone, and so are its labels: names come and go with addresses."""
        for metric in self._of_replica:
            metric.remove_by_labels({"replica": replica})

    def _counts(self, name: str, text: str, labels: Sequence[str]) -> Counts:
        return self._forgotten(Counts(_PREFIX + name, text, labels, self.registry), labels)

    def _spreads(self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float] = _SECONDS) -> Spreads:
        return self._forgotten(Spreads(_PREFIX + name, text, labels, bounds, self.registry), labels)

    def _gauge(self, name: str, text: str, labels: Sequence[str]) -> Gauge:
        return self._forgotten(Gauge(_PREFIX + name, text, labels, registry=self.registry), labels)

    def _forgotten(self, metric: M, labels: Sequence[str]) -> M:
        """`metric`, whose labels go when their replica does."""
        if "replica" in labels:
            self._of_replica.append(metric)
        return metric
