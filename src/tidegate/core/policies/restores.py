"""How a victim gets its KV back."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.core.policy import PolicyContext, Price
from tidegate.core.view import Candidate, HostView


@dataclass(frozen=True, slots=True)
class Recompute:
    """Drop the KV, keep the token ids, compute what the prefix cache no longer holds as ordinary chunks."""

    def price(self, victim: Candidate, host: HostView, ctx: PolicyContext) -> Price:
        return Price("recompute", ctx.step_time.prefill(victim.lost))


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Copy the KV to the host and back, whatever it costs; recompute where the host has no room (vLLM V0)."""

    def price(self, victim: Candidate, host: HostView, ctx: PolicyContext) -> Price:
        seconds = host.round_trip(victim.held) if victim.held else None
        if seconds is None:
            return Price("recompute", ctx.step_time.prefill(victim.lost), f"no host room for {victim.held} blocks")
        return Price("swap", seconds)


@dataclass(frozen=True, slots=True)
class Cheaper:
    """Whichever takes fewer seconds.

    A swap costs its blocks out and in again over the measured bandwidth, behind the copies already planned; a
    recompute costs the prefill of what the prefix cache does not hold, by the step-time model.
    """

    def price(self, victim: Candidate, host: HostView, ctx: PolicyContext) -> Price:
        recompute = ctx.step_time.prefill(victim.lost)
        swap = host.round_trip(victim.held) if victim.held else None
        if swap is None:
            room = f"no host room for {victim.held} blocks" if host.free_memory or host.free_disk else ""
            return Price("recompute", recompute, room)
        told = f"swap {swap * 1e3:.3g} ms {{}} recompute {recompute * 1e3:.3g} ms"
        if swap < recompute:
            return Price("swap", swap, told.format("<"))
        return Price("recompute", recompute, told.format(">="))
