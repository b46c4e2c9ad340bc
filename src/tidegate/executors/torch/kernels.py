"""The decode kernel for CPUs: one new token per sequence, attending to its paged context.

A query group reads each key and value once. bfloat16 comes and goes as its bits (uint16), is widened in
registers, and sums are float32 throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

# Torch comes first and brings its own copy of GNU's OpenMP; numba then takes the system's. Loaded the other way round
# both share the system's copy and one pool, and change its size at every turn: a float32 prefill took five times
# as long.
import torch
from numba import njit, prange

from tidegate.executors.torch.simd import primitives

WHOLE_SEQUENCES = 8
"""From this many sequences on, one task takes all heads of a sequence, which reads memory in order."""


@njit(inline="always")
def same(x):  # type: ignore[no-untyped-def]
    return x


@njit(inline="always")
def widen(x):  # type: ignore[no-untyped-def]
    """The float32 whose upper half is the bfloat16 with bits `x`."""
    return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)


@njit(inline="always")
def narrow(x):  # type: ignore[no-untyped-def]
    """The bits of the bfloat16 nearest to the float32 `x`, ties to even. Infinity stays, NaN may not."""
    bits = np.float32(x).view(np.uint32)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@njit(inline="always")
def rounded(x):  # type: ignore[no-untyped-def]
    """`x` as a bfloat16 would hold it."""
    return widen(narrow(x))


@njit(inline="always")
def exp(x):  # type: ignore[no-untyped-def]
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


def as_array(x: torch.Tensor) -> np.ndarray:
    """A contiguous CPU tensor as the array that the kernels take."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


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
        row[i] = exp(row[i] - top)
        total += row[i]
    inverse = np.float32(1.0) / total
    for i in range(row.shape[0]):
        row[i] *= inverse


@cache
def decode_kernel(head_dim: int, group: int, bits16: bool) -> Callable[..., None]:
    """The kernel for one head size, query heads a KV head, and KV format, compiled at its first call (some seconds).

    Called as `kernel(out, q, keys, values, tables, positions, slots, scaling, window, softcap)` with
    out, q:       `[S, heads, head_dim]`
    keys, values: `[blocks, block_size, kv_heads, head_dim]` of one layer, the new token already written
    tables:       `[slots, width]` int32 block ids; positions: `[slots]` int64, KV position of the new token
    slots:        `[S]` int64
    window:       keys seen by a query at most, itself included (0 = all); softcap: 0 = none
    """
    scores_of, add_weighted, prefetch = primitives(head_dim, group, bits16)
    load, store = (widen, narrow) if bits16 else (same, same)
    item = 2 if bits16 else 4
    row_bytes, float_bytes = head_dim * item, head_dim * 4

    @njit(fastmath=True, nogil=True, error_model="numpy")
    def attend(out, q, keys, values, table, start, end, first, heads, scaling, softcap):  # type: ignore[no-untyped-def]
        """KV heads `first .. first+heads` of one sequence over KV positions `start .. end`."""
        size, n = keys.shape[1], end - start
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
        last = (end - 1) // size
        for b in range(start // size, last + 1):
            low, high = max(b * size, start), min(b * size + size, end)
            at = keys_at + (np.int64(table[b]) * size + low - b * size) * stride
            following = keys_at + np.int64(table[min(b + 1, last)]) * size * stride
            for i in range(low - start, high - start):
                for h in range(heads):
                    prefetch(following + (i - low + start) * stride + h * row_bytes)
                    out_at, query_row = scores_at + (h * group * n + i) * 4, query_at + h * group * float_bytes
                    scores_of(out_at, n * 4, query_row, at + h * row_bytes)
                at += stride
        for r in range(rows):
            _softmax(scores[r], softcap)
        for b in range(start // size, last + 1):
            low, high = max(b * size, start), min(b * size + size, end)
            at = values_at + (np.int64(table[b]) * size + low - b * size) * stride
            following = values_at + np.int64(table[min(b + 1, last)]) * size * stride
            for h in range(heads):
                for i in range(high - low):
                    prefetch(following + i * stride + h * row_bytes)
                weights = scores_at + (h * group * n + low - start) * 4
                acc_row = acc_at + h * group * float_bytes
                add_weighted(acc_row, weights, n * 4, at + h * row_bytes, stride, high - low)
        for r in range(rows):
            for d in range(head_dim):
                out[first * group + r, d] = store(acc[r, d])

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
