"""What expressions compute: operators, and functions by intrinsics of LLVM, polynomials in line, else the C library."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from celosia.compiler.cpu.llvm.operations import (
    I32,
    V,
    convert,
    extreme,
    features,
    int_division,
    int_power,
    intrinsic,
    is_vector,
    like,
    multiply_add,
    shift,
    widened,
)
from celosia.compiler.expr.nodes import is_float


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


def binary(b: Any, op: str, dtype: str, x: V, y: V, any_order: bool = False) -> V:
    """x op y of element type `dtype`, scalars or vectors. any_order: sums of floats may be regrouped."""
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
                return extreme(b, op, x, y)
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


def library(b: Any, name: str, dtype: str, *args: V) -> V:
    """A function of the C library, lane by lane. float16 goes through float32."""
    if dtype == "float16":
        wide = library(b, name, "float32", *(convert(b, a, "float16", "float32") for a in args))
        return convert(b, wide, "float32", "float16")
    if is_vector(args[0]):
        out = ir.Constant(args[0].type, ir.Undefined)
        for lane in range(args[0].type.count):
            one = library(b, name, dtype, *(b.extract_element(a, I32(lane)) for a in args))
            out = b.insert_element(out, one, I32(lane))
        return out
    full = name + ("f" if dtype == "float32" else "")
    fn = b.module.globals.get(full)
    if fn is None:
        fn = ir.Function(b.module, ir.FunctionType(args[0].type, [a.type for a in args]), full)
        fn.attributes.add("nounwind")
    return b.call(fn, args)


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


# float32 functions, in line. Errors are about 2 ulp (tests/compiler/test_functions.py).


class _F32:
    """Arithmetic on one width, to write polynomials as they are in books."""

    def __init__(self, b: Any, x: V):
        self.b, self.x = b, x

    def c(self, number: float) -> V:
        return like(self.x, "float32", number)

    def i(self, number: int) -> V:
        return like(self.x, "int32", number)

    def fma(self, a: V, b: V, c: V) -> V:
        return multiply_add(self.b, a, b, c)

    def poly(self, x: V, *coefficients: float) -> V:
        """Horner's rule, highest power first."""
        value = self.c(coefficients[0])
        for k in coefficients[1:]:
            value = self.fma(value, x, self.c(k))
        return value

    def bits(self, x: V) -> V:
        return self.b.bitcast(x, widened(x, I32))

    def float(self, x: V) -> V:
        return self.b.bitcast(x, widened(x, ir.FloatType()))

    def scaled(self, x: V, k: V, n: V, where: V) -> V:
        """x * 2^k for -252 <= k <= 254, which is n as a float; 0, and not computed, where that does not hold."""
        zero = self.c(0.0)
        if is_vector(x) and "avx512f" in features(self.b):
            if x.type.count == 16:
                return self._vscalefps(x, n, zero, self.b.bitcast(where, ir.IntType(16)))
            return self.where(where, intrinsic(self.b, "llvm.ldexp", x, extra=(k,), second=k.type), zero)
        x = self.where(where, x, zero)
        half = self.b.ashr(k, self.i(1))  # two factors, so that the result may be subnormal or infinite
        for power in (half, self.b.sub(k, half)):
            x = self.b.fmul(x, self.float(self.b.shl(self.b.add(power, self.i(127)), self.i(23))))
        return self.where(where, x, zero)

    def _vscalefps(self, x: V, n: V, otherwise: V, where: V) -> V:
        rounding = ir.IntType(32)
        kind = ir.FunctionType(x.type, [x.type, x.type, x.type, where.type, rounding])
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        fn = self.b.module.globals.get(name) or ir.Function(self.b.module, kind, name)
        return self.b.call(fn, [x, n, otherwise, where, rounding(4)])

    def where(self, test: V, yes: V, no: V) -> V:
        return self.b.select(test, yes, no)


def exp32(b: Any, x: V) -> V:
    """exp of float32, of scalars or vectors."""
    f = _F32(b, x)
    magic = f.c(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
    x = f.where(b.fcmp_ordered(">", x, f.c(90.0)), f.c(90.0), x)
    there = b.fcmp_unordered(">=", x, f.c(-104.0))  # what is too small for a float would be slow to compute
    shifted = f.fma(x, f.c(1.44269504088896341), magic)
    n = b.fsub(shifted, magic)
    k = b.sub(f.bits(shifted), f.bits(magic))
    r = f.fma(n, f.c(-0.693145752), x)
    r = f.fma(n, f.c(-1.42860677e-6), r)
    p = f.poly(r, 1.38824864e-3, 8.36669188e-3, 4.16672044e-2, 0.16666542, 0.49999997, 1.0, 1.0)
    return f.scaled(p, k, n, there)


def log32(b: Any, x: V) -> V:
    """The natural logarithm of float32, of scalars or vectors."""
    f = _F32(b, x)
    tiny = b.fcmp_ordered("<", x, f.c(1.1754943508222875e-38))
    scaled = f.where(tiny, b.fmul(x, f.c(8388608.0)), x)
    bias = f.where(tiny, f.c(-23.0), f.c(0.0))
    raw = f.bits(scaled)
    exponent = b.and_(b.sub(raw, f.i(0x3F2AAAAB)), f.i(-8388608))
    m = f.float(b.sub(raw, exponent))
    e = f.fma(b.sitofp(exponent, x.type), f.c(1.0 / 8388608), bias)
    m = b.fsub(m, f.c(1.0))
    s = b.fmul(m, m)
    r = f.poly(s, -0.130310059, -0.121483512, -0.166846126, -0.249996200)
    r = f.fma(f.poly(s, 0.140869141, 0.139814854, 0.200120345), m, r)
    r = f.fma(f.fma(r, m, f.c(0.333331972)), m, f.c(-0.5))
    r = f.fma(r, s, m)
    r = f.fma(e, f.c(0.693147182), r)
    r = f.where(b.fcmp_ordered("<", x, f.c(math.inf)), r, x)  # inf and NaN
    r = f.where(b.fcmp_ordered("<", x, f.c(0.0)), f.c(math.nan), r)
    return f.where(b.fcmp_ordered("==", x, f.c(0.0)), f.c(-math.inf), r)


def tanh32(b: Any, x: V) -> V:
    """(1 - e) / (1 + e) for e = exp(-2|x|) = 2^k + 2^k * p: sums that keep the digits of p near 0."""
    f = _F32(b, x)
    magic = f.c(12582912.0)  # as in exp32
    size = intrinsic(b, "llvm.fabs", x)
    size = f.where(b.fcmp_ordered(">", size, f.c(9.5)), f.c(9.5), size)  # where the result is 1
    shifted = f.fma(size, f.c(-2 * 1.44269504088896341), magic)
    n = b.fsub(shifted, magic)
    scale = f.float(b.add(b.shl(f.bits(shifted), f.i(23)), f.i(127 << 23)))
    r = f.fma(n, f.c(-0.693145752 / 2), b.fneg(size))
    r = f.fma(n, f.c(-1.42860677e-6 / 2), r)
    r = b.fadd(r, r)
    p = f.poly(r, 1.38824864e-3, 8.36669188e-3, 4.16672044e-2, 0.16666542, 0.49999997)
    p = f.fma(b.fmul(p, r), r, r)
    above = f.fma(scale, p, b.fsub(scale, f.c(1.0)))
    below = f.fma(scale, p, b.fadd(scale, f.c(1.0)))
    return intrinsic(b, "llvm.copysign", b.fdiv(above, below), x)


def erf32(b: Any, x: V) -> V:
    """The error function of float32, of scalars or vectors."""
    f = _F32(b, x)
    size = intrinsic(b, "llvm.fabs", x)
    s = b.fmul(x, x)
    t = f.where(b.fcmp_ordered(">", size, f.c(4.0)), f.c(4.0), size)
    ts = b.fmul(t, t)
    r = f.fma(f.poly(t, -1.72853470e-5, 3.83197126e-4), ts, f.poly(t, -3.88396438e-3, 2.42546219e-2))
    for k in (-1.06777877e-1, -6.34846687e-1, -1.28717512e-1):
        r = f.fma(r, t, f.c(k))
    r = f.fma(r, t, b.fneg(t))
    large = intrinsic(b, "llvm.copysign", b.fsub(f.c(1.0), exp32(b, r)), x)
    p = f.poly(s, -5.96761703e-4, 4.99119423e-3, -2.67681349e-2, 1.12819925e-1, -3.76125336e-1, 1.28379166e-1)
    small = f.fma(p, x, x)
    return f.where(b.fcmp_ordered(">", size, f.c(0.927734375)), large, small)


F32 = {"exp": exp32, "log": log32, "tanh": tanh32, "erf": erf32}
