"""LLVM instructions of operators and functions: intrinsics of LLVM, inline polynomials, else the C library.

In all functions `b` is the IRBuilder that writes the instructions; operands are LLVM values, scalars or vectors of one
number of lanes.

In order: operations, functions, and polynomials of float32. The coefficients and the order of operations of these are
onnxruntime's, so that results have its bits.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from celosia.compiler.cpu.llvm.operations import (
    I32,
    V,
    convert,
    declare,
    extreme,
    extreme_number,
    features,
    int_division,
    int_power,
    intrinsic,
    is_vector,
    like,
    multiply_add,
    pick_lanes,
    shift,
    vector_type_like,
)
from celosia.compiler.expr.nodes import is_float
from celosia.compiler.program.host.float32_math import LOGISTIC_DENOMINATOR, LOGISTIC_LIMIT, LOGISTIC_NUMERATOR
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
        x = pick_lanes(b, x, (min(k, lanes) for k in range(padded)))
    counts = intrinsic(b, "llvm.ctpop", b.bitcast(x, ir.VectorType(ir.IntType(8), 4 * padded)))
    words = b.bitcast(counts, x.type)
    return words if padded == lanes else pick_lanes(b, words, range(lanes))


def call_c_library(b: Any, name: str, dtype: str, *args: V) -> V:
    """Call a function of the C library, lane by lane. float16 goes through float32."""
    if dtype == "float16":
        wide = call_c_library(b, name, "float32", *(convert(b, a, "float16", "float32") for a in args))
        return convert(b, wide, "float32", "float16")
    if is_vector(args[0]):
        out = ir.Constant(args[0].type, ir.Undefined)
        for lane in range(args[0].type.count):
            one = call_c_library(b, name, dtype, *(b.extract_element(a, I32(lane)) for a in args))
            out = b.insert_element(out, one, I32(lane))
        return out
    full = name + ("f" if dtype == "float32" else "")
    fn = declare(b, full, args[0].type, *(a.type for a in args))
    fn.attributes.add("nounwind")
    return b.call(fn, args)


class _Float32Writer:
    """Writer of float32 arithmetic with as many lanes as `x`, to write polynomials as in textbooks."""

    def __init__(self, b: Any, x: V):
        self.b, self.x = b, x

    def constant(self, value: float) -> V:
        """Return a float32 constant in all lanes."""
        return like(self.x, "float32", value)

    def int_constant(self, value: int) -> V:
        """Return an int32 constant in all lanes."""
        return like(self.x, "int32", value)

    def fma(self, a: V, b: V, c: V) -> V:
        """Write a * b + c with one rounding, where the processor can."""
        return multiply_add(self.b, a, b, c)

    def horner_fused(self, x: V, *coefficients: float) -> V:
        """Evaluate a polynomial by Horner's rule with fused products, highest power first."""
        value = self.constant(coefficients[0])
        for k in coefficients[1:]:
            value = self.fma(value, x, self.constant(k))
        return value

    def multiply_add_unfused(self, a: V, b: V, c: V) -> V:
        """Write a * b + c with two roundings."""
        return self.b.fadd(self.b.fmul(a, b), c)

    def horner_unfused(self, x: V, *coefficients: float) -> V:
        """Evaluate a polynomial by Horner's rule with two roundings for each power, highest power first."""
        value = self.constant(coefficients[0])
        for k in coefficients[1:]:
            value = self.multiply_add_unfused(value, x, self.constant(k))
        return value

    def bits(self, x: V) -> V:
        """Return the bits of float32 as int32."""
        return self.b.bitcast(x, vector_type_like(x, I32))

    def from_bits(self, x: V) -> V:
        """Return the float32 with the bits of an int32."""
        return self.b.bitcast(x, vector_type_like(x, ir.FloatType()))

    def reduce_exponent(self, x: V) -> tuple[V, V, V]:
        """Return (r, k, n) such that exp(x) = 2^k exp(r) for small r; n is k as a float."""
        magic = self.constant(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
        shifted = self.fma(x, self.constant(1.44269504088896341), magic)
        n = self.b.fsub(shifted, magic)
        k = self.b.sub(self.bits(shifted), self.bits(magic))
        r = self.fma(n, self.constant(-0.693145752), x)
        return self.fma(n, self.constant(-1.42860677e-6), r), k, n

    def scale(self, x: V, k: V, n: V, mask: V) -> V:
        """Write x * 2^k for -252 <= k <= 254 (n is k as a float); 0 where `mask` does not hold."""
        zero = self.constant(0.0)
        if is_vector(x) and "avx512f" in features(self.b):
            if x.type.count == 16:
                return self._vscalefps(x, n, zero, self.b.bitcast(mask, ir.IntType(16)))
            return self.where(mask, intrinsic(self.b, "llvm.ldexp", x, extra=(k,), second_type=k.type), zero)
        x = self.where(mask, x, zero)
        half = self.b.ashr(k, self.int_constant(1))  # two factors, so that the result may be subnormal or infinite
        for power in (half, self.b.sub(k, half)):
            x = self.b.fmul(
                x, self.from_bits(self.b.shl(self.b.add(power, self.int_constant(127)), self.int_constant(23)))
            )
        return self.where(mask, x, zero)

    def _vscalefps(self, x: V, n: V, otherwise: V, mask: V) -> V:
        """Write AVX-512's vscalefps: x * 2^n in the lanes of `mask`, `otherwise` in the others."""
        types = x.type, x.type, x.type, mask.type, I32
        fn = declare(self.b, "llvm.x86.avx512.mask.scalef.ps.512", x.type, *types)
        return self.b.call(fn, [x, n, otherwise, mask, I32(4)])

    def where(self, test: V, yes: V, no: V) -> V:
        """Select lane by lane."""
        return self.b.select(test, yes, no)


def exp32(b: Any, x: V) -> V:
    """Write exp of float32, with the bits of onnxruntime's softmax."""
    f = _Float32Writer(b, x)
    x = f.where(b.fcmp_ordered(">", x, f.constant(90.0)), f.constant(90.0), x)
    is_representable = b.fcmp_unordered(">=", x, f.constant(-104.0))  # smaller results would be slow to compute
    r, k, n = f.reduce_exponent(x)
    # Coefficients: those of onnxruntime's softmax, so that all bits are the same.
    p = f.horner_fused(
        r,
        0.0013780593872070312,
        0.008373124524950981,
        0.041669536381959915,
        0.166664719581604,
        0.49999985098838806,
        1.0,
        1.0,
    )
    return f.scale(p, k, n, is_representable)


def _rational(f: _Float32Writer, x: V, limit: float, numerator: tuple[float, ...], denominator: tuple[float, ...]) -> V:
    """Write x P(x^2) / Q(x^2), with x clamped to [-limit, limit]; tanh and sigmoid have this form."""
    b = f.b
    x = f.where(b.fcmp_ordered("<", x, f.constant(-limit)), f.constant(-limit), x)
    x = f.where(b.fcmp_ordered(">", x, f.constant(limit)), f.constant(limit), x)
    square = b.fmul(x, x)
    return b.fdiv(b.fmul(f.horner_fused(square, *numerator), x), f.horner_fused(square, *denominator))


def tanh32(b: Any, x: V) -> V:
    """Write tanh of float32, bit-exact with onnxruntime."""
    numerator = (
        -2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08, 1.48572235717979e-05,
        6.37261928875436e-04, 4.89352455891786e-03,
    )  # fmt: skip
    denominator = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)
    return _rational(_Float32Writer(b, x), x, 9.0, numerator, denominator)


def sigmoid32(b: Any, x: V) -> V:
    """Write 1 / (1 + exp(-x)) of float32, bit-exact with onnxruntime."""
    f = _Float32Writer(b, x)
    y = b.fadd(_rational(f, x, LOGISTIC_LIMIT, LOGISTIC_NUMERATOR, LOGISTIC_DENOMINATOR), f.constant(0.5))
    return f.where(b.fcmp_ordered("<", y, f.constant(0.0)), f.constant(0.0), y)


def erf32(b: Any, x: V) -> V:
    """Write the error function of float32, bit-exact with onnxruntime."""
    f = _Float32Writer(b, x)
    size = intrinsic(b, "llvm.fabs", x)
    size = f.where(b.fcmp_ordered(">", size, f.constant(3.925)), f.constant(3.925), size)
    small_coefficients = (-5.99104969e-4, 4.99339588e-3, -2.67667342e-2, 1.12818025e-1, -3.76124859e-1, 1.28379151e-1)
    large_coefficients = (
        1.72948930e-5,
        -3.83208680e-4,
        3.88393435e-3,
        -2.42545605e-2,
        1.06777847e-1,
        6.34846687e-1,
        1.28717512e-1,
    )
    small = f.fma(f.horner_fused(b.fmul(size, size), *small_coefficients), size, size)
    power = b.fneg(f.fma(f.horner_fused(size, *large_coefficients), size, size))
    r, k, _ = f.reduce_exponent(power)
    p = f.horner_fused(r, 1.38319808e-3, 8.37550033e-3, 4.16689515e-2, 1.66664466e-1, 4.99999851e-1, 1.0, 1.0)
    scale = f.from_bits(b.shl(b.add(k, f.int_constant(127)), f.int_constant(23)))  # of a power that is not far below 0
    large = b.fsub(f.constant(1.0), b.fmul(p, scale))
    return intrinsic(b, "llvm.copysign", f.where(b.fcmp_ordered(">=", size, f.constant(0.921875)), large, small), x)


# The functions below are those of onnxruntime's element-wise operators: polynomials of the library Eigen
# (GenericPacketMathFunctions.h) without fused multiplication, as onnxruntime is built for x86 processors without it.


def unfused_exp32(b: Any, x: V) -> V:
    """Write exp of float32 as in onnxruntime's Elu, Softplus and similar operators."""
    f = _Float32Writer(b, x)
    is_representable = b.fcmp_unordered(">=", x, f.constant(-104.0))
    top = f.where(b.fcmp_ordered(">", x, f.constant(88.723)), f.constant(88.723), x)
    scale, magic = f.multiply_add_unfused(top, f.constant(1.44269504088896341), f.constant(0.5)), f.constant(12582912.0)
    nearest = b.fsub(b.fadd(scale, magic), magic)
    n = b.fsub(nearest, f.where(b.fcmp_ordered(">", nearest, scale), f.constant(1.0), f.constant(0.0)))  # rounded down
    r = f.multiply_add_unfused(n, f.constant(2.12194440e-4), f.multiply_add_unfused(n, f.constant(-0.693359375), top))
    square = b.fmul(r, r)
    even = f.horner_unfused(
        square, 1.37449637986719608306884765625e-3, 4.166965186595916748046875e-2, 0.4999998807907104
    )
    odd = f.horner_unfused(square, 8.36894474923610687255859375e-3, 0.16666518151760101318359375)
    power = f.multiply_add_unfused(square, f.multiply_add_unfused(r, odd, even), b.fadd(r, f.constant(1.0)))
    k = b.fptosi(f.where(is_representable, n, f.constant(0.0)), f.bits(n).type)
    return f.where(b.fcmp_unordered("uno", x, x), x, f.scale(power, k, n, is_representable))


def log32(b: Any, x: V) -> V:
    """Write the natural logarithm of float32, bit-exact with onnxruntime's Log."""
    f = _Float32Writer(b, x)
    tiny = b.fcmp_ordered("<", x, f.constant(1.1754943508222875e-38))
    raw = f.bits(f.where(tiny, b.fmul(x, f.constant(16777216.0)), x))
    low = b.sub(b.and_(b.lshr(raw, f.int_constant(23)), f.int_constant(255)), f.int_constant(126))
    e = b.sitofp(b.sub(low, f.where(tiny, f.int_constant(24), f.int_constant(0))), x.type)
    m = f.from_bits(b.or_(b.and_(raw, f.int_constant(0x007FFFFF)), f.int_constant(0x3F000000)))  # from 0.5 on, below 1
    below = b.fcmp_ordered("<", m, f.constant(0.707106781186547524))
    e = b.fsub(e, f.where(below, f.constant(1.0), f.constant(0.0)))
    m = b.fadd(b.fsub(m, f.constant(1.0)), f.where(below, m, f.constant(0.0)))
    above = b.fmul(m, f.horner_unfused(m, 0.18256296349849254, 1.0000000190281063, 1.0000000190281136))
    under = f.horner_unfused(m, 0.049616247954120038, 0.59923249590823520, 1.4999999999999927, 1.0)
    r = f.multiply_add_unfused(e, f.constant(0.6931471805599453), b.fdiv(above, under))
    r = f.where(b.fcmp_ordered("<", x, f.constant(math.inf)), r, x)  # inf and NaN
    r = f.where(b.fcmp_ordered("<", x, f.constant(0.0)), f.constant(math.nan), r)
    return f.where(b.fcmp_ordered("==", x, f.constant(0.0)), f.constant(-math.inf), r)


def acos32(b: Any, x: V) -> V:
    """Write the inverse cosine of float32, bit-exact with onnxruntime; NaN beyond 1."""
    f = _Float32Writer(b, x)
    size, square = intrinsic(b, "llvm.fabs", x), b.fmul(x, x)
    even = f.horner_unfused(
        square, 2.36423197202384471893310546875e-3, 2.717843465507030487060546875e-2, 8.8804088532924652099609375e-2,
        1.57079637050628662109375,
    )  # fmt: skip
    odd = f.horner_unfused(
        square, -1.1368644423782825469970703125e-2, -4.8969544470310211181640625e-2, -0.214591205120086669921875
    )
    root = intrinsic(b, "llvm.sqrt", b.fsub(f.constant(1.0), size))
    angle = b.fmul(root, f.multiply_add_unfused(odd, size, even))
    return f.where(b.icmp_signed("<", f.bits(x), f.int_constant(0)), b.fsub(f.constant(math.pi), angle), angle)


def asin32(b: Any, x: V) -> V:
    """Write the inverse sine of float32, bit-exact with onnxruntime; NaN beyond 1."""
    f = _Float32Writer(b, x)
    size = intrinsic(b, "llvm.fabs", x)
    large = b.fcmp_ordered(">", size, f.constant(0.5))
    root = intrinsic(b, "llvm.sqrt", b.fsub(f.constant(0.5), b.fmul(f.constant(0.5), size)))
    t = f.where(large, root, size)
    p = b.fmul(t, f.horner_unfused(
        b.fmul(t, t), 5.08838854730129241943359375e-2, 3.95139865577220916748046875e-2, 7.550220191478729248046875e-2,
        0.16664917767047882080078125, 1.00000011920928955078125,
    ))  # fmt: skip
    p = f.where(large, b.fsub(f.constant(math.pi / 2), b.fmul(f.constant(2.0), p)), p)
    return intrinsic(b, "llvm.copysign", p, x)


def _sine(b: Any, x: V, cosine: bool, limit: float) -> V:
    """Write the sine, or the cosine, by a polynomial; beyond magnitude `limit` by the C library."""
    f = _Float32Writer(b, x)
    size, magic = intrinsic(b, "llvm.fabs", x), f.constant(12582912.0)
    shifted = b.fadd(b.fmul(size, f.constant(0.636619746685028076171875)), magic)
    quarter, y = f.bits(shifted), b.fsub(shifted, magic)
    r = size
    for part in (-1.5703125, -0.000483989715576171875, 1.62865035235881805419921875e-7, 5.5644315544167710640977e-11):
        r = f.multiply_add_unfused(y, f.constant(part), r)
    square = b.fmul(r, r)
    even = f.horner_unfused(square, 2.4372266125283204e-05, -0.001388652017340064, 0.041666619479656219, -0.5, 1.0)
    odd = f.horner_unfused(square, -0.00019592341140837029, 0.0083326873655616852, -0.16666662039822983)
    odd = f.multiply_add_unfused(b.fmul(odd, square), r, r)
    is_even = b.icmp_signed("==", b.and_(quarter, f.int_constant(1)), f.int_constant(0))
    value = f.where(is_even, even, odd) if cosine else f.where(is_even, odd, even)
    sign_source = (
        b.shl(b.add(quarter, f.int_constant(1)), f.int_constant(30))
        if cosine
        else b.xor(f.bits(x), b.shl(quarter, f.int_constant(30)))
    )
    value = f.from_bits(b.xor(f.bits(value), b.and_(sign_source, f.int_constant(-(1 << 31)))))
    is_far = b.fcmp_unordered(">=", size, f.constant(limit))
    return _or_library(b, "cos" if cosine else "sin", x, is_far, value)


def _or_library(b: Any, name: str, x: V, mask: V, value: V) -> V:
    """Replace the lanes of `mask` by results of the C library, which is called only if there is such a lane."""
    lanes = ir.IntType(x.type.count if is_vector(x) else 1)
    has_lane = b.icmp_unsigned("!=", b.bitcast(mask, lanes), lanes(0))
    before = b.block
    with b.if_then(has_lane, likely=False):
        replaced = b.select(mask, call_c_library(b, name, "float32", x), value)
        inside = b.block
    result = b.phi(x.type)
    result.add_incoming(value, before)
    result.add_incoming(replaced, inside)
    return result


def sin32(b: Any, x: V) -> V:
    """Write the sine of float32, bit-exact with onnxruntime below 25,966."""
    return _sine(b, x, cosine=False, limit=25966.0)


def cos32(b: Any, x: V) -> V:
    """Write the cosine of float32, bit-exact with onnxruntime below 18,838."""
    return _sine(b, x, cosine=True, limit=18838.0)


F32 = {
    "exp": exp32, "log": log32, "tanh": tanh32, "erf": erf32, "sigmoid": sigmoid32, "unfused_exp": unfused_exp32,
    "asin": asin32, "acos": acos32, "sin": sin32, "cos": cos32,
}  # fmt: skip
"""Function of float32 that is written inline -> its writer; others are calls of the C library."""
