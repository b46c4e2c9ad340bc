"""Our metrics stand in the registry of vLLM's own, by class, with bounded labels."""

from __future__ import annotations

from prometheus_client import REGISTRY

from tidegate.integrations.vllm import TidegateScheduler
from tidegate.integrations.vllm.scripted import Engine, make_config, make_scheduler, run


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def engine_of() -> Engine:
    config = make_config(num_blocks=100, max_num_seqs=4, max_num_batched_tokens=64)
    return Engine(make_scheduler(TidegateScheduler, config, log_stats=True))


def test_by_class_and_tenant():
    engine = engine_of()
    for n in range(40):
        xargs = {"slo_class": "batch" if n % 2 else "interactive", "tenant": f"t{n}"}
        engine.add(engine.request(f"r{n}", list(range(2, 30)), 4, xargs=xargs))
    run(engine)
    assert value("tidegate_requests_finished_total", **{"class": "batch", "reason": "length"}) == 20
    assert value("tidegate_generation_tokens_total") == 160
    tenants = [s for m in REGISTRY.collect() if m.name == "tidegate_tenant_requests" for s in m.samples]
    assert len({s.labels["tenant"] for s in tenants}) <= 20
    engine.scheduler.shutdown()
    assert value("tidegate_generation_tokens_total") == 0.0


def test_a_second_engine_in_one_process_takes_their_place():
    engine_of()
    engine = engine_of()
    engine.add(engine.request("r", list(range(2, 30)), 4))
    run(engine)
    assert value("tidegate_generation_tokens_total") == 4
    engine.scheduler.shutdown()
