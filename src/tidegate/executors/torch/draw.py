"""Random choice of one token per row, a pure function of the row's logits, parameters and (seed, output index).

Each row is one uniform number against the cumulated probabilities in descending order, so neither the
neighbours in the batch nor a preemption change what a seeded request says. The 256 best tokens are looked
at first; only a row that needs more of its tail is sorted whole.

Whatever a request asks for and whatever its logits hold, its row gets a token of the vocabulary: one
request must not end the step of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tidegate.engine.sampling import SamplingParams

BEST = 256
MIN_TEMPERATURE = 1e-5
"""Below it a row is greedy: a difference of logits over it is beyond what float32 tells apart."""
LARGEST = 1e30
"""Parameters are held within this, so that they stay finite in float32, and products with logits too."""


@dataclass(slots=True)
class Draw:
    """Parameters of `[R]` random rows; `top_k` 0, `min_p` 0 and `top_p` 1 are off."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Draw:
        """The parameters of several requests as columns."""

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

        return cls(
            column([p.temperature for p in params]).clamp(MIN_TEMPERATURE, LARGEST),
            column([min(p.top_k, 1 << 40) for p in params]),
            column([p.top_p for p in params]),
            column([p.min_p for p in params]),
        )

    def rows(self, index: torch.Tensor) -> Draw:
        """The parameters of some of the rows."""
        return Draw(self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index])


def uniforms(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """A number in [0, 1) per (seed, output index) pair, `[R]` float64: SplitMix64's finaliser over both."""
    x = seeds.astype(np.uint64) + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for _ in range(2):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def draw(logits: torch.Tensor, params: Draw, at: torch.Tensor) -> torch.Tensor:
    """One token id per row of `logits` `[R, vocab]`, chosen by the uniforms `at` `[R]`."""
    logits, top = _finite_top(logits)
    # Against the row's best, so that a small temperature sends the others to -inf and none to +inf.
    scaled = (logits - top).div_(params.temperature.float())
    vocab = scaled.shape[1]
    normaliser = torch.logsumexp(scaled, -1, keepdim=True)
    values, ids = scaled.topk(min(BEST, vocab))
    picked = _pick((values - normaliser).double().exp(), vocab, params, at[:, None])
    tokens = ids.gather(1, picked.clamp(min=0))[:, 0]
    short = (picked[:, 0] < 0).nonzero()[:, 0]
    if len(short):
        values, ids = scaled[short].sort(dim=-1, descending=True)
        probabilities = (values - normaliser[short]).double().exp()
        picked = _pick(probabilities, vocab, params.rows(short), at[short, None])
        tokens[short] = ids.gather(1, picked)[:, 0]
    return tokens


def is_random(params: SamplingParams) -> bool:
    """Whether the request draws at all; it is greedy otherwise."""
    return params.temperature >= MIN_TEMPERATURE


def _finite_top(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`logits` `[R, vocab]` with rows whose greatest is not finite mended, and the greatest of each `[R, 1]`.

    NaN counts as forbidden and +inf as the greatest number; a row that allows nothing says token 0,
    as the argmax does.
    """
    top = logits.amax(-1, keepdim=True)
    odd = ~top.isfinite()[:, 0]
    if not odd.any():
        return logits, top
    mended = logits[odd].nan_to_num(nan=-torch.inf, posinf=torch.finfo(logits.dtype).max, neginf=-torch.inf)
    mended[(mended == -torch.inf).all(-1), 0] = 0.0
    logits = logits.clone()
    logits[odd] = mended
    return logits, logits.amax(-1, keepdim=True)


def _pick(probabilities: torch.Tensor, vocab: int, params: Draw, at: torch.Tensor) -> torch.Tensor:
    """The place of the chosen token in each row of descending `probabilities` `[R, C]`, as `[R, 1]`.

    The rows are the first C of `vocab` tokens; -1 where the choice depends on what comes after them.
    """
    known = probabilities.shape[1]
    whole = known == vocab
    mass = probabilities.cumsum(-1)
    # Tokens that min_p and top_k leave; more than `known` means that nothing known ends the prefix.
    likely = (probabilities >= params.min_p * probabilities[:, :1]).sum(-1, keepdim=True).double()
    left = torch.where((likely == known) & (not whole), vocab, likely)
    left = torch.where(params.top_k > 0, torch.minimum(left, params.top_k), left)
    left = left.clamp(min=1)  # a min_p above 1 or not a number leaves the best one
    cut_later = (left > known) & ((params.min_p > 0) | (params.top_k > 0))
    inside = mass.gather(1, (left.clamp(max=known) - 1).long())
    total = torch.where(left >= vocab, mass[:, -1:] if whole else torch.ones_like(inside), inside)
    # The shortest prefix of those that holds top_p of their mass.
    nucleus = ((mass < params.top_p * total).sum(-1, keepdim=True) + 1).double()
    last = torch.where(params.top_p < 1, torch.minimum(nucleus, left), left)
    kept = torch.where(last > known, total, mass.gather(1, (last.clamp(max=known) - 1).long()))
    place = (mass <= at * kept).sum(-1, keepdim=True).double()
    place = torch.minimum(place, last - 1)
    unknown = cut_later | ((params.top_p < 1) & (last > known)) | (place >= known)
    return torch.where(unknown, -1, place).long()
