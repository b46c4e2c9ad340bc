"""The scenario format: one situation for a scheduler, in a YAML file that people can read.

`parse` turns a file's text into a `Scenario`; `simulate/scenario_run.py` runs it. Everything a file
may say is in the tables below; whatever is not in them is an InputError that names the nearest key.
docs/scenarios.md describes the format for its users.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import yaml

from tidegate.config import PredictorConfig, resolve
from tidegate.core.limits import HEADROOMS
from tidegate.core.slo import NO_SLO, Slo, shortest
from tidegate.errors import ConfigError, InputError
from tidegate.executors.scripted import StepFormula
from tidegate.simulate.nearest import nearest

TOP_KEYS = ("id", "title", "group", "cfg", "reqs", "expect", "facts", "essence", "seen_in", "mended", "FCFS-stock")
PROSE_KEYS = ("load", "trace")
REQUEST_KEYS = (
    "id", "x", "every", "from", "until", "t", "p", "o", "max_o", "prio", "class", "tenant",
    "hit", "share", "cancel", "blocked_until", "slo", "ttl", "queue_ttl", "lora",
)  # fmt: skip
CONFIG_KEYS = (
    "kv", "block", "budget", "max_seqs", "max_model_len", "headroom", "watermark", "oversize", "partial_prefills",
    "prefix_caching", "mixed_batches", "policy", "params", "predictor", "history", "step_ms", "cached", "limits",
    "host_blocks", "disk_blocks", "cost", "draft", "accept", "weights",
    "headroom_quantile", "max_waiting", "max_queued_tokens", "ttft_target_s", "queue_ttl", "max_loras", "prefill_rate",
)  # fmt: skip
LIMIT_KEYS = ("bypass_bound", "resume_span", "max_preemptions", "stall_steps", "nearly_done", "resource_patience")
COST_KEYS = ("prefill_tok_us", "copy_block_us")
SLO_KEYS = ("ttft", "tpot", "tbt", "e2e")

# Where a file says what a configuration says elsewhere (config/idle.py names options by their place there).
PLACES = {
    **{f"scheduler.{key}": key for key in ("policy", "headroom", "watermark", "headroom_quantile", "prefix_caching")},
    **{f"scheduler.{key}": key for key in ("partial_prefills", "host_blocks", "disk_blocks", "max_waiting")},
    "scheduler.max_num_seqs": "max_seqs", "scheduler.max_num_batched_tokens": "budget",
    "scheduler.host_kv_memory": "host_blocks", "scheduler.disk_kv_memory": "disk_blocks",
    "scheduler.max_waiting_tokens": "max_queued_tokens", "scheduler.refuse_hopeless": "ttft_target_s",
    "policy.mixed_batches": "mixed_batches", "aging.window": "params.aging_window", "aging.rate": "params.aging_rate",
}  # fmt: skip

# What a file may ask for that this version does not do: the key, and the mechanism it needs.
AWAITED = {
    "service_rate": "an executor of a given rate",
    "free_delay": "delayed frees", "lease": "pinned blocks",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScenarioRequest:
    """One request. Steps are step indices, sizes tokens.

    outputs:       the request stops after exactly so many
    declared:      outputs it declared (its `max_tokens`)
    prefix:        name of the prefix it begins with, None where it shares nothing
    prefix_tokens: how long that prefix is
    cancel:        the last step in which it may still compute
    blocked_until: the step before which it may not be scheduled; inf for never
    queue_ttl:     how long it may wait to be admitted, in time units; None for ever
    resource:      what it needs beside a seat (an adapter), None for nothing
    """

    id: str
    arrival: int
    prompt: int
    outputs: int
    declared: int
    priority: int
    slo_class: str
    tenant: str
    slo: Slo
    prefix: str | None
    prefix_tokens: int
    cancel: int | None
    blocked_until: float
    queue_ttl: float | None = None
    resource: str | None = None


@dataclass(frozen=True, slots=True)
class ScenarioConfig:
    """The `cfg` of a file, with its defaults. Sizes are blocks or tokens as in `core`'s `Limits`.

    draft:    draft tokens that every decode computes beside its own, none of which is accepted
    limits:   further fields of `Limits` (steps, outputs, counts), for those who study them
    door:     parameters of the policy that say who may wait (`max_waiting` and so on)
    resident: blocks of each named prefix that lie computed and unreferenced in the cache at the start
    queue_ttl: how long anybody may wait to be admitted, in time units; a request's own may be shorter
    ttft_target: TTFT promised to everybody who says nothing else, and enforced at the door; seconds
    history:  (prompt tokens, outputs) of requests that the predictor has seen end
    prefill_token_s, copy_block_s: seconds to compute a prompt token and to copy a block, None where nothing is said
    mixed_batches: None where nothing is said: the policy's own
    written:  what the file says, as `cfg.KEY` and `cfg.params.KEY`
    """

    num_blocks: int
    budget: int
    max_seqs: int
    block_size: int = 16
    max_model_len: int | None = None
    headroom: str = "none"
    oversize: str = "refuse"
    partial_prefills: int | None = None
    prefix_caching: bool = True
    mixed_batches: bool | None = None
    policy: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    door: Mapping[str, Any] = field(default_factory=dict)
    queue_ttl: float | None = None
    ttft_target: float | None = None
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    history: tuple[tuple[int, int], ...] = ()
    step_ms: StepFormula | None = None
    resident: Mapping[str, int] = field(default_factory=dict)
    host_blocks: int = 0
    disk_blocks: int = 0
    prefill_token_s: float | None = None
    copy_block_s: float | None = None
    draft: int = 0
    written: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Scenario:
    """A parsed file: requests in order of arrival, ties in the order of the file."""

    id: str
    title: str
    config: ScenarioConfig
    requests: tuple[ScenarioRequest, ...]
    expect: tuple[str, ...]


def parse(text: str, overrides: Mapping[str, Any] | None = None, source: str = "scenario") -> Scenario:
    """A scenario from YAML text. `overrides` are {"cfg.key": value, "H.prio": 10}; None removes a key.

    Raises InputError, one sentence that starts with the scenario's id (or `source`).
    """
    try:
        return _parse(text, overrides or {}, source)
    except RecursionError:
        raise InputError(f"{source} is nested too deeply") from None


def _parse(text: str, overrides: Mapping[str, Any], source: str) -> Scenario:
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{source} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{source} is not a scenario: it must be a mapping with `cfg` and `reqs`")
    name = str(raw.get("id", source))
    try:
        raw = _overridden(raw, overrides)
        _check_top(raw)
        families = _families(raw["reqs"])
        config = _config(raw["cfg"], families)
        requests = [request for family in families for request in _members(family, config)]
        requests.sort(key=lambda request: request.arrival)
        expect = tuple(str(line) for line in raw.get("expect") or ())
        return Scenario(name, str(raw.get("title", "")), config, tuple(requests), expect)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def place(option: str) -> str:
    """Where a file says `option`, which config/idle.py names by its place in a configuration."""
    section, _, key = option.partition(".")
    if option in PLACES:
        return f"cfg.{PLACES[option]}"
    return f"cfg.{'limits' if section == 'scheduler' and key in LIMIT_KEYS else 'params'}.{key}"


def parse_override(text: str) -> tuple[str, Any]:
    """("H.prio", 10) from "H.prio=10", the value read as YAML."""
    path, equals, value = text.partition("=")
    if not equals or "." not in path:
        raise InputError(f"--set {text} is not of the form cfg.key=value or REQUEST.key=value")
    try:
        return path.strip(), yaml.safe_load(value)
    except yaml.YAMLError:
        raise InputError(f"--set {text}: {value!r} is not a YAML value") from None


def _overridden(raw: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    raw = deepcopy(raw)
    for path, value in overrides.items():
        target, *keys = path.split(".")
        node = _override_target(raw, target)
        for key in keys[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise InputError(f"override {path}: {key!r} holds a value, not keys")
        if value is None:
            node.pop(keys[-1], None)
        else:
            node[keys[-1]] = value
    return raw


def _override_target(raw: dict[str, Any], target: str) -> dict[str, Any]:
    if target == "cfg":
        return raw.setdefault("cfg", {})
    requests = [r for r in raw.get("reqs") or () if isinstance(r, dict)]
    for request in requests:
        if request.get("id") == target:
            return request
    known = ["cfg", *(str(r.get("id")) for r in requests)]
    raise InputError(f"override of {target!r}, which is neither cfg nor a request; {nearest(target, known)}")


def _check_top(raw: Mapping[str, Any]) -> None:
    for key in PROSE_KEYS:
        if key in raw:
            raise InputError(f"`{key}` describes its arrivals in words; only scenarios with `reqs` can be run")
    _check_keys(raw, TOP_KEYS, "key")
    for key, kind in (("cfg", dict), ("reqs", list)):
        if not isinstance(raw.get(key), kind) or not raw[key]:
            raise InputError(f"`{key}` is missing or not a {'mapping' if kind is dict else 'list'}")


def _check_keys(raw: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for key in raw:
        if key in known:
            continue
        if key in AWAITED and what != "key":
            raise InputError(f"{what} {key!r} needs {AWAITED[key]}, which this version does not have")
        raise InputError(f"unknown {what} {key!r}; {nearest(str(key), known)}")


def _families(raw: Sequence[Any]) -> list[Mapping[str, Any]]:
    families: list[Mapping[str, Any]] = []
    seen: set[str] = set()
    for family in raw:
        if not isinstance(family, dict) or "id" not in family:
            raise InputError(f"each of `reqs` must be a mapping with an id, not {family!r}")
        name = str(family["id"])
        _check_keys(family, REQUEST_KEYS, f"{name}: request key")
        if name in seen or name == "cfg":
            raise InputError(
                f"request id {name!r} " + ("means the configuration" if name == "cfg" else "is used twice")
            )
        seen.add(name)
        families.append(family)
    return families


def _config(raw: Mapping[str, Any], families: Sequence[Mapping[str, Any]]) -> ScenarioConfig:
    _check_keys(raw, CONFIG_KEYS, "cfg key")
    block = _whole(raw, "block", default=16, least=1, where="cfg")
    formula = _step_formula(raw)
    return ScenarioConfig(
        num_blocks=_whole(raw, "kv", least=1, where="cfg"),
        budget=_whole(raw, "budget", least=1, where="cfg"),
        max_seqs=_whole(raw, "max_seqs", least=1, where="cfg"),
        block_size=block,
        max_model_len=_maybe_whole(raw, "max_model_len", least=1, where="cfg"),
        headroom=_one_of(raw, "headroom", HEADROOMS, "none"),
        limits=_limits(raw),
        oversize=_one_of(raw, "oversize", ("refuse", "clip"), "refuse"),
        partial_prefills=_maybe_whole(raw, "partial_prefills", least=1, where="cfg"),
        prefix_caching=_flag(raw, "prefix_caching", True),
        mixed_batches=_flag(raw, "mixed_batches", True) if "mixed_batches" in raw else None,
        policy=str(raw["policy"]) if "policy" in raw else None,
        params=dict(_mapping(raw, "params")) | {key: dict(_mapping(raw, key)) for key in ("weights",) if key in raw},
        predictor=_predictor(raw["predictor"]) if "predictor" in raw else PredictorConfig(),
        history=tuple(_history(raw.get("history") or ())),
        step_ms=formula,
        door=_door(raw),
        queue_ttl=_maybe_time(raw, "queue_ttl", "cfg"),
        ttft_target=_maybe_time(raw, "ttft_target_s", "cfg"),
        resident=_resident(_mapping(raw, "cached"), families, block),
        host_blocks=_whole(raw, "host_blocks", default=0, least=0, where="cfg"),
        disk_blocks=_whole(raw, "disk_blocks", default=0, least=0, where="cfg"),
        **_cost(raw),
        draft=_draft(raw),
        written=frozenset(_written(raw)),
    )


def _written(raw: Mapping[str, Any]) -> Iterator[str]:
    for key in raw:
        yield f"cfg.{key}"
    for section in ("params", "limits"):
        yield from (f"cfg.{section}.{key}" for key in _mapping(raw, section))


def _predictor(raw: Any) -> PredictorConfig:
    """A kind alone, or a mapping with the options of a configuration's `[predictor]`."""
    try:
        return resolve({"predictor": {"kind": raw} if isinstance(raw, str) else raw}).predictor
    except ConfigError as error:
        raise InputError(f"cfg: {error}") from None


def _cost(raw: Mapping[str, Any]) -> dict[str, float]:
    """Seconds for each of the `cost` keys that are given."""
    given = _mapping(raw, "cost")
    _check_keys(given, COST_KEYS, "cfg.cost key")
    seconds = {key: _number(value, f"cfg.cost.{key}") / 1e6 for key, value in given.items()}
    for key, value in seconds.items():
        if not 0 < value < math.inf:
            raise InputError(f"cfg.cost.{key} is microseconds above 0, not {given[key]!r}")
    if "copy_block_us" in seconds and not raw.get("host_blocks") and not raw.get("disk_blocks"):
        raise InputError("cfg.cost.copy_block_us does nothing without cfg.host_blocks (or disk_blocks)")
    return {key.removesuffix("_us").replace("tok", "token") + "_s": value for key, value in seconds.items()}


def _limits(raw: Mapping[str, Any]) -> dict[str, Any]:
    given = _mapping(raw, "limits")
    _check_keys(given, LIMIT_KEYS, "cfg.limits key")
    limits: dict[str, Any] = {key: _whole(given, key, least=0, where="cfg.limits") for key in given}
    for key in ("watermark", "headroom_quantile"):
        if key in raw:
            limits[key] = _number(raw[key], f"cfg.{key}")
    if "max_loras" in raw:
        limits["max_resources"] = _whole(raw, "max_loras", least=1, where="cfg")
    if "resource_patience" in limits and "max_resources" not in limits:
        raise InputError("cfg.limits.resource_patience does nothing without cfg.max_loras")
    return limits


def _draft(raw: Mapping[str, Any]) -> int:
    draft, accept = _whole(raw, "draft", default=0, least=0, where="cfg"), raw.get("accept", 0)
    if accept and _whole(raw, "accept", least=0, where="cfg"):
        raise InputError(f"cfg.accept is 0, not {accept}: a step yields one token a decode in this version")
    if "accept" in raw and not draft:
        raise InputError("cfg.accept without cfg.draft says nothing")
    return draft


def _door(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The policy's parameters behind the keys that limit who may wait."""
    named = {"max_waiting": "max_waiting", "max_queued_tokens": "max_waiting_tokens"}
    door: dict[str, Any] = {named[key]: _whole(raw, key, least=1, where="cfg") for key in named if key in raw}
    return door | ({"refuse_hopeless": True} if "ttft_target_s" in raw else {})


def _step_formula(raw: Mapping[str, Any]) -> StepFormula | None:
    """The length of a step in milliseconds: a formula, or a rate of prefill such as "10000 tok/s"."""
    if "prefill_rate" not in raw:
        return StepFormula(str(raw["step_ms"])) if "step_ms" in raw else None
    if "step_ms" in raw:
        raise InputError("cfg.prefill_rate and cfg.step_ms both give steps a length; give one of them")
    rate, _, unit = str(raw["prefill_rate"]).partition(" ")
    if unit.strip() != "tok/s" or not rate.isdigit() or not int(rate):
        raise InputError(f'cfg.prefill_rate is such as "10000 tok/s", not {raw["prefill_rate"]!r}')
    return StepFormula(f"1000*prefill_tokens/{rate}")


def _maybe_time(raw: Mapping[str, Any], key: str, where: str) -> float | None:
    if key not in raw:
        return None
    value = _number(raw[key], f"{where}.{key}")
    if not value > 0:
        raise InputError(f"{where}.{key} is above 0, not {raw[key]!r}")
    return value


def _history(raw: Sequence[Any]) -> Iterator[tuple[int, int]]:
    for entry in raw:
        if not isinstance(entry, dict):
            raise InputError(f"cfg.history holds mappings such as {{p: 160, o: 30, x: 50}}, not {entry!r}")
        _check_keys(entry, ("p", "o", "x"), "cfg.history key")
        finished = (_whole(entry, "p", least=1, where="history"), _whole(entry, "o", least=1, where="history"))
        yield from [finished] * _whole(entry, "x", default=1, least=1, where="history")


def _resident(cached: Mapping[str, Any], families: Sequence[Mapping[str, Any]], block: int) -> dict[str, int]:
    """Blocks in the cache at the start: what `cached` says, and the one prefix of each family with a `hit`."""
    resident = {str(name): _whole(cached, name, least=1, where="cfg.cached") for name in cached}
    for family in families:
        name, tokens = _prefix(family)
        if "hit" not in family or not tokens:
            continue
        if name != family["id"] and name not in resident:
            raise InputError(f"{family['id']}.hit names prefix {name!r}; {nearest(str(name), tuple(resident))}")
        if name == family["id"]:
            resident[str(name)] = tokens // block
    return {name: blocks for name, blocks in resident.items() if blocks}


def _prefix(family: Mapping[str, Any]) -> tuple[str | None, int]:
    """The prefix that a family's members begin with, and its tokens."""
    name = str(family["id"])
    if "hit" in family and "share" in family:
        raise InputError(f"{name} has both `hit` (cached already) and `share` (cached by the first of them)")
    if "share" in family:
        return name, min(_whole(family, "share", least=0, where=name), _whole(family, "p", least=1, where=name))
    hit = family.get("hit", 0)
    if isinstance(hit, str):
        prefix, equals, tokens = hit.partition("=")
        if not equals or not tokens.strip().isdigit():
            raise InputError(f"{name}.hit must be a number of tokens or NAME=TOKENS, not {hit!r}")
        name, hit = prefix.strip(), int(tokens)
    elif "hit" in family:
        hit = _whole(family, "hit", least=0, where=name)
    return (name, min(hit, _whole(family, "p", least=1, where=name) - 1)) if hit else (None, 0)


def _members(family: Mapping[str, Any], config: ScenarioConfig) -> Iterator[ScenarioRequest]:
    name = str(family["id"])
    outputs = _whole(family, "o", least=1, where=name)
    prefix, prefix_tokens = _prefix(family)
    arrivals = list(_arrivals(family, name))
    copies = "x" in family or "every" in family
    cancel = _maybe_whole(family, "cancel", least=0, where=name)
    if cancel is not None and cancel < max(arrivals):
        raise InputError(f"{name} is cancelled at step {cancel}, before it arrives at {max(arrivals)}")
    for index, arrival in enumerate(arrivals):
        yield ScenarioRequest(
            id=f"{name}[{index}]" if copies else name,
            arrival=arrival,
            prompt=_whole(family, "p", least=1, where=name),
            outputs=outputs,
            declared=_whole(family, "max_o", default=outputs, least=outputs, where=name),
            priority=_whole(family, "prio", default=0, where=name),
            slo_class=str(family.get("class", "interactive")),
            tenant=str(family.get("tenant", "default")),
            slo=_slo(_mapping(family, "slo"), name, config.ttft_target),
            prefix=prefix,
            prefix_tokens=prefix_tokens,
            cancel=cancel,
            blocked_until=_blocked_until(family, config, name),
            queue_ttl=_queue_ttl(family, config, name),
            resource=_resource(family, name),
        )


def _arrivals(family: Mapping[str, Any], name: str) -> Sequence[int]:
    if "every" not in family:
        return [_whole(family, "t", default=0, least=0, where=name)] * _whole(
            family, "x", default=1, least=1, where=name
        )
    if "t" in family or "x" in family:
        raise InputError(f"{name} is a stream (every, from, until); it takes neither `t` nor `x`")
    first = _whole(family, "from", default=0, least=0, where=name)
    arrivals = range(first, _whole(family, "until", where=name), _whole(family, "every", least=1, where=name))
    if not arrivals:
        raise InputError(f"{name} is a stream without a member: until must be after from")
    return arrivals


def _blocked_until(family: Mapping[str, Any], config: ScenarioConfig, name: str) -> float:
    value = family.get("blocked_until", 0)
    if value == "never":
        return math.inf
    if value and config.step_ms is not None:
        raise InputError(f"{name}.blocked_until must be a step; with cfg.step_ms steps have no time known in advance")
    return float(_whole(family, "blocked_until", default=0, least=0, where=name))


def _queue_ttl(family: Mapping[str, Any], config: ScenarioConfig, name: str) -> float | None:
    """The shorter of its own time limit (`ttl`, or `queue_ttl`) and that of the configuration."""
    return shortest(_maybe_time(family, "ttl", name), _maybe_time(family, "queue_ttl", name), config.queue_ttl)


def _resource(family: Mapping[str, Any], name: str) -> str | None:
    if "lora" not in family:
        return None
    if isinstance(family["lora"], bool) or not isinstance(family["lora"], int | str):
        raise InputError(f"{name}.lora is the name or number of an adapter, not {family['lora']!r}")
    return str(family["lora"])


def _slo(raw: Mapping[str, Any], name: str, ttft: float | None) -> Slo:
    """A promise from keys such as `ttft_ms` (milliseconds) or `ttft` (seconds; a step without step_ms)."""
    if not raw:
        return NO_SLO if ttft is None else Slo(ttft=ttft)
    _check_keys(raw, (*SLO_KEYS, *(f"{key}_ms" for key in SLO_KEYS)), f"{name}.slo key")
    seconds = {
        key.removesuffix("_ms"): _number(value, f"{name}.slo.{key}") / (1000.0 if key.endswith("_ms") else 1.0)
        for key, value in raw.items()
    }
    return Slo(**seconds)


def _whole(
    raw: Mapping[str, Any], key: str, *, where: str, default: int | None = None, least: int | None = None
) -> int:
    value = raw.get(key, default)
    if value is None:
        raise InputError(f"{where}.{key} is missing")
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{where}.{key} must be a whole number, not {value!r}")
    if least is not None and value < least:
        raise InputError(f"{where}.{key} must be at least {least}, not {value}")
    return value


def _maybe_whole(raw: Mapping[str, Any], key: str, *, where: str, least: int) -> int | None:
    return _whole(raw, key, where=where, least=least) if key in raw else None


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{where} must be a number, not {value!r}")
    return float(value)


def _flag(raw: Mapping[str, Any], key: str, default: bool) -> bool:
    value = raw.get(key, default)
    if not isinstance(value, bool):
        raise InputError(f"cfg.{key} is true or false, not {value!r}")
    return value


def _one_of(raw: Mapping[str, Any], key: str, known: Sequence[str], default: str) -> str:
    value = str(raw.get(key, default))
    if value not in known:
        raise InputError(f"cfg.{key} {value!r} is unknown; {nearest(value, known)}")
    return value


def _mapping(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise InputError(f"{key} must be a mapping, not {value!r}")
    return value
