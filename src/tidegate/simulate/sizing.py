"""How large the KV pool of a simulated engine is, where nobody says."""

from __future__ import annotations

from tidegate.errors import InputError
from tidegate.executors.sim.step_cost import StepCost

MEMORY_SHARE = 0.9
"""Of the accelerator's memory, what weights and KV may take; the rest is for activations (vLLM's default)."""


def pool_blocks(cost: StepCost, block_size: int, kv_memory: float | None = None) -> int:
    """KV blocks in `kv_memory` bytes, or else in what the weights leave of `MEMORY_SHARE` of the memory.

    Raises InputError where that is not one.
    """
    model, hardware = cost.model, cost.hardware
    # KV heads that are fewer than the GPUs are held by several of them.
    block = block_size * model.kv_bytes_per_token * cost.tp / cost.kv_shares
    room = cost.tp * hardware.memory_bytes * MEMORY_SHARE - model.weight_bytes if kv_memory is None else kv_memory
    blocks = int(room // block)
    if blocks < 1:
        gpus = f"{cost.tp} x {hardware.name}" if cost.tp > 1 else hardware.name
        needed = f"{model.weight_bytes / 1e9:.1f} GB of weights and a block of {block / 1e6:.1f} MB"
        where = f"{MEMORY_SHARE:.0%} of {gpus}" if kv_memory is None else f"{kv_memory / 1e6:.1f} MB"
        raise InputError(f"{model.name}: no KV block fits in {where} ({needed}); use more --tp or other --hardware")
    return blocks
