"""Two vector primitives for numba kernels, written in LLVM's own terms.

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

FLOAT, INT32 = ir.FloatType(), ir.IntType(32)
FAST = ("fast",)


class Primitives(NamedTuple):
    """Callable inside numba functions; every address is an int64, rows are `dim` contiguous elements.

    dot(a, row) -> float32: inner product of float32[dim] at `a` and the KV row at `row`.
    add_weighted(acc, weights, rows, stride, count): adds weights[i] * row i to float32[dim] at `acc`,
        for `count` float32 weights and rows that lie `stride` bytes apart.
    """

    dot: Any
    add_weighted: Any


@cache
def primitives(dim: int, bits16: bool) -> Primitives:
    """The primitives for KV rows of `dim` float32, or of `dim` bfloat16 with `bits16`."""
    vector = ir.VectorType(FLOAT, dim)

    def load_floats(builder: Any, address: Any) -> Any:
        return builder.load(builder.inttoptr(address, vector.as_pointer()), align=4)

    def load_row(builder: Any, address: Any) -> Any:
        if not bits16:
            return load_floats(builder, address)
        halves, words = ir.VectorType(ir.IntType(16), dim), ir.VectorType(INT32, dim)
        raw = builder.load(builder.inttoptr(address, halves.as_pointer()), align=2)
        upper = builder.shl(builder.zext(raw, words), ir.Constant(words, [16] * dim))
        return builder.bitcast(upper, vector)

    def spread(builder: Any, scalar: Any) -> Any:
        undefined = ir.Constant(vector, ir.Undefined)
        first = builder.insert_element(undefined, scalar, INT32(0))
        return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(INT32, dim), [0] * dim))

    @intrinsic
    def dot(_context, a, row):  # type: ignore[no-untyped-def]
        def codegen(_context, builder, _signature, args):  # type: ignore[no-untyped-def]
            product = builder.fmul(load_floats(builder, args[0]), load_row(builder, args[1]), flags=FAST)
            kind = ir.FunctionType(FLOAT, [FLOAT, vector])
            total = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{dim}f32")
            return builder.call(total, [FLOAT(0.0), product], fastmath=FAST)

        return types.float32(types.int64, types.int64), codegen

    @intrinsic
    def add_weighted(_context, acc, weights, rows, stride, count):  # type: ignore[no-untyped-def]
        def codegen(context, builder, _signature, args):  # type: ignore[no-untyped-def]
            acc, weights, rows, stride, count = args
            target = builder.inttoptr(acc, vector.as_pointer())
            floats = builder.inttoptr(weights, FLOAT.as_pointer())
            register = cgutils.alloca_once(builder, vector)  # LLVM keeps it in registers over the loop
            builder.store(builder.load(target, align=4), register)
            with cgutils.for_range(builder, count) as loop:
                weight = spread(builder, builder.load(builder.gep(floats, [loop.index])))
                row = load_row(builder, builder.add(rows, builder.mul(loop.index, stride)))
                product = builder.fmul(weight, row, flags=FAST)
                builder.store(builder.fadd(builder.load(register), product, flags=FAST), register)
            builder.store(builder.load(register), target, align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64, types.int64), codegen

    return Primitives(dot, add_weighted)
