"""Generate code for expressions: operators, and functions by intrinsics of LLVM, polynomials in line, else the C
library."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from llvmlite import ir

from celosia.compiler.cpu.llvm.functions import F32, library
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
    widened,
)
from celosia.compiler.expr.nodes import is_float
from celosia.hw.spec.pipeline import ROOT_BITS


def unsigned(dtype: str) -> bool:
    """Whether LLVM's instructions for it are the unsigned ones."""
    return dtype.startswith(("uint", "bool"))


def compare(b: Any, op: str, dtype: str, x: V, y: V) -> V:
    """x op y as i1, of scalars or vectors; with NaN all but "ne" are false."""
    sign = {"lt": "<", "le": "<=", "eq": "==", "ne": "!="}[op]
    if is_float(dtype):
        return b.fcmp_unordered(sign, x, y) if op == "ne" else b.fcmp_ordered(sign, x, y)
    return (b.icmp_unsigned if unsigned(dtype) else b.icmp_signed)(sign, x, y)


def index_division(b: Any, op: str, plain: bool, x: V, y: V) -> V:
    """Floor division by a positive constant."""
    if plain:
        return b.udiv(x, y) if op == "floordiv" else b.urem(x, y)
    rest = b.srem(x, y)
    negative = b.icmp_signed("<", rest, ir.Constant(rest.type, None) if is_vector(rest) else ir.IntType(64)(0))
    if op == "mod":
        return b.select(negative, b.add(rest, y), rest)
    whole = b.sdiv(x, y)
    return b.sub(whole, b.zext(negative, whole.type))


def binary(b: Any, op: str, dtype: str, x: V, y: V, any_order: bool = False, numbers: bool = False) -> V:
    """x op y of element type `dtype`, scalars or vectors. any_order: sums of floats may be regrouped. numbers: `x` is
    no NaN, and an extreme leaves out `y` where it is one."""
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
                rest = b.frem(x, y)
                zero = like(x, dtype, 0)
                other = b.xor(b.fcmp_ordered("<", rest, zero), b.fcmp_ordered("<", y, zero))
                move = b.and_(other, b.fcmp_ordered("!=", rest, zero))
                return b.select(move, b.fadd(rest, y), rest)
            case "min" | "max":
                return (extreme_number if numbers else extreme)(b, op, x, y)
            case "pow":
                return call(b, "pow", dtype, x, y)
        raise ValueError(f"{op} is not defined on {dtype}")
    signed = not unsigned(dtype)
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


DIRECT = {
    "sqrt": "llvm.sqrt", "floor": "llvm.floor", "ceil": "llvm.ceil", "trunc": "llvm.trunc",
    "round_even": "llvm.roundeven", "abs": "llvm.fabs", "fma": "llvm.fma",
}  # fmt: skip
ROUNDINGS = ("round_even", "floor", "ceil", "trunc")


def _rounded(b: Any, name: str, x: V) -> V:
    """float32 to a whole number, for processors that round no vectors: adding 2^23 leaves no place for fractions."""
    limit, one = like(x, "float32", 8388608.0), like(x, "float32", 1.0)
    size = intrinsic(b, "llvm.fabs", x)
    near = b.fsub(b.fadd(size, limit), limit)
    if name == "trunc":
        near = b.select(b.fcmp_ordered(">", near, size), b.fsub(near, one), near)
    whole = intrinsic(b, "llvm.copysign", near, x)
    if name == "floor":
        whole = b.select(b.fcmp_ordered(">", whole, x), b.fsub(whole, one), whole)
    if name == "ceil":
        whole = b.select(b.fcmp_ordered("<", whole, x), b.fadd(whole, one), whole)
    whole = intrinsic(b, "llvm.copysign", whole, x)
    return b.select(b.fcmp_ordered("<", size, limit), whole, x)


def call(b: Any, name: str, dtype: str, *args: V) -> V:
    """The intrinsic `name` of expr.nodes on values of `dtype`."""
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
    if name in ROUNDINGS and dtype == "float32" and not features(b) & {"sse4.1", "fp-armv8"}:
        return _rounded(b, name, args[0])
    if name in DIRECT:
        return intrinsic(b, DIRECT[name], *args)
    if name == "isnan":
        return b.fcmp_unordered("uno", args[0], args[0])
    if name == "isinf":
        return b.fcmp_ordered("==", intrinsic(b, "llvm.fabs", args[0]), like(args[0], dtype, math.inf))
    if dtype == "float16" and name in F32:
        wide = call(b, name, "float32", *(convert(b, a, "float16", "float32") for a in args))
        return convert(b, wide, "float32", "float16")
    if dtype == "float32" and name in F32:
        return F32[name](b, args[0])
    return library(b, name, dtype, *args)


def _inverse_root(b: Any, x: V) -> V:
    """sim.norm.inverse_root. The quotient of doubles is at most one beside it, so that r^2 x - 2^82 modulo 2^64 has its
    sign; below 2^30 it is the largest number that there is."""
    one, most = like(x, "int64", 1), like(x, "int64", (1 << ROOT_BITS) - 1)
    root = intrinsic(b, "llvm.sqrt", b.sitofp(x, widened(x, ir.DoubleType())))
    near = b.fptosi(b.fdiv(like(x, "float64", 2.0**41), root), x.type)

    def above(r: V) -> V:
        return b.icmp_signed(">", b.mul(b.mul(r, r), x), like(x, "int64", 0))

    near = b.sub(near, b.zext(above(near), x.type))
    near = b.select(above(b.add(near, one)), near, b.add(near, one))
    near = intrinsic(b, "llvm.smin", near, most)
    return b.select(b.icmp_signed("<", x, like(x, "int64", 1 << 30)), most, near)


def _popcount4(b: Any, x: V) -> V:
    """In a vector of a power of two of lanes: LLVM would take the bytes of others one by one."""
    lanes = x.type.count if is_vector(x) else 1
    wide = 1 << (lanes - 1).bit_length()
    if wide > lanes:
        x = b.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), _places(min(k, lanes) for k in range(wide)))
    counts = intrinsic(b, "llvm.ctpop", b.bitcast(x, ir.VectorType(ir.IntType(8), 4 * wide)))
    words = b.bitcast(counts, x.type)
    return b.shuffle_vector(words, ir.Constant(x.type, ir.Undefined), _places(range(lanes))) if wide > lanes else words


def _places(numbers: Iterable[int]) -> V:
    places = list(numbers)
    return ir.Constant(ir.VectorType(I32, len(places)), places)
