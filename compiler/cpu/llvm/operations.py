"""Scalar and vector operations that LLVM has no single instruction for: conversions, division, sums over lanes."""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import numpy as np
from llvmlite import ir

from celosia.compiler.cpu.element_types import TYPES
from celosia.compiler.program.dtypes import numpy_dtype

V = Any
I32 = ir.IntType(32)
ALIGN = 64  # of each tensor in the workspace
SPECIAL = {
    "float16": ir.HalfType(), "float32": ir.FloatType(), "float64": ir.DoubleType(), "bool": ir.IntType(1),
    "bfloat16": ir.IntType(16),
}  # fmt: skip
LLVM_TYPES: dict[str, Any] = {
    name: SPECIAL[name] if name in SPECIAL else ir.IntType(int(name.lstrip("uint"))) for name in TYPES
}
SUFFIX = {"half": "f16", "float": "f32", "double": "f64"}


def llvm_type(dtype: str) -> Any:
    """LLVM's type of an element. ValueError where the CPU has none."""
    if dtype not in LLVM_TYPES:
        raise ValueError(f"the CPU has no element type {dtype}")
    return LLVM_TYPES[dtype]


def memory_type(dtype: str) -> Any:
    """LLVM's type of an element in memory: a bool is a byte there."""
    return ir.IntType(8) if dtype == "bool" else llvm_type(dtype)


def aligned(size: int) -> int:
    """Bytes that `size` of them take in the workspace."""
    return -(-max(size, 1) // ALIGN) * ALIGN


def fits(low: float, high: float, dtype: str) -> bool:
    """Whether all of [low, high] can be converted to `dtype`, by way of int32."""
    return dtype in ("int8", "uint8", "int16", "uint16", "int32") and low >= -(2**31) and high < 2**31


def is_vector(value: V) -> bool:
    """Whether it is a vector, not a scalar."""
    return isinstance(value.type, ir.VectorType)


def constant(dtype: str, value: float) -> V:
    """A scalar of element type `dtype`; integers wrap."""
    type_ = llvm_type(dtype)
    if dtype == "bfloat16":
        value = int(np.array(value, numpy_dtype(dtype)).view(np.uint16))
    if isinstance(type_, ir.IntType):
        bits = type_.width
        number = int(value) & ((1 << bits) - 1)
        return ir.Constant(type_, number if bits == 1 or number < 1 << (bits - 1) else number - (1 << bits))
    return ir.Constant(type_, float(value))


def splat(b: Any, value: V, lanes: int) -> V:
    """A vector of equal lanes; vectors as they are."""
    if is_vector(value):
        return value
    if isinstance(value, ir.Constant):
        return ir.Constant(ir.VectorType(value.type, lanes), [value] * lanes)
    wide = ir.VectorType(value.type, lanes)
    one = b.insert_element(ir.Constant(wide, ir.Undefined), value, I32(0))
    return b.shuffle_vector(one, ir.Constant(wide, ir.Undefined), ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def like(value: V, dtype: str, number: float) -> V:
    """A constant as wide as `value`."""
    c = constant(dtype, number)
    return ir.Constant(ir.VectorType(c.type, value.type.count), [c] * value.type.count) if is_vector(value) else c


def widened(value: V, scalar: Any) -> Any:
    """The type of `scalar` elements with as many lanes as `value`."""
    return ir.VectorType(scalar, value.type.count) if is_vector(value) else scalar


def _suffix(type_: Any) -> str:
    if isinstance(type_, ir.VectorType):
        return f"v{type_.count}{_suffix(type_.element)}"
    return SUFFIX.get(str(type_)) or str(type_)


def intrinsic(
    b: Any, name: str, *args: V, result: Any = None, extra: tuple[V, ...] = (), flags: tuple[str, ...] = (),
    second: Any = None,
) -> V:  # fmt: skip
    """llvm.name on one overloaded type, that of the first argument; and of `result` or `second`, if given."""
    out = result or args[0].type
    others = [args[0].type] if result is not None else [second] if second is not None else []
    full = ".".join((name, *map(_suffix, (out, *others))))
    values = (*args, *extra)
    fn = b.module.globals.get(full)
    if fn is None:
        fn = ir.Function(b.module, ir.FunctionType(out, [v.type for v in values]), full)
    return b.call(fn, values, fastmath=flags)


def masked_load(b: Any, at: V, mask: V, element: Any, align: int) -> V:
    """The vector of `element` at the pointer `at`; lanes where `mask` does not hold are 0, and not read."""
    wide = ir.VectorType(element, mask.type.count)
    name = f"llvm.masked.load.{_suffix(wide)}.p0"
    types = [at.type, I32, mask.type, wide]
    fn = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(wide, types), name)
    return b.call(fn, [at, I32(align), mask, ir.Constant(wide, None)])


def load_if(b: Any, inside: V, at: V, mask: V, element: Any, align: int) -> V:
    """A masked load, or where all of the vector is `inside`, a plain one: then the other lanes are anything."""
    plain, masked, done = (b.append_basic_block(name) for name in ("plain", "masked", "loaded"))
    b.cbranch(inside, plain, masked)
    found = []
    for block in (plain, masked):
        b.position_at_end(block)
        wide = ir.VectorType(element, mask.type.count)
        value = b.load(at, typ=wide, align=align) if block is plain else masked_load(b, at, mask, element, align)
        found.append((value, b.block))
        b.branch(done)
    b.position_at_end(done)
    value = b.phi(found[0][0].type)
    for each, block in found:
        value.add_incoming(each, block)
    return value


def fetch(b: Any, at: V, ahead: V, element: Any, near: bool = True) -> None:
    """Bring what lies `ahead` elements behind the pointer `at` into the first cache, or only into the second, wherever
    that is."""
    place = b.gep(at, [ahead], source_etype=element)
    name = "llvm.prefetch.p0"
    kind = ir.FunctionType(ir.VoidType(), [at.type, I32, I32, I32])
    fn = b.module.globals.get(name) or ir.Function(b.module, kind, name)
    b.call(fn, [place, I32(0), I32(3 if near else 2), I32(1)])  # to be read, near, data


def fence(b: Any) -> None:
    """Stores that passed by the caches are seen by whoever sees what is stored after this."""
    if "sse2" in features(b):
        name = "llvm.x86.sse.sfence"
        fn = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(ir.VoidType(), []), name)
        b.call(fn, [])


def extreme(b: Any, op: str, x: V, y: V) -> V:
    """The smaller or larger float, NaN where there is one. op: min or max."""
    if soft_floats(b):
        taken = b.or_(b.fcmp_ordered("<" if op == "min" else ">", x, y), b.fcmp_unordered("uno", x, x))
        return b.select(taken, x, y)
    return intrinsic(b, f"llvm.{op}imum", x, y, flags=("nsz",))


def extreme_number(b: Any, op: str, x: V, y: V) -> V:
    """The smaller or larger float, `x` where `y` is NaN. op: min or max."""
    return b.select(b.fcmp_ordered(">" if op == "min" else "<", x, y), y, x)


def soft_floats(b: Any) -> bool:
    """Whether floats are computed by calls, as on a RISC-V without F: LLVM calls what few C libraries have, then."""
    return features(b) & {"m", "f"} == {"m"}


def horizontal(b: Any, op: str, dtype: str, vector: V, numbers: bool = False) -> V:
    """All lanes combined with `op`: add, mul, min or max; in any order. numbers: for min and max, none is NaN."""
    element = vector.type.element
    if numbers and vector.type.count & (vector.type.count - 1) == 0:
        return _extreme_lane(b, op, vector)
    if dtype.startswith("float") and op in ("min", "max") and soft_floats(b):
        lanes = [b.extract_element(vector, I32(lane)) for lane in range(vector.type.count)]
        return reduce(partial(extreme, b, op), lanes)
    name = f"llvm.vector.reduce.{op}"
    if dtype.startswith("float"):
        name = f"llvm.vector.reduce.f{op}" + ("imum" if op in ("min", "max") else "")
    elif op in ("min", "max"):
        name = f"llvm.vector.reduce.{'s' if dtype.startswith('int') else 'u'}{op}"
    full = f"{name}.{_suffix(vector.type)}"
    starts = dtype.startswith("float") and op in ("add", "mul")
    types = [element, vector.type] if starts else [vector.type]
    fn = b.module.globals.get(full) or ir.Function(b.module, ir.FunctionType(element, types), full)
    if not starts:
        return b.call(fn, [vector], fastmath=("nsz",) if dtype.startswith("float") else ())
    return b.call(fn, [ir.Constant(element, -0.0 if op == "add" else 1.0), vector], fastmath=("reassoc",))


def _extreme_lane(b: Any, op: str, vector: V) -> V:
    """Reduce lanes, whose number is a power of two, to their extreme."""
    while (half := vector.type.count // 2) > 0:
        places = [ir.Constant(ir.VectorType(I32, half), [*range(at, at + half)]) for at in (0, half)]
        parts = [b.shuffle_vector(vector, vector, each) for each in places]
        vector = extreme_number(b, op, *parts)
    return b.extract_element(vector, I32(0))


def convert(b: Any, value: V, source: str, target: str) -> V:
    """Cast of expr.nodes.Cast: to integers towards zero, saturating, NaN to 0; from integers to nearest."""
    if source == target:
        return value
    if source == "bfloat16":
        bits = b.shl(b.zext(value, widened(value, I32)), like(value, "int32", 16))
        return convert(b, b.bitcast(bits, widened(value, ir.FloatType())), "float32", target)
    if target == "bfloat16":
        single = _round_to_odd(b, value) if source == "float64" else convert(b, value, source, "float32")
        return _to_bfloat16(b, single)
    to = widened(value, llvm_type(target))
    from_float, to_float = source.startswith("float"), target.startswith("float")
    signed_from = source.startswith("int")
    if target == "bool":
        zero = like(value, source, 0)
        return b.fcmp_unordered("!=", value, zero) if from_float else b.icmp_unsigned("!=", value, zero)
    if from_float and to_float:
        if (source, target) == ("float64", "float16"):  # through float32, rounded to odd, so that it rounds once
            return b.fptrunc(_round_to_odd(b, value), to)
        return b.fpext(value, to) if float(source[5:]) < float(target[5:]) else b.fptrunc(value, to)
    if from_float:
        return _saturated(b, value, source, target)
    if to_float:
        return b.sitofp(value, to) if signed_from else b.uitofp(value, to)
    bits_from, bits_to = (LLVM_TYPES[d].width for d in (source, target))
    if bits_to < bits_from:
        return b.trunc(value, to)
    if bits_to == bits_from:
        return value
    return b.sext(value, to) if signed_from else b.zext(value, to)


def _to_bfloat16(b: Any, value: V) -> V:
    """The upper half of a float32, rounded to nearest, ties to even; NaN stays NaN."""
    bits = b.bitcast(value, widened(value, I32))
    upper = b.lshr(bits, like(bits, "int32", 16))
    odd = b.and_(upper, like(bits, "int32", 1))
    rounded = b.lshr(b.add(b.add(bits, like(bits, "int32", 0x7FFF)), odd), like(bits, "int32", 16))
    quiet = b.or_(upper, like(bits, "int32", 0x40))
    chosen = b.select(b.fcmp_unordered("uno", value, value), quiet, rounded)
    return b.trunc(chosen, widened(value, ir.IntType(16)))


def _saturated(b: Any, value: V, source: str, target: str) -> V:
    """A float to an integer: towards zero, to the nearest that there is, NaN to 0. llvm.fptosi.sat goes by lanes."""
    if source == "float16":  # in which the limits of most integers are infinite
        return _saturated(b, convert(b, value, source, "float32"), "float32", target)
    bits, signed = LLVM_TYPES[target].width, target.startswith("int")
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    wide = ir.IntType(max(bits, 32))
    least = like(value, source, low)
    inside = b.select(b.fcmp_ordered("<", value, like(value, source, high + 1)), value, like(value, source, 0))
    inside = b.select(b.fcmp_ordered(">", inside, least), inside, least)
    whole = (b.fptosi if signed else b.fptoui)(inside, widened(value, wide))
    whole = whole if wide.width == bits else b.trunc(whole, widened(value, LLVM_TYPES[target]))
    return b.select(b.fcmp_ordered(">=", value, like(value, source, high + 1)), like(value, target, high), whole)


def _round_to_odd(b: Any, value: V) -> V:
    """float64 to float32: where it is not exact, towards zero, and then the last bit set."""
    near = b.fptrunc(value, widened(value, ir.FloatType()))
    back = b.fpext(near, value.type)
    bits = b.bitcast(near, widened(value, I32))
    one = ir.Constant(bits.type, [1] * bits.type.count if is_vector(bits) else 1)
    size = [intrinsic(b, "llvm.fabs", each) for each in (back, value)]
    bits = b.select(b.fcmp_ordered(">", *size), b.sub(bits, one), bits)
    odd = b.select(b.fcmp_ordered("!=", back, value), b.or_(bits, one), bits)
    return b.bitcast(odd, near.type)


def convert_small(b: Any, value: V, target: str) -> V:
    """A float that is known to fit int32 to a small integer type."""
    whole = b.fptosi(value, widened(value, I32))
    return whole if target == "int32" else b.trunc(whole, widened(value, llvm_type(target)))


def shift(b: Any, op: str, x: V, y: V) -> V:
    """Shift by `y`; by the width or more gives 0, or the sign for ashr."""
    width = (x.type.element if is_vector(x) else x.type).width
    dtype = f"uint{width}"
    fits = b.icmp_unsigned("<", y, like(y, dtype, width))
    if op == "ashr":
        return b.ashr(x, b.select(fits, y, like(y, dtype, width - 1)))
    moved = getattr(b, op)(x, b.select(fits, y, like(y, dtype, 0)))
    return b.select(fits, moved, like(x, dtype, 0))


def int_division(b: Any, op: str, signed: bool, x: V, y: V) -> V:
    """div towards zero, floordiv, mod with the sign of the divisor. By zero gives 0; nothing traps."""
    width = (x.type.element if is_vector(x) else x.type).width
    dtype = f"uint{width}"
    zero, one = like(x, dtype, 0), like(x, dtype, 1)
    by_zero = b.icmp_unsigned("==", y, zero)
    if not signed:
        safe = b.select(by_zero, one, y)
        return b.select(by_zero, zero, b.urem(x, safe) if op == "mod" else b.udiv(x, safe))
    minus = b.icmp_unsigned("==", y, like(x, dtype, -1))
    safe = b.select(b.or_(by_zero, minus), one, y)
    quotient, rest = b.sdiv(x, safe), b.srem(x, safe)
    quotient = b.select(minus, b.sub(zero, x), quotient)
    if op != "div":
        differs = b.icmp_signed("<", b.xor(rest, safe), zero)
        move = b.and_(differs, b.icmp_unsigned("!=", rest, zero))
        quotient = b.select(move, b.sub(quotient, one), quotient)
        rest = b.select(move, b.add(rest, safe), rest)
    return b.select(by_zero, zero, rest if op == "mod" else quotient)


def int_power(b: Any, x: V, y: V) -> V:
    """x**y by squaring, wrapping; a negative exponent gives what float power, cut to an integer, gives."""
    if is_vector(x):
        out = ir.Constant(x.type, ir.Undefined)
        for lane in range(x.type.count):
            out = b.insert_element(out, int_power(b, *(b.extract_element(v, I32(lane)) for v in (x, y))), I32(lane))
        return out
    type_ = x.type
    before, head, done = b.block, b.append_basic_block("pow"), b.append_basic_block("powed")
    b.branch(head)
    b.position_at_end(head)
    result, base, left = b.phi(type_), b.phi(type_), b.phi(type_)
    odd = b.trunc(left, ir.IntType(1))
    new = b.select(odd, b.mul(result, base), result)
    square, half = b.mul(base, base), b.ashr(left, type_(1))
    for phi, first, then in ((result, type_(1), new), (base, x, square), (left, y, half)):
        phi.add_incoming(first, before)
        phi.add_incoming(then, b.block)
    b.cbranch(b.icmp_signed(">", half, type_(0)), head, done)
    b.position_at_end(done)
    unit = b.icmp_signed("==", x, type_(1))
    minus = b.icmp_signed("==", x, type_(-1))
    sign = b.select(b.trunc(y, ir.IntType(1)), type_(-1), type_(1))
    inverse = b.select(unit, type_(1), b.select(minus, sign, type_(0)))
    return b.select(b.icmp_signed("<", y, type_(0)), inverse, b.select(b.icmp_signed("==", y, type_(0)), type_(1), new))


def features(b: Any) -> frozenset[str]:
    """Features of the processor that the module of builder `b` is for, in LLVM's names."""
    return getattr(b.module, "features", frozenset())


def multiply_add(b: Any, x: V, y: V, z: V) -> V:
    """x * y + z, rounded once where the processor can; where it cannot, a call of fma would take a hundred times as
    long. Where the one rounding counts, expressions have `call("fma", ...)`."""
    once = features(b) & {"fma", "fma4", "fp-armv8", "vfp4"}
    return intrinsic(b, "llvm.fma" if once else "llvm.fmuladd", x, y, z)
