"""What a class of requests was promised. All times are seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Slo:
    """A promise to one request; None means that nothing was promised.

    ttft: seconds from arrival to the first token.
    tpot: mean seconds per output token after the first.
    tbt:  seconds between two tokens, at the 99th percentile within the request (nearest rank).
    e2e:  seconds from arrival to the last token.
    """

    ttft: float | None = None
    tpot: float | None = None
    tbt: float | None = None
    e2e: float | None = None

    def missed(
        self, ttft: float | None, tpot: float | None, p99_gap: float | None, e2e: float | None
    ) -> tuple[str, ...]:
        """Names of the promises that these measurements (seconds, None = never happened) break.

        A first token that never came breaks `ttft`, an end that never came breaks `e2e`; a request
        with one output has no gaps, so it cannot break `tpot` or `tbt`.
        """
        broken = []
        if self.ttft is not None and (ttft is None or ttft > self.ttft):
            broken.append("ttft")
        if self.tpot is not None and tpot is not None and tpot > self.tpot:
            broken.append("tpot")
        if self.tbt is not None and p99_gap is not None and p99_gap > self.tbt:
            broken.append("tbt")
        if self.e2e is not None and (e2e is None or e2e > self.e2e):
            broken.append("e2e")
        return tuple(broken)


NO_SLO = Slo()


def shortest(*seconds: float | None) -> float | None:
    """The least of several time limits, where None is no limit: a class's and a request's own combine so."""
    return min((s for s in seconds if s is not None), default=None)


@dataclass(frozen=True, slots=True)
class SloClass:
    """A named class: its promise, its static priority (lower is more urgent), and how long its requests may
    wait to be admitted, in seconds (None: for ever)."""

    name: str
    slo: Slo = NO_SLO
    priority: int = 0
    queue_ttl: float | None = None


DEFAULT_CLASS = "interactive"

DEFAULT_CLASSES: Mapping[str, SloClass] = MappingProxyType(
    {
        "interactive": SloClass("interactive", Slo(ttft=0.5, tpot=0.05), 0),
        "completion": SloClass("completion", Slo(ttft=0.2, tbt=0.05), 0),
        "offline": SloClass("offline", Slo(e2e=30.0), 5),
        "batch": SloClass("batch", NO_SLO, 10),
    }
)
