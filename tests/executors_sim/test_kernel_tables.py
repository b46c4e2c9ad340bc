"""The kernel tables of aiconfigurator-core as a cost model: they say what the library says, and no more."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from aiconfigurator_core.sdk.engine import EngineHandle

from tidegate.errors import InputError, MissingExtra
from tidegate.executors.sim.cost import CostModel
from tidegate.executors.sim.hardware import find_hardware
from tidegate.executors.sim.kernel_tables import MODEL_PATHS, SYSTEMS, KernelTables
from tidegate.executors.sim.models import find_model

SRC = Path(__file__).resolve().parents[2] / "src"
ENGINES = [
    ("h100", "llama-3.1-8b", 1, "vllm"),
    ("a100", "llama-3.1-70b", 4, "trtllm"),
    ("h200", "qwen3-32b", 2, "sglang"),
]


def tables(hardware: str = "h100", model: str = "llama-3.1-8b", tp: int = 1, **given: Any) -> KernelTables:
    return KernelTables(find_hardware(hardware), find_model(model), tp, **given)


@cache
def library(hardware: str, model: str, tp: int, backend: str) -> EngineHandle:
    return EngineHandle.compile(MODEL_PATHS[model], SYSTEMS[hardware], backend, tp_size=tp)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_prompts_take_what_the_library_says(engine: tuple[str, str, int, str]) -> None:
    """One prompt, whole or behind a prefix, and one beside decodes."""
    *at, backend = engine
    cost, says = tables(*at, backend=backend), library(*engine)
    for tokens, cached in ((1, 0), (512, 0), (2048, 0), (2048, 1024), (9000, 8990)):
        expected = says.predict_prefill_latency(1, tokens, cached)
        assert cost.prefill_seconds(tokens, cached) * 1e3 == pytest.approx(expected, rel=1e-9)
    beside = says.mixed_step_latency(512, 64, 512, 1)
    assert cost.step_seconds([(0, 512)], 64, 64 * 512) * 1e3 == pytest.approx(beside, rel=1e-9)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize(("decodes", "context"), [(1, 100), (1, 30_000), (16, 512), (64, 2048), (256, 700)])
def test_decodes_take_what_the_library_says(engine: tuple[str, str, int, str], decodes: int, context: int) -> None:
    """Within 1 %: ours go on from a step with prompts without a jump, the library's have tables of their own."""
    *at, backend = engine
    expected = library(*engine).predict_decode_latency(decodes, context)
    cost = tables(*at, backend=backend)
    assert cost.step_seconds(decodes=decodes, context=decodes * context) * 1e3 == pytest.approx(expected, rel=0.01)


def test_a_step_of_several_chunks_pays_for_its_tokens_together_and_for_each_attention() -> None:
    cost = tables()
    both, one, other = (cost.step_seconds(c) for c in ([(0, 512), (3000, 512)], [(0, 512)], [(3000, 512)]))
    assert max(one, other) < both < one + other
    attention = cost.step_seconds([(3000, 512)]) - cost.step_seconds([(0, 512)])
    assert both == pytest.approx(cost.step_seconds([(0, 512), (0, 512)]) + attention, rel=1e-9)


def test_contexts_count_by_their_mean_and_the_host_is_added_to_every_step() -> None:
    plain, slow = tables(), tables(host_overhead=0.003)
    assert plain.step_seconds(decodes=8, context=8 * 500) < plain.step_seconds(decodes=8, context=8 * 5000)
    for step in (((), 8, 4000), (((0, 100),), 0, 0)):
        assert slow.step_seconds(*step) == plain.step_seconds(*step) + 0.003
    assert slow.step_seconds() == 0.0
    assert slow.prefill_seconds(1000, chunk=100) == pytest.approx(plain.prefill_seconds(1000, chunk=100) + 0.03)


def test_what_policies_ask_is_the_step_itself() -> None:
    cost = tables()
    assert cost.estimate(0.0, 0.0, 0.0) == 0.0
    assert cost.estimate(511.6, 64.0, 64_000.0) == cost.step_seconds([(0, 512)], 64, 64_000)


def test_the_fitted_presets_come_near_the_tables() -> None:
    """They were fitted to them; the formula has to answer what the tables do, near enough."""
    for hardware in ("a100", "h100", "h200", "b200"):
        by_tables, by_formula = tables(hardware), CostModel(find_hardware(hardware), find_model("llama-3.1-8b"))
        for step in (((), 64, 64 * 2048), (((0, 2048),), 0, 0)):
            assert by_formula.step_seconds(*step) == pytest.approx(by_tables.step_seconds(*step), rel=0.06)


@pytest.mark.parametrize(
    ("at", "backend", "told"),
    [
        (("a10g", "llama-3.1-8b", 1), "vllm", "no tables for hardware a10g; for: a100, h100, h200, b200, l40s"),
        (("cpu", "smollm2-135m", 1), "vllm", "no tables for hardware cpu; for: "),
        (("h100", "llama-2-7b", 1), "vllm", "no tables for model llama-2-7b; for: llama-3.1-8b, "),
        (("h100", "llama-3.1-8b", 1), "tgi", "no tables of 'tgi'; there are: vllm, sglang, trtllm"),
        (("h100", "llama-3.1-8b", 3), "vllm", "cannot be spread over 3 GPUs"),
    ],
    ids=str,
)
def test_what_has_no_tables_is_told_in_one_sentence(at: tuple[str, str, int], backend: str, told: str) -> None:
    with pytest.raises(InputError) as error:
        tables(*at, backend=backend)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_constants_of_ones_own_are_not_ignored() -> None:
    """A calibrated file may bear the name of a preset; the tables would not be of it."""
    with pytest.raises(InputError, match="no tables for hardware h100 of a file; for: a100, "):
        KernelTables(replace(find_hardware("h100"), t0=0.01), find_model("llama-3.1-8b"))


def test_without_the_extra_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.engine", None)
    with pytest.raises(MissingExtra, match=r"pip install 'tidegate\[aiconfigurator\]'"):
        tables()


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tidegate", "simulate", "azure-conv:first=40", "--policy", "vllm-v1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(SRC)})


def test_the_command_says_whose_step_times_they_are() -> None:
    done = simulate("--cost-model", "aiconfigurator")
    assert (done.returncode, done.stderr) == (0, "")
    title = "azure-conv, 40 requests, llama-3.1-8b on h100, step times of aiconfigurator:vllm"
    assert done.stdout.splitlines()[0].strip() == title
    assert '"cost_model": "aiconfigurator:sglang"' in simulate("--cost-model", "aiconfigurator:sglang", "--json").stdout
    assert '"cost_model": "formula"' in simulate("--json").stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--cost-model", "roofline"), "no cost model 'roofline'; there are: formula, aiconfigurator"),
        (("--cost-model", "aiconfigurator", "--hardware", "a10g"), "no tables for hardware a10g"),
    ],
    ids=str,
)
def test_the_command_refuses_what_it_does_not_know(arguments: tuple[str, ...], told: str) -> None:
    done = simulate(*arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
