"""Floats that are rounded, moved by a zero point and kept within a byte: with NEON by conversions that saturate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from celosia.compiler.cpu.llvm import operations
from celosia.compiler.cpu.llvm.operations import I32
from celosia.compiler.expr.nodes import Binary, Call, Cast, Const, Expr

V = Any
I8, I16 = ir.IntType(8), ir.IntType(16)
LANES = 4
SMALL = -(2.0**20)
"""What NaN becomes: as good as the smallest value."""


def requantised(b: Any, e: Cast, lanes: int, has: frozenset[str], value: Callable[[Expr], V]) -> V:
    """clip(round_even(x) + zero) as int8 or uint8, of four lanes; None where `e` is something else. value: writes x and
    the zero point."""
    match e.value:
        case Call("clamp", (Binary("add", Call("round_even", (x,)), Cast(zero, "float32")), Const(low), Const(high))):
            limits = {"int8": (-128, 127), "uint8": (0, 255)}.get(e.dtype)
            if lanes != LANES or "fp-armv8" not in has or zero.dtype != e.dtype or limits != (low, high):
                return None
            return _by_neon(b, value(x), value(zero), e.dtype == "int8")
    return None


def _by_neon(b: Any, x: V, zero: V, signed: bool) -> V:
    if not operations.is_vector(x) or operations.is_vector(zero):
        return None
    halves, bytes_ = ir.VectorType(I16, LANES), ir.VectorType(I8, 2 * LANES)
    least = operations.like(x, "float32", SMALL)
    x = b.select(b.fcmp_ordered(">", x, least), x, least)
    whole = _called(b, "fcvtns.v4i32.v4f32", ir.VectorType(I32, LANES), x)
    narrow = _called(b, "sqxtn.v4i16", halves, whole)
    moved = operations.splat(b, (b.sext if signed else b.zext)(zero, I16), LANES)
    total = operations.intrinsic(b, "llvm.sadd.sat", narrow, moved)
    places = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(2 * LANES)))
    wide = b.shuffle_vector(total, ir.Constant(halves, ir.Undefined), places)
    found = _called(b, f"{'sqxtn' if signed else 'sqxtun'}.v8i8", bytes_, wide)
    word = b.extract_element(b.bitcast(found, ir.VectorType(I32, 2)), I32(0))
    return b.bitcast(word, ir.VectorType(I8, LANES))


def _called(b: Any, name: str, result: Any, x: V) -> V:
    full = f"llvm.aarch64.neon.{name}"
    fn = b.module.globals.get(full) or ir.Function(b.module, ir.FunctionType(result, [x.type]), full)
    return b.call(fn, [x])
