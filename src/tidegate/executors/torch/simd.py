"""Vector primitives for numba kernels, written in LLVM's own terms.

Numba's loops over array elements must assume that arrays overlap, which keeps sums in memory instead of
registers (four times slower here). These primitives load whole rows of `dim` lanes as one vector value;
LLVM splits that into whatever registers the CPU has, so they are portable.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

FLOAT, INT32, INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
FAST = ("fast",)


CACHE_LINE = 64

ACCUMULATORS = 96
"""Float32 lanes that sums over rows may hold: twelve registers of eight, which leaves AVX2 four for everything else."""


class Primitives(NamedTuple):
    """Callable inside numba functions; every address is an int64, rows are `dim` contiguous elements.

    A key or value row is loaded and widened once for all `group` query heads that share it.

    scores(out, out_stride, queries, row): the inner products of float32[group, dim] at `queries` with the KV row at
        `row`, as float32 that lie `out_stride` bytes apart.
    add_weighted(acc, weights, weights_stride, rows, stride, count): adds weights[g, i] * row i to acc[g] for `count`
        KV rows that lie `stride` bytes apart; acc is float32[group, dim], and the float32 weights of one query head
        lie `weights_stride` bytes from the next one's.
    prefetch(row): has the KV row at `row` brought near.
    """

    scores: Any
    add_weighted: Any
    prefetch: Any


@cache
def primitives(dim: int, group: int, bits16: bool) -> Primitives:
    """The primitives for KV rows of `dim` float32, or of `dim` bfloat16 with `bits16`."""
    tile = largest_divisor(dim, ACCUMULATORS // group)
    item = 2 if bits16 else 4

    def load_floats(builder: Any, address: Any, lanes: int) -> Any:
        kind = ir.VectorType(FLOAT, lanes)
        return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)

    def load_row(builder: Any, address: Any, lanes: int) -> Any:
        if not bits16:
            return load_floats(builder, address, lanes)
        halves, words = ir.VectorType(ir.IntType(16), lanes), ir.VectorType(INT32, lanes)
        raw = builder.load(builder.inttoptr(address, halves.as_pointer()), align=2)
        upper = builder.shl(builder.zext(raw, words), ir.Constant(words, [16] * lanes))
        return builder.bitcast(upper, ir.VectorType(FLOAT, lanes))

    def spread(builder: Any, scalar: Any, lanes: int) -> Any:
        undefined = ir.Constant(ir.VectorType(FLOAT, lanes), ir.Undefined)
        first = builder.insert_element(undefined, scalar, INT32(0))
        return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes))

    def offset(builder: Any, address: Any, distance: Any) -> Any:
        return builder.add(address, INT64(distance) if isinstance(distance, int) else distance)

    @intrinsic
    def scores(_context, out, out_stride, queries, row):  # type: ignore[no-untyped-def]
        def codegen(context, builder, _signature, args):  # type: ignore[no-untyped-def]
            out, out_stride, queries, row = args
            keys = load_row(builder, row, dim)
            kind = ir.FunctionType(FLOAT, [FLOAT, ir.VectorType(FLOAT, dim)])
            reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{dim}f32")
            for g in range(group):
                query = load_floats(builder, offset(builder, queries, g * dim * 4), dim)
                total = builder.call(reduce, [FLOAT(0.0), builder.fmul(query, keys, flags=FAST)], fastmath=FAST)
                at = offset(builder, out, builder.mul(INT64(g), out_stride))
                builder.store(total, builder.inttoptr(at, FLOAT.as_pointer()))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64), codegen

    @intrinsic
    def add_weighted(_context, acc, weights, weights_stride, rows, stride, count):  # type: ignore[no-untyped-def]
        def codegen(context, builder, _signature, args):  # type: ignore[no-untyped-def]
            acc, weights, weights_stride, rows, stride, count = args
            kind = ir.VectorType(FLOAT, tile)
            sums = [cgutils.alloca_once(builder, kind) for _ in range(group)]  # LLVM keeps them in registers
            for start in range(0, dim, tile):
                targets = [offset(builder, acc, (g * dim + start) * 4) for g in range(group)]
                for total, target in zip(sums, targets, strict=True):
                    builder.store(load_floats(builder, target, tile), total)
                with cgutils.for_range(builder, count) as loop:
                    at = offset(builder, rows, builder.mul(loop.index, stride))
                    row = load_row(builder, offset(builder, at, start * item), tile)
                    for g, total in enumerate(sums):
                        where = offset(builder, weights, builder.mul(INT64(g), weights_stride))
                        floats = builder.inttoptr(where, FLOAT.as_pointer())
                        weight = spread(builder, builder.load(builder.gep(floats, [loop.index])), tile)
                        product = builder.fmul(weight, row, flags=FAST)
                        builder.store(builder.fadd(builder.load(total), product, flags=FAST), total)
                for total, target in zip(sums, targets, strict=True):
                    builder.store(builder.load(total), builder.inttoptr(target, kind.as_pointer()), align=4)
            return context.get_dummy_value()

        signature = types.void(types.int64, types.int64, types.int64, types.int64, types.int64, types.int64)
        return signature, codegen

    @intrinsic
    def prefetch(_context, address):  # type: ignore[no-untyped-def]
        def codegen(context, builder, _signature, args):  # type: ignore[no-untyped-def]
            pointer = ir.IntType(8).as_pointer()
            kind = ir.FunctionType(ir.VoidType(), [pointer, INT32, INT32, INT32])
            ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            for line in range(0, dim * item, CACHE_LINE):
                where = builder.inttoptr(offset(builder, args[0], line), pointer)
                builder.call(ask, [where, INT32(0), INT32(3), INT32(1)])
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    return Primitives(scores, add_weighted, prefetch)


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit` (and at least 1)."""
    return next(d for d in range(max(1, min(number, limit)), 0, -1) if number % d == 0)
