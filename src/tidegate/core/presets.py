"""Whole policies by name, and the known designs they reproduce.

`build_policy(name, params)` is how a configuration becomes a `Policy`; `PRESETS` is what it chooses from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import partial
from math import isfinite
from typing import Any, get_type_hints

from tidegate.core.policies.adaptive import AdaptiveBudget
from tidegate.core.policies.budgets import FixedBudget
from tidegate.core.policies.cache import LongestPrefix, PrefixShare
from tidegate.core.policies.deadlines import Deadlines, EarliestDeadline, Joint
from tidegate.core.policies.doors import ClassLimit, QueueLimit
from tidegate.core.policies.fairness import FairShare, LeastServed
from tidegate.core.policies.feedback import FeedbackQueue
from tidegate.core.policies.orders import Aged, Fcfs, Priority, ShortestJob
from tidegate.core.policies.restores import Cheaper, Recompute, SwapOut
from tidegate.core.policies.victims import LeastWorkLost, LowestPriority, MostHeadroom, Newest
from tidegate.core.policy import Budget, Features, Order, Policy, Restore, Victim
from tidegate.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Composition:
    """Parameters every preset takes, beside those of its order (the fields of the order's class).

    aging_window: seconds of waiting that one class is worth; None is no ageing. An order that has a parameter
        of this name takes it as its own; one that ages otherwise takes none
    aging_rate: seconds of waiting that one unit of the order's score is worth
    share: what one long prompt gets of a step's prefill tokens while others wait, 0 to 1
    max_chunk: tokens of one chunk at most; None is no cap
    budget: "fixed", or "adaptive": what keeps the promises between tokens of those who decode
    floor, margin, max_stride: of the adaptive budget (see `AdaptiveBudget`); None is its default
    max_waiting: requests that may wait; None is no end
    max_waiting_tokens: tokens of work that may wait; None is no end
    class_limits: the same for single classes, by name
    displace_waiting, refuse_hopeless, shed_hopeless: see `QueueLimit`
    victim: "least-work", "lowest-priority", "most-headroom", "newest", or "priority-headroom"
    restore: how a victim comes back: "auto" (whichever is cheaper), "swap" or "recompute"
    displace, displace_slack, keep_ends, backfill, hold_pending, spare, mixed_batches, max_prefill_steps: see `Features`
    """

    aging_window: float | None = None
    aging_rate: float = 1.0
    share: float = 0.5
    max_chunk: int | None = None
    budget: str = "fixed"
    floor: int | None = None
    margin: float | None = None
    max_stride: int | None = None
    max_waiting: int | None = None
    max_waiting_tokens: int | None = None
    class_limits: Mapping[str, ClassLimit] = field(default_factory=dict)
    displace_waiting: bool = False
    refuse_hopeless: bool = False
    shed_hopeless: bool = False
    victim: str = "lowest-priority"
    restore: str = "auto"
    displace: bool = True
    displace_slack: float | None = None
    keep_ends: bool = False
    backfill: bool = True
    hold_pending: bool = True
    spare: bool = True
    mixed_batches: bool = True
    max_prefill_steps: int = 4


@dataclass(frozen=True, slots=True)
class Preset:
    """A policy by name: one line of what it is, its order (a dataclass whose fields are its parameters), the
    defaults of the composition, and limits where they differ."""

    summary: str
    order: Callable[..., Order]
    defaults: Composition = Composition()
    limits: Mapping[str, Any] = field(default_factory=dict)


VICTIMS: Mapping[str, Callable[[], Victim]] = {
    "least-work": LeastWorkLost,
    "lowest-priority": LowestPriority,
    "most-headroom": MostHeadroom,
    "newest": Newest,
    "priority-headroom": partial(MostHeadroom, tiers=True),
}

RESTORES: Mapping[str, Callable[[], Restore]] = {"auto": Cheaper, "recompute": Recompute, "swap": SwapOut}

_PLAIN = Composition(
    share=1.0, victim="newest", restore="recompute", displace=False, backfill=False, hold_pending=False, spare=False
)
_PROMISES = Composition(victim="priority-headroom", budget="adaptive")
_UNBOUNDED: Mapping[str, Any] = {"stall_steps": 0, "resume_span": 0, "max_preemptions": 1_000_000}

PRESETS: Mapping[str, Preset] = {
    "joint": Preset(
        "promises first, then the prefix cache; without promises priority, arrival and ageing",
        Joint,
        _PROMISES,
    ),
    "sla": Preset(
        "least slack to a promise first; who was promised nothing fills what is left, within a bound",
        Deadlines,
        _PROMISES,
    ),
    "fcfs": Preset("first come, first served", Fcfs),
    "priority": Preset("static classes, lower is more urgent, first come first served within a class", Priority),
    "sjf": Preset("shortest remaining job first, by predicted seconds", ShortestJob),
    "mlfq": Preset("multi-level feedback queue: a request falls a level when its quantum is used up", FeedbackQueue),
    # Prompts strictly one after the other: each next one is then admitted by the counters of its time.
    "fair": Preset("fair share of tokens among tenants, by weight, work conserving", FairShare, Composition(share=1.0)),
    "lcf": Preset(
        "least-served tenant first, without the lift that keeps the idle from banking service",
        LeastServed,
        Composition(share=1.0),
    ),
    "prefix": Preset("largest cached share of the prompt first, with ageing by arrivals", PrefixShare),
    "edf": Preset(
        "plain earliest deadline first, the baseline: no ageing, the late are not demoted", EarliestDeadline, _PLAIN
    ),
    "vllm-v0": Preset(
        "vLLM V0's design: first come first served, prompts before decodes in steps of their own, swap",
        Fcfs,
        replace(_PLAIN, restore="swap", mixed_batches=False, max_prefill_steps=1_000_000),
        {**_UNBOUNDED, "prefix_caching": False},
    ),
    "vllm-v1": Preset(
        "vLLM V1's design: first come first served, chunked prefill, recompute, the last in order gives way",
        Fcfs,
        _PLAIN,
        _UNBOUNDED,
    ),
    "sarathi": Preset(
        "Sarathi-Serve: stall-free batches, decodes first, prefill chunks of at most 512 tokens a step",
        Fcfs,
        _PLAIN,
        {"max_num_batched_tokens": 512, **_UNBOUNDED},
    ),
    "sglang-lpm": Preset(
        "SGLang's longest prefix match, without its fall-back to fcfs in long queues; ageing if asked",
        LongestPrefix,
        replace(_PLAIN, hold_pending=True),
        _UNBOUNDED,
    ),
    "fastserve": Preset(
        "FastServe: skip-join multi-level feedback queue that displaces those whose level has fallen",
        FeedbackQueue,
        replace(_PLAIN, displace=True),
    ),
    "vtc": Preset("VTC: virtual token counters a tenant, in an otherwise plain engine", FairShare, _PLAIN, _UNBOUNDED),
}

DEFAULT_POLICY = "joint"


def parameters(preset: Preset) -> dict[str, Any]:
    """The parameters of a preset with their types: the composition's, then its order's own."""
    own = get_type_hints(preset.order)
    return get_type_hints(Composition) | {f: own[f] for f in _order_fields(preset)}


def defaults(preset: Preset) -> dict[str, Any]:
    """The default of each parameter that does something in this preset: its order's own first.

    None is no limit, or what the order or budget has by itself; a parameter that has to be given is "required".
    """
    required = _required(preset)
    own: dict[str, Any] = {}
    for f in fields(preset.order):  # type: ignore[arg-type]
        factory = f.default_factory
        own[f.name] = "required" if f.name in required else f.default if factory is MISSING else factory()
    shared = {f.name: getattr(preset.defaults, f.name) for f in fields(Composition)}
    if getattr(preset.order, "unwrapped", None) is not None:
        del shared["aging_window"], shared["aging_rate"]
    return own | {option: value for option, value in shared.items() if option not in own}


def build_policy(name: str, params: Mapping[str, Any] | None = None) -> Policy:
    """The policy `name` with `params` over its defaults (fields of `Composition` and of its order).

    Raises ConfigError for an unknown name or parameter, naming the nearest, and for a parameter that does
    nothing here or means nothing.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown policy {name!r}; known are {', '.join(PRESETS)}")
    return compose(name, PRESETS[name], params)


def compose(name: str, preset: Preset, params: Mapping[str, Any] | None = None) -> Policy:
    """The policy of `preset` under `name`, as `build_policy` makes those that ship."""
    given, known = dict(params or {}), parameters(preset)
    for option in given:
        if option not in known:
            close = get_close_matches(option, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}"
            raise ConfigError(f"policy {name} has no parameter {option!r}; {hint}")
    _check_finite(given)
    own = {f: given.pop(f) for f in _order_fields(preset) if f in given}
    if own.get("aging_window", 0) is None:  # not said: the order's own default
        del own["aging_window"]
    c = replace(preset.defaults, **given)
    if c.victim not in VICTIMS:
        raise ConfigError(f"unknown victim {c.victim!r}; known are {', '.join(VICTIMS)}")
    if c.restore not in RESTORES:
        raise ConfigError(f"unknown restore {c.restore!r}; known are {', '.join(RESTORES)}")
    _check(c)
    for unsaid in _required(preset) - own.keys():
        raise ConfigError(f"policy {name} needs its parameter {unsaid!r}, which has no default")
    order = preset.order(**own)
    if c.aging_window is not None:
        order = Aged(order, c.aging_window, c.aging_rate)
    elif c.aging_rate != 1.0:
        raise ConfigError("aging_rate does nothing here: it goes with an aging_window over an order's score")
    return Policy(
        name=name,
        order=order,
        victim=VICTIMS[c.victim](),
        budget=_budget(c),
        admit=_door(c),
        restore=RESTORES[c.restore](),
        features=Features(**{f.name: getattr(c, f.name) for f in fields(Features)}),
    )


def _budget(c: Composition) -> Budget:
    """The budget, with what was said of it. Raises ConfigError for an option that this budget does not read."""
    given = {n: v for n in ("floor", "margin", "max_stride") if (v := getattr(c, n)) is not None}
    if c.budget == "adaptive":
        return AdaptiveBudget(c.share, c.max_chunk, **given)
    if c.budget != "fixed":
        raise ConfigError(f"unknown budget {c.budget!r}; known are fixed, adaptive")
    if given:
        raise ConfigError(f'{next(iter(given))} is of the adaptive budget; say budget = "adaptive", or leave it out')
    return FixedBudget(c.share, c.max_chunk)


def _door(c: Composition) -> QueueLimit:
    return QueueLimit(
        c.max_waiting, c.max_waiting_tokens, c.class_limits, c.displace_waiting, c.refuse_hopeless, c.shed_hopeless
    )


def _order_fields(preset: Preset) -> list[str]:
    """Parameters of the policy's order; one that an order shares with the composition is its own."""
    return [f.name for f in fields(preset.order)]  # type: ignore[arg-type]


def _required(preset: Preset) -> set[str]:
    """Parameters of the policy's order that somebody has to give."""
    own = fields(preset.order)  # type: ignore[arg-type]
    return {f.name for f in own if f.default is MISSING and f.default_factory is MISSING}


def _check_finite(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a number that is infinite or none: a key made with it has no place in an order."""
    for option, value in given.items():
        numbers = value.values() if isinstance(value, Mapping) else (value,)
        for number in numbers:
            if isinstance(number, float) and not isfinite(number):
                raise ConfigError(f"{option} must be a finite number, not {number}")


def _check(c: Composition) -> None:
    """Raise ConfigError for a value with which nothing would ever be planned, or that means nothing."""
    wrong = {
        "share must be above 0 and at most 1": not 0 < c.share <= 1,
        "max_chunk must be at least 1": c.max_chunk is not None and c.max_chunk < 1,
        "floor must be at least 1": c.floor is not None and c.floor < 1,
        "margin must be at least 0 and under 1": c.margin is not None and not 0 <= c.margin < 1,
        "max_stride must be at least 1": c.max_stride is not None and c.max_stride < 1,
        "max_waiting must be at least 0": c.max_waiting is not None and c.max_waiting < 0,
        "max_waiting_tokens must be at least 1": c.max_waiting_tokens is not None and c.max_waiting_tokens < 1,
        "displace_waiting does nothing without an end of the queue and must be false": c.displace_waiting
        and c.max_waiting is None
        and c.max_waiting_tokens is None,
        "max_prefill_steps must be at least 1": c.max_prefill_steps < 1,
        "displace_slack must be at least 0": c.displace_slack is not None and not c.displace_slack >= 0,
        "aging_window must be above 0": c.aging_window is not None and not c.aging_window > 0,
        "aging_rate must be at least 0": not c.aging_rate >= 0,
    }
    for told, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(f"{told}, not {getattr(c, told.split()[0])}")
