"""Configuration: TOML in, one frozen `Config` out, which knows how to make what the engine needs.

`resolve` validates and fills in; it returns a new object and never changes what it was given. Whatever
a file says that no option reads is an error that names the nearest one that does.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_type_hints

import tomli_w
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError

from tidegate.core.limits import Limits
from tidegate.core.policies.doors import ClassLimit, QueueLimit
from tidegate.core.policy import Policy
from tidegate.core.predict import MAX_ERROR
from tidegate.core.presets import DEFAULT_POLICY, PRESETS, Composition, Preset, build_policy, compose, parameters
from tidegate.core.slo import DEFAULT_CLASS, DEFAULT_CLASSES, Slo, SloClass
from tidegate.custom import find_policy, is_own
from tidegate.errors import ConfigError

SECTION = ConfigDict(extra="forbid")

# TOML knows its types, so nothing is converted: "64" is no number and 1 is no truth value.
Switch = Annotated[bool, Strict()]
Whole = Annotated[int, Strict()]
Steps = Annotated[int, Strict(), Field(ge=0)]
Count = Annotated[int, Strict(), Field(ge=1)]
Share = Annotated[float, Strict(), Field(ge=0, lt=1)]
Seconds = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]

MEDIAN = 0.5

DEFAULT_TIERS: Mapping[str, str] = MappingProxyType({"flex": "batch", "priority": "interactive"})

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _bytes(value: Any) -> Any:
    """ "1.5GiB" as a number of bytes."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)\s*", value)
    if match is None:
        raise ValueError(f"must be a number of bytes or a size such as '512MiB' or '1.5GiB', not {value!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def _no_promise(value: Any) -> Any:
    """ "none" takes a promise back that a class has by default."""
    return None if value == "none" else value


def _sendable(key: str) -> str:
    if re.fullmatch(r"[!-~]+", key) is None:
        raise ValueError("must be visible ASCII characters without spaces: no header can carry another key")
    return key


def _some_class(classes: tuple[str, ...]) -> tuple[str, ...]:
    if not classes:
        raise ValueError("must name a class: a key without any can ask for nothing; leave it out for all classes")
    return classes


Size = Annotated[Count, BeforeValidator(_bytes)]
Promise = Annotated[Seconds | None, BeforeValidator(_no_promise)]
Limit = Annotated[Count | None, BeforeValidator(_no_promise)]


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
    rate:   seconds of waiting that make up for one unit of the order's score
    """

    __pydantic_config__ = SECTION

    window: Seconds | None = None
    rate: Seconds = 1.0


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


@dataclass(frozen=True, slots=True)
class ApiKey:
    """`[[server.api_keys]]`: a key, whose it is, and what it may claim.

    tenant:  requests with this key are this tenant's, whatever they say; None leaves it to them
    classes: classes it may claim; None is all
    """

    __pydantic_config__ = SECTION

    key: Annotated[str, AfterValidator(_sendable)]
    tenant: Name | None = None
    classes: Annotated[tuple[Name, ...], AfterValidator(_some_class)] | None = None


def _over_default_tiers(value: Any) -> Any:
    return {**DEFAULT_TIERS, **value} if isinstance(value, dict) else value


def _api_keys(value: Any) -> Any:
    """A bare string is a key without bounds."""
    return tuple({"key": k} if isinstance(k, str) else k for k in value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """`[server]`.

    api_keys:       none means that everybody may come
    max_body_bytes: larger bodies are refused with 413
    drain_seconds:  how long a shutdown lets running requests finish
    tenant_labels:  tenants that metrics name at most; the rest is "other"
    default_class:  class of a request that claims none
    service_tiers:  class for each of OpenAI's `service_tier` values, over the default ones; a tier
        without a class ("auto", "default") is the default class
    """

    __pydantic_config__ = SECTION

    host: Name = "127.0.0.1"
    port: Annotated[int, Strict(), Field(ge=0, le=65535)] = 8000
    api_keys: Annotated[tuple[ApiKey, ...], BeforeValidator(_api_keys)] = ()
    max_body_bytes: Size = 4 * 2**20
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
    max_bytes: a file that reaches it is renamed to FILE.1, over the one before, and begun anew
    """

    __pydantic_config__ = SECTION

    decisions: Name | None = None
    records: Name | None = None
    steps: Name | None = None
    max_bytes: Size = 256 * 2**20


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
        if self.kind != "learned" and self.path is not None:
            raise ValueError(f'has a path, which kind "{self.kind}" does not read; set kind = "learned"')
        if self.kind == "oracle" and self.quantile != MEDIAN:
            raise ValueError('has a quantile, but kind "oracle" knows the one length there is')
        if self.seed and not self.noise:
            raise ValueError("has a seed, which does nothing without noise")


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


def _default_classes() -> dict[str, ClassConfig]:
    return {name: ClassConfig(**asdict(known.slo), priority=known.priority) for name, known in DEFAULT_CLASSES.items()}


@dataclass(frozen=True, slots=True)
class Config:
    """The resolved whole. `policy` holds parameters by policy name, `classes` every class there is."""

    __pydantic_config__ = SECTION

    scheduler: SchedulerConfig = SchedulerConfig()
    policy: dict[str, dict[str, Any]] = field(default_factory=dict)
    aging: AgingConfig = AgingConfig()
    classes: dict[str, ClassConfig] = field(default_factory=_default_classes)
    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    predictor: PredictorConfig = PredictorConfig()
    observe: ObserveConfig = ObserveConfig()
    vllm: VllmConfig = VllmConfig()

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
        return self._build_policy(self.scheduler.policy)

    def _build_policy(self, name: str) -> Policy:
        found, shared = find_policy(name), self._shared(name)
        try:
            if isinstance(found, Policy):
                return self._behind_a_door(found, shared, SchedulerConfig(policy=name))
            _check_door(found)
            return compose(name, found, {**shared, **self.policy.get(name, {})})
        except ConfigError as e:
            told = re.sub(r"\b(" + "|".join(SAID_ELSEWHERE) + r")\b", lambda m: SAID_ELSEWHERE[m[0]], str(e))
            raise ConfigError(f"policy.{name}: {told}") from e

    def _shared(self, name: str) -> dict[str, Any]:
        """What sections of their own say of the composition of every policy, or of the chosen one."""
        shared = {"class_limits": self.class_limits, **{door: getattr(self.scheduler, door) for door in DOOR}}
        # Ageing is the chosen policy's, the sections of others may know none; unsaid it is the preset's.
        if name == self.scheduler.policy and self.aging != AgingConfig():
            shared |= {"aging_window": self.aging.window, "aging_rate": self.aging.rate}
        return shared

    def _behind_a_door(self, whole: Policy, shared: dict[str, Any], plain: SchedulerConfig) -> Policy:
        """A policy that was composed in Python, behind the configuration's door unless it has limits of its own.

        Raises ConfigError for an option that would do nothing; `plain` is where nothing was said.
        """
        ours = whole.admit == QueueLimit()
        unsaid = Config(plain)._shared(plain.policy)
        for option, value in shared.items():
            aged = option.startswith("aging")
            if (aged or not ours) and value != unsaid.get(option):
                own = "an order" if aged else "a door"
                raise ConfigError(f"{option} does nothing here: this policy is whole, with {own} of its own")
        if not ours:
            return whole
        door = {option: value for option, value in shared.items() if not option.startswith("aging")}
        return replace(whole, admit=build_policy(DEFAULT_POLICY, door).admit)


_CONFIG = TypeAdapter(Config)

# What a policy is composed with and a section of its own says, for every policy alike.
SAID_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {"aging_window": "aging.window", "aging_rate": "aging.rate", "class_limits": "classes.NAME.max_waiting"}
    | {name: f"scheduler.{name}" for name in DOOR}
)


def load_config(path: Path | None, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Config:
    """The configuration in a TOML file, or the defaults without one.

    `overrides` (section, option, value) win over the file; a value of None overrides nothing. Raises
    ConfigError naming the file and the option.
    """
    raw: dict[str, Any] = {}
    if path is not None:
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as e:
            raise ConfigError(f"cannot read {path}: {e.strerror}") from e
        except UnicodeDecodeError as e:
            raise ConfigError(f"{path}: not UTF-8 text (byte {e.start})") from e
        except tomllib.TOMLDecodeError as e:
            raise ConfigError(f"{path}: not TOML: {e}") from e
    for section, options in (overrides or {}).items():
        given = {name: value for name, value in options.items() if value is not None}
        if given and isinstance(raw.get(section, {}), dict):
            raw[section] = {**raw.get(section, {}), **given}
    try:
        return resolve(raw)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}" if path is not None else str(e)) from e


def resolve(raw: Mapping[str, Any]) -> Config:
    """Validate what a TOML document said and fill in the rest. Raises ConfigError in one sentence."""
    merged = {
        **raw,
        "scheduler": _over_preset(raw.get("scheduler", {})),
        "classes": _over_default_classes(raw.get("classes", {})),
    }
    try:
        config = _CONFIG.validate_python(merged)
    except ValidationError as e:
        raise ConfigError(_sentence(e)) from e
    _check_references(config)
    _check_policies(config)
    config.limits(config.scheduler.num_blocks or 1, None)
    return config


def to_toml(config: Config) -> str:
    """Every option with its value, as TOML that resolves to an equal Config. Options without a value are left out."""
    document = asdict(config)
    document["classes"] = {
        name: {option: "none" if value is None else value for option, value in options.items()}
        for name, options in document["classes"].items()
    }
    return tomli_w.dumps(_without_none(document))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_without_none(v) for v in value]
    return value


def _over_preset(raw: Any) -> Any:
    """The limits that the chosen preset brings, each overridden by what the file says of it."""
    if not isinstance(raw, Mapping):
        return raw
    name = str(raw.get("policy", DEFAULT_POLICY))
    preset = find_policy(name) if is_own(name) or name in PRESETS else None
    return {**(preset.limits if isinstance(preset, Preset) else {}), **raw}


def _over_default_classes(raw: Any) -> Any:
    """The default classes, each option overridden by what the file says of it."""
    if not isinstance(raw, Mapping):
        return raw
    merged: dict[str, Any] = {name: asdict(c) for name, c in _default_classes().items()}
    for name, options in raw.items():
        merged[name] = {**merged.get(name, {}), **options} if isinstance(options, Mapping) else options
    return merged


def _check_references(config: Config) -> None:
    """Everything that names a class names one there is, and no option contradicts another."""
    _check_pools(config.scheduler)
    _check_restore(config)
    if "" in config.classes:
        raise ConfigError('classes."": a class needs a name')
    named: dict[str, tuple[str, ...]] = {"server.default_class": (config.server.default_class,)}
    named |= {f"server.service_tiers.{tier}": (name,) for tier, name in config.server.service_tiers.items()}
    named |= {f"server.api_keys.{i}.classes": k.classes or () for i, k in enumerate(config.server.api_keys)}
    for where, names in named.items():
        for name in names:
            if name not in config.classes:
                raise ConfigError(f"{where}: unknown class {name!r}{_nearest(name, config.classes)}")
    _check_files(config.observe)
    keys = [k.key for k in config.server.api_keys]
    if len(set(keys)) < len(keys):
        raise ConfigError("server.api_keys: the same key stands there twice")


def _check_files(observe: ObserveConfig) -> None:
    """Every file has one writer."""
    told: dict[str, str] = {}
    for option in ("decisions", "records", "steps"):
        path = getattr(observe, option)
        if path is not None and path in told:
            raise ConfigError(f"observe.{told[path]} and observe.{option} both write {path}; name two files")
        told[path] = option


def _check_pools(s: SchedulerConfig) -> None:
    """Every pool is sized once, and the file's directory is given only for a file."""
    sizes = (("num_blocks", "kv_memory", "KV pool"), ("host_blocks", "host_kv_memory", "host pool"))
    for blocks, size, pool in (*sizes, ("disk_blocks", "disk_kv_memory", "file of swapped KV")):
        if getattr(s, blocks) is not None and getattr(s, size) is not None:
            raise ConfigError(f"scheduler.{blocks} and scheduler.{size} both size the {pool}; give one of them")
    if s.disk_kv_path is not None and s.disk_blocks is None and s.disk_kv_memory is None:
        raise ConfigError("scheduler.disk_kv_path does nothing without scheduler.disk_kv_memory (or disk_blocks)")


def _check_restore(config: Config) -> None:
    """Whoever asks the chosen policy to swap has a place to swap to. A preset that swaps by itself then recomputes."""
    s = config.scheduler
    pools = (s.host_blocks, s.host_kv_memory, s.disk_blocks, s.disk_kv_memory)
    if config.policy.get(s.policy, {}).get("restore") == "swap" and not any(pools):
        raise ConfigError(
            f'policy.{s.policy}.restore = "swap" does nothing without scheduler.host_kv_memory (or disk_kv_memory)'
        )


def _check_policies(config: Config) -> None:
    """The chosen policy exists, and so does every parameter of every policy that has a section."""
    counted: dict[Any, Any] = {int: Count, int | None: Count | None}  # a policy's whole numbers are counts
    for name, params in config.policy.items():
        if not is_own(name) and name not in PRESETS:
            raise ConfigError(f"policy.{name}: unknown policy{_nearest(name, PRESETS)}")
        found = find_policy(name)
        if isinstance(found, Policy):
            raise ConfigError(f"policy.{name}: is a whole policy and has no parameters")
        hints = parameters(found)
        known = {option: counted.get(hint, hint) for option, hint in hints.items() if option not in SAID_ELSEWHERE}
        for option, value in params.items():
            where = f"policy.{name}.{option}"
            if option in SAID_ELSEWHERE:
                raise ConfigError(f"{where} goes for every policy; set {SAID_ELSEWHERE[option]} instead")
            if option not in known:
                raise ConfigError(f"unknown option {where}{_nearest(option, known)}")
            try:
                TypeAdapter(known[option], config=ConfigDict(strict=True)).validate_python(value)
            except ValidationError as e:
                told = _sentence(e)  # begins with a space, or with the path to an entry of the option
                raise ConfigError(f"{where}{told if told.startswith(' ') else '.' + told}") from e
        config._build_policy(name)
    unknown = config.scheduler.policy
    if not is_own(unknown) and unknown not in PRESETS:
        raise ConfigError(f"scheduler.policy: unknown policy {unknown!r}{_nearest(unknown, PRESETS)}")
    config.build_policy()


def _check_door(preset: Preset) -> None:
    """A preset leaves to the configuration who may wait."""
    for option in (*DOOR, "class_limits"):
        if getattr(preset.defaults, option) != getattr(Composition(), option):
            raise ConfigError(f"a preset cannot set {option}, which goes for every policy alike")


def _sentence(error: ValidationError) -> str:
    """The first of pydantic's complaints, as one sentence with the option's dotted path."""
    first = error.errors()[0]
    path = tuple(part for part in first["loc"] if not (isinstance(part, str) and part.startswith("function-")))
    dotted = ".".join(map(str, path))
    if first["type"] == "unexpected_keyword_argument":
        return f"unknown option {dotted}{_nearest(str(path[-1]), _options_at(path[:-1]))}"
    if first["type"] == "missing":
        return f"{dotted} is missing"
    if first["type"] in ("dataclass_type", "dict_type"):
        return f"{dotted} must be a table, not {first['input']!r}"
    message = (
        first["msg"]
        .removeprefix("Value error, ")
        .replace("Input should be", "must be")
        .replace("String should have at least 1 character", "must not be empty")
        .replace("a valid tuple", "a list")
    )
    shown = "" if first["type"] == "value_error" else f", not {first['input']!r}"
    return f"{dotted} {message}{shown}"


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(sorted(known))}"


def _options_at(path: tuple[int | str, ...]) -> dict[str, Any]:
    """The options that may stand at a path of sections, names and list positions."""
    at: Any = Config
    for part in path:
        if is_dataclass(at):
            at = get_type_hints(at)[str(part)]
        elif get_args(at):
            at = get_args(at)[-1] if not isinstance(part, int) else get_args(at)[0]
    return {f.name: f for f in fields(at)} if is_dataclass(at) else {}
