"""Requantisation with NEON: round floats, add a zero point and saturate to bytes by saturating conversions.

armv7 rounds no vectors: there adding a large number leaves no bits for fractions, for floats of a limited magnitude.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from celosia.compiler.cpu.llvm import operations
from celosia.compiler.cpu.llvm.operations import I32
from celosia.compiler.expr.nodes import Binary, Call, Cast, Const, Expr

V = Any
I8, I16 = ir.IntType(8), ir.IntType(16)
NEON_LANES = 4
MAX_MAGNITUDE = 2.0**20
"""Floats beyond it, and NaN, may become any float that saturates to the same byte."""
ROUNDING_ADDEND = 1.5 * 2**23
"""Added to a float up to MAX_MAGNITUDE, it leaves the nearest integer (ties to even) in the lowest bits."""


def requantise(b: Any, e: Cast, lanes: int, features: frozenset[str], value: Callable[[Expr], V]) -> V:
    """Write clip(round_even(x) + zero) as int8 or uint8 vectors; None where `e` is something else.

    value: writes x and the zero point.
    """
    match e.value:
        case Call("clamp", (Binary("add", Call("round_even", (x,)), Cast(zero, "float32")), Const(low), Const(high))):
            limits = {"int8": (-128, 127), "uint8": (0, 255)}.get(e.dtype)
            if lanes % NEON_LANES or "neon" not in features or zero.dtype != e.dtype or limits != (low, high):
                return None
            return _requantise_by_neon(b, value(x), value(zero), e.dtype == "int8", "fp-armv8" in features)
    return None


def _requantise_by_neon(b: Any, x: V, zero: V, signed: bool, is_aarch64: bool) -> V:
    """Round, add the zero point and narrow, eight lanes at a time."""
    if not operations.is_vector(x) or operations.is_vector(zero):
        return None
    n, bytes_ = x.type.count, ir.VectorType(I8, 2 * NEON_LANES)
    least = operations.like(x, "float32", -MAX_MAGNITUDE)
    x = b.select(b.fcmp_ordered(">", x, least), x, least)
    narrow = (
        ("aarch64.neon.sqxtn" if signed else "aarch64.neon.sqxtun")
        if is_aarch64
        else f"arm.neon.vqmovn{'s' if signed else 'su'}"
    )
    zero_point = operations.splat(b, (b.sext if signed else b.zext)(zero, I16), 2 * NEON_LANES)
    words = []
    for start in range(0, n, 2 * NEON_LANES):
        halves = [
            _round_to_int16(b, _four_lanes(b, x, first_lane), is_aarch64)
            for first_lane in range(start, min(n, start + 2 * NEON_LANES), NEON_LANES)
        ]
        eight = ir.Constant(ir.VectorType(I32, 2 * NEON_LANES), list(range(2 * NEON_LANES)))
        total = operations.intrinsic(b, "llvm.sadd.sat", b.shuffle_vector(halves[0], halves[-1], eight), zero_point)
        packed = b.bitcast(_call_intrinsic(b, f"{narrow}.v8i8", bytes_, total), ir.VectorType(I32, 2))
        words += [b.extract_element(packed, I32(k)) for k in range(len(halves))]
    if len(words) == 1:
        return b.bitcast(words[0], ir.VectorType(I8, NEON_LANES))
    combined = ir.Constant(ir.VectorType(I32, len(words)), ir.Undefined)
    for k, word in enumerate(words):
        combined = b.insert_element(combined, word, I32(k))
    return b.bitcast(combined, ir.VectorType(I8, n))


def _four_lanes(b: Any, x: V, start: int) -> V:
    lanes = ir.Constant(ir.VectorType(I32, NEON_LANES), list(range(start, start + NEON_LANES)))
    return b.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), lanes)


def _round_to_int16(b: Any, x: V, is_aarch64: bool) -> V:
    """Round four float32 to int16, saturating."""
    words, halves = ir.VectorType(I32, NEON_LANES), ir.VectorType(I16, NEON_LANES)
    if is_aarch64:
        return _call_intrinsic(
            b, "aarch64.neon.sqxtn.v4i16", halves, _call_intrinsic(b, "aarch64.neon.fcvtns.v4i32.v4f32", words, x)
        )
    limit, magic = (operations.like(x, "float32", constant) for constant in (MAX_MAGNITUDE, ROUNDING_ADDEND))
    x = b.select(b.fcmp_ordered("<", x, limit), x, limit)
    integers = b.sub(b.bitcast(b.fadd(x, magic), words), b.bitcast(magic, words))
    return _call_intrinsic(b, "arm.neon.vqmovns.v4i16", halves, integers)


def _call_intrinsic(b: Any, name: str, result: Any, x: V) -> V:
    full = f"llvm.{name}"
    fn = b.module.globals.get(full) or ir.Function(b.module, ir.FunctionType(result, [x.type]), full)
    return b.call(fn, [x])
