"""Steps of a log as the cost model sees them (executors/sim/cost.py), in columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidegate.observe.steplog import StepRow, causal_pairs

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

KINDS = ("decode", "mixed", "prefill")
STRETCHES = 20
"""Into how many stretches a log is cut, of which some are held out."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Columns of equal length, a step each, in the order of the log.

    tokens:  computed, of prompts and decodes
    read:    KV tokens of earlier steps that are read
    pairs:   query-key pairs of prompt chunks
    seconds: measured
    kind:    index into KINDS
    guessed: steps with prompt tokens of which the log does not say where they begin; they count as one chunk
             at the start of a prompt
    """

    tokens: Floats
    read: Floats
    pairs: Floats
    seconds: Floats
    kind: npt.NDArray[np.int64]
    guessed: int

    def __len__(self) -> int:
        return len(self.seconds)

    def of(self, which: Flags) -> StepCosts:
        """Those steps where `which` is true."""
        return StepCosts(
            self.tokens[which],
            self.read[which],
            self.pairs[which],
            self.seconds[which],
            self.kind[which],
            self.guessed,
        )

    def of_kind(self, kind: str) -> StepCosts:
        """Steps of one of KINDS."""
        return self.of(self.kind == KINDS.index(kind))


def step_costs(rows: Iterable[StepRow]) -> StepCosts:
    """The columns of `rows`, without steps that computed nothing or took no time."""
    columns: list[tuple[float, float, float, float, int]] = []
    guessed = 0
    for row in rows:
        tokens = row.prefill_tokens + row.decodes
        if tokens < 1 or not row.seconds > 0:
            continue
        before, pairs = row.prefill_context, row.prefill_pairs
        if before is None or pairs is None:
            guessed += row.prefill_tokens > 0
            before, pairs = 0, causal_pairs(0, row.prefill_tokens)
        kind = 0 if not row.prefill_tokens else 1 if row.decodes else 2
        columns.append((tokens, row.context_tokens + before, pairs, row.seconds, kind))
    table = np.array(columns, np.float64).reshape(-1, 5)
    return StepCosts(table[:, 0], table[:, 1], table[:, 2], table[:, 3], table[:, 4].astype(np.int64), guessed)


def held_out(steps: int, share: float) -> Flags:
    """Which of `steps` to hold out: whole stretches, spread evenly over the log, `share` of them in all.

    Neighbouring steps are nearly alike, so a single step that was held out would have been seen after all.
    """
    stretch = np.arange(steps) * STRETCHES // max(steps, 1)
    chosen = np.floor((np.arange(STRETCHES) + 1) * share) > np.floor(np.arange(STRETCHES) * share)
    return np.asarray(chosen[stretch], np.bool_)
