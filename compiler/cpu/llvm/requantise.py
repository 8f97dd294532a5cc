"""Floats that are rounded, moved by a zero point and kept within a byte: with NEON by conversions that saturate.

armv7 rounds no vectors: there a number that is added leaves no place for fractions, for floats of a limited size.
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
LANES = 4
LIMIT = 2.0**20
"""Floats beyond it, and NaN, become as good a number."""
ROUNDING = 1.5 * 2**23
"""Added to a float up to LIMIT, it leaves the nearest integer, even of two, in the lowest bits."""


def requantised(b: Any, e: Cast, lanes: int, has: frozenset[str], value: Callable[[Expr], V]) -> V:
    """clip(round_even(x) + zero) as int8 or uint8, in vectors; None where `e` is something else. value: writes x
    and the zero point."""
    match e.value:
        case Call("clamp", (Binary("add", Call("round_even", (x,)), Cast(zero, "float32")), Const(low), Const(high))):
            limits = {"int8": (-128, 127), "uint8": (0, 255)}.get(e.dtype)
            if lanes % LANES or "neon" not in has or zero.dtype != e.dtype or limits != (low, high):
                return None
            return _by_neon(b, value(x), value(zero), e.dtype == "int8", "fp-armv8" in has)
    return None


def _by_neon(b: Any, x: V, zero: V, signed: bool, new: bool) -> V:
    if not operations.is_vector(x) or operations.is_vector(zero):
        return None
    n, bytes_ = x.type.count, ir.VectorType(I8, 2 * LANES)
    least = operations.like(x, "float32", -LIMIT)
    x = b.select(b.fcmp_ordered(">", x, least), x, least)
    narrow = (
        ("aarch64.neon.sqxtn" if signed else "aarch64.neon.sqxtun")
        if new
        else f"arm.neon.vqmovn{'s' if signed else 'su'}"
    )
    moved = operations.splat(b, (b.sext if signed else b.zext)(zero, I16), 2 * LANES)
    words = []
    for start in range(0, n, 2 * LANES):
        halves = [_rounded(b, _part(b, x, at), new) for at in range(start, min(n, start + 2 * LANES), LANES)]
        eight = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(2 * LANES)))
        total = operations.intrinsic(b, "llvm.sadd.sat", b.shuffle_vector(halves[0], halves[-1], eight), moved)
        found = b.bitcast(_called(b, f"{narrow}.v8i8", bytes_, total), ir.VectorType(I32, 2))
        words += [b.extract_element(found, I32(k)) for k in range(len(halves))]
    if len(words) == 1:
        return b.bitcast(words[0], ir.VectorType(I8, LANES))
    whole = ir.Constant(ir.VectorType(I32, len(words)), ir.Undefined)
    for k, word in enumerate(words):
        whole = b.insert_element(whole, word, I32(k))
    return b.bitcast(whole, ir.VectorType(I8, n))


def _part(b: Any, x: V, start: int) -> V:
    places = ir.Constant(ir.VectorType(I32, LANES), list(range(start, start + LANES)))
    return b.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), places)


def _rounded(b: Any, x: V, new: bool) -> V:
    """Four float32 as int16, saturated."""
    words, halves = ir.VectorType(I32, LANES), ir.VectorType(I16, LANES)
    if new:
        return _called(b, "aarch64.neon.sqxtn.v4i16", halves, _called(b, "aarch64.neon.fcvtns.v4i32.v4f32", words, x))
    most, magic = (operations.like(x, "float32", number) for number in (LIMIT, ROUNDING))
    x = b.select(b.fcmp_ordered("<", x, most), x, most)
    whole = b.sub(b.bitcast(b.fadd(x, magic), words), b.bitcast(magic, words))
    return _called(b, "arm.neon.vqmovns.v4i16", halves, whole)


def _called(b: Any, name: str, result: Any, x: V) -> V:
    full = f"llvm.{name}"
    fn = b.module.globals.get(full) or ir.Function(b.module, ir.FunctionType(result, [x.type]), full)
    return b.call(fn, [x])
