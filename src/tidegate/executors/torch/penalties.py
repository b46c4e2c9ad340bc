"""Repetition, presence and frequency penalties, for the slots that ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tidegate.engine.sampling import SamplingParams
from tidegate.executors.torch.draw import LARGEST


class Penalties:
    """Token counts by slot, in a table that grows by doubling and holds penalised slots only.

    A row takes 5 bytes per vocabulary entry.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab = vocab_size
        self._device = device
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._strength = torch.zeros((0, 3), device=device)

    def join(self, slot: int, params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int]) -> None:
        """Start counting for `slot`, with what its prompt and its outputs so far hold."""
        if not self._free:
            self._extend()
        row = self._rows[slot] = self._free.pop()
        self._in_prompt[row] = False
        self._in_prompt[row, torch.tensor(list(prompt), dtype=torch.long)] = True
        emitted = torch.tensor(list(outputs), dtype=torch.long)
        self._counts[row] = torch.bincount(emitted, minlength=self._vocab).int()
        strength = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self._strength[row] = _finite(strength)

    def leave(self, slot: int) -> None:
        """Stop counting for `slot`, if it was counted."""
        row = self._rows.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        """Penalised logits `[R, vocab]` of the rows whose requests sit in `slots` `[R]`."""
        rows = self._table_rows(slots)
        counts = self._counts[rows]
        repetition, presence, frequency = self._strength[rows][:, :, None].unbind(1)
        seen = self._in_prompt[rows] | (counts > 0)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        return torch.where(seen, repeated, logits) - frequency * counts - presence * (counts > 0)

    def count(self, slots: np.ndarray, tokens: torch.Tensor) -> None:
        """Book one sampled token for each of `slots`."""
        self._counts[self._table_rows(slots), tokens] += 1

    def _table_rows(self, slots: np.ndarray) -> torch.Tensor:
        return torch.tensor([self._rows[int(s)] for s in slots], dtype=torch.long, device=self._device)

    def _extend(self) -> None:
        old = len(self._counts)
        more = max(4, old)
        self._free.extend(range(old, old + more))
        self._in_prompt = torch.cat([self._in_prompt, self._in_prompt.new_zeros(more, self._vocab)])
        self._counts = torch.cat([self._counts, self._counts.new_zeros(more, self._vocab)])
        self._strength = torch.cat([self._strength, self._strength.new_zeros(more, 3)])


def _finite(strength: tuple[float, float, float]) -> torch.Tensor:
    """Penalties (repetition, presence, frequency) as `[3]` float32 that keep finite logits finite.

    In float32 a tiny repetition penalty would become 0 and a large one infinite; what is no number is off.
    """
    repetition, presence, frequency = torch.tensor(strength, dtype=torch.float64)
    return torch.stack(
        [
            repetition.nan_to_num(1.0).clamp(1 / LARGEST, LARGEST),
            presence.nan_to_num(0.0).clamp(-LARGEST, LARGEST),
            frequency.nan_to_num(0.0).clamp(-LARGEST, LARGEST),
        ]
    ).float()
