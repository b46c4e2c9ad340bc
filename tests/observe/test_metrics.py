"""Metrics: numbers per class, whatever clients call themselves, with a bounded number of labels."""

from __future__ import annotations

import pytest

from tests.observe.counted import host, samples, total
from tidegate.core.request import Request
from tidegate.core.slo import Slo
from tidegate.observe.metrics import OTHER, Labels


def test_promises_kept_and_broken_are_counted_by_class() -> None:
    at = host()
    for name, slo in (("kept", Slo(ttft=10.0)), ("late", Slo(ttft=0.5, e2e=2.0)), ("none", Slo())):
        at.scheduler.add(Request(name, prompt_tokens=8, max_tokens=4, slo_class="batch", slo=slo), at.now)
    at.run()
    found = samples(at.metrics, at.scheduler, at.now)
    assert total(found, "tidegate_slo_met_total", **{"class": "batch"}) == 2
    assert total(found, "tidegate_slo_missed_total", **{"class": "batch", "promise": "ttft"}) == 1
    assert total(found, "tidegate_slo_missed_total", **{"class": "batch", "promise": "e2e"}) == 1


def test_preemptions_tokens_and_memory() -> None:
    at = host(num_blocks=6, max_num_seqs=2)
    at.scheduler.add(Request("slow", prompt_tokens=40, max_tokens=40, slo_class="batch", priority=10), at.now)
    at.step()
    assert samples(at.metrics, at.scheduler, at.now)["tidegate_kv_used_blocks"][()] == 3
    at.scheduler.add(Request("urgent", prompt_tokens=60, max_tokens=4), at.now)
    at.run()
    found = samples(at.metrics, at.scheduler, at.now)
    assert total(found, "tidegate_preemptions_total", **{"class": "batch"}) == 1
    assert total(found, "tidegate_preempted_wait_seconds_count", **{"class": "batch"}) == 1
    assert found["tidegate_prompt_tokens_total"][()] == 100
    assert found["tidegate_generation_tokens_total"][()] == 44
    assert found["tidegate_kv_used_blocks"][()] == 0
    assert found["tidegate_kv_blocks"][()] == 6
    assert found["tidegate_recomputed_tokens_total"][()] > 0
    assert found["tidegate_step_tokens_sum"][()] == 100 + 44 - 2 + found["tidegate_recomputed_tokens_total"][()]


def test_starvation_is_seen_while_it_happens() -> None:
    at = host(max_num_seqs=1)
    at.scheduler.add(Request("first", prompt_tokens=8, max_tokens=50), at.now)
    at.step()
    at.scheduler.add(Request("starved", prompt_tokens=8, max_tokens=4, arrival=at.now, slo_class="batch"), at.now)
    for _ in range(20):
        at.step()
    found = samples(at.metrics, at.scheduler, at.now)
    assert total(found, "tidegate_oldest_wait_seconds", **{"class": "batch"}) == 20
    at.run()
    found = samples(at.metrics, at.scheduler, at.now)
    assert total(found, "tidegate_oldest_wait_seconds") == 0


def test_cancelled_requests_broke_no_promise_and_met_none() -> None:
    at = host()
    at.scheduler.add(Request("left", prompt_tokens=8, max_tokens=50, slo=Slo(e2e=0.1)), at.now)
    at.step()
    at.scheduler.abort("left", at.now)
    at.step()
    found = samples(at.metrics, at.scheduler, at.now)
    assert total(found, "tidegate_requests_finished_total", reason="cancelled") == 1
    assert total(found, "tidegate_slo_met_total") == total(found, "tidegate_slo_missed_total") == 0


def test_a_dead_engine_is_down() -> None:
    at = host()
    assert b"tidegate_engine_up 1.0" in at.metrics.render(at.scheduler.snapshot(0.0))
    assert b"tidegate_engine_up 0.0" in at.metrics.render(None)


def test_configured_names_keep_their_labels() -> None:
    labels = Labels(3, ["a", "b", "c"])
    assert [labels(name) for name in ("z", "c", "b", "a")] == [OTHER, OTHER, "b", "a"]
    with pytest.raises(ValueError, match="limit of 0"):
        Labels(0)


def test_a_request_that_was_never_served_kept_no_promise() -> None:
    at = host(max_num_seqs=1)
    at.scheduler.add(Request("runs", prompt_tokens=16, max_tokens=20), at.now)
    at.step()
    late = Request("late", prompt_tokens=16, max_tokens=2, arrival=at.now, queue_ttl=3.0, slo_class="batch")
    at.scheduler.add(late, at.now)
    at.run()
    found = samples(at.metrics, at.scheduler, at.now)
    assert total(found, "tidegate_requests_finished_total", reason="timeout") == 1
    assert total(found, "tidegate_slo_met_total", **{"class": "batch"}) == 0
    assert total(found, "tidegate_e2e_seconds_count", **{"class": "batch"}) == 0
    assert total(found, "tidegate_e2e_seconds_count") == 1
