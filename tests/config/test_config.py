"""The configuration: defaults, strictness, round trip, and that every option does something."""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.config import (
    DOOR,
    PER_ENGINE,
    AgingConfig,
    ApiKey,
    ClassConfig,
    Config,
    DeadlineConfig,
    DiscoveryConfig,
    GatewayConfig,
    GatewayKey,
    ModelConfig,
    ObserveConfig,
    PoolsConfig,
    PredictorConfig,
    RateConfig,
    ReplicaConfig,
    SchedulerConfig,
    ServerConfig,
    VllmConfig,
    load_config,
    refuse_written,
    resolve,
    to_toml,
)
from tidegate.core.limits import Limits
from tidegate.core.policies.deadlines import Joint
from tidegate.core.policies.fairness import FairShare
from tidegate.core.presets import PRESETS, Composition
from tidegate.core.slo import DEFAULT_CLASSES
from tidegate.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "tidegate"


def test_an_empty_file_is_the_default() -> None:
    config = resolve({})
    assert config == Config()
    assert config.slo_classes == dict(DEFAULT_CLASSES)
    assert config.limits(100, 4096) == Limits(num_blocks=100, max_model_len=4096)
    assert config.build_policy().name == config.scheduler.policy


def test_a_config_is_frozen_and_its_source_untouched() -> None:
    raw = {"scheduler": {"max_num_seqs": 7}, "classes": {"batch": {"priority": 3}}}
    config = resolve(raw)
    assert raw == {"scheduler": {"max_num_seqs": 7}, "classes": {"batch": {"priority": 3}}}
    with pytest.raises(FrozenInstanceError):
        config.scheduler.max_num_seqs = 8  # type: ignore[misc]


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ({"schedular": {}}, "unknown option schedular; did you mean scheduler?"),
        ({"scheduler": {"max_num_seq": 3}}, "unknown option scheduler.max_num_seq; did you mean max_num_seqs?"),
        ({"scheduler": {"zzz": 3}}, "unknown option scheduler.zzz; there are: block_size, bypass_bound,"),
        ({"scheduler": {"max_num_seqs": 0}}, "scheduler.max_num_seqs must be greater than or equal to 1, not 0"),
        ({"scheduler": {"max_num_seqs": "64"}}, "scheduler.max_num_seqs must be a valid integer, not '64'"),
        ({"scheduler": {"max_num_seqs": True}}, "scheduler.max_num_seqs must be a valid integer, not True"),
        ({"scheduler": {"max_num_seqs": 4096}}, "scheduler.max_num_batched_tokens (2048) must be at least max_num"),
        ({"scheduler": {"prefix_caching": 1}}, "scheduler.prefix_caching must be a valid boolean, not 1"),
        ({"scheduler": {"policy": ""}}, "scheduler.policy must not be empty"),
        ({"policy": {"fair": {"weights": {"a": "x"}}}}, "policy.fair.weights.a must be a valid number"),
        ({"policy": {"joint": {"w_cache": float("inf")}}}, "policy.joint: w_cache must be a finite number, not inf"),
        (
            {"policy": {"fair": {"weights": {"a": float("nan")}}}},
            "policy.fair: weights must be a finite number, not nan",
        ),
        ({"observe": {"decisions": "a", "steps": "a"}}, "observe.decisions and observe.steps both write a; name two"),
        ({"scheduler": {"headroom": "some"}}, "scheduler.headroom must be one of none, watermark, quantile, declared"),
        ({"scheduler": {"headroom_quantile": 0.5}}, "scheduler.headroom_quantile does nothing with headroom"),
        ({"classes": {"batch": {"queue_ttl": 0}}}, "classes.batch.queue_ttl must be greater than 0, not 0"),
        ({"scheduler": {"oversize": "some"}}, "scheduler.oversize must be one of refuse, clip, not 'some'"),
        ({"scheduler": {"watermark": 1.0}}, "scheduler.watermark must be less than 1, not 1.0"),
        ({"scheduler": {"pipeline_depth": 3}}, "scheduler.pipeline_depth must be 1 or 2, not 3"),
        ({"scheduler": {"kv_memory": "1GB"}}, "scheduler.kv_memory must be a number of bytes or a size such as"),
        ({"scheduler": {"kv_memory": 1, "num_blocks": 1}}, "scheduler.num_blocks and scheduler.kv_memory both"),
        ({"scheduler": {"host_blocks": 1, "host_kv_memory": 1}}, "scheduler.host_blocks and scheduler.host_kv_memory"),
        ({"scheduler": {"disk_blocks": 1, "disk_kv_memory": 1}}, "scheduler.disk_blocks and scheduler.disk_kv_memory"),
        ({"scheduler": {"policy": "sarati"}}, "scheduler.policy: unknown policy 'sarati'; did you mean sarathi?"),
        ({"scheduler": 3}, "scheduler must be a table, not 3"),
        ({"policy": {"fcf": {}}}, "policy.fcf: unknown policy; did you mean fcfs?"),
        ({"policy": {"fcfs": {"shares": 1}}}, "unknown option policy.fcfs.shares; did you mean share?"),
        ({"policy": {"fcfs": {"share": "x"}}}, "policy.fcfs.share must be a valid number, not 'x'"),
        ({"policy": {"fcfs": {"max_chunk": 0}}}, "policy.fcfs.max_chunk must be greater than or equal to 1, not 0"),
        ({"policy": {"fcfs": {"max_prefill_steps": 0}}}, "policy.fcfs.max_prefill_steps must be greater than or equal"),
        ({"policy": {"fcfs": {"share": 2}}}, "policy.fcfs: share must be above 0 and at most 1, not 2"),
        ({"policy": {"fcfs": {"max_waiting": 2}}}, "policy.fcfs.max_waiting goes for every policy; set scheduler.max"),
        ({"aging": {"window": 0}}, "aging.window must be greater than 0, not 0"),
        ({"classes": {"interactive": {"tfft": 1}}}, "unknown option classes.interactive.tfft; did you mean ttft?"),
        ({"classes": {"interactive": {"ttft": -1}}}, "classes.interactive.ttft must be greater than 0, not -1"),
        ({"classes": {"mine": 3}}, "classes.mine must be a table, not 3"),
        ({"server": {"port": 99999}}, "server.port must be less than or equal to 65535, not 99999"),
        ({"server": {"default_class": "chat"}}, "server.default_class: unknown class 'chat'; there are: batch, comp"),
        ({"server": {"service_tiers": {"flex": "bach"}}}, "server.service_tiers.flex: unknown class 'bach'; did you"),
        ({"server": {"api_keys": [{"tenant": "a"}]}}, "server.api_keys.0.key is missing"),
        ({"server": {"api_keys": [{"key": "a", "tenat": "a"}]}}, "unknown option server.api_keys.0.tenat; did you"),
        ({"server": {"api_keys": [{"key": "a", "classes": ["x"]}]}}, "server.api_keys.0.classes: unknown class 'x'"),
        ({"server": {"api_keys": ["sk-\u00fc"]}}, "server.api_keys.0.key must be visible ASCII characters"),
        ({"server": {"api_keys": ["two words"]}}, "server.api_keys.0.key must be visible ASCII characters"),
        ({"server": {"api_keys": [{"key": "sk\n"}]}}, "server.api_keys.0.key must be visible ASCII characters"),
        ({"server": {"api_keys": [""]}}, "server.api_keys.0.key must be visible ASCII characters"),
        ({"server": {"api_keys": [{"key": "a", "classes": []}]}}, "server.api_keys.0.classes must name a class"),
        ({"server": {"api_keys": "sk-a"}}, "server.api_keys must be a list, not 'sk-a'"),
        ({"classes": {"": {"ttft": 1}}}, 'classes."": a class needs a name'),
        ({"server": {"api_keys": ["a", {"key": "a"}]}}, "server.api_keys: the same key stands there twice"),
        ({"predictor": {"kind": "learnt"}}, "predictor.kind must be 'history', 'oracle' or 'learned', not 'learnt'"),
        ({"predictor": {"nois": 1.0}}, "unknown option predictor.nois; did you mean noise?"),
        ({"predictor": {"noise": -1.0}}, "predictor.noise must be greater than or equal to 0, not -1.0"),
        ({"predictor": {"quantile": 1.0}}, "predictor.quantile must be less than 1, not 1.0"),
        ({"predictor": {"kind": "learned"}}, 'predictor of kind "learned" needs a path: the file that `tidegate pred'),
        (
            {"observe": {"steps": "s", "max_bytes": 10}},
            "observe.max_bytes must be greater than or equal to 4096, not 10",
        ),
        ({"model": {"dtype": "int8"}}, "model.dtype must be 'auto', 'bfloat16' or 'float32', not 'int8'"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_option(raw: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(raw)
    assert str(caught.value).startswith(complaint)
    assert "\n" not in str(caught.value)


def test_classes_merge_over_the_defaults() -> None:
    config = resolve(
        {"classes": {"interactive": {"ttft": 1, "tpot": "none"}, "bulk": {"e2e": 60.0, "priority": 20}}},
    )
    assert config.classes["interactive"] == ClassConfig(ttft=1.0, priority=0)
    assert config.slo_classes["bulk"].slo.e2e == 60.0
    assert config.slo_classes["bulk"].priority == 20
    assert config.slo_classes["batch"] == DEFAULT_CLASSES["batch"]


def test_keys_may_be_bare_or_bound() -> None:
    config = resolve({"server": {"api_keys": ["open", {"key": "k", "tenant": "acme", "classes": ["batch"]}]}})
    assert config.server.api_keys == (ApiKey("open"), ApiKey("k", "acme", ("batch",)))


def test_tiers_merge_over_the_defaults() -> None:
    tiers = resolve({"server": {"service_tiers": {"flex": "offline"}}}).server.service_tiers
    assert tiers == {"flex": "offline", "priority": "interactive"}


def test_sizes_are_bytes() -> None:
    assert resolve({"scheduler": {"kv_memory": "1.5GiB"}}).scheduler.kv_memory == 3 * 2**29
    assert resolve({"server": {"max_body_bytes": "64 KiB"}}).server.max_body_bytes == 65536


def test_a_preset_brings_its_limits_and_the_file_wins() -> None:
    assert PRESETS["sarathi"].limits["max_num_batched_tokens"] == 512
    assert resolve({"scheduler": {"policy": "sarathi"}}).scheduler.max_num_batched_tokens == 512
    said = {"scheduler": {"policy": "sarathi", "max_num_batched_tokens": 256}}
    assert resolve(said).scheduler.max_num_batched_tokens == 256


@pytest.mark.parametrize("name", PRESETS)
def test_every_policy_can_be_configured(name: str) -> None:
    assert resolve({"scheduler": {"policy": name}}).build_policy().name == name


def test_the_scheduler_is_told_the_sizes_that_the_executor_made() -> None:
    limits = resolve({"scheduler": {"host_kv_memory": "1GiB"}}).limits(10, None, host_blocks=7, disk_blocks=3)
    assert (limits.num_blocks, limits.host_blocks, limits.disk_blocks) == (10, 7, 3)
    with pytest.raises(ConfigError, match="host_blocks must be at least 0, not -1"):
        Limits(num_blocks=1, host_blocks=-1)


def test_the_parameters_of_an_order_are_checked() -> None:
    raw: dict[str, Any] = {"scheduler": {"policy": "fair"}, "policy": {"fair": {"weights": {"gold": 3, "free": 0.5}}}}
    assert resolve(raw).build_policy().order == FairShare(weights={"gold": 3, "free": 0.5})
    wrong = {
        "policy.fair.weights": {"policy": {"fair": {"weights": {"gold": "3"}}}},
        "did you mean urgent_slack": {"policy": {"joint": {"urgent_slak": 0.2}}},
        "unknown option policy.fcfs.patience": {"policy": {"fcfs": {"patience": 3.0}}},
        "set scheduler.shed_hopeless instead": {"policy": {"sla": {"shed_hopeless": True}}},
        "policy.mlfq.levels": {"policy": {"mlfq": {"levels": 0}}},
    }
    for told, document in wrong.items():
        with pytest.raises(ConfigError, match=re.escape(told)):
            resolve(document)
    assert resolve({"policy": {"vtc": {}}, "aging": {"window": 5.0}}), "only the chosen policy is aged"
    aged = resolve({"scheduler": {"policy": "joint"}, "aging": {"window": 5.0}}).build_policy()
    assert aged.order == Joint(aging_window=5.0)


def test_a_shorter_length_wins() -> None:
    config = resolve({"scheduler": {"max_model_len": 1000}})
    assert config.limits(10, 8192).max_model_len == 1000
    assert config.limits(10, 512).max_model_len == 512
    assert config.limits(10, None).max_model_len == 1000


maybe = st.none() | st.floats(0.001, 1e6)
documents = st.fixed_dictionaries(
    {},
    optional={
        "scheduler": st.fixed_dictionaries(
            {"policy": st.sampled_from(sorted(PRESETS))},
            optional={"num_blocks": st.integers(1, 10**9), "max_model_len": st.integers(2, 10**6)},
        ),
        "policy": st.fixed_dictionaries({}, optional={"sjf": st.just({"share": 0.25, "victim": "newest"})}),
        "aging": st.fixed_dictionaries({}, optional={"window": st.floats(0.1, 1e6), "rate": st.floats(0.1, 10)}),
        "classes": st.dictionaries(
            st.text(min_size=1, max_size=9),
            st.fixed_dictionaries(
                {"priority": st.integers(-9, 99)},
                optional={k: st.just("none") | st.floats(0.001, 10) for k in ("ttft", "tpot", "tbt")}
                | {"e2e": st.just("none") | st.floats(10, 1e6)},
            ),
            max_size=3,
        ),
        "server": st.fixed_dictionaries(
            {},
            optional={
                "port": st.integers(0, 65535),
                "api_keys": st.lists(st.from_regex(r"[!-~]{1,5}", fullmatch=True), max_size=3, unique=True),
            },
        ),
        "model": st.fixed_dictionaries({}, optional={"threads": st.integers(1, 64)}),
        "predictor": st.sampled_from([{}, {"kind": "learned", "path": "p.json"}, {"noise": 0.5, "seed": 3}]),
    },
)


def without_contradiction(raw: dict[str, Any]) -> dict[str, Any]:
    """`raw`, its policy one that ageing works on where it speaks of ageing."""
    if "aging" not in raw:
        return raw
    return {**raw, "scheduler": {"policy": "sjf"}, "aging": {"window": 10.0, **raw["aging"]}}


@given(documents.map(without_contradiction))
def test_what_is_shown_resolves_to_the_same(raw: dict[str, Any]) -> None:
    config = resolve(raw)
    assert resolve(tomllib.loads(to_toml(config))) == config


def test_files_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "tidegate.toml"
    path.write_text("[server]\nport = 9000\nhost = '::1'\n", encoding="utf-8")
    config = load_config(path, {"server": {"port": 9001, "host": None}, "model": {"name": "mine"}})
    assert (config.server.port, config.server.host, config.model.name) == (9001, "::1", "mine")
    assert load_config(None) == Config()
    path.write_text("[server", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tidegate\.toml: not TOML"):
        load_config(path)
    with pytest.raises(ConfigError) as told:
        refuse_written(path, {})
    assert str(told.value).count(str(path)) == 1
    path.write_text("a = " + "[" * 5000, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tidegate\.toml: not TOML of ours: nested too deeply"):
        load_config(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"tidegate\.toml: not UTF-8"):
        load_config(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "none.toml")
    path.write_text("[server]\nprot = 9000\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tidegate\.toml: unknown option server\.prot; did you mean port"):
        load_config(path)


QUANTILE: dict[str, Any] = {"scheduler": {"headroom": "quantile"}}

# One other value for every option that becomes part of Limits or Policy.
OTHER: dict[str, dict[str, Any]] = {
    "scheduler": {
        "policy": "sjf",
        "block_size": 32,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 1024,
        "max_model_len": 99,
        "headroom": "declared",
        "watermark": 0.2,
        "headroom_quantile": 0.5,
        "oversize": "clip",
        "partial_prefills": 3,
        "prefix_caching": False,
        "max_waiting": 5,
        "max_waiting_tokens": 9000,
        "displace_waiting": True,
        "refuse_hopeless": True,
        "shed_hopeless": True,
        "bypass_bound": 1,
        "resume_span": 1,
        "max_preemptions": 1,
        "stall_steps": 1,
        "nearly_done": 2,
    },
    "aging": {"window": 30.0, "rate": 2.0},
}

# Options that the code which starts a server reads as they are.
READ_AS_THEY_ARE = {
    "scheduler": {
        *("num_blocks", "kv_memory", "pipeline_depth", "host_blocks", "host_kv_memory"),
        *("disk_blocks", "disk_kv_memory", "disk_kv_path"),
    },
    "server": {f.name for f in fields(ServerConfig)},
    "model": {f.name for f in fields(ModelConfig)},
    "predictor": {f.name for f in fields(PredictorConfig)},
    "observe": {f.name for f in fields(ObserveConfig)},
    "vllm": {f.name for f in fields(VllmConfig)},
}
READ_BY_THE_GATEWAY = {f.name for f in fields(GatewayConfig)}


def made(raw: dict[str, Any]) -> tuple[Any, ...]:
    config = resolve(raw)
    return config.limits(1000, 8192), config.build_policy(), config.slo_classes, config.service_limits


@pytest.mark.parametrize(("section", "option"), [(s, o) for s, options in OTHER.items() for o in options])
def test_every_scheduling_option_changes_what_is_made(section: str, option: str) -> None:
    base: dict[str, Any] = {"headroom_quantile": QUANTILE}.get(option, {})
    if option == "rate":  # the default policy is aged by a window alone
        base = {"aging": {"window": 10.0}, "scheduler": {"policy": "sjf"}}
    changed = {**base, section: {**base.get(section, {}), option: OTHER[section][option]}}
    assert made(changed) != made(base)


@pytest.mark.parametrize("option", [f.name for f in fields(ClassConfig)])
def test_every_class_option_changes_what_is_made(option: str) -> None:
    assert made({"classes": {"batch": {option: 77}}}) != made({})


POLICY_OPTIONS = {
    "share": 0.1,
    "max_chunk": 64,
    "victim": "newest",
    "displace": False,
    "displace_slack": 0.3,
    "keep_ends": True,
    "backfill": False,
    "hold_pending": False,
    "restore": "swap",
    "spare": False,
    "mixed_batches": False,
    "max_prefill_steps": 9,
    "budget": "adaptive",
    "floor": 16,
    "margin": 0.2,
    "max_stride": 2,
}
ADAPTIVE = {"floor", "margin", "max_stride"}
# What an option goes with, so that it does something.
COMPANIONS: dict[str, dict[str, Any]] = {
    **{option: {"policy": {"priority": {"budget": "adaptive"}}} for option in ADAPTIVE},
    "max_prefill_steps": {"policy": {"priority": {"mixed_batches": False}}},
    "restore": {"scheduler": {"host_kv_memory": "1MiB"}},
}


def test_every_policy_option_is_covered_here() -> None:
    elsewhere = {"aging_window", "aging_rate", "class_limits", *DOOR}
    assert set(POLICY_OPTIONS) == {f.name for f in fields(Composition)} - elsewhere


@pytest.mark.parametrize("option", POLICY_OPTIONS)
def test_every_policy_option_changes_what_is_made(option: str) -> None:
    base = {"scheduler": {}, "policy": {"priority": {}}} | COMPANIONS.get(option, {})
    base["scheduler"] = {"policy": "priority", **base["scheduler"]}
    changed = {**base, "policy": {"priority": {**base["policy"]["priority"], option: POLICY_OPTIONS[option]}}}
    assert made(changed) != made(base)


@pytest.mark.parametrize("option", sorted(ADAPTIVE))
def test_an_option_of_the_adaptive_budget_is_refused_without_it(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} .*adaptive"):
        resolve({"policy": {"fcfs": {option: POLICY_OPTIONS[option]}}})


def test_no_option_is_left_out_of_these_tests() -> None:
    sections = {
        "scheduler": SchedulerConfig,
        "aging": AgingConfig,
        "server": ServerConfig,
        "model": ModelConfig,
        "predictor": PredictorConfig,
        "observe": ObserveConfig,
        "vllm": VllmConfig,
        "gateway": GatewayConfig,
    }
    assert {f.name for f in fields(Config)} == {*sections, "policy", "classes"}
    for name, section in sections.items():
        covered = set(OTHER.get(name, {})) | {**READ_AS_THEY_ARE, "gateway": READ_BY_THE_GATEWAY}.get(name, set())
        assert covered == {f.name for f in fields(section)}, name


def test_every_limit_can_be_configured() -> None:
    assert {f.name for f in fields(Limits)} - set(PER_ENGINE) <= {f.name for f in fields(SchedulerConfig)}


def options_read() -> set[str]:
    """`section.option` for every attribute that code outside config/ reads, through local names as well."""
    read = set()
    for path in SRC.rglob("*.py"):
        if path.parent == SRC / "config":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        section_of = {
            ast.unparse(node.targets[0]): node.value.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                holder = ast.unparse(node.value)
                read.add(f"{section_of.get(holder, holder.rpartition('.')[2])}.{node.attr}")
    return read


def test_what_no_limit_or_policy_takes_is_read_by_the_server() -> None:
    wanted = {f"{section}.{option}" for section, options in READ_AS_THEY_ARE.items() for option in options}
    read = options_read()
    assert not wanted - read
    # Who carries requests has the section itself as its `config`; deadlines by class are read through methods.
    methods = {"first_token_seconds": "first_token_of", "stall_seconds": "stall_of", "deadlines": "stall_of"}
    asked = {option: methods.get(option, option) for option in READ_BY_THE_GATEWAY}
    assert not {o for o, name in asked.items() if not {f"gateway.{name}", f"config.{name}"} & read}


def test_every_option_of_the_gateway_is_documented() -> None:
    documented = (ROOT / "docs" / "gateway.md").read_text(encoding="utf-8")
    sections = (GatewayConfig, GatewayKey, RateConfig, ReplicaConfig, DiscoveryConfig, PoolsConfig, DeadlineConfig)
    shown = {word.strip("`") for word in re.findall(r"`\w+`", documented)}
    assert not {f.name for section in sections for f in fields(section)} - shown


def test_every_option_is_documented() -> None:
    documented = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    sections = (
        SchedulerConfig,
        AgingConfig,
        ClassConfig,
        ApiKey,
        ServerConfig,
        ModelConfig,
        PredictorConfig,
        ObserveConfig,
    )
    options = {f.name for section in sections for f in fields(section)} | set(POLICY_OPTIONS)
    shown = {word.strip("`") for word in re.findall(r"`\w+`", documented)}
    assert not {option for option in options if option not in shown}


def test_swapping_needs_a_place_to_swap_to() -> None:
    swap: dict[str, Any] = {"policy": {"joint": {"restore": "swap"}}}
    with pytest.raises(ConfigError, match="host_kv_memory"):
        resolve(swap)
    assert resolve({**swap, "scheduler": {"host_kv_memory": "1MiB"}}).policy["joint"]["restore"] == "swap"
    resolve({"scheduler": {"policy": "vllm-v0"}})  # which swaps by itself where it can
