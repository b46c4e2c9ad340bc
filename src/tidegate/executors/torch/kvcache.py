"""The paged KV tensor: one allocation for all layers, addressed by block id."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidegate.errors import ConfigError
from tidegate.executors.torch.hardware import available_memory

GIB = 1 << 30
LOWER = "lower kv_memory (or num_blocks)"


@dataclass(frozen=True, slots=True)
class KvShape:
    """How much KV one token takes. `layers` counts attention layers."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        return 2 * self.layers * self.block_size * self.kv_heads * self.head_dim * self.dtype.itemsize

    def blocks_in(self, kv_bytes: int, option: str = "kv_memory") -> int:
        """Whole blocks in `kv_bytes` bytes; ConfigError, naming the `option` that said so, if not even one fits."""
        blocks = kv_bytes // self.block_bytes
        if blocks < 1:
            raise ConfigError(
                f"{option} of {kv_bytes:,} bytes holds no block of {self.block_bytes:,} bytes: "
                "raise it or lower block_size"
            )
        return int(blocks)


class PagedKv:
    """Keys and values, `[layers, 2, blocks, block_size, kv_heads, head_dim]`.

    The tensor is zeroed once so that a masked read of a never-written position is finite.
    Raises ConfigError where the device has no memory for it.
    """

    def __init__(self, shape: KvShape, blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.blocks = blocks
        wanted, available = blocks * shape.block_bytes, available_memory(device)
        if available is not None and wanted > available:
            raise ConfigError(f"{_pool(blocks, wanted)}, and {available / GIB:,.1f} GiB are free: {LOWER}")
        size = (shape.layers, 2, blocks, shape.block_size, shape.kv_heads, shape.head_dim)
        try:
            self.data = torch.zeros(size, dtype=shape.dtype, device=device)
        except (RuntimeError, TypeError) as error:  # no memory after all, or a size beyond 64 bits
            raise ConfigError(f"{_pool(blocks, wanted)}, which cannot be allocated: {LOWER}") from error
        self._layers = [(layer[0], layer[1]) for layer in self.data]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each `[blocks, block_size, kv_heads, head_dim]`."""
        return self._layers[index]


def _pool(blocks: int, size: int) -> str:
    return f"the KV pool of {blocks:,} blocks takes {size / GIB:,.1f} GiB"
