"""The configuration of a gateway: what it takes, what it refuses, and in which words."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tidegate.config import ServerConfig, resolve, to_toml
from tidegate.errors import ConfigError
from tidegate.gateway.settings import OWNED, load

ENGINE = {"url": "http://127.0.0.1:8001"}

WHOLE: dict[str, Any] = {
    "scheduler": {"policy": "priority", "max_waiting": 9},
    "classes": {"nightly": {"priority": 20, "queue_ttl": 60.0}},
    "server": {"default_class": "nightly", "service_tiers": {"scale": "interactive"}},
    "gateway": {
        "port": 9000,
        "route": "least-loaded",
        "replicas": [ENGINE, {"url": "http://[::1]:8002/base/", "name": "b", "pool": "bulk", "seats": 4}],
        "discovery": [{"source": "dns", "host": "vllm.local", "port": 8000, "pool": "chat"}],
        "pools": {"mode": "borrow", "classes": {"nightly": "bulk"}, "borrow": 0.3},
        "api_keys": ["plain", {"key": "sk", "tenant": "acme", "classes": ["nightly"], "tokens_per_minute": 9}],
        "rates": {"batch": {"requests_per_minute": 5}},
        "deadlines": {"nightly": {"first_token_seconds": 600.0}},
        "weights": {"acme": 2.0},
    },
}


def written(tmp_path: Path, raw: dict[str, Any]) -> Path:
    path = tmp_path / "gateway.toml"
    path.write_text(tomli_w.dumps(raw), encoding="utf-8")
    return path


def test_a_whole_configuration_is_read_and_shown_so_that_it_reads_again(tmp_path: Path) -> None:
    config = load(written(tmp_path, WHOLE))
    gateway = config.gateway
    assert gateway.replicas[1].url == "http://[::1]:8002/base"
    assert [key.tokens_per_minute for key in gateway.api_keys] == [None, 9]
    assert (gateway.first_token_of("nightly"), gateway.first_token_of("batch")) == (600.0, 60.0)
    assert gateway.stall_of("nightly") == gateway.stall_seconds
    import tomllib

    assert resolve(tomllib.loads(to_toml(config))) == config


def test_every_option_of_the_server_is_the_gateways_too_or_refused() -> None:
    """One that is new must not be read and then do nothing."""
    meant = {"default_class", "service_tiers", "tenant_labels"}
    assert {f.name for f in fields(ServerConfig)} - meant == {p[7:] for p in OWNED if p.startswith("server.")}


@pytest.mark.parametrize("place", sorted(OWNED))
def test_what_only_an_engine_does_is_refused(tmp_path: Path, place: str) -> None:
    section, *middle, option = place.split(".")
    said: dict[str, Any] = {option: 1}
    for name in reversed(middle):
        said = {name.replace("*", "priority"): said}
    with pytest.raises(ConfigError) as fault:
        load(written(tmp_path, {section: said, "gateway": {"replicas": [ENGINE]}}))
    told = str(fault.value)
    assert f"{place.replace('*', 'priority')} does nothing here: {OWNED[place]}" in told


@pytest.mark.parametrize(
    ("gateway", "told"),
    [
        ({"prot": 1}, "unknown option gateway.prot; did you mean port?"),
        ({"replicas": [{"ulr": "http://a:1"}]}, "unknown option gateway.replicas.0.ulr; did you mean url?"),
        ({"pools": {"mod": "shared"}}, "unknown option gateway.pools.mod; did you mean mode?"),
        (
            {"discovery": [{"source": "dns", "hots": "x"}]},
            "unknown option gateway.discovery.0.hots; did you mean host?",
        ),
        ({"api_keys": [{"key": "k", "tokens_per_min": 1}]}, "did you mean tokens_per_minute?"),
        (
            {"rates": {"batch": {"requests": 1}}},
            "unknown option gateway.rates.batch.requests; did you mean requests_per",
        ),
        ({"port": "80"}, "gateway.port must be a valid integer, not '80'"),
        ({"replicas": [{"url": "https://a:1"}]}, "gateway.replicas.0.url must look like 'http://10.0.0.1:8000'"),
        ({"replicas": [{"url": "http://me:secret@a:1"}]}, "gateway.replicas.0.url must name no user and no password"),
        ({"replicas": [{"url": "http://a:99999"}]}, "gateway.replicas.0.url must look like"),
        ({"replicas": [{"url": "http://a:1/x\r\ny"}]}, "gateway.replicas.0.url must look like"),
        ({"replicas": [{"url": "http://\u0430:1"}]}, "gateway.replicas.0.url must look like"),
        (
            {"replicas": [{**ENGINE, "kv_events": "tcp://a:99999"}]},
            "gateway.replicas.0.kv_events must look like 'tcp://",
        ),
        ({"replicas": [{"url": "http://a:1"}, {**ENGINE, "name": "a:1"}]}, "'a:1' stands there twice as name"),
        ({"replicas": [{**ENGINE, "pool": "x"}]}, "gateway.replicas.0.pool does nothing without gateway.pools.classes"),
        (
            {"discovery": [{"source": "dns", "host": "a", "port": 1, "pool": "x"}]},
            "gateway.discovery.0.pool does nothing",
        ),
        ({"replicas": [ENGINE], "rates": {"batch": {}}}, "gateway.rates.batch says neither requests_per_minute nor"),
        (
            {"replicas": [ENGINE], "deadlines": {"batch": {}}},
            "gateway.deadlines.batch says neither first_token_seconds",
        ),
        ({"replicas": [ENGINE, ENGINE]}, "gateway.replicas: 'http://127.0.0.1:8001' stands there twice as url"),
        ({"replicas": [{**ENGINE, "kv_replay": "tcp://a:1"}]}, "gateway.replicas.0 names kv_replay without kv_events"),
        ({"replicas": [{**ENGINE, "kv_events": "a:1"}]}, "gateway.replicas.0.kv_events must look like 'tcp://"),
        ({"discovery": [{"source": "dns"}]}, 'gateway.discovery.0 of source "dns" needs a host and a port'),
        ({"discovery": [{"source": "file"}]}, 'gateway.discovery.0 of source "file" needs a path'),
        ({"discovery": [{"source": "file", "path": "x", "pool": "y"}]}, 'of source "file" says only path and seconds'),
        ({"pools": {"classes": {"bach": "x"}}}, "gateway.pools.classes: unknown class 'bach'; did you mean batch?"),
        ({"rates": {"bach": {"tokens_per_minute": 1}}}, "gateway.rates: unknown class 'bach'; did you mean batch?"),
        (
            {"deadlines": {"bach": {"stall_seconds": 1.0}}},
            "gateway.deadlines: unknown class 'bach'; did you mean batch?",
        ),
        ({"api_keys": [{"key": "k", "classes": ["bach"]}]}, "gateway.api_keys.0.classes: unknown class 'bach'"),
        ({"api_keys": ["k", "k"]}, "gateway.api_keys: the same key stands there twice"),
        (
            {"replicas": [{**ENGINE, "pool": "bulk"}], "pools": {"mode": "isolated", "classes": {"batch": "blk"}}},
            "gateway.pools.classes.batch: no replica is of pool 'blk'; did you mean bulk?",
        ),
        ({"route": "jont"}, "gateway.route: unknown route 'jont'; did you mean joint?"),
        ({}, "a gateway needs an engine: [[gateway.replicas]] with a url, or [[gateway.discovery]]"),
    ],
)
def test_mistakes_are_told_in_one_sentence(tmp_path: Path, gateway: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as fault:
        load(written(tmp_path, {"gateway": gateway}))
    assert told in str(fault.value)
    assert "secret" not in str(fault.value)


@pytest.mark.parametrize("name", ["срочно", " urgent", "a\tb"])
def test_a_class_that_no_header_can_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="a gateway names classes in a header, which carries only printable ASCII"):
        load(written(tmp_path, {"gateway": {"replicas": [ENGINE]}, "classes": {name: {"priority": 1}}}))


def test_lengths_that_only_a_simulation_knows_are_refused(tmp_path: Path) -> None:
    raw = {"gateway": {"replicas": [ENGINE]}, "predictor": {"kind": "oracle"}}
    with pytest.raises(ConfigError, match="only in a simulation"):
        load(written(tmp_path, raw))
