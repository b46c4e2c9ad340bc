"""The decode kernel for CPUs: one new token per sequence, attending to its paged context.

A query group reads each key and value once. bfloat16 arrives as its bits (uint16), is widened in
registers, and sums are float32 throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

# Torch comes first, so that numba finds the OpenMP runtime that torch loaded and both share one thread
# pool: two pools on the same cores spin against each other.
import torch  # noqa: F401
from numba import njit, prange

from tidegate.executors.torch.simd import primitives

WHOLE_SEQUENCES = 8
"""From this many sequences on, one task takes all heads of a sequence, which reads memory in order."""


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


@njit(fastmath=True, nogil=True, error_model="numpy")
def _softmax(row, softcap):  # type: ignore[no-untyped-def]
    """Scores to weights in place; `softcap` 0 is none."""
    if softcap > 0.0:
        for i in range(row.shape[0]):
            row[i] = softcap * np.tanh(row[i] / softcap)
    top = np.float32(-3.0e38)
    for i in range(row.shape[0]):
        top = max(top, row[i])
    total = np.float32(0.0)
    for i in range(row.shape[0]):
        row[i] = _exp(row[i] - top)
        total += row[i]
    inverse = np.float32(1.0) / total
    for i in range(row.shape[0]):
        row[i] *= inverse


@cache
def decode_kernel(head_dim: int, bits16: bool) -> Callable[..., None]:
    """The kernel for one head size and KV format, compiled at its first call (some seconds).

    Called as `kernel(out, q, keys, values, tables, positions, slots, scaling, window, softcap)` with
    out, q:       `[S, heads, head_dim]`, float32 (out) and the KV dtype (q)
    keys, values: `[blocks, block_size, kv_heads, head_dim]` of one layer, the new token already written
    tables:       `[slots, width]` int32 block ids; positions: `[slots]` int64, KV position of the new token
    slots:        `[S]` int64
    window:       keys seen by a query at most, itself included (0 = all); softcap: 0 = none
    """
    dot, add_weighted = primitives(head_dim, bits16)
    load = _widen if bits16 else _same
    item = 2 if bits16 else 4
    row_bytes, float_bytes = head_dim * item, head_dim * 4

    @njit(fastmath=True, nogil=True, error_model="numpy")
    def attend(out, q, keys, values, table, start, end, first, heads, scaling, softcap):  # type: ignore[no-untyped-def]
        """KV heads `first .. first+heads` of one sequence over KV positions `start .. end`."""
        size, group, n = keys.shape[1], q.shape[0] // keys.shape[2], end - start
        rows, stride = heads * group, keys.shape[2] * row_bytes
        query, acc = np.empty((rows, head_dim), np.float32), np.zeros((rows, head_dim), np.float32)
        scores = np.empty((rows, n), np.float32)
        for r in range(rows):
            for d in range(head_dim):
                query[r, d] = load(q[first * group + r, d]) * scaling
        query_at, acc_at, scores_at = (
            np.int64(query.ctypes.data),
            np.int64(acc.ctypes.data),
            np.int64(scores.ctypes.data),
        )
        keys_at = np.int64(keys.ctypes.data) + first * row_bytes
        values_at = np.int64(values.ctypes.data) + first * row_bytes
        for b in range(start // size, (end - 1) // size + 1):
            low, high = max(b * size, start), min(b * size + size, end)
            at = keys_at + (np.int64(table[b]) * size + low - b * size) * stride
            for i in range(low - start, high - start):
                for h in range(heads):
                    for r in range(h * group, (h + 1) * group):
                        scores[r, i] = dot(query_at + r * float_bytes, at + h * row_bytes)
                at += stride
        for r in range(rows):
            _softmax(scores[r], softcap)
        for b in range(start // size, (end - 1) // size + 1):
            low, high = max(b * size, start), min(b * size + size, end)
            at = values_at + (np.int64(table[b]) * size + low - b * size) * stride
            for h in range(heads):
                for r in range(h * group, (h + 1) * group):
                    weights = scores_at + (r * n + low - start) * 4
                    add_weighted(acc_at + r * float_bytes, weights, at + h * row_bytes, stride, high - low)
        for r in range(rows):
            for d in range(head_dim):
                out[first * group + r, d] = acc[r, d]

    @njit(parallel=True, fastmath=True, nogil=True, error_model="numpy")
    def kernel(out, q, keys, values, tables, positions, slots, scaling, window, softcap):  # type: ignore[no-untyped-def]
        heads = keys.shape[2] if slots.shape[0] >= WHOLE_SEQUENCES else 1
        parts = keys.shape[2] // heads
        for task in prange(slots.shape[0] * parts):
            s = task // parts
            slot = slots[s]
            end = positions[slot] + 1
            start = max(0, end - window) if window > 0 else 0
            first = (task - s * parts) * heads
            attend(out[s], q[s], keys, values, tables[slot], start, end, first, heads, scaling, softcap)

    return kernel
