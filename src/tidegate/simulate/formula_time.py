"""The step model of a scenario: the very formula that gives its steps their length."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.core.predict import StepTime
from tidegate.executors.scripted import StepFormula


@dataclass(frozen=True, slots=True)
class FormulaTime(StepTime):
    """A `StepModel` that is right: `formula` in milliseconds, or a second for every step where there is none.

    `service` goes by full budgets and single decodes, as `of` works them out.
    """

    formula: StepFormula | None = None

    @classmethod
    def of(cls, formula: StepFormula | None, budget: int, prefill_token: float | None = None) -> FormulaTime:
        """The model of a scenario whose steps hold `budget` tokens; `prefill_token` seconds a token if given."""
        prefill, decode = 1.0 / budget, 1.0
        if formula is not None:
            prefill, decode = (formula(0, budget) - formula(0, 0)) / budget / 1000.0, formula(1, 0) / 1000.0
        return cls(prefill if prefill_token is None else prefill_token, decode, formula)

    def step(self, prefill_tokens: float, decodes: float, context_tokens: float = 0.0) -> float:
        return 1.0 if self.formula is None else self.formula(int(decodes), int(prefill_tokens)) / 1000.0
