"""Synthetic workloads: each kind is a model of its keys that builds its requests from a seed.

`poisson:rate=4,count=1000,prompt=512,output=128` is the kind `poisson` with four keys; see
`simulate/expression.py` for the syntax and docs/workloads.md for every kind.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, Self

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from tidegate.simulate.arrivals import MOST_ARRIVALS, Gaps, gamma_gaps, on_off, poisson_gaps, renewal
from tidegate.simulate.closed_loop import ClosedLoop
from tidegate.simulate.draws import Draw, Fixed, Floats, parse_draw, parse_seconds
from tidegate.simulate.lengths import Ints, LengthDraw, Pairs, parse_output, parse_pairs, parse_prompt
from tidegate.simulate.seeds import Decides, SeedKey, stream
from tidegate.simulate.workload import Workload, WorkloadRequest

Count = Annotated[int, Field(ge=1, le=MOST_ARRIVALS)]
Rate = Annotated[float, Field(ge=1e-6, le=1e6)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]
Times = Annotated[Draw, PlainValidator(lambda text: parse_draw(text, parse_seconds))]


class Synthetic(BaseModel):
    """Keys that every kind has. `prompt` and `output` are tokens; `lengths` draws both from a trace, in pairs.

    tenants: each request belongs to one of so many, by lot
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)
    kind: ClassVar[str]

    prompt: Annotated[LengthDraw | None, PlainValidator(parse_prompt)] = None
    output: Annotated[LengthDraw | None, PlainValidator(parse_output)] = None
    lengths: Annotated[Pairs | None, PlainValidator(parse_pairs)] = None
    tenants: Count = 1

    @model_validator(mode="after")
    def _lengths_are_given_once(self) -> Self:
        given = (self.prompt is not None, self.output is not None)
        if (self.lengths is None and not all(given)) or (self.lengths is not None and any(given)):
            raise ValueError("give prompt= and output=, or lengths= of a trace instead of both")
        return self

    @abstractmethod
    def workload(self, key: SeedKey) -> Workload:
        """The workload, the same for the same key. Raises InputError where the keys make no sense together."""

    def draw_lengths(self, key: SeedKey, n: int) -> tuple[Ints, Ints]:
        """Prompt and output tokens of n requests."""
        rng = stream(key, Decides.LENGTHS)
        if self.lengths is not None:
            return self.lengths.sample(rng, n)
        assert self.prompt is not None and self.output is not None  # noqa: S101, PT018 - validated above
        return self.prompt.sample(rng, n), self.output.sample(rng, n)

    def draw_tenants(self, key: SeedKey, n: int) -> list[str]:
        """The tenants of n requests; `default` for all where there is one."""
        if self.tenants == 1:
            return ["default"] * n
        names = [f"tenant-{number}" for number in range(self.tenants)]
        return [names[number] for number in stream(key, Decides.TENANTS).integers(0, self.tenants, n)]


class OpenLoop(Synthetic):
    """Kinds whose arrivals are known beforehand: until `count` requests or `duration` (seconds), whichever is less."""

    rate: Rate
    count: Count | None = None
    duration: Annotated[Seconds | None, Field(gt=0)] = None

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if self.count is None and self.duration is None:
            raise ValueError("give count= or duration=, or it never ends")
        return self

    def workload(self, key: SeedKey) -> Workload:
        arrivals = self.arrivals(key)
        prompts, outputs = self.draw_lengths(key, len(arrivals))
        tenants = self.draw_tenants(key, len(arrivals))
        columns = zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), tenants, strict=True)
        return Workload(self.kind, tuple(WorkloadRequest(*row) for row in columns))

    def arrivals(self, key: SeedKey) -> Floats:
        """Arrivals in order, in seconds."""
        return renewal(self.gaps(stream(key, Decides.ARRIVALS)), self.rate, self.count, self.duration)

    def gaps(self, rng: np.random.Generator) -> Gaps:
        """Gaps between arrivals; those of a Poisson process."""
        return poisson_gaps(rng, self.rate)


class Poisson(OpenLoop):
    """Independent arrivals, `rate` a second."""

    kind = "poisson"


class Steady(OpenLoop):
    """Even arrivals, `rate` a second."""

    kind = "steady"

    def gaps(self, rng: np.random.Generator) -> Gaps:
        return gamma_gaps(rng, self.rate, 0.0)


class Gamma(OpenLoop):
    """Gamma gaps: `cv` is their coefficient of variation, 1 as Poisson and above 1 in bursts."""

    kind = "gamma"
    cv: Annotated[float, Field(ge=0, le=100)]

    def gaps(self, rng: np.random.Generator) -> Gaps:
        return gamma_gaps(rng, self.rate, self.cv)


class OnOff(OpenLoop):
    """Poisson arrivals of `rate` a second for a time `on`, none for a time `off`, in turn."""

    kind = "onoff"
    on: Times
    off: Times

    def arrivals(self, key: SeedKey) -> Floats:
        return on_off(super().arrivals(key), (self.on, self.off), stream(key, Decides.PHASES), self.duration)


class Burst(Synthetic):
    """`count` requests, all at once."""

    kind = "burst"
    count: Count

    def workload(self, key: SeedKey) -> Workload:
        prompts, outputs = self.draw_lengths(key, self.count)
        columns = zip(prompts.tolist(), outputs.tolist(), self.draw_tenants(key, self.count), strict=True)
        return Workload(self.kind, tuple(WorkloadRequest(0.0, *row) for row in columns))


class Closed(Synthetic):
    """`clients`, each of whom waits for its answer and thinks before it asks again, until `count` were asked.

    tenants: the clients belong to them in turn
    """

    kind = "closed"
    clients: Count
    count: Count
    think: Times = Fixed(0.0)

    def workload(self, key: SeedKey) -> Workload:
        prompts, outputs = self.draw_lengths(key, self.count)
        columns = zip(prompts.tolist(), outputs.tolist(), self.draw_tenants(key, self.count), strict=True)
        requests = tuple(WorkloadRequest(0.0, *row) for row in columns)
        think_s = tuple(self.think.sample(stream(key, Decides.THINKING), self.count).tolist())
        return Workload(self.kind, (), (ClosedLoop(self.clients, requests, think_s),))

    def draw_tenants(self, key: SeedKey, n: int) -> list[str]:
        if self.tenants == 1:
            return ["default"] * n
        return [f"tenant-{number % self.clients % self.tenants}" for number in range(n)]
