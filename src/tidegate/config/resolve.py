"""From a file to a `Config`, and back.

`resolve` validates and fills in; it returns a new object and never changes what it was given.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ConfigDict, TypeAdapter, ValidationError

from tidegate.config.gateway import GatewayConfig
from tidegate.config.idle import idle
from tidegate.config.options import (
    SAID_ELSEWHERE,
    Config,
    ObserveConfig,
    SchedulerConfig,
    default_classes,
)
from tidegate.config.sentences import nearest, sentence
from tidegate.config.values import ApiKey, Count
from tidegate.core.policy import Policy
from tidegate.core.presets import DEFAULT_POLICY, PRESETS, Preset, parameters
from tidegate.custom import find_policy, is_own
from tidegate.errors import ConfigError

_CONFIG = TypeAdapter(Config)

Overrides = Mapping[str, Mapping[str, Any]]


def load_config(path: Path | None, overrides: Overrides | None = None) -> Config:
    """The configuration in a TOML file, or the defaults without one.

    `overrides` (section, option, value) win over the file; a value of None overrides nothing. Raises
    ConfigError naming the file and the option.
    """
    raw = _read(path, overrides or {})
    with _naming(path):
        return resolve(raw)


def load_configs(path: Path | None, policies: Sequence[str], overrides: Overrides | None = None) -> list[Config]:
    """The same under each of `policies`, which are compared: see `resolve_each`."""
    raw = _read(path, overrides or {})
    with _naming(path):
        return resolve_each(raw, policies)


def refuse_written(path: Path | None, elsewhere: Mapping[str, str]) -> None:
    """Raise ConfigError for an option that the file writes and that does nothing where it is read.

    `elsewhere` says for each such option, dotted and with `policy.*` for any policy, what says it there.
    """
    written = _written(_read(path, {}))
    with _naming(path):
        for place in written:
            section, *rest = place.split(".")
            kind = f"policy.*.{rest[-1]}" if section == "policy" else place
            if kind in elsewhere:
                raise ConfigError(f"{place} does nothing here: {elsewhere[kind]}")


@contextmanager
def _naming(path: Path | None) -> Iterator[None]:
    """A ConfigError begins with the file that it is about."""
    try:
        yield
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}" if path is not None else str(e)) from e


def _read(path: Path | None, overrides: Overrides) -> dict[str, Any]:
    """What the file and the overrides say."""
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
        except RecursionError as e:
            raise ConfigError(f"{path}: not TOML of ours: nested too deeply") from e
    for section, options in overrides.items():
        given = {name: value for name, value in options.items() if value is not None}
        if given and isinstance(raw.get(section, {}), dict):
            raw[section] = {**raw.get(section, {}), **given}
    return raw


def resolve(raw: Mapping[str, Any]) -> Config:
    """Validate what a TOML document said and fill in the rest.

    Raises ConfigError in one sentence, also for an option that the document says and that would do nothing.
    """
    return _refused_if_idle(raw, [_filled_in(raw)])[0]


def resolve_each(raw: Mapping[str, Any], policies: Iterable[str]) -> list[Config]:
    """The same under each of `policies`. An option is refused only if it would do nothing under all of them."""
    return _refused_if_idle(raw, [_filled_in(_under(raw, name)) for name in policies])


def to_toml(config: Config) -> str:
    """Every option with its value, as TOML that resolves to an equal Config.

    Options without a value are left out, and so are those that do nothing: written down they would be refused.
    """
    document = asdict(config)
    document["classes"] = {
        name: {option: "none" if value is None else value for option, value in options.items()}
        for name, options in document["classes"].items()
    }
    for place in idle(config):
        _without(document, place)
    return tomli_w.dumps(_without_none(document))


def _without(document: dict[str, Any], place: str) -> None:
    """Take out the option at a dotted place, if it is there. A name between dots may have some itself."""
    section, _, rest = place.partition(".")
    name, _, option = rest.rpartition(".")
    options = document.get(section, {})
    (options.get(name, {}) if name else options).pop(option, None)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_without_none(v) for v in value]
    return value


def _under(raw: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """The document with `policy` as the chosen one."""
    scheduler = raw.get("scheduler", {})
    return {**raw, "scheduler": {**scheduler, "policy": policy} if isinstance(scheduler, Mapping) else scheduler}


def _filled_in(raw: Mapping[str, Any]) -> Config:
    """The checked Config, options that do nothing among it."""
    merged = {
        **raw,
        "scheduler": _over_preset(raw.get("scheduler", {})),
        "classes": _over_default_classes(raw.get("classes", {})),
    }
    try:
        config = _CONFIG.validate_python(merged)
    except ValidationError as e:
        raise ConfigError(sentence(e)) from e
    _check_references(config)
    _check_policies(config)
    return config


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
    merged: dict[str, Any] = {name: asdict(c) for name, c in default_classes().items()}
    for name, options in raw.items():
        merged[name] = {**merged.get(name, {}), **options} if isinstance(options, Mapping) else options
    return merged


# What does nothing


def _refused_if_idle(raw: Mapping[str, Any], configs: list[Config]) -> list[Config]:
    """`configs`, unless `raw` says an option that does nothing in any of them. Raises ConfigError for the first.

    The section of a policy is about that policy alone, whether it is among the chosen ones or not.
    """
    for config in configs:
        config.limits(config.scheduler.num_blocks or 1, None)
    written = set(_written(raw))
    for name in raw.get("policy", {}):
        for place, why in idle(_filled_in({**_under(raw, name), "aging": {}})).items():
            if place in written and place.startswith(f"policy.{name}."):
                raise ConfigError(f"{place} does nothing {why}")
    first, *others = (idle(config) for config in configs)
    for place, why in first.items():
        if place in written and all(place in other for other in others):
            rest = ", ".join(config.scheduler.policy for config in configs[1:])
            raise ConfigError(f"{place} does nothing {why}" + (f"; nor does it under {rest}" if rest else ""))
    return configs


def _written(raw: Mapping[str, Any]) -> Iterator[str]:
    """The dotted place of every option of `raw` that a row could be about, and of every table among a section's."""
    for section, options in raw.items():
        for name, said in options.items():
            if isinstance(said, Mapping):
                yield from (f"{section}.{name}.{option}" for option in said)
            if section not in ("policy", "classes"):
                yield f"{section}.{name}"


# What contradicts itself


def _check_references(config: Config) -> None:
    """Everything that names a class names one there is, and no option contradicts another."""
    _check_pools(config.scheduler)
    if "" in config.classes:
        raise ConfigError('classes."": a class needs a name')
    named: dict[str, tuple[str, ...]] = {"server.default_class": (config.server.default_class,)}
    named |= {f"server.service_tiers.{tier}": (name,) for tier, name in config.server.service_tiers.items()}
    named |= {f"server.api_keys.{i}.classes": k.classes or () for i, k in enumerate(config.server.api_keys)}
    for section in ("rates", "deadlines", "pools.classes"):
        told = config.gateway.pools.classes if section == "pools.classes" else getattr(config.gateway, section)
        named |= {f"gateway.{section}": tuple(told)}
    named |= {f"gateway.api_keys.{i}.classes": k.classes or () for i, k in enumerate(config.gateway.api_keys)}
    for where, names in named.items():
        for name in names:
            if name not in config.classes:
                raise ConfigError(f"{where}: unknown class {name!r}{nearest(name, config.classes)}")
    _check_files(config.observe)
    _check_keys("server", config.server.api_keys)
    _check_keys("gateway", config.gateway.api_keys)
    _check_replicas(config.gateway)


def _check_keys(section: str, keys: Iterable[ApiKey]) -> None:
    """A key stands for one thing."""
    secrets = [k.key for k in keys]
    if len(set(secrets)) < len(secrets):
        raise ConfigError(f"{section}.api_keys: the same key stands there twice")


def _check_replicas(gateway: GatewayConfig) -> None:
    """Every engine stands there once, and where all are known, every pool has one."""
    if not gateway.pools.classes:
        for section in ("replicas", "discovery"):
            for i, engine in enumerate(getattr(gateway, section)):
                if engine.pool:
                    raise ConfigError(f"gateway.{section}.{i}.pool does nothing without gateway.pools.classes")
    for option, of in (("url", "url"), ("name", "called")):
        values = [getattr(replica, of) for replica in gateway.replicas]
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ConfigError(f"gateway.replicas: {twice!r} stands there twice as {option}")
    pools = {replica.pool: None for replica in gateway.replicas if replica.pool}
    for name, pool in gateway.pools.classes.items():
        if gateway.replicas and not gateway.discovery and pool not in pools:
            raise ConfigError(
                f"gateway.pools.classes.{name}: no replica is of pool {pool!r}{nearest(pool, pools) if pools else ''}"
            )


def _check_files(observe: ObserveConfig) -> None:
    """Every file has one writer."""
    told: dict[str, str] = {}
    for option in ("decisions", "records", "steps"):
        path = getattr(observe, option)
        if path is not None and path in told:
            raise ConfigError(f"observe.{told[path]} and observe.{option} both write {path}; name two files")
        told[path] = option


def _check_pools(s: SchedulerConfig) -> None:
    """Every pool is sized once."""
    sizes = (("num_blocks", "kv_memory", "KV pool"), ("host_blocks", "host_kv_memory", "host pool"))
    for blocks, size, pool in (*sizes, ("disk_blocks", "disk_kv_memory", "file of swapped KV")):
        if getattr(s, blocks) is not None and getattr(s, size) is not None:
            raise ConfigError(f"scheduler.{blocks} and scheduler.{size} both size the {pool}; give one of them")


def _check_policies(config: Config) -> None:
    """The chosen policy exists, and so does every parameter of every policy that has a section."""
    counted: dict[Any, Any] = {int: Count, int | None: Count | None}  # a policy's whole numbers are counts
    for name, params in config.policy.items():
        if not is_own(name) and name not in PRESETS:
            raise ConfigError(f"policy.{name}: unknown policy{nearest(name, PRESETS)}")
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
                raise ConfigError(f"unknown option {where}{nearest(option, known)}")
            try:
                TypeAdapter(known[option], config=ConfigDict(strict=True)).validate_python(value)
            except ValidationError as e:
                told = sentence(e)  # begins with a space, or with the path to an entry of the option
                raise ConfigError(f"{where}{told if told.startswith(' ') else '.' + told}") from e
    unknown = config.scheduler.policy
    if not is_own(unknown) and unknown not in PRESETS:
        raise ConfigError(f"scheduler.policy: unknown policy {unknown!r}{nearest(unknown, PRESETS)}")
    config.build_policy()
