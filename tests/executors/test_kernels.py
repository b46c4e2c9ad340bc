"""The decode kernel against its slow twin of plain torch operations."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.executors.torch.attention import decode_numba, decode_torch

HEAD_DIM = 16


@given(
    sequences=st.integers(1, 12),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    block_size=st.integers(1, 17),
    window=st.sampled_from([0, 1, 7]),
    softcap=st.sampled_from([0.0, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_the_kernel_equals_gathered_attention(
    sequences: int,
    kv_heads: int,
    group: int,
    block_size: int,
    window: int,
    softcap: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Ragged contexts, shuffled tables, blocks shared by several sequences."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    slots = rng.permutation(16)[:sequences].astype(np.int64)
    positions = rng.integers(0, 60, 16).astype(np.int64)
    tables = rng.integers(0, 20, (16, 60)).astype(np.int32)
    shape = (20, block_size, kv_heads, HEAD_DIM)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    q = (torch.randn((sequences, kv_heads * group, HEAD_DIM), generator=generator) * 2).to(dtype)
    arguments = (tables, positions, slots, 0.25, window, softcap)
    fast = decode_numba(q, keys, values, *arguments)
    slow = decode_torch(q.float(), keys.float(), values.float(), *arguments)
    assert fast.dtype == dtype
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(fast.float(), slow, atol=tolerance, rtol=tolerance)
