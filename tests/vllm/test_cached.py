"""Whoever waits for a prefix that is cached meanwhile gets the place that the policy has for it."""

from __future__ import annotations

from tests.vllm.test_door import engine_of
from tidegate.integrations.vllm.scripted import run


def test_who_waits_is_looked_at_again_when_its_prefix_is_cached(tmp_path):
    """`warm` came last and shares the prompt of `first`, which is computed while both others wait."""
    toml = '[scheduler]\npolicy = "joint"\n[policy.joint]\nw_cache = 60.0\nurgent_slack = 0.0\n'
    engine = engine_of(tmp_path, toml, max_num_seqs=1, max_num_batched_tokens=256)
    shared = list(range(2, 130))
    engine.add(engine.request("first", shared, 12))
    engine.add(engine.request("cold", list(range(300, 428)), 4))
    engine.add(engine.request("warm", [*shared, 200], 4))
    order = []
    while engine.scheduler.has_unfinished_requests():
        output = engine.step()
        order += [r.req_id for r in output.scheduled_new_reqs] if output is not None else []
    run(engine)
    assert order == ["first", "warm", "cold"]
