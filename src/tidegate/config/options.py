"""The options there are, section by section, and the whole, which knows how to make what the engine needs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Strict

from tidegate.config.gateway import GatewayConfig
from tidegate.config.values import (
    SECTION,
    ApiKey,
    Count,
    Limit,
    Name,
    Promise,
    Seconds,
    Share,
    Size,
    Steps,
    Switch,
    Whole,
    bare_keys,
)
from tidegate.core.limits import Limits
from tidegate.core.policies.doors import ClassLimit, QueueLimit
from tidegate.core.policy import Admit, Policy
from tidegate.core.predict import MAX_ERROR
from tidegate.core.presets import DEFAULT_POLICY, Composition, Preset, build_policy, compose, defaults
from tidegate.core.slo import DEFAULT_CLASS, DEFAULT_CLASSES, Slo, SloClass
from tidegate.custom import find_policy
from tidegate.errors import ConfigError

MEDIAN = 0.5

DEFAULT_TIERS: Mapping[str, str] = MappingProxyType({"flex": "batch", "priority": "interactive"})

PER_ENGINE = (
    "num_blocks", "max_model_len", "host_blocks", "disk_blocks", "draft_tokens", "max_resources", "resource_patience",
)  # fmt: skip
"""Limits that depend on the model, the machine and the executor: whoever starts an engine works them out."""


DOOR = ("max_waiting", "max_waiting_tokens", "displace_waiting", "refuse_hopeless", "shed_hopeless")
"""Options of `[scheduler]` that say who may wait, for every policy alike."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`[scheduler]`. What is named as in core.limits.Limits means what it means there.

    policy:         name of a policy or of a preset (`tidegate policies`), or of an own one, `package.module:NAME`.
                    A preset has its own defaults for some of the options below
    num_blocks:     KV blocks; or
    kv_memory:      bytes for KV ("512MiB"); with neither whoever starts the engine chooses
    host_blocks:    KV blocks of host memory to swap to; or
    host_kv_memory: bytes for them; with neither there are none
    disk_blocks:    KV blocks of a file beyond those; or
    disk_kv_memory: bytes for them; with neither there are none
    disk_kv_path:   the directory of that file; the system's for temporary files where absent
    max_model_len:  a lower limit than the model's own, tokens
    max_waiting:    requests that may wait before new ones are refused with 429
    max_waiting_tokens: the same in tokens of work: prompts without what is cached, and predicted outputs
    displace_waiting: if the queue is full, a request of a better class takes the place of the worst that waits
    refuse_hopeless: a request that is predicted to miss its promise, because of those ahead, is refused with 429
    shed_hopeless:  one that waits until nothing could keep its promise any more is ended
    pipeline_depth: 2 plans a step while the one before it runs
    """

    __pydantic_config__ = SECTION

    policy: Name = DEFAULT_POLICY
    num_blocks: Count | None = None
    kv_memory: Size | None = None
    host_blocks: Count | None = None
    host_kv_memory: Size | None = None
    disk_blocks: Count | None = None
    disk_kv_memory: Size | None = None
    disk_kv_path: Name | None = None
    block_size: Count = 16
    max_num_seqs: Count = 64
    max_num_batched_tokens: Count = 2048
    max_model_len: Count | None = None
    headroom: str = "watermark"
    watermark: Share = 0.01
    headroom_quantile: Annotated[float, Strict(), Field(gt=0, le=1)] | None = None
    oversize: str = "refuse"
    partial_prefills: Count | None = None
    prefix_caching: Switch = True
    max_waiting: Count = 1024
    max_waiting_tokens: Count | None = None
    displace_waiting: Switch = False
    refuse_hopeless: Switch = False
    shed_hopeless: Switch = False
    pipeline_depth: Literal[1, 2] = 2
    bypass_bound: Steps = 60
    resume_span: Steps = 128
    max_preemptions: Steps = 8
    stall_steps: Steps = 2
    nearly_done: Steps = 4


@dataclass(frozen=True, slots=True)
class AgingConfig:
    """`[aging]`, on any policy.

    window: seconds of waiting that make up for one step of priority; absent means no ageing
    rate:   seconds of waiting that make up for one unit of the order's score; absent means 1
    """

    __pydantic_config__ = SECTION

    window: Seconds | None = None
    rate: Seconds | None = None


@dataclass(frozen=True, slots=True)
class ClassConfig:
    """`[classes.NAME]`: promises in seconds ("none" takes one back) and static priority, lower first.

    queue_ttl: seconds that a request of the class may wait to begin; absent means for ever
    max_waiting, max_waiting_tokens: as those of `[scheduler]`, for this class alone
    """

    __pydantic_config__ = SECTION

    ttft: Promise = None
    tpot: Promise = None
    tbt: Promise = None
    e2e: Promise = None
    priority: Whole = 0
    queue_ttl: Promise = None
    max_waiting: Limit = None
    max_waiting_tokens: Limit = None


def _over_default_tiers(value: Any) -> Any:
    return {**DEFAULT_TIERS, **value} if isinstance(value, dict) else value


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """`[server]`.

    api_keys:       none means that everybody may come
    max_body_bytes: larger bodies are refused with 413
    max_connections: of clients at once; further ones are refused with 503
    drain_seconds:  how long a shutdown lets running requests finish
    tenant_labels:  tenants that metrics name at most; the rest is "other"
    default_class:  class of a request that claims none
    service_tiers:  class for each of OpenAI's `service_tier` values, over the default ones; a tier
        without a class ("auto", "default") is the default class
    """

    __pydantic_config__ = SECTION

    host: Name = "127.0.0.1"
    port: Annotated[int, Strict(), Field(ge=0, le=65535)] = 8000
    api_keys: Annotated[tuple[ApiKey, ...], BeforeValidator(bare_keys)] = ()
    max_body_bytes: Size = 4 * 2**20
    max_connections: Count = 4096
    drain_seconds: Seconds = 30.0
    tenant_labels: Count = 20
    default_class: Name = DEFAULT_CLASS
    service_tiers: Annotated[dict[str, Name], BeforeValidator(_over_default_tiers)] = field(
        default_factory=lambda: dict(DEFAULT_TIERS)
    )


@dataclass(frozen=True, slots=True)
class ObserveConfig:
    """`[observe]`: files that a server writes as it goes, one JSON object a line. Off where no path is given.

    decisions: why requests were admitted, evicted, restored, refused, and what held the others back
    records:   one line for every request that came to the door (docs/records.md)
    steps:     one line for every step that was computed (docs/records.md)
    max_bytes: a file that reaches it is renamed to FILE.1, over the one before, and begun anew; a page at least,
               so that a file holds more than the line that made it too long
    """

    __pydantic_config__ = SECTION

    decisions: Name | None = None
    records: Name | None = None
    steps: Name | None = None
    max_bytes: Annotated[Size, Field(ge=4096)] = 256 * 2**20


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`[model]`.

    name:    a known name (`tidegate models`), a directory or GGUF file, or a hub id
    dtype:   of weights and KV; "auto" is bfloat16, on CPUs that multiply float32 faster float32
    threads: of the CPU kernels; absent takes the cores this process really has
    """

    __pydantic_config__ = SECTION

    name: Name = "smollm2-135m"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    threads: Count | None = None


@dataclass(frozen=True, slots=True)
class PredictorConfig:
    """`[predictor]`: where predicted output lengths come from (docs/prediction.md).

    kind:     "history" learns while it serves; "learned" reads a file of `tidegate predictor train`; "oracle"
              knows the truth, which only a simulation does
    quantile: of the lengths that are likely, the one that counts as the prediction
    path:     the file of kind "learned"
    noise:    sigma of the log-normal error that is put on predictions; 0 is none
    seed:     of that error
    """

    __pydantic_config__ = SECTION

    kind: Literal["history", "oracle", "learned"] = "history"
    quantile: Annotated[float, Strict(), Field(gt=0, lt=1)] = MEDIAN
    path: Name | None = None
    noise: Annotated[float, Strict(), Field(ge=0, le=MAX_ERROR)] = 0.0
    seed: Whole = 0

    def __post_init__(self) -> None:
        if self.kind == "learned" and self.path is None:
            raise ValueError('of kind "learned" needs a path: the file that `tidegate predictor train` wrote')


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """`[vllm]`: how Tidegate stands inside vLLM (docs/vllm.md).

    mode:     "active" decides; "shadow" decides and logs, and vLLM acts as if it were alone
    fallback: where this vLLM is not one that Tidegate schedules in, "stock" leaves it to vLLM with a warning,
              "refuse" does not start
    """

    __pydantic_config__ = SECTION

    mode: Literal["active", "shadow"] = "active"
    fallback: Literal["stock", "refuse"] = "stock"


def default_classes() -> dict[str, ClassConfig]:
    return {name: ClassConfig(**asdict(known.slo), priority=known.priority) for name, known in DEFAULT_CLASSES.items()}


@dataclass(frozen=True, slots=True)
class Config:
    """The resolved whole. `policy` holds parameters by policy name, `classes` every class there is."""

    __pydantic_config__ = SECTION

    scheduler: SchedulerConfig = SchedulerConfig()
    policy: dict[str, dict[str, Any]] = field(default_factory=dict)
    aging: AgingConfig = AgingConfig()
    classes: dict[str, ClassConfig] = field(default_factory=default_classes)
    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    predictor: PredictorConfig = PredictorConfig()
    observe: ObserveConfig = ObserveConfig()
    vllm: VllmConfig = VllmConfig()
    gateway: GatewayConfig = field(default_factory=GatewayConfig)

    @property
    def slo_classes(self) -> dict[str, SloClass]:
        """The classes as the scheduler knows them."""
        return {
            name: SloClass(name, Slo(ttft=c.ttft, tpot=c.tpot, tbt=c.tbt, e2e=c.e2e), c.priority, c.queue_ttl)
            for name, c in self.classes.items()
        }

    @property
    def class_limits(self) -> dict[str, ClassLimit]:
        """The classes of which not everything may wait."""
        limits = {name: ClassLimit(c.max_waiting, c.max_waiting_tokens) for name, c in self.classes.items()}
        return {name: limit for name, limit in limits.items() if limit != ClassLimit()}

    @property
    def service_limits(self) -> dict[str, Any]:
        """What the server's front tells clients about the queue before it asks the scheduler."""
        return {
            "max_waiting": self.scheduler.max_waiting,
            "class_max_waiting": {name: c.max_waiting for name, c in self.classes.items()},
            "queue_ttl": {name: c.queue_ttl for name, c in self.classes.items()},
        }

    def limits(self, num_blocks: int, max_model_len: int | None, host_blocks: int = 0, disk_blocks: int = 0) -> Limits:
        """The scheduler's limits over an executor's pools and a model of `max_model_len` tokens."""
        s = self.scheduler
        pools = {"num_blocks": num_blocks, "host_blocks": host_blocks, "disk_blocks": disk_blocks}
        known = PER_ENGINE
        shared: dict[str, Any] = {f.name: getattr(s, f.name) for f in fields(Limits) if f.name not in known}
        lengths = [n for n in (max_model_len, s.max_model_len) if n is not None]
        try:
            return Limits(max_model_len=min(lengths, default=None), **shared | pools)
        except ConfigError as e:
            raise ConfigError(f"scheduler.{e}") from e

    def build_policy(self) -> Policy:
        """The policy that `scheduler.policy` names, with its parameters."""
        name = self.scheduler.policy
        found = find_policy(name)
        try:
            if isinstance(found, Policy):
                return replace(found, admit=self._door_of(found))
            _check_door(found)
            return compose(name, found, {**self._door(), **self._ageing(found), **self.policy.get(name, {})})
        except ConfigError as e:
            told = re.sub(r"\b(" + "|".join(SAID_ELSEWHERE) + r")\b", lambda m: SAID_ELSEWHERE[m[0]], str(e))
            raise ConfigError(f"policy.{name}: {told}") from e

    def _door(self) -> dict[str, Any]:
        """What sections of their own say of the door, for every policy alike."""
        return {"class_limits": self.class_limits, **{door: getattr(self.scheduler, door) for door in DOOR}}

    def _ageing(self, preset: Preset) -> dict[str, Any]:
        """What `[aging]` says, as far as the order can be aged by it; unsaid it is the preset's."""
        said = {"aging_window": self.aging.window, "aging_rate": self.aging.rate}
        if self.aging.window is None and preset.defaults.aging_window is None:
            return {}  # a rate alone weighs nothing
        taken = defaults(preset)
        return {option: value for option, value in said.items() if value is not None and option in taken}

    def _door_of(self, whole: Policy) -> Admit:
        """The configuration's door for a policy that was composed in Python, unless it has one of its own."""
        return whole.admit if has_door(whole) else build_policy(DEFAULT_POLICY, self._door()).admit


def has_door(whole: Policy) -> bool:
    """Whether a policy that was composed in Python decides itself who may wait."""
    return whole.admit != QueueLimit()


def _check_door(preset: Preset) -> None:
    """A preset leaves to the configuration who may wait."""
    for option in (*DOOR, "class_limits"):
        if getattr(preset.defaults, option) != getattr(Composition(), option):
            raise ConfigError(f"a preset cannot set {option}, which goes for every policy alike")


# What a policy is composed with and a section of its own says, for every policy alike.
SAID_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {"aging_window": "aging.window", "aging_rate": "aging.rate", "class_limits": "classes.NAME.max_waiting"}
    | {name: f"scheduler.{name}" for name in DOOR}
)
