"""The constants that a step log was made with come out of it again, as far as it tells them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tidegate.core.limits import Limits
from tidegate.core.presets import build_policy
from tidegate.errors import InputError
from tidegate.executors.sim.cost import CostModel
from tidegate.executors.sim.hardware import Hardware, find_hardware
from tidegate.executors.sim.models import find_model
from tidegate.observe.steplog import StepRow, causal_pairs
from tidegate.simulate.calibration import calibrate, predicted
from tidegate.simulate.run import EngineSetup, simulate
from tidegate.simulate.step_costs import KINDS, held_out, step_costs
from tidegate.simulate.traces import load_workload

MODEL = find_model("llama-3.1-8b")
TRUE = replace(find_hardware("a100"), t0=3e-3, e1=0.55, e2=0.83, e3=0.4, e4=0.7, p=2.1)
BASE = find_hardware("h100")


@pytest.fixture(scope="module")
def log() -> list[StepRow]:
    """What a simulated engine of TRUE logs of two traces, long prompts in chunks among them."""
    rows: list[StepRow] = []
    limits = Limits(num_blocks=4_000, max_num_seqs=64, max_num_batched_tokens=2_048)
    setup = EngineSetup(build_policy("vllm-v1"), limits, CostModel(TRUE, MODEL))
    for name, limit in (("azure-conv", 120), ("azure-code", 80)):
        simulate(load_workload(name).limited(limit), setup, lambda ended: None, on_step=rows.append)
    return rows


def peaks(h: Hardware) -> list[float]:
    """The constants as rates, however peaks and shares divide them."""
    compute, memory = h.peak_flops, h.memory_bandwidth
    return [h.t0, h.e1 * compute, h.e2 * memory, h.e3 * compute, h.e4 * memory, h.p]


def test_known_constants_are_recovered_on_another_base(log: list[StepRow]) -> None:
    steps = step_costs(log)
    found = calibrate(steps, MODEL, BASE)
    assert {kind: errors.steps > 0 for kind, errors in found.held_out.items()} == dict.fromkeys((*KINDS, "all"), True)
    for errors in found.held_out.values():
        assert errors.p90 is not None
        assert errors.p90 < 0.01
    assert all(c.error is not None for c in found.constants)
    assert peaks(found.hardware) == pytest.approx(peaks(TRUE), rel=0.02)


def test_outliers_and_noise_do_not_bend_the_fit(log: list[StepRow]) -> None:
    rng = np.random.default_rng(1)
    noise = np.exp(rng.normal(0, 0.02, len(log)))
    noise[rng.random(len(log)) < 0.02] *= 8  # who waited for something else
    noisy = [row._replace(seconds=row.seconds * n) for row, n in zip(log, noise.tolist(), strict=True)]
    found = calibrate(step_costs(noisy), MODEL, BASE)
    clean = step_costs(log)
    assert np.median(np.abs(predicted(found.hardware, MODEL, 1, clean) / clean.seconds - 1)) < 0.01


def test_what_a_log_does_not_tell_is_kept_from_the_base(log: list[StepRow]) -> None:
    decodes = [row for row in log if not row.prefill_tokens][::4]
    found = calibrate(step_costs(decodes), MODEL, BASE)
    assert {c.name for c in found.constants if c.error is None} >= {"e3"}
    assert found.hardware.e3 * found.hardware.peak_flops >= BASE.e3 * BASE.peak_flops * 0.999
    assert found.held_out["decode"].p90 is not None
    assert found.held_out["decode"].p90 < 0.01
    assert found.held_out["prefill"] == (0, None, None, None)


def test_what_a_log_rules_out_is_not_kept_from_the_base() -> None:
    """Noise hides how much of a step reads weights; but on this base they alone would take longer than a short step."""
    small = find_model("smollm2-135m")
    true = replace(find_hardware("cpu"), t0=15e-3, e2=1.0, memory_bandwidth=200e9, e1=0.8, e3=0.15, e4=0.03)
    rng = np.random.default_rng(3)
    rows = []
    for _ in range(3_000):
        decodes, prefill = int(rng.integers(1, 17)), int(rng.integers(16, 257)) if rng.random() < 0.3 else 0
        context = decodes * int(rng.integers(20, 200))
        seconds = CostModel(true, small).step_seconds([(0, prefill)] if prefill else [], decodes, context)
        noisy = seconds * float(np.exp(rng.normal(0, 0.06)))
        pairs = causal_pairs(0, prefill)
        rows.append(StepRow(0.0, noisy, prefill, decodes, context, decodes, 0, 100, 0, "0", 0, pairs))
    found = calibrate(step_costs(rows), small, replace(find_hardware("cpu"), memory_bandwidth=15e9))
    for decodes in (1, 4, 16):
        step = {"decodes": decodes, "context": 100 * decodes}
        due = CostModel(true, small).step_seconds(**step)
        assert CostModel(found.hardware, small).step_seconds(**step) == pytest.approx(due, rel=0.02)


def test_steps_that_are_all_alike_tell_hardly_anything() -> None:
    same = [StepRow(0.0, 0.02, 0, 8, 8_000, 8, 0, 100, 0, "0")] * 200
    found = calibrate(step_costs(same), MODEL, BASE)
    assert sum(c.error is not None for c in found.constants) <= 1
    assert found.held_out["all"].median == pytest.approx(0, abs=0.01)


def test_a_log_that_does_not_say_where_chunks_begin_is_said_to_be_guessed(log: list[StepRow]) -> None:
    old = [row._replace(prefill_context=None, prefill_pairs=None) for row in log]
    found = calibrate(step_costs(old), MODEL, BASE)
    assert found.guessed == sum(row.prefill_tokens > 0 for row in log)
    assert found.held_out["all"].median is not None
    assert found.held_out["all"].median < 0.03


def test_held_out_steps_come_in_stretches_and_are_the_share_that_was_asked_for() -> None:
    out = held_out(1_000, 0.3)
    assert out.mean() == pytest.approx(0.3, abs=0.05)
    assert np.count_nonzero(np.diff(out.astype(int))) <= 20


def test_more_than_a_peak_raises_the_peak(log: list[StepRow]) -> None:
    slow = replace(BASE, peak_flops=1e12, memory_bandwidth=5e11)
    found = calibrate(step_costs(log), MODEL, slow)
    shares = [getattr(found.hardware, name) for name in ("e1", "e2", "e3", "e4")]
    assert max(shares) <= 1
    assert peaks(found.hardware) == pytest.approx(peaks(TRUE), rel=0.05)


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0])
def test_a_share_outside_is_refused(log: list[StepRow], share: float) -> None:
    with pytest.raises(InputError, match="held out must be above 0 and under 1"):
        calibrate(step_costs(log), MODEL, BASE, hold_out=share)


def test_too_few_steps_are_refused(log: list[StepRow]) -> None:
    with pytest.raises(InputError, match="too few to fit on"):
        calibrate(step_costs(log[:20]), MODEL, BASE)
