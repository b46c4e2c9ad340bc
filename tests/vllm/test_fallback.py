"""Where this vLLM is not the one we know, it schedules by itself, or does not start; never by halves."""

from __future__ import annotations

import logging
from dataclasses import fields

import pytest
from vllm.config import LoRAConfig
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler

from tidegate.config import ServerConfig
from tidegate.errors import ConfigError
from tidegate.integrations.vllm import TidegateScheduler
from tidegate.integrations.vllm.scripted import Engine, make_config, make_scheduler, run, whole
from tidegate.integrations.vllm.settings import OWNED

SIZES = {"num_blocks": 50, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def start(additional=None):
    return make_scheduler(TidegateScheduler, make_config(additional=additional, **SIZES))


@pytest.fixture
def unknown(monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.99.1")


def test_an_unknown_minor_is_left_to_vllm(unknown, caplog):
    with caplog.at_level(logging.WARNING, logger="vllm.tidegate"):
        logging.getLogger("vllm").propagate = True
        scheduler = start()
    assert scheduler.tidegate is None
    assert type(scheduler.waiting) is FCFSRequestQueue
    told = [r.getMessage() for r in caplog.records if r.name == "vllm.tidegate"]
    assert told == [
        "Tidegate does nothing here: vLLM 0.99.1 is none of the supported minors (0.31, 0.32). "
        "vLLM schedules by itself."
    ]
    engine = Engine(scheduler)
    for n in range(6):
        engine.add(engine.request(f"r{n}", list(range(2, 40)), 8))
    run(engine)
    assert all(len(stream) == 8 for stream in engine.streams.values())
    assert whole(scheduler)


def test_an_unknown_minor_is_refused_where_that_is_asked_for(unknown, tmp_path):
    (tmp_path / "t.toml").write_text('[vllm]\nfallback = "refuse"\n')
    with pytest.raises(ConfigError, match=r"vLLM 0\.99\.1 is none of the supported minors"):
        start({"tidegate": str(tmp_path / "t.toml")})


@pytest.mark.parametrize("name", ["_reserve_prefill_lookahead", "_preempt_request", "_handle_blocked_waiting_request"])
def test_a_missing_method_is_told_by_name(monkeypatch, name):
    from tidegate.integrations.vllm.supported import obstacle

    scheduler = start()
    monkeypatch.delattr(Scheduler, name)
    assert obstacle(scheduler, "0.32.0") == f"this vLLM's scheduler has no {name}()"


def test_a_method_that_takes_something_else_is_told(monkeypatch):
    from tidegate.integrations.vllm.supported import obstacle

    scheduler = start()
    monkeypatch.setattr(Scheduler, "_preempt_request", lambda self, victim: None)
    assert "does not take request, timestamp, drop_stale_output" in obstacle(scheduler, "0.32.0")


def test_a_missing_attribute_is_told_by_name():
    from tidegate.integrations.vllm.supported import obstacle

    scheduler = start()
    del scheduler.kv_holding_waiting
    assert obstacle(scheduler, "0.32.0") == "this vLLM's scheduler has no kv_holding_waiting"


def test_what_was_not_thought_through_is_told():
    from tidegate.integrations.vllm.supported import obstacle

    scheduler = start()
    scheduler.vllm_config.parallel_config.pipeline_parallel_size = 2
    assert obstacle(scheduler, "0.32.0") == "Tidegate does not schedule pipeline parallelism inside vLLM yet"


def test_adapters_are_slots():
    config = make_config(**SIZES)
    config.lora_config = LoRAConfig(max_loras=2, max_lora_rank=8)
    assert make_scheduler(TidegateScheduler, config).tidegate.scheduler.limits.max_resources == 2


def test_a_configuration_that_is_wrong_does_not_start(tmp_path):
    (tmp_path / "t.toml").write_text('[scheduler]\npolicy = "jiont"\n')
    with pytest.raises(ConfigError, match="did you mean joint"):
        start({"tidegate": str(tmp_path / "t.toml")})


def test_the_file_may_be_named_by_the_environment(tmp_path, monkeypatch):
    (tmp_path / "t.toml").write_text('[scheduler]\npolicy = "sjf"\n')
    monkeypatch.setenv("TIDEGATE_CONFIG", str(tmp_path / "t.toml"))
    assert start().tidegate.scheduler.policy.name == "sjf"
    assert start().tidegate.scheduler.limits.max_num_seqs == 4


def test_every_option_of_the_server_is_read_or_refused():
    read = {"default_class", "service_tiers", "tenant_labels"}
    assert {f.name for f in fields(ServerConfig)} - read == {p[7:] for p in OWNED if p.startswith("server.")}


def test_options_of_our_own_engine_are_refused(tmp_path):
    """vLLM's flags say these; whoever writes them into the file would wait for them in vain."""
    values = {"prefix_caching": "false", "disk_kv_path": '"/tmp"', "kv_memory": '"1GiB"', "pipeline_depth": "1"}
    for place in OWNED:
        head, _, option = place.rpartition(".")
        head = head.replace("*", "joint")
        (tmp_path / "t.toml").write_text(f"[{head}]\n{option} = {values.get(option, 2)}\n")
        with pytest.raises(ConfigError, match=rf"t\.toml: {head}\.{option} does nothing here: .*vLLM"):
            start({"tidegate": str(tmp_path / "t.toml")})
