"""What expressions compute: operators, and functions by intrinsics of LLVM, polynomials in line, else the C library."""

from __future__ import annotations

import math
from collections.abc import Iterable
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
        if name == "popcount4":
            return _popcount4(b, args[0])
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

    def reduced(self, x: V) -> tuple[V, V, V]:
        """(r, k, n) such that exp(x) = 2^k exp(r) for small r; n is k as a float."""
        magic = self.c(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
        shifted = self.fma(x, self.c(1.44269504088896341), magic)
        n = self.b.fsub(shifted, magic)
        k = self.b.sub(self.bits(shifted), self.bits(magic))
        r = self.fma(n, self.c(-0.693145752), x)
        return self.fma(n, self.c(-1.42860677e-6), r), k, n

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
    x = f.where(b.fcmp_ordered(">", x, f.c(90.0)), f.c(90.0), x)
    there = b.fcmp_unordered(">=", x, f.c(-104.0))  # what is too small for a float would be slow to compute
    r, k, n = f.reduced(x)
    # Coefficients: those of onnxruntime's softmax, so that all bits are the same.
    p = f.poly(
        r,
        0.0013780593872070312,
        0.008373124524950981,
        0.041669536381959915,
        0.166664719581604,
        0.49999985098838806,
        1.0,
        1.0,
    )
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


def _rational(f: _F32, x: V, limit: float, above: tuple[float, ...], below: tuple[float, ...]) -> V:
    """x P(x^2) / Q(x^2), for x kept within the limit on both sides."""
    b = f.b
    x = f.where(b.fcmp_ordered("<", x, f.c(-limit)), f.c(-limit), x)
    x = f.where(b.fcmp_ordered(">", x, f.c(limit)), f.c(limit), x)
    square = b.fmul(x, x)
    return b.fdiv(b.fmul(f.poly(square, *above), x), f.poly(square, *below))


def tanh32(b: Any, x: V) -> V:
    """The hyperbolic tangent of float32, of scalars or vectors, to the last bit as onnxruntime has it."""
    above = (
        -2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08, 1.48572235717979e-05,
        6.37261928875436e-04, 4.89352455891786e-03,
    )  # fmt: skip
    below = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)
    return _rational(_F32(b, x), x, 9.0, above, below)


def sigmoid32(b: Any, x: V) -> V:
    """1 / (1 + exp(-x)) of float32, of scalars or vectors, to the last bit as onnxruntime has it."""
    f = _F32(b, x)
    above = (
        4.37031012579801e-11, 1.15627324459942e-07, 6.08574864600143e-05, 8.51377133304701e-03, 2.48287947061529e-01,
    )  # fmt: skip
    below = (
        6.10247389755681e-13, 5.76102136993427e-09, 6.29106785017040e-06, 1.70198817374094e-03, 1.16817656904453e-01,
        9.93151921023180e-01,
    )  # fmt: skip
    y = b.fadd(_rational(f, x, 18.0, above, below), f.c(0.5))
    return f.where(b.fcmp_ordered("<", y, f.c(0.0)), f.c(0.0), y)


def erf32(b: Any, x: V) -> V:
    """The error function of float32, of scalars or vectors, to the last bit as onnxruntime has it."""
    f = _F32(b, x)
    size = intrinsic(b, "llvm.fabs", x)
    size = f.where(b.fcmp_ordered(">", size, f.c(3.925)), f.c(3.925), size)
    near = (-5.99104969e-4, 4.99339588e-3, -2.67667342e-2, 1.12818025e-1, -3.76124859e-1, 1.28379151e-1)
    far = (1.72948930e-5, -3.83208680e-4, 3.88393435e-3, -2.42545605e-2, 1.06777847e-1, 6.34846687e-1, 1.28717512e-1)
    small = f.fma(f.poly(b.fmul(size, size), *near), size, size)
    power = b.fneg(f.fma(f.poly(size, *far), size, size))
    r, k, _ = f.reduced(power)
    p = f.poly(r, 1.38319808e-3, 8.37550033e-3, 4.16689515e-2, 1.66664466e-1, 4.99999851e-1, 1.0, 1.0)
    scale = f.float(b.shl(b.add(k, f.i(127)), f.i(23)))  # of a power that is not far below 0
    large = b.fsub(f.c(1.0), b.fmul(p, scale))
    return intrinsic(b, "llvm.copysign", f.where(b.fcmp_ordered(">=", size, f.c(0.921875)), large, small), x)


F32 = {"exp": exp32, "log": log32, "tanh": tanh32, "erf": erf32, "sigmoid": sigmoid32}
