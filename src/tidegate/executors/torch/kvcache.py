"""The paged KV tensor: one allocation for all layers, addressed by block id."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidegate.errors import ConfigError


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

    def blocks_in(self, kv_bytes: int) -> int:
        """Whole blocks in `kv_bytes` bytes; ConfigError if not even one fits."""
        blocks = kv_bytes // self.block_bytes
        if blocks < 1:
            raise ConfigError(
                f"the KV memory of {kv_bytes} bytes holds no block of {self.block_bytes} bytes: "
                "raise it or lower block_size"
            )
        return int(blocks)


class PagedKv:
    """Keys and values, `[layers, 2, blocks, block_size, kv_heads, head_dim]`.

    The tensor is zeroed once so that a masked read of a never-written position is finite.
    """

    def __init__(self, shape: KvShape, blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.blocks = blocks
        self.data = torch.zeros(
            (shape.layers, 2, blocks, shape.block_size, shape.kv_heads, shape.head_dim),
            dtype=shape.dtype,
            device=device,
        )

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each `[blocks, block_size, kv_heads, head_dim]`."""
        return self.data[index, 0], self.data[index, 1]
