"""How many prefill tokens a step computes beside its decodes."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.core.policy import PolicyContext
from tidegate.core.view import RequestView, StepView


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """Whatever the decodes leave of a fixed budget goes to prompts, in order (vLLM V1, Sarathi-Serve).

    `share` is what one long prompt (one that no whole step could end) gets of the step's prefill tokens
    while another prompt of its class or better waits for some; 1 is strictly in order. What nobody else takes
    it gets all the same, so a smaller share costs the long prompt little and spares the short ones a wait
    of many steps. `max_chunk` (tokens) caps every chunk; None is no cap. Everybody decodes in every step.
    """

    share: float = 0.5
    max_chunk: int | None = None

    @property
    def max_stride(self) -> int:
        return 1

    def tokens(self, step: StepView, ctx: PolicyContext) -> int:
        return step.budget - step.decodes

    def chunk(
        self, r: RequestView, remaining: int, left: int, step: StepView, contended: bool, ctx: PolicyContext
    ) -> int:
        whole = self.tokens(step, ctx) if contended else remaining
        return share_of(remaining, left, whole, self.share, self.max_chunk)

    def decode_tokens(self, step: StepView, ctx: PolicyContext) -> int:
        return step.decodes

    def stride(self, r: RequestView, step: StepView, ctx: PolicyContext) -> int:
        return 1


def share_of(remaining: int, left: int, whole: int, share: float, max_chunk: int | None) -> int:
    """Tokens of one chunk: what remains of the prompt or is left of the step, `max_chunk` at most.

    A prompt that a `whole` step could not end gets a `share` of what is left.
    """
    tokens = min(remaining, left)
    if max_chunk is not None:
        tokens = min(tokens, max_chunk)
    if remaining > whole:
        tokens = min(tokens, max(1, int(left * share)))
    return tokens
