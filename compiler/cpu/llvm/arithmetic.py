"""LLVM instructions of operators and functions: intrinsics of LLVM, inline polynomials, else the C library.

In all functions `b` is the IRBuilder that writes the instructions; operands are LLVM values, scalars or vectors of one
number of lanes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from llvmlite import ir

from celosia.compiler.cpu.llvm.float_functions import F32, call_c_library
from celosia.compiler.cpu.llvm.operations import (
    I32,
    V,
    convert,
    extreme,
    extreme_number,
    features,
    int_division,
    int_power,
    intrinsic,
    is_vector,
    like,
    shift,
    vector_type_like,
)
from celosia.compiler.expr.nodes import is_float
from celosia.hw.spec.pipeline import ROOT_BITS


def is_unsigned(dtype: str) -> bool:
    """Return whether LLVM's unsigned instructions are the right ones for `dtype`."""
    return dtype.startswith(("uint", "bool"))


def compare(b: Any, op: str, dtype: str, x: V, y: V) -> V:
    """Compare x and y as i1, scalars or vectors; with NaN all comparisons but "ne" are false."""
    sign = {"lt": "<", "le": "<=", "eq": "==", "ne": "!="}[op]
    if is_float(dtype):
        return b.fcmp_unordered(sign, x, y) if op == "ne" else b.fcmp_ordered(sign, x, y)
    return (b.icmp_unsigned if is_unsigned(dtype) else b.icmp_signed)(sign, x, y)


def index_division(b: Any, op: str, is_nonnegative: bool, x: V, y: V) -> V:
    """Write x // y or x % y (op floordiv or mod) of an index and a positive constant, rounded down.

    is_nonnegative: whether `x` is proved to be at least 0, so that unsigned instructions suffice.
    """
    if is_nonnegative:
        return b.udiv(x, y) if op == "floordiv" else b.urem(x, y)
    remainder = b.srem(x, y)
    negative = b.icmp_signed(
        "<", remainder, ir.Constant(remainder.type, None) if is_vector(remainder) else ir.IntType(64)(0)
    )
    if op == "mod":
        return b.select(negative, b.add(remainder, y), remainder)
    quotient = b.sdiv(x, y)
    return b.sub(quotient, b.zext(negative, quotient.type))


def binary(b: Any, op: str, dtype: str, x: V, y: V, any_order: bool = False, nan_free: bool = False) -> V:
    """Write x op y of element type `dtype`, for the operations of nodes.ARITHMETIC. Raises ValueError for others.

    any_order: whether sums and products of floats may be regrouped. nan_free: whether `x` is no NaN and min and max
    ignore `y` where it is NaN, which takes fewer instructions.
    """
    if is_float(dtype):
        flags = ("reassoc",) if any_order else ()
        match op:
            case "add":
                return b.fadd(x, y, flags=flags)
            case "sub":
                return b.fsub(x, y)
            case "mul":
                return b.fmul(x, y, flags=flags)
            case "div":
                return b.fdiv(x, y)
            case "floordiv":
                return call(b, "floor", dtype, b.fdiv(x, y))
            case "mod":
                remainder = b.frem(x, y)
                zero = like(x, dtype, 0)
                other = b.xor(b.fcmp_ordered("<", remainder, zero), b.fcmp_ordered("<", y, zero))
                move = b.and_(other, b.fcmp_ordered("!=", remainder, zero))
                return b.select(move, b.fadd(remainder, y), remainder)
            case "min" | "max":
                return (extreme_number if nan_free else extreme)(b, op, x, y)
            case "pow":
                return call(b, "pow", dtype, x, y)
        raise ValueError(f"{op} is not defined on {dtype}")
    signed = not is_unsigned(dtype)
    match op:
        case "add" | "sub" | "mul" | "xor":
            return getattr(b, op)(x, y)
        case "and":
            return b.and_(x, y)
        case "or":
            return b.or_(x, y)
        case "shl":
            return shift(b, "shl", x, y)
        case "shr":
            return shift(b, "ashr" if signed else "lshr", x, y)
        case "min":
            return intrinsic(b, "llvm.smin" if signed else "llvm.umin", x, y)
        case "max":
            return intrinsic(b, "llvm.smax" if signed else "llvm.umax", x, y)
        case "div" | "floordiv" | "mod":
            return int_division(b, op, signed, x, y)
        case "pow":
            return int_power(b, x, y)
    raise ValueError(f"{op} is not defined on {dtype}")


LLVM_INTRINSICS = {
    "sqrt": "llvm.sqrt", "floor": "llvm.floor", "ceil": "llvm.ceil", "trunc": "llvm.trunc",
    "round_even": "llvm.roundeven", "abs": "llvm.fabs", "fma": "llvm.fma",
}  # fmt: skip
"""Function of expressions -> LLVM's intrinsic for it, which is one instruction on most processors."""
ROUNDING_FUNCTIONS = ("round_even", "floor", "ceil", "trunc")
"""Functions for which SSE2 and ARMv7 have no vector instruction."""


def _round_by_addition(b: Any, name: str, x: V) -> V:
    """Write a function of ROUNDING_FUNCTIONS for processors without such an instruction for vectors.

    Adding 2^23 to a smaller float32 leaves no bits for fractions, so that the addition rounds it to an integer.
    """
    limit, one = like(x, "float32", 8388608.0), like(x, "float32", 1.0)
    size = intrinsic(b, "llvm.fabs", x)
    nearest = b.fsub(b.fadd(size, limit), limit)
    if name == "trunc":
        nearest = b.select(b.fcmp_ordered(">", nearest, size), b.fsub(nearest, one), nearest)
    rounded = intrinsic(b, "llvm.copysign", nearest, x)
    if name == "floor":
        rounded = b.select(b.fcmp_ordered(">", rounded, x), b.fsub(rounded, one), rounded)
    if name == "ceil":
        rounded = b.select(b.fcmp_ordered("<", rounded, x), b.fadd(rounded, one), rounded)
    rounded = intrinsic(b, "llvm.copysign", rounded, x)
    return b.select(b.fcmp_ordered("<", size, limit), rounded, x)


def call(b: Any, name: str, dtype: str, *args: V) -> V:
    """Write the intrinsic function `name` of expr.math_functions on values of `dtype`.

    Raises ValueError where it is not defined for that type.
    """
    if not dtype.startswith("float"):
        if name == "abs":
            return intrinsic(b, "llvm.abs", args[0], extra=(ir.IntType(1)(0),)) if dtype.startswith("int") else args[0]
        if name == "popcount":
            return intrinsic(b, "llvm.ctpop", args[0])
        if name == "popcount4":
            return _popcount4(b, args[0])
        if name == "leading_zeros":
            return intrinsic(b, "llvm.ctlz", args[0], extra=(ir.IntType(1)(0),))
        if name == "inverse_root":
            return _inverse_root(b, args[0])
        raise ValueError(f"{name} is not defined on {dtype}")
    if name == "clamp":
        value, low, high = args
        value = b.select(b.fcmp_ordered(">", value, low), value, low)
        return b.select(b.fcmp_ordered("<", value, high), value, high)
    if name in ROUNDING_FUNCTIONS and dtype == "float32" and not features(b) & {"sse4.1", "fp-armv8"}:
        return _round_by_addition(b, name, args[0])
    if name in LLVM_INTRINSICS:
        return intrinsic(b, LLVM_INTRINSICS[name], *args)
    if name == "isnan":
        return b.fcmp_unordered("uno", args[0], args[0])
    if name == "isinf":
        return b.fcmp_ordered("==", intrinsic(b, "llvm.fabs", args[0]), like(args[0], dtype, math.inf))
    if dtype == "float16" and name in F32:
        wide = call(b, name, "float32", *(convert(b, a, "float16", "float32") for a in args))
        return convert(b, wide, "float32", "float16")
    if dtype == "float32" and name in F32:
        return F32[name](b, args[0])
    return call_c_library(b, name, dtype, *args)


def _inverse_root(b: Any, x: V) -> V:
    """Write sim.functional.norm.inverse_root of int64: 2^41 / sqrt(x), rounded down.

    The quotient of doubles is off by at most one. r^2 x - 2^82 modulo 2^64 has the sign of the error. Below 2^30 the
    result is the largest number of ROOT_BITS.
    """
    one, largest = like(x, "int64", 1), like(x, "int64", (1 << ROOT_BITS) - 1)
    root = intrinsic(b, "llvm.sqrt", b.sitofp(x, vector_type_like(x, ir.DoubleType())))
    estimate = b.fptosi(b.fdiv(like(x, "float64", 2.0**41), root), x.type)

    def is_above(r: V) -> V:
        return b.icmp_signed(">", b.mul(b.mul(r, r), x), like(x, "int64", 0))

    estimate = b.sub(estimate, b.zext(is_above(estimate), x.type))
    estimate = b.select(is_above(b.add(estimate, one)), estimate, b.add(estimate, one))
    estimate = intrinsic(b, "llvm.smin", estimate, largest)
    return b.select(b.icmp_signed("<", x, like(x, "int64", 1 << 30)), largest, estimate)


def _popcount4(b: Any, x: V) -> V:
    """Write the counts of set bits of the four bytes of each uint32, each count in its byte.

    Vectors are padded to a power of two of lanes, since LLVM would split others into bytes.
    """
    lanes = x.type.count if is_vector(x) else 1
    padded = 1 << (lanes - 1).bit_length()
    if padded > lanes:
        x = b.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), _shuffle_mask(min(k, lanes) for k in range(padded)))
    counts = intrinsic(b, "llvm.ctpop", b.bitcast(x, ir.VectorType(ir.IntType(8), 4 * padded)))
    words = b.bitcast(counts, x.type)
    if padded == lanes:
        return words
    return b.shuffle_vector(words, ir.Constant(x.type, ir.Undefined), _shuffle_mask(range(lanes)))


def _shuffle_mask(lanes: Iterable[int]) -> V:
    """Return the constant vector of lane numbers that a shuffle takes."""
    lane_list = list(lanes)
    return ir.Constant(ir.VectorType(I32, len(lane_list)), lane_list)
