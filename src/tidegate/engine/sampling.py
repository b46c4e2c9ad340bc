"""How a client wants tokens to be chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one sequence, with OpenAI's (and vLLM's) names and meanings.

    temperature 0 is greedy. top_k 0 and min_p 0 are off. Penalties: `repetition_penalty` divides
    (positive) or multiplies (negative) logits of tokens seen in prompt or output (CTRL, Keskar et al.
    2019); presence and frequency are subtracted for tokens seen in the output. `seed` None draws a
    fresh one. `logprobs` is the number of alternatives per token, None for none. `json_schema` (a
    schema, or {"type": "object"} for any object) constrains the output by a grammar; `ignore_eos`
    keeps going past stop tokens. `min_tokens` outputs are emitted before a stop token is allowed.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    json_schema: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one emitted token: its own, and the `logprobs` best as (token id, logprob)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
