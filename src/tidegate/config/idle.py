"""Options that do nothing because of what another option says: one row each, with what would have to change.

Whoever writes such an option expects something of it, so it is an error; a default that does nothing is none.
An option does nothing where what it asks for cannot happen: to switch off what is not there asks for nothing,
and is right. What contradicts itself within one object of the core that object refuses by itself.

The first table is about how a policy and the scheduler's limits go together, and serves scenarios as well; the others
are about a configuration alone. Options are dotted, those of a policy's own section `policy.OPTION`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from tidegate.config.options import DOOR, ClassConfig, Config, SchedulerConfig, has_door
from tidegate.core.limits import Limits
from tidegate.core.policies.adaptive import AdaptiveBudget
from tidegate.core.policies.budgets import FixedBudget
from tidegate.core.policies.cache import LongestPrefix, PrefixShare
from tidegate.core.policies.deadlines import EarliestDeadline, Joint
from tidegate.core.policies.doors import QueueLimit
from tidegate.core.policies.fairness import FairShare, LeastServed
from tidegate.core.policies.feedback import FeedbackQueue
from tidegate.core.policies.orders import Aged, Fcfs, Priority, ShortestJob
from tidegate.core.policies.restores import Recompute
from tidegate.core.policy import Grouping, Order, Policy
from tidegate.custom import find_policy

T = TypeVar("T")

WITHOUT_CLASSES = (Fcfs, ShortestJob, PrefixShare, LongestPrefix, LeastServed, FairShare, EarliestDeadline)
"""Orders to which everybody is of one class."""

WITHOUT_SCORE = (Fcfs, Priority, FeedbackQueue)
"""Orders in which, within a class, only the arrival decides."""

WITHOUT_PREFIXES = ("random", "round-robin", "least-loaded")
"""Routes to which all prefixes are alike."""


@dataclass(frozen=True, slots=True)
class Row(Generic[T]):
    """`options` do nothing where `idle`; `why` follows "does nothing" and says what would have to change.

    In `why`, `{policy}` is the policy's name.
    """

    options: tuple[str, ...]
    idle: Callable[[T], bool]
    why: str


@dataclass(frozen=True, slots=True)
class Scheduling:
    """A policy and the limits that it is run under.

    host:     whether there is somewhere to swap to
    whole:    whether it was composed in Python, so that no option composes it,
    own_door: and decides itself who may wait
    """

    limits: SchedulerConfig | Limits
    policy: Policy
    host: bool
    whole: bool = False
    own_door: bool = False

    @property
    def order(self) -> Order:
        """The order without its ageing."""
        order = self.policy.order
        return order.order if isinstance(order, Aged) else order

    @property
    def displaces(self) -> bool:
        """Whether an urgent waiting request may take the place of a running one."""
        return self.policy.features.displace and not isinstance(self.order, WITHOUT_CLASSES)

    @property
    def evicts(self) -> bool:
        """Whether anybody ever gives way."""
        return self.limits.headroom != "declared" or self.displaces

    @property
    def ages(self) -> bool:
        """Whether `[aging]` moves anybody."""
        aged = isinstance(self.policy.order, Aged) or hasattr(self.order, "aging_window")
        return aged and not self.whole and not isinstance(self.order, Fcfs)

    @property
    def most_of_a_chunk(self) -> int:
        """Tokens that the policy lets a chunk have; 0 where it sets no bound."""
        budget = self.policy.budget
        return (isinstance(budget, AdaptiveBudget | FixedBudget) and budget.max_chunk) or 0

    @property
    def floor(self) -> int:
        """Prefill tokens that an adaptive budget leaves every step; 0 of another budget."""
        return self.policy.budget.floor if isinstance(self.policy.budget, AdaptiveBudget) else 0


_POOLS = ("scheduler.host_kv_memory", "scheduler.host_blocks", "scheduler.disk_kv_memory", "scheduler.disk_blocks")
_OWN_DOOR = 'with scheduler.policy = "{policy}", which is whole, with a door of its own'
_ONE_CLASS = 'with scheduler.policy = "{policy}", to which everybody is of one class; "priority" knows classes'
_LATE = "above the e2e of its class, which is missed first"
_NOBODY_EVICTED = (
    'with scheduler.headroom = "declared", where nobody is evicted for memory, and a policy that displaces nobody'
)

SCHEDULING: tuple[Row[Scheduling], ...] = (
    Row(
        tuple(f"scheduler.{option}" for option in DOOR),
        lambda s: s.own_door,
        _OWN_DOOR,
    ),
    Row(
        ("policy.beta", "policy.age", "scheduler.policy"),
        lambda s: not s.limits.prefix_caching and isinstance(s.order, PrefixShare | LongestPrefix),
        "without scheduler.prefix_caching = true: the order goes by what is cached",
    ),
    Row(
        ("policy.w_cache",),
        lambda s: not s.limits.prefix_caching and isinstance(s.order, Joint),
        "without scheduler.prefix_caching = true",
    ),
    Row(
        ("policy.hold_pending",),
        lambda s: not s.limits.prefix_caching and s.policy.features.hold_pending,
        "without scheduler.prefix_caching = true",
    ),
    Row(
        ("aging.window",),
        lambda s: not s.ages,
        'with scheduler.policy = "{policy}", whose order it does not change',
    ),
    Row(
        ("aging.rate",),
        lambda s: s.ages and hasattr(s.order, "aging_window"),
        'with scheduler.policy = "{policy}", which is aged by a window alone',
    ),
    Row(
        ("aging.rate",),
        lambda s: s.whole or not isinstance(s.policy.order, Aged),
        'without aging.window, under a policy whose order takes one; "{policy}" has none',
    ),
    Row(
        ("aging.rate",),
        lambda s: isinstance(s.order, WITHOUT_SCORE),
        'with scheduler.policy = "{policy}", whose order has no score that it could weigh',
    ),
    Row(
        ("policy.displace",),
        lambda s: s.policy.features.displace and not s.displaces,
        _ONE_CLASS,
    ),
    Row(
        ("scheduler.displace_waiting",),
        lambda s: (
            isinstance(s.policy.admit, QueueLimit) and s.policy.admit.displace and isinstance(s.order, WITHOUT_CLASSES)
        ),
        _ONE_CLASS,
    ),
    Row(
        ("scheduler.watermark",),
        lambda s: s.limits.headroom != "watermark",
        'without scheduler.headroom = "watermark"',
    ),
    Row(
        ("scheduler.partial_prefills",),
        lambda s: _above(s.limits.partial_prefills, s.limits.max_num_seqs),
        "above scheduler.max_num_seqs",
    ),
    Row(("scheduler.stall_steps",), lambda s: s.limits.headroom == "declared", 'with scheduler.headroom = "declared"'),
    Row(
        ("scheduler.resume_span", "scheduler.nearly_done", "policy.victim", "policy.spare"),
        lambda s: not s.evicts,
        _NOBODY_EVICTED,
    ),
    Row(  # 0 reserves everybody's whole footprint
        ("scheduler.max_preemptions",),
        lambda s: not s.evicts and s.limits.max_preemptions > 0,
        _NOBODY_EVICTED,
    ),
    Row(("policy.restore", *_POOLS), lambda s: not s.evicts and s.host, _NOBODY_EVICTED),
    Row(("scheduler.nearly_done",), lambda s: not s.policy.features.spare, "without policy.spare = true"),
    Row(("scheduler.bypass_bound",), lambda s: not s.policy.features.backfill, "without policy.backfill = true"),
    Row(
        ("policy.restore",),
        lambda s: not s.host and not isinstance(s.policy.restore, Recompute),
        "without scheduler.host_kv_memory or scheduler.disk_kv_memory",
    ),
    Row(
        _POOLS,
        lambda s: s.host and isinstance(s.policy.restore, Recompute),
        'without policy.restore = "auto" (or "swap")',
    ),
    Row(
        ("policy.displace_slack",),
        lambda s: not s.displaces,
        "without an order with classes, and policy.displace = true",
    ),
    Row(
        ("policy.max_prefill_steps",),
        lambda s: s.policy.features.mixed_batches,
        "without policy.mixed_batches = false",
    ),
    Row(
        ("policy.budget",),
        lambda s: not s.policy.features.mixed_batches and isinstance(s.policy.budget, AdaptiveBudget),
        "that keeps a promise without policy.mixed_batches = true",
    ),
    Row(
        ("policy.max_chunk",),
        lambda s: s.most_of_a_chunk > s.limits.max_num_batched_tokens,
        "above scheduler.max_num_batched_tokens",
    ),
    Row(
        ("policy.floor",),
        lambda s: s.floor > s.limits.max_num_batched_tokens,
        "above scheduler.max_num_batched_tokens",
    ),
)


class OfClass(NamedTuple):
    """One class beside what goes for all of them."""

    its: ClassConfig
    all: SchedulerConfig
    own_door: bool


CLASSES: tuple[Row[OfClass], ...] = (
    Row(("ttft",), lambda c: _above(c.its.ttft, c.its.e2e), _LATE),
    Row(("tpot",), lambda c: _above(c.its.tpot, c.its.e2e), _LATE),
    Row(("tbt",), lambda c: _above(c.its.tbt, c.its.e2e), _LATE),
    Row(("max_waiting", "max_waiting_tokens"), lambda c: c.own_door, _OWN_DOOR),
    Row(("max_waiting",), lambda c: _above(c.its.max_waiting, c.all.max_waiting), "above scheduler.max_waiting"),
    Row(
        ("max_waiting_tokens",),
        lambda c: _above(c.its.max_waiting_tokens, c.all.max_waiting_tokens),
        "above scheduler.max_waiting_tokens",
    ),
)

SECTIONS: tuple[Row[Config], ...] = (
    Row(
        ("scheduler.disk_kv_path",),
        lambda c: c.scheduler.disk_blocks is None and c.scheduler.disk_kv_memory is None,
        "without scheduler.disk_kv_memory (or disk_blocks)",
    ),
    Row(("predictor.path",), lambda c: c.predictor.kind != "learned", 'without predictor.kind = "learned"'),
    Row(
        ("predictor.quantile",),
        lambda c: c.predictor.kind == "oracle",
        'with predictor.kind = "oracle", which knows the one length there is',
    ),
    Row(("predictor.seed",), lambda c: not c.predictor.noise, "without predictor.noise"),
    Row(
        ("observe.max_bytes",),
        lambda c: not (c.observe.decisions or c.observe.records or c.observe.steps),
        "without a file: observe.decisions, observe.records or observe.steps",
    ),
    Row(
        ("gateway.remembered_tokens",),
        lambda c: c.gateway.route in WITHOUT_PREFIXES,
        "with this gateway.route, which does not look at prefixes",
    ),
    Row(("gateway.pools.classes",), lambda c: c.gateway.pools.mode == "shared", 'with gateway.pools.mode = "shared"'),
    Row(
        ("gateway.pools.mode",),
        lambda c: c.gateway.pools.mode != "shared" and not c.gateway.pools.classes,
        "without gateway.pools.classes",
    ),
    Row(
        ("gateway.pools.borrow",),
        lambda c: c.gateway.pools.mode != "borrow",
        'without gateway.pools.mode = "borrow"',
    ),
    Row(("gateway.weights",), lambda c: not c.gateway.fair, "without gateway.fair = true"),
    Row(
        ("gateway.fair", "gateway.weights"),
        lambda c: c.gateway.fair and isinstance(c.build_policy().order, Grouping),
        "with a scheduler.policy that shares among tenants by itself",
    ),
)


def idle(config: Config) -> dict[str, str]:
    """Every option that does nothing in `config`, written or not, by its place, and why.

    Of policies only the chosen one is looked at, and of its parameters those that have a value by themselves as well.
    """
    name, s = config.scheduler.policy, config.scheduler
    found = find_policy(name)
    whole = isinstance(found, Policy)
    own_door = isinstance(found, Policy) and has_door(found)
    host = any((s.host_blocks, s.host_kv_memory, s.disk_blocks, s.disk_kv_memory))

    def place(option: str) -> str:
        section, _, last = option.partition(".")
        if section != "policy":
            return option
        return f"{last} of {name}" if whole else f"policy.{name}.{last}"

    told = idle_scheduling(Scheduling(s, config.build_policy(), host, whole, own_door), name, place)
    for label, its in config.classes.items():
        for option, why in _idle(CLASSES, OfClass(its, s, own_door)):
            told.setdefault(f"classes.{label}.{option}", why.replace("{policy}", name))
    return told | dict(_idle(SECTIONS, config))


def idle_scheduling(scheduling: Scheduling, name: str, place: Callable[[str], str]) -> dict[str, str]:
    """Every option of the scheduler and its policy `name` that does nothing, and why.

    `place` is where an option is set.
    """
    told: dict[str, str] = {}
    for option, why in _idle(SCHEDULING, scheduling):
        placed = re.sub(r"\b(?:scheduler|policy|aging)\.\w+", lambda named: place(named[0]), why)
        told.setdefault(place(option), placed.replace("{policy}", name))
    return told


def _idle(table: Iterable[Row[T]], of: T) -> Iterator[tuple[str, str]]:
    for row in table:
        if row.idle(of):
            yield from ((option, row.why) for option in row.options)


def _above(value: float | None, most: float | None) -> bool:
    return value is not None and most is not None and value > most
