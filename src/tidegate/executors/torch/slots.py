"""Per-slot columns, kept up by plan deltas, and the packed batch of a step made from them.

A steady decode step touches no Python object per request: positions, block tables and last tokens are
columns, and the decoding slots are one array that lives as long as `plan.decodes` is the same list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tidegate.core.plan import Chunk, Growth, Join, StepPlan
from tidegate.executors.torch.attention import ChunkSpan, StepBatch
from tidegate.executors.torch.kvcache import PagedKv


@dataclass(slots=True)
class PackedStep:
    """The model's input: decodes first, then chunks.

    input_ids, position_ids: `[1, T]`; logit_rows: `[E]` rows to take logits of, in the order of
    `StepPlan.emitting()`; emit_slots: `[E]` their slots, emit_index the same on the device.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logit_rows: torch.Tensor
    emit_slots: np.ndarray
    emit_index: torch.Tensor
    batch: StepBatch


class Slots:
    """Columns by slot. `width` is the most blocks one request may hold."""

    def __init__(self, max_num_seqs: int, width: int, kv: PagedKv, device: torch.device, numba: bool) -> None:
        self.kv = kv
        self.device = device
        self.numba = numba
        self.tables = np.zeros((max_num_seqs, width), np.int32)
        self.held = np.zeros(max_num_seqs, np.int64)
        self.positions = np.zeros(max_num_seqs, np.int64)
        self.tokens: list[np.ndarray] = [np.empty(0, np.int64)] * max_num_seqs
        self.last_token = torch.zeros(max_num_seqs, dtype=torch.long, device=device)
        self._decodes: list[int] | None = None
        self._slots = np.empty(0, np.int64)
        self._slots_on_device = torch.empty(0, dtype=torch.long, device=device)
        self._rows = torch.empty(0, dtype=torch.long, device=device)

    def join(self, join: Join) -> None:
        """A request takes a slot: its known tokens and blocks replace whatever was there."""
        self.tokens[join.slot] = np.asarray(join.tokens, np.int64)
        self.tables[join.slot, : len(join.blocks)] = join.blocks
        self.held[join.slot] = len(join.blocks)
        self.positions[join.slot] = join.cached

    def grow(self, growth: Sequence[Growth]) -> None:
        """Append one block each to some block tables."""
        for slot, block in growth:
            self.tables[slot, self.held[slot]] = block
            self.held[slot] += 1

    def pack(self, plan: StepPlan) -> PackedStep:
        """The batch of `plan`, whose deltas are applied already."""
        slots = self._decoding(plan.decodes)
        positions = self.positions[slots]
        ids = self.last_token.index_select(0, self._slots_on_device)
        if not plan.chunks:
            return self._packed(ids, positions, slots, slots, self._rows, self._kv_rows(slots, positions), [])
        return self._pack_mixed(plan.chunks, ids, positions, slots)

    def advance(self, plan: StepPlan) -> None:
        """Move positions past what the step computed."""
        self.positions[self._slots] += 1
        for chunk in plan.chunks:
            self.positions[chunk.slot] = chunk.start + chunk.length

    def _pack_mixed(
        self, chunks: Sequence[Chunk], ids: torch.Tensor, positions: np.ndarray, slots: np.ndarray
    ) -> PackedStep:
        all_ids, all_positions, all_rows = [ids], [positions], [self._kv_rows(slots, positions)]
        spans, emit_rows, emit_slots = [], list(range(len(slots))), slots.tolist()
        row = len(slots)
        for chunk in chunks:
            end = chunk.start + chunk.length
            at = np.arange(chunk.start, end)
            all_ids.append(torch.from_numpy(self.tokens[chunk.slot][chunk.start : end]).to(self.device))
            all_positions.append(at)
            all_rows.append(self._kv_rows(np.full(chunk.length, chunk.slot), at))
            blocks = self.tables[chunk.slot, : -(-end // self.kv.shape.block_size)].astype(np.int64)
            spans.append(ChunkSpan(row, chunk.length, chunk.start, torch.from_numpy(blocks).to(self.device)))
            row += chunk.length
            if chunk.emits:
                emit_rows.append(row - 1)
                emit_slots.append(chunk.slot)
        return self._packed(
            torch.cat(all_ids),
            np.concatenate(all_positions),
            slots,
            np.asarray(emit_slots, np.int64),
            torch.tensor(emit_rows, dtype=torch.long, device=self.device),
            np.concatenate(all_rows),
            spans,
        )

    def _packed(
        self,
        ids: torch.Tensor,
        positions: np.ndarray,
        slots: np.ndarray,
        emit_slots: np.ndarray,
        logit_rows: torch.Tensor,
        kv_rows: np.ndarray,
        spans: list[ChunkSpan],
    ) -> PackedStep:
        batch = StepBatch(
            kv=self.kv,
            slots=slots,
            tables=self.tables,
            positions=self.positions,
            kv_rows=torch.from_numpy(kv_rows).to(self.device),
            chunks=spans,
            numba=self.numba,
        )
        position_ids = torch.from_numpy(positions)[None].to(self.device)
        emit_index = self._slots_on_device if emit_slots is slots else torch.from_numpy(emit_slots).to(self.device)
        return PackedStep(ids[None], position_ids, logit_rows, emit_slots, emit_index, batch)

    def _kv_rows(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Flat KV position that each (slot, position) pair writes."""
        size = self.kv.shape.block_size
        return self.tables[slots, positions // size].astype(np.int64) * size + positions % size

    def _decoding(self, decodes: list[int]) -> np.ndarray:
        """The decoding slots as an array, kept while the plan's list is the same object."""
        if decodes is not self._decodes:
            self._decodes = decodes
            self._slots = np.asarray(decodes, np.int64)
            self._slots_on_device = torch.from_numpy(self._slots).to(self.device)
            self._rows = torch.arange(len(decodes), device=self.device)
        return self._slots
