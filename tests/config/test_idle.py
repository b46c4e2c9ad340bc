"""Options that do nothing: each row of the table is right, complete with what would have to change, and told."""

from __future__ import annotations

import random
import tomllib
from typing import Any

import pytest
import yaml

from tidegate.config import resolve, resolve_each, to_toml
from tidegate.config.idle import CLASSES, SCHEDULING, SECTIONS, WITHOUT_CLASSES, WITHOUT_SCORE
from tidegate.core.policies.orders import Aged
from tidegate.core.policy import PolicyContext
from tidegate.core.predict import OraclePredictor, StepTime
from tidegate.core.presets import PRESETS, build_policy
from tidegate.core.request import Request
from tidegate.errors import ConfigError
from tidegate.simulate import scenario_run
from tidegate.simulate.scenario import parse
from tidegate.simulate.scenario_run import run

POOL: dict[str, Any] = {"kv": 40, "budget": 64, "max_seqs": 6}
TIGHT = {**POOL, "headroom": "none"}
SWAP = {"host_blocks": 64, "cost": {"copy_block_us": 1, "prefill_tok_us": 9000}}

# What does nothing: the configuration around it, its place in a scenario, two values of it that make no difference,
# and what makes them differ.
CASES: dict[str, tuple[dict[str, Any], str, tuple[Any, Any], dict[str, Any]]] = {
    "watermark": ({**TIGHT, "policy": "fcfs"}, "cfg.watermark", (0.01, 0.4), {"headroom": "watermark"}),
    "quantile's watermark": ({**POOL, "headroom": "quantile"}, "cfg.watermark", (0.01, 0.4), {"headroom": "watermark"}),
    "bypass_bound": (
        {**TIGHT, "policy": "vllm-v1"},
        "cfg.limits.bypass_bound",
        (0, 60),
        {"params": {"backfill": True}},
    ),
    "nearly_done": ({**TIGHT, "policy": "vllm-v1"}, "cfg.limits.nearly_done", (0, 60), {"params": {"spare": True}}),
    "max_prefill_steps": (
        {**TIGHT, "policy": "fcfs"},
        "cfg.params.max_prefill_steps",
        (1, 9),
        {"mixed_batches": False},
    ),
    "displace": ({**TIGHT, "policy": "fcfs"}, "cfg.params.displace", (False, True), {"policy": "priority"}),
    "displace_slack": ({**TIGHT, "policy": "fcfs"}, "cfg.params.displace_slack", (0.1, 39.0), {"policy": "joint"}),
    "displace under sjf": ({**TIGHT, "policy": "sjf"}, "cfg.params.displace", (False, True), {"policy": "joint"}),
    "displace_waiting": (
        {**TIGHT, "policy": "edf", "max_waiting": 3},
        "cfg.params.displace_waiting",
        (False, True),
        {"policy": "priority"},
    ),
    "aging_window": ({**TIGHT, "policy": "fcfs"}, "cfg.params.aging_window", (None, 1.0), {"policy": "priority"}),
    "aging_rate": (
        {**TIGHT, "policy": "priority", "params": {"aging_window": 9.0}},
        "cfg.params.aging_rate",
        (0.1, 9.0),
        {"policy": "sjf"},
    ),
    "aging_rate of levels": (
        {**TIGHT, "policy": "mlfq", "params": {"aging_window": 9.0}},
        "cfg.params.aging_rate",
        (0.1, 9.0),
        {"policy": "sjf"},
    ),
    "host_blocks": (
        {**TIGHT, "policy": "vllm-v1", "cost": {"prefill_tok_us": 900}},
        "cfg.host_blocks",
        (0, 64),
        {"params": {"restore": "swap"}},
    ),
    "disk_blocks": (
        {**TIGHT, "policy": "vllm-v1", "cost": {"prefill_tok_us": 900}},
        "cfg.disk_blocks",
        (0, 64),
        {"params": {"restore": "swap"}},
    ),
    "restore": ({**TIGHT, "policy": "fcfs"}, "cfg.params.restore", ("recompute", "auto"), SWAP),
    "w_cache": (
        {**POOL, "policy": "joint", "prefix_caching": False},
        "cfg.params.w_cache",
        (0.0, 90.0),
        {"prefix_caching": True},
    ),
    "beta": (
        {**POOL, "policy": "prefix", "prefix_caching": False},
        "cfg.params.beta",
        (1.0, 90000.0),
        {"prefix_caching": True},
    ),
    "age": (
        {**POOL, "policy": "sglang-lpm", "prefix_caching": False},
        "cfg.params.age",
        (0.0, 900.0),
        {"prefix_caching": True},
    ),
    "policy": ({**POOL, "prefix_caching": False}, "cfg.policy", ("vllm-v1", "sglang-lpm"), {"prefix_caching": True}),
    "hold_pending": (
        {**POOL, "policy": "fcfs", "prefix_caching": False},
        "cfg.params.hold_pending",
        (False, True),
        {"prefix_caching": True},
    ),
    "partial_prefills": (
        {**TIGHT, "policy": "fcfs"},
        "cfg.partial_prefills",
        (7, 90),
        {"max_seqs": 100, "budget": 200, "kv": 400, "params": {"max_chunk": 8}},
    ),
    "stall_steps": (
        {**POOL, "headroom": "declared", "policy": "priority"},
        "cfg.limits.stall_steps",
        (0, 9),
        {"headroom": "none"},
    ),
    **{
        f"{place} with nobody to evict": (
            {**POOL, "headroom": "declared", "policy": "sjf", **around},
            f"cfg.{place}",
            values,
            {"headroom": "none"},
        )
        for place, values, around in (
            ("limits.resume_span", (0, 500), {}),
            ("limits.max_preemptions", (1, 9), {}),
            ("limits.nearly_done", (0, 60), {}),
            ("params.victim", ("newest", "least-work"), {}),
            ("params.spare", (False, True), {}),
            ("params.restore", ("recompute", "swap"), SWAP),
            ("host_blocks", (0, 64), {"cost": {"prefill_tok_us": 9000}}),
        )
    },
    "max_chunk": ({**TIGHT, "policy": "fcfs"}, "cfg.params.max_chunk", (65, 900), {"budget": 1000}),
    "floor": (
        {**TIGHT, "policy": "joint", "step_ms": "10 + 1*tokens"},
        "cfg.params.floor",
        (65, 900),
        {"budget": 900},
    ),
}


def workload(seed: int) -> list[dict[str, Any]]:
    """Requests of three classes and tenants, some with a common prefix, more than the pool holds at once."""
    draw = random.Random(seed)
    return [
        {
            "id": f"R{n}",
            "t": draw.randrange(60),
            "p": draw.randrange(40, 200),
            "o": draw.randrange(4, 90),
            "prio": draw.randrange(3),
            "tenant": f"t{draw.randrange(3)}",
            **({"share": 32} if draw.random() < 0.4 else {}),
            **({"slo": {"ttft": 40, "tpot": 0.03}} if draw.random() < 0.5 else {}),
        }
        for n in range(24)
    ]


def played(seed: int, cfg: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    text = yaml.safe_dump({"id": "T", "cfg": cfg, "reqs": shared(workload(seed))})
    told = run(parse(text, {place: value}), max_steps=1500).to_json()
    return {**told, "policy": ""}


def _without_reasons(told: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps without the scores behind them: ageing moves everybody's under fcfs, and so nobody's place."""
    return [{key: value for key, value in step.items() if key != "why"} for step in told["steps"]]


def shared(reqs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those with a prefix as families of two, because the members of a family share it."""
    return [{**r, "x": 2} if "share" in r else r for r in reqs]


@pytest.mark.parametrize("name", CASES)
def test_what_is_refused_does_nothing_and_what_would_have_to_change_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, place, values, companion = CASES[name]
    with pytest.raises(ConfigError, match=rf"^{place} does nothing (with|without|above) "):
        played(1, cfg, place, values[1])
    active = {**cfg, **companion}
    if "params" in cfg and "params" in companion:
        active["params"] = {**cfg["params"], **companion["params"]}
    played(1, active, place, values[1])
    monkeypatch.setattr(scenario_run, "_refuse_idle", lambda *_: None)
    for seed in range(4):
        one, other = (played(seed, cfg, place, value) for value in values)
        assert one["requests"] == other["requests"]
        assert _without_reasons(one) == _without_reasons(other)
    assert any(played(seed, active, place, values[0]) != played(seed, active, place, values[1]) for seed in range(8))


def test_every_row_about_a_policy_and_its_limits_is_tried() -> None:
    tried = {place.rpartition(".")[2] for _, place, _, _ in CASES.values()}
    tried |= {place.replace(".", "_").removeprefix("cfg_params_") for _, place, _, _ in CASES.values()}
    named = {option for row in SCHEDULING for option in row.options}
    last = {option.replace(".", "_") if option.startswith("aging") else option.partition(".")[2] for option in named}
    in_sizes = {"host_kv_memory", "disk_kv_memory"}  # the same pools
    door = {"max_waiting", "max_waiting_tokens", "refuse_hopeless", "shed_hopeless"}  # tests/config/test_custom.py
    assert last - in_sizes - door - {"budget"} == tried & last


def request(**said: Any) -> Request:
    return Request("r", prompt_tokens=40, max_tokens=9, **said)


@pytest.mark.parametrize("name", PRESETS)
def test_which_orders_know_no_classes_and_no_score(name: str) -> None:
    """By asking them: of requests that differ in every way, whether the tier and the score do."""
    order, ctx = build_policy(name).order, PolicyContext(OraclePredictor(), StepTime())
    promised = resolve({}).slo_classes["completion"].slo
    asked = [
        request(priority=0, oracle_tokens=2),
        request(priority=9, oracle_tokens=900, slo=promised, arrival=5.0),
        Request("s", prompt_tokens=4000, max_tokens=9),
    ]
    assert isinstance(order, WITHOUT_CLASSES) == (len({order.tier(r, ctx) for r in asked}) == 1)
    if getattr(order, "unwrapped", None) is None:
        assert isinstance(order, WITHOUT_SCORE) == ({order.key(r, ctx).score for r in asked} == {0.0})


# What does nothing in a configuration, how that is told, and what makes it do something.
CONFIGS: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    (
        {"scheduler": {"headroom": "quantile", "watermark": 0.1}},
        'scheduler.watermark does nothing without scheduler.headroom = "watermark"',
        {"scheduler": {"headroom": "watermark", "watermark": 0.1}},
    ),
    (
        {"scheduler": {"bypass_bound": 9, "policy": "vllm-v1"}},
        "scheduler.bypass_bound does nothing without policy.vllm-v1.backfill = true",
        {"scheduler": {"bypass_bound": 9, "policy": "vllm-v1"}, "policy": {"vllm-v1": {"backfill": True}}},
    ),
    (
        {"scheduler": {"host_kv_memory": "1MiB"}, "policy": {"joint": {"restore": "recompute"}}},
        'scheduler.host_kv_memory does nothing without policy.joint.restore = "auto" (or "swap")',
        {"scheduler": {"host_kv_memory": "1MiB"}},
    ),
    (
        {"policy": {"joint": {"budget": "adaptive", "mixed_batches": False}}},
        "policy.joint.budget does nothing that keeps a promise without policy.joint.mixed_batches = true",
        {"policy": {"joint": {"budget": "fixed", "mixed_batches": False}}},
    ),
    (
        {"policy": {"sarathi": {"max_chunk": 513}}},
        "policy.sarathi.max_chunk does nothing above scheduler.max_num_batched_tokens",
        {"policy": {"sarathi": {"max_chunk": 512}}},
    ),
    (
        {"aging": {"window": 5.0}, "scheduler": {"policy": "vtc"}},
        'aging.window does nothing with scheduler.policy = "vtc", whose order it does not change',
        {"aging": {"window": 5.0}, "scheduler": {"policy": "mlfq"}},
    ),
    (
        {"aging": {"rate": 2.0}, "scheduler": {"policy": "sjf"}},
        'aging.rate does nothing without aging.window, under a policy whose order takes one; "sjf" has none',
        {"aging": {"rate": 2.0, "window": 5.0}, "scheduler": {"policy": "sjf"}},
    ),
    (
        {"aging": {"rate": 2.0, "window": 5.0}},
        'aging.rate does nothing with scheduler.policy = "joint", which is aged by a window alone',
        {"aging": {"window": 5.0}},
    ),
    (
        {"classes": {"offline": {"ttft": 31.0}}},
        "classes.offline.ttft does nothing above the e2e of its class, which is missed first",
        {"classes": {"offline": {"ttft": 31.0, "e2e": "none"}}},
    ),
    (
        {"classes": {"mine": {"tpot": 2.0, "e2e": 1.0}}},
        "classes.mine.tpot does nothing above the e2e of its class, which is missed first",
        {"classes": {"mine": {"tpot": 1.0, "e2e": 1.0}}},
    ),
    (
        {"classes": {"mine": {"tbt": 2.0, "e2e": 1.0}}},
        "classes.mine.tbt does nothing above the e2e of its class, which is missed first",
        {"classes": {"mine": {"tbt": 0.2, "e2e": 1.0}}},
    ),
    (
        {"classes": {"batch": {"max_waiting": 1025}}},
        "classes.batch.max_waiting does nothing above scheduler.max_waiting",
        {"classes": {"batch": {"max_waiting": 1025}}, "scheduler": {"max_waiting": 2000}},
    ),
    (
        {"classes": {"batch": {"max_waiting_tokens": 11}}, "scheduler": {"max_waiting_tokens": 10}},
        "classes.batch.max_waiting_tokens does nothing above scheduler.max_waiting_tokens",
        {"classes": {"batch": {"max_waiting_tokens": 11}}},
    ),
    (
        {"scheduler": {"disk_kv_path": "here"}},
        "scheduler.disk_kv_path does nothing without scheduler.disk_kv_memory (or disk_blocks)",
        {"scheduler": {"disk_kv_path": "here", "disk_blocks": 3}},
    ),
    (
        {"predictor": {"path": "p.json"}},
        'predictor.path does nothing without predictor.kind = "learned"',
        {"predictor": {"path": "p.json", "kind": "learned"}},
    ),
    (
        {"predictor": {"quantile": 0.9, "kind": "oracle"}},
        'predictor.quantile does nothing with predictor.kind = "oracle", which knows the one length there is',
        {"predictor": {"quantile": 0.9}},
    ),
    (
        {"predictor": {"seed": 3}},
        "predictor.seed does nothing without predictor.noise",
        {"predictor": {"seed": 3, "noise": 0.5}},
    ),
    (
        {"observe": {"max_bytes": "1MiB"}},
        "observe.max_bytes does nothing without a file: observe.decisions, observe.records or observe.steps",
        {"observe": {"max_bytes": "1MiB", "steps": "steps.jsonl"}},
    ),
    (
        {"gateway": {"remembered_tokens": 9, "route": "random"}},
        "gateway.remembered_tokens does nothing with this gateway.route, which does not look at prefixes",
        {"gateway": {"remembered_tokens": 9, "route": "joint"}},
    ),
    (
        {"gateway": {"pools": {"classes": {"batch": "bulk"}}}},
        'gateway.pools.classes does nothing with gateway.pools.mode = "shared"',
        {"gateway": {"pools": {"classes": {"batch": "bulk"}, "mode": "isolated"}}},
    ),
    (
        {"gateway": {"pools": {"mode": "borrow"}}},
        "gateway.pools.mode does nothing without gateway.pools.classes",
        {"gateway": {"pools": {"classes": {"batch": "bulk"}, "mode": "borrow"}}},
    ),
    (
        {"gateway": {"pools": {"classes": {"batch": "bulk"}, "mode": "isolated", "borrow": 0.2}}},
        'gateway.pools.borrow does nothing without gateway.pools.mode = "borrow"',
        {"gateway": {"pools": {"classes": {"batch": "bulk"}, "mode": "borrow", "borrow": 0.2}}},
    ),
    (
        {"gateway": {"fair": False, "weights": {"acme": 2.0}}},
        "gateway.weights does nothing without gateway.fair = true",
        {"gateway": {"weights": {"acme": 2.0}}},
    ),
    (
        {"gateway": {"fair": True}, "scheduler": {"policy": "vtc"}},
        "gateway.fair does nothing with a scheduler.policy that shares among tenants by itself",
        {"gateway": {"fair": False}, "scheduler": {"policy": "vtc"}},
    ),
]


@pytest.mark.parametrize(("raw", "told", "mended"), CONFIGS, ids=[told.split()[0] for _, told, _ in CONFIGS])
def test_a_configuration_is_refused_in_one_sentence(raw: dict[str, Any], told: str, mended: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as fault:
        resolve(raw)
    assert str(fault.value) == told
    resolve(mended)


def test_every_row_about_a_configuration_alone_is_tried() -> None:
    tried = {told.split()[0].rpartition(".")[2] for _, told, _ in CONFIGS}
    assert {option.rpartition(".")[2] for row in (*CLASSES, *SECTIONS) for option in row.options} <= tried


def test_only_what_is_written_counts() -> None:
    """Presets and defaults bring options that do nothing."""
    assert resolve({"scheduler": {"policy": "fcfs", "headroom": "none"}}).scheduler.watermark == 0.01
    resolve({"scheduler": {"policy": "vllm-v0"}})
    resolve({"policy": {"joint": {"mixed_batches": False}}})
    resolve({"scheduler": {"prefix_caching": False}})
    resolve({"policy": {"fcfs": {"displace": False}}, "scheduler": {"policy": "fcfs", "displace_waiting": False}})


def test_of_policies_that_are_compared_one_suffices() -> None:
    raw = {"scheduler": {"bypass_bound": 9, "host_blocks": 5}, "aging": {"window": 5.0}}
    joint, v1, vtc = resolve_each(raw, ["joint", "vllm-v1", "vtc"])
    assert (joint.scheduler.policy, v1.scheduler.policy, vtc.scheduler.policy) == ("joint", "vllm-v1", "vtc")
    assert isinstance(v1.build_policy().order, Aged)
    assert vtc.build_policy() == resolve({"scheduler": {"policy": "vtc"}}).build_policy()
    with pytest.raises(ConfigError) as fault:
        resolve_each({"scheduler": {"bypass_bound": 9}}, ["vllm-v1", "vtc"])
    assert str(fault.value) == (
        "scheduler.bypass_bound does nothing without policy.vllm-v1.backfill = true; nor does it under vtc"
    )


def test_a_section_is_about_its_policy_whoever_is_chosen() -> None:
    spare = {"policy": {"vllm-v1": {"max_prefill_steps": 9}}}
    for chosen in ("joint", "vllm-v1"):
        with pytest.raises(ConfigError, match=r"policy\.vllm-v1\.max_prefill_steps does nothing without policy\.vllm"):
            resolve({**spare, "scheduler": {"policy": chosen}})
    with pytest.raises(ConfigError, match=r"policy\.vllm-v1\.max_prefill_steps"):
        resolve_each(spare, ["joint", "fcfs"])
    resolve({"policy": {"vllm-v0": {"max_prefill_steps": 9}}})
    crowded: dict[str, Any] = {"scheduler": {"max_num_seqs": 600}, "policy": {"sarathi": {"share": 0.5}}}
    assert resolve(crowded), "600 seats are too many for sarathi, which is not chosen"


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_shown_has_no_option_that_would_be_refused(name: str) -> None:
    for said in ({}, {"headroom": "none"}, {"headroom": "declared"}, {"prefix_caching": False}):
        if name in ("prefix", "sglang-lpm") and "prefix_caching" in said:
            continue
        config = resolve({"scheduler": {"policy": name, **said}})
        assert resolve(tomllib.loads(to_toml(config))) == config
