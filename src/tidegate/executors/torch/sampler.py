"""Logits to token ids for a whole batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from tidegate.core.plan import Join
from tidegate.core.request import FinishReason
from tidegate.executors.torch.model import LoadedModel


@dataclass(slots=True)
class Sampled:
    """`[E]` token ids, and what `StepResult` wants beside them."""

    tokens: torch.Tensor
    finished: list[tuple[int, FinishReason]] = field(default_factory=list)
    details: dict[int, object] = field(default_factory=dict)


class Sampler:
    def __init__(self, loaded: LoadedModel, max_num_seqs: int) -> None:
        pass

    def join(self, join: Join) -> None:
        pass

    def leave(self, slot: int) -> None:
        pass

    def sample(self, logits: torch.Tensor, slots: np.ndarray) -> Sampled:
        return Sampled(logits.argmax(-1))
