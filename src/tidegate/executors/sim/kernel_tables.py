"""What a step costs by measured kernel times: the tables of `aiconfigurator-core` (extra `aiconfigurator`).

    t = all but attention, by the tokens in it + attention of each chunk + attention of the decodes + host overhead

The decodes' attention is that of as many requests with the mean of their contexts; the tables know no others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from tidegate.errors import InputError, MissingExtra
from tidegate.executors.sim.hardware import HARDWARE, Hardware
from tidegate.executors.sim.models import ModelShape
from tidegate.executors.sim.step_cost import StepCost

BACKENDS = ("vllm", "sglang", "trtllm")
"""Whose kernels there are; the first unless another is asked for."""

# What the library calls our presets. A model that it did not ship would be looked for on a hub.
SYSTEMS: Mapping[str, str] = {
    "a100": "a100_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "l40s": "l40s",
}
MODEL_PATHS: Mapping[str, str] = {
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "qwen3-32b": "Qwen/Qwen3-32B",
}

REMEMBERED = 1 << 16
"""Answers of the tables that are kept; some 20 MB."""


class KernelTables(StepCost):
    """Seconds of steps by the kernels of one of BACKENDS, in bfloat16.

    Raises InputError for hardware, models and degrees of parallelism without tables, and MissingExtra.
    """

    __slots__ = ("_breakdown",)

    def __init__(
        self,
        hardware: Hardware,
        model: ModelShape,
        tp: int = 1,
        host_overhead: float = 0.0,
        backend: str = BACKENDS[0],
    ) -> None:
        super().__init__(f"aiconfigurator:{backend}", hardware, model, tp, host_overhead)
        self._breakdown = lru_cache(REMEMBERED)(_engine(hardware, model, tp, backend).mixed_step_breakdown)
        self.step_seconds(((0, 1),), 1, 1)  # so that what is missing is told now

    @property
    def validated(self) -> bool:
        return True

    def step_seconds(self, chunks: Iterable[tuple[int, int]] = (), decodes: int = 0, context: int = 0) -> float:
        tokens, ms = decodes, 0.0
        for start, length in chunks:
            tokens += length
            ms += self._ask(start + length, 0, start + length, start)[2]
        if not tokens:
            return 0.0
        ms += self._ask(tokens, 0, tokens, 0)[1]
        if decodes:
            ms += self._ask(0, decodes, max(1, context // decodes), 0)[3]
        return ms / 1e3 + self.host_overhead

    def _ask(self, prompt: int, decodes: int, length: int, before: int) -> tuple[float, float, float, float]:
        """Milliseconds of a step: in all, all but attention, attention of the prompt, attention of the decodes.

        length: tokens of the prompt of which `before` are there already, or of the context of each decode
        """
        try:
            # One output: contexts as they are. Told of more, the library takes them to be half of those longer.
            found: tuple[float, float, float, float] = self._breakdown(prompt, decodes, length, 1, before)
        except (ValueError, RuntimeError) as error:  # its error for missing data is a RuntimeError
            raise InputError(
                f"{self.name} knows no such step of {self.model.name} on {self.tp} x {self.hardware.name}: {error}"
            ) from error
        return found


def _engine(hardware: Hardware, model: ModelShape, tp: int, backend: str) -> Any:
    """The library's engine. Raises InputError where it has none, and MissingExtra."""
    if backend not in BACKENDS:
        raise InputError(f"aiconfigurator has no tables of {backend!r}; there are: {', '.join(BACKENDS)}")
    if hardware.name not in SYSTEMS or hardware != HARDWARE[hardware.name]:
        own = "" if HARDWARE.get(hardware.name) == hardware else " of a file"
        raise InputError(f"aiconfigurator has no tables for hardware {hardware.name}{own}; for: {', '.join(SYSTEMS)}")
    if model.name not in MODEL_PATHS:
        raise InputError(f"aiconfigurator has no tables for model {model.name}; for: {', '.join(MODEL_PATHS)}")
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle
    except ImportError as error:
        raise MissingExtra(
            "step times of aiconfigurator need aiconfigurator-core: pip install 'tidegate[aiconfigurator]'"
        ) from error
    # It warns on the console of kernels that these models do not use.
    logging.getLogger("aiconfigurator_core").addHandler(logging.NullHandler())
    return EngineHandle.compile(MODEL_PATHS[model.name], SYSTEMS[hardware.name], backend, tp_size=tp)
