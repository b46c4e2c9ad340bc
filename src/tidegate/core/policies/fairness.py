"""Tenants share the machine by the tokens they were served (core/service.py counts them)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from tidegate.core.policy import Key, PolicyContext
from tidegate.core.view import RequestView
from tidegate.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LeastServed:
    """Least-served tenant first: a tenant's score is `w_in * inputs + w_out * outputs`, in weighted tokens.

    FCFS within a tenant. The baseline that `FairShare` improves on: whoever stayed away for an hour has
    an hour's service to his credit, and locks everybody out until he has used it up.
    """

    unwrapped: ClassVar[str] = "moves tenants, not requests"
    score_unit: ClassVar[str] = "weighted tokens"

    w_in: float = 1.0
    w_out: float = 2.0

    def __post_init__(self) -> None:
        for name in ("w_in", "w_out"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")

    def tier(self, r: RequestView, ctx: PolicyContext) -> int:
        return 0

    def key(self, r: RequestView, ctx: PolicyContext) -> Key:
        return Key(0, 0.0)

    def group(self, r: RequestView) -> str:
        return r.tenant

    def group_score(self, group: str, ctx: PolicyContext) -> float:
        account = ctx.service.account(group)
        return self.w_in * account.inputs + self.w_out * account.outputs

    def enter(self, group: str, least: float | None, ctx: PolicyContext) -> None:
        ctx.service.enter(group)
        ctx.service.tidy(0.0, lambda tenant: self.group_score(tenant, ctx))

    def leave(self, group: str, ctx: PolicyContext) -> None:
        ctx.service.leave(group)


@dataclass(frozen=True, slots=True)
class FairShare:
    """Virtual token counters: the tenant with the least `lift + (w_in * inputs + w_out * outputs) / weight` first.

    A tenant who begins to wait is lifted to the least counter of those who wait (of whoever was last to,
    if nobody is), so that idling banks nothing and a newcomer waits no longer than anybody. FCFS within a
    tenant; work conserving. `weights` by tenant are shares, 1 where none is given.

    While both of two tenants of equal weight have requests waiting, their services differ by at most
    `2 * max(w_in * longest prompt, w_out * tokens a full batch can hold)` weighted tokens; back-fill comes on top,
    which gives a tenant what the first in order cannot use and does not wait longer for.
    Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.
    """

    unwrapped: ClassVar[str] = "moves tenants, not requests"
    score_unit: ClassVar[str] = "weighted tokens"

    w_in: float = 1.0
    w_out: float = 2.0
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("w_in", "w_out"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
        for tenant, weight in self.weights.items():
            if not weight > 0:
                raise ConfigError(f"weights.{tenant} must be above 0, not {weight}")

    def tier(self, r: RequestView, ctx: PolicyContext) -> int:
        return 0

    def key(self, r: RequestView, ctx: PolicyContext) -> Key:
        return Key(0, 0.0)

    def group(self, r: RequestView) -> str:
        return r.tenant

    def group_score(self, group: str, ctx: PolicyContext) -> float:
        account = ctx.service.account(group)
        served = self.w_in * account.inputs + self.w_out * account.outputs
        return account.lift + served / self.weights.get(group, 1.0)

    def enter(self, group: str, least: float | None, ctx: PolicyContext) -> None:
        service = ctx.service
        account = service.enter(group)
        if least is None:
            least = 0.0 if service.last is None else self.group_score(service.last, ctx)
        account.lift += max(0.0, least - self.group_score(group, ctx))
        service.tidy(least, lambda tenant: self.group_score(tenant, ctx))

    def leave(self, group: str, ctx: PolicyContext) -> None:
        ctx.service.leave(group)
