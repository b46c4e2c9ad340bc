"""Lengths of synthetic requests: drawn from a distribution, or from the requests of a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tidegate.simulate.draws import Draw, Uniform, parse_draw
from tidegate.simulate.named import named_workload
from tidegate.simulate.workload_files import is_workload_file

MOST_TOKENS = 10_000_000
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Draws lengths: whole numbers from 1 to MOST_TOKENS."""

    draw: Draw

    def sample(self, rng: np.random.Generator, n: int) -> Ints:
        if isinstance(self.draw, Uniform):
            return rng.integers(int(self.draw.low), int(self.draw.high), n, endpoint=True)
        return np.clip(np.rint(self.draw.sample(rng, n)), 1, MOST_TOKENS).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """Draws, with repetition, from lengths that a trace has."""

    values: Ints

    def sample(self, rng: np.random.Generator, n: int) -> Ints:
        return self.values[rng.integers(0, len(self.values), n)]


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Prompt and output lengths of a trace, drawn together, so that long prompts keep their outputs."""

    prompts: Ints
    outputs: Ints

    def sample(self, rng: np.random.Generator, n: int) -> tuple[Ints, Ints]:
        rows = rng.integers(0, len(self.prompts), n)
        return self.prompts[rows], self.outputs[rows]


LengthDraw = Lengths | Observed


def parse_prompt(text: str) -> LengthDraw:
    """Prompt lengths from a distribution, or from a trace or file of that name. Raises ValueError."""
    return _distribution(text) or Observed(parse_pairs(text).prompts)


def parse_output(text: str) -> LengthDraw:
    """Output lengths from a distribution, or from a trace or file of that name. Raises ValueError."""
    return _distribution(text) or Observed(parse_pairs(text).outputs)


def parse_pairs(text: str) -> Pairs:
    """The lengths of the trace or file called `text`. Raises ValueError."""
    workload = named_workload(text)
    if workload is None:
        raise ValueError(f"{text!r} is neither a distribution such as 512 or lognormal:512:1.2 nor a trace or file")
    return Pairs(
        np.array([r.prompt_tokens for r in workload], np.int64), np.array([r.output_tokens for r in workload], np.int64)
    )


def parse_count(text: str) -> Lengths:
    """A distribution of whole numbers. Raises ValueError."""
    found = _distribution(text)
    if found is None:
        raise ValueError(f"{text!r} is no distribution of whole numbers: write 5, 2..8 or exponential:4")
    return found


def _distribution(text: str) -> Lengths | None:
    written = text[:1].isdigit() or ".." in text or ":" in text
    return Lengths(parse_draw(text, whole)) if written and not is_workload_file(Path(text)) else None


def whole(text: str) -> float:
    """A whole number from 1 to MOST_TOKENS. Raises ValueError."""
    if not text.isdecimal() or not 1 <= int(text) <= MOST_TOKENS:
        raise ValueError(f"{text!r} is no whole number from 1 to {MOST_TOKENS}")
    return int(text)
