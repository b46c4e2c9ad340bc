"""The decode kernel for CPUs: one new token per sequence, attending to its paged context.

Work is spread over (sequence, key/value head) pairs, so a query group reads each key and value once.
bfloat16 arrives as its bits (uint16), is widened in registers, and sums are float32 throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

# Torch loads its OpenMP runtime first, so that numba finds the same one and both share one thread pool:
# two pools on the same cores spin against each other.
import torch  # noqa: F401
from numba import njit, prange


@njit(inline="always")
def _same(x):  # type: ignore[no-untyped-def]
    return x


@njit(inline="always")
def _widen(x):  # type: ignore[no-untyped-def]
    """The float32 whose upper half is the bfloat16 with bits `x`."""
    return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)


@njit(inline="always")
def _exp(x):  # type: ignore[no-untyped-def]
    """e**x for x <= 0 as float32, relative error below 3e-7; written out so that loops over it vectorise.

    2**f by its Taylor series on [-0.5, 0.5], scaled by 2**n through the exponent bits.
    """
    y = max(x * np.float32(1.4426950408889634), np.float32(-126.0))
    n = np.floor(y + np.float32(0.5))
    f = (y - n) * np.float32(0.6931471805599453)
    p = np.float32(1.0 / 5040.0)
    p = p * f + np.float32(1.0 / 720.0)
    p = p * f + np.float32(1.0 / 120.0)
    p = p * f + np.float32(1.0 / 24.0)
    p = p * f + np.float32(1.0 / 6.0)
    p = p * f + np.float32(0.5)
    p = p * f + np.float32(1.0)
    p = p * f + np.float32(1.0)
    scale = np.int32((np.int32(n) + np.int32(127)) << np.int32(23))
    return p * scale.view(np.float32)


@lru_cache(maxsize=None)
def decode_kernel(head_dim: int, group: int, block_size: int, bits16: bool) -> Callable[..., None]:
    """The kernel for one model shape, compiled at its first call.

    Called as `kernel(out, q, keys, values, tables, positions, slots, scaling, window, softcap)` with
    out, q:       `[S, kv_heads * group, head_dim]`, float32 (out) and the KV dtype (q)
    keys, values: `[blocks, block_size, kv_heads, head_dim]` of one layer, the new token already written
    tables:       `[slots, width]` int32 block ids; positions: `[slots]` int64, KV position of the new token
    slots:        `[S]` int64
    window:       keys seen by a query at most, itself included (0 = all); softcap: 0 = none
    """
    load = _widen if bits16 else _same
    D, G, B = head_dim, group, block_size

    @njit(parallel=True, fastmath=True, nogil=True, error_model="numpy")
    def kernel(out, q, keys, values, tables, positions, slots, scaling, window, softcap):  # type: ignore[no-untyped-def]
        kv_heads = keys.shape[2]
        for task in prange(slots.shape[0] * kv_heads):
            s = task // kv_heads
            h = task - s * kv_heads
            slot = slots[s]
            end = positions[slot] + 1
            start = max(0, end - window) if window > 0 else 0
            scores = np.empty((G, end - start), np.float32)
            query = np.empty((G, D), np.float32)
            for g in range(G):
                for d in range(D):
                    query[g, d] = load(q[s, h * G + g, d]) * scaling
            for b in range(start // B, (end - 1) // B + 1):
                block = tables[slot, b]
                for t in range(max(start - b * B, 0), min(end - b * B, B)):
                    for g in range(G):
                        dot = np.float32(0.0)
                        for d in range(D):
                            dot += query[g, d] * load(keys[block, t, h, d])
                        scores[g, b * B + t - start] = dot
            for g in range(G):
                if softcap > 0.0:
                    for i in range(end - start):
                        scores[g, i] = softcap * np.tanh(scores[g, i] / softcap)
                top = np.float32(-3.0e38)
                for i in range(end - start):
                    top = max(top, scores[g, i])
                total = np.float32(0.0)
                for i in range(end - start):
                    weight = _exp(scores[g, i] - top)
                    scores[g, i] = weight
                    total += weight
                inverse = np.float32(1.0) / total
                for i in range(end - start):
                    scores[g, i] *= inverse
            acc = np.zeros((G, D), np.float32)
            for b in range(start // B, (end - 1) // B + 1):
                block = tables[slot, b]
                for t in range(max(start - b * B, 0), min(end - b * B, B)):
                    for g in range(G):
                        weight = scores[g, b * B + t - start]
                        for d in range(D):
                            acc[g, d] += weight * load(values[block, t, h, d])
            for g in range(G):
                for d in range(D):
                    out[s, h * G + g, d] = acc[g, d]

    return kernel
