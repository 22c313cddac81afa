"""Memory by address, for kernels: arrays at an address, and reading ahead.

Rows lie in many pieces of memory. Kernels get the addresses of these pieces, because a list of
arrays costs them much more: the caller keeps the pieces alive for as long as a kernel runs.
"""

from __future__ import annotations

from typing import Any

from trireme.tables.compiled import compiled  # first: without numba it says what to install

# isort: split
import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@intrinsic  # type: ignore[untyped-decorator]
def read_ahead(typing_context: Any, address: Any) -> Any:
    """Asks the processor to bring the cache line at an address (uint64) near; changes nothing."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch",
            [cgutils.voidptr_t],
            ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number]),
        )
        pointer = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        read, keep, data = ir.Constant(number, 0), ir.Constant(number, 3), ir.Constant(number, 1)
        builder.call(function, [pointer, read, keep, data])
        return context.get_dummy_value()

    return types.void(address), generate


@intrinsic  # type: ignore[untyped-decorator]
def upper_bytes_equal(typing_context: Any, address: Any, byte: Any) -> Any:
    """Compares the upper bytes of the 16 uint32 numbers at an address, all at once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.IntType(32)
        vector = ir.VectorType(number, 16)
        pointer = builder.inttoptr(arguments[0], vector.as_pointer())
        uppers = builder.lshr(builder.load(pointer, align=64), ir.Constant(vector, [24] * 16))
        first = builder.insert_element(
            ir.Constant(vector, ir.Undefined), arguments[1], ir.Constant(number, 0)
        )
        wanted = builder.shuffle_vector(first, first, ir.Constant(vector, [0] * 16))
        equal = builder.icmp_unsigned("==", uppers, wanted)
        return builder.zext(builder.bitcast(equal, ir.IntType(16)), ir.IntType(64))

    return types.uint64(address, types.uint32), generate


@intrinsic  # type: ignore[untyped-decorator]
def lowest_bit(typing_context: Any, bits: Any) -> Any:
    """Returns the number of the lowest bit that is set in a uint64; 64 if none is."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


@compiled
def array_at(address: Any, size: Any, dtype: Any) -> Any:
    """Returns the array of shape (size,) that lies at an address (uint64), without a copy."""
    return numba.carray(_pointer(address), (size,), dtype)
