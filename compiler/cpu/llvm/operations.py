"""Operations that LLVM has no single instruction for: conversions, division, power, reductions over lanes.

Also the types and constants that all files of this folder share. In all functions `b` is the IRBuilder that writes the
instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any

import numpy as np
from llvmlite import ir

from celosia.compiler.expr.nodes import Binary, Call, Cast, Const, Expr
from celosia.compiler.ops.registry import TYPES
from celosia.compiler.program.dtypes import numpy_dtype

V = Any
"""An LLVM value; llvmlite has no types."""
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
WORKSPACE_ALIGNMENT = 64
"""Alignment of each tensor in the workspace, in bytes."""
SPECIAL_TYPES = {
    "float16": ir.HalfType(), "float32": ir.FloatType(), "float64": ir.DoubleType(), "bool": ir.IntType(1),
    "bfloat16": ir.IntType(16),
}  # fmt: skip
LLVM_TYPES: dict[str, Any] = {
    name: SPECIAL_TYPES[name] if name in SPECIAL_TYPES else ir.IntType(int(name.lstrip("uint"))) for name in TYPES
}
"""Element type -> LLVM's type of a value in registers."""
INTRINSIC_SUFFIXES = {"half": "f16", "float": "f32", "double": "f64"}
"""LLVM's name of a type -> the same in the names of intrinsics."""


def llvm_type(dtype: str) -> Any:
    """Return LLVM's type of an element. Raises ValueError where the CPU has none."""
    if dtype not in LLVM_TYPES:
        raise ValueError(f"the CPU has no element type {dtype}")
    return LLVM_TYPES[dtype]


def memory_type(dtype: str) -> Any:
    """Return LLVM's type of an element in memory, where a bool is a byte."""
    return ir.IntType(8) if dtype == "bool" else llvm_type(dtype)


def align_size(size: int) -> int:
    """Round a size up to the alignment of tensors in the workspace."""
    return -(-max(size, 1) // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT


def converts_exactly(low: float, high: float, dtype: str) -> bool:
    """Return whether floats clamped to [low, high] can be converted to `dtype` through int32, without saturation."""
    return dtype in ("int8", "uint8", "int16", "uint16", "int32") and low >= -(2**31) and high < 2**31


def is_vector(value: V) -> bool:
    """Return whether `value` is a vector."""
    return isinstance(value.type, ir.VectorType)


def constant(dtype: str, value: float) -> V:
    """Create a scalar constant of element type `dtype`; integers wrap."""
    type_ = llvm_type(dtype)
    if dtype == "bfloat16":
        value = int(np.array(value, numpy_dtype(dtype)).view(np.uint16))
    if isinstance(type_, ir.IntType):
        bits = type_.width
        pattern = int(value) & ((1 << bits) - 1)
        return ir.Constant(type_, pattern if bits == 1 or pattern < 1 << (bits - 1) else pattern - (1 << bits))
    return ir.Constant(type_, float(value))


def splat(b: Any, value: V, lanes: int) -> V:
    """Broadcast a scalar to a vector; vectors are unchanged."""
    if is_vector(value):
        return value
    if isinstance(value, ir.Constant):
        return ir.Constant(ir.VectorType(value.type, lanes), [value] * lanes)
    wide = ir.VectorType(value.type, lanes)
    one = b.insert_element(ir.Constant(wide, ir.Undefined), value, I32(0))
    return b.shuffle_vector(one, ir.Constant(wide, ir.Undefined), ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def like(value: V, dtype: str, scalar: float) -> V:
    """Create a constant of element type `dtype` with as many lanes as `value`: a scalar where that is a scalar."""
    c = constant(dtype, scalar)
    return ir.Constant(ir.VectorType(c.type, value.type.count), [c] * value.type.count) if is_vector(value) else c


def vector_type_like(value: V, scalar: Any) -> Any:
    """Return the LLVM type with elements of type `scalar` and as many lanes as `value`."""
    return ir.VectorType(scalar, value.type.count) if is_vector(value) else scalar


def _suffix(type_: Any) -> str:
    """Return a type as it is written in the names of LLVM's intrinsics, such as v4f32."""
    if isinstance(type_, ir.VectorType):
        return f"v{type_.count}{_suffix(type_.element)}"
    return INTRINSIC_SUFFIXES.get(str(type_)) or str(type_)


def declare(b: Any, name: str, result: Any, *types: Any) -> V:
    """Return the declaration of a function outside of the module, with these types of result and arguments."""
    return b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(result, types), name)


def shuffle_mask(lanes: Iterable[int]) -> V:
    """Return the constant vector of lane numbers that a shuffle takes."""
    numbers = list(lanes)
    return ir.Constant(ir.VectorType(I32, len(numbers)), numbers)


def pick_lanes(b: Any, vector: V, lanes: Iterable[int]) -> V:
    """Return the vector of these lanes of `vector`; a number beyond the last lane gives an arbitrary value."""
    return b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), shuffle_mask(lanes))


def intrinsic(
    b: Any, name: str, *args: V, result: Any = None, extra: tuple[V, ...] = (), flags: tuple[str, ...] = (),
    second_type: Any = None,
) -> V:  # fmt: skip
    """Call LLVM's overloaded intrinsic `name`, such as "llvm.sqrt", and return its value.

    The suffix of its full name has the type of the result (by default that of the first argument). With `result` the
    type of the first argument follows, else `second_type` if it is passed. extra: further arguments. flags: fast-math
    flags.
    """
    out = result or args[0].type
    others = [args[0].type] if result is not None else [second_type] if second_type is not None else []
    full = ".".join((name, *map(_suffix, (out, *others))))
    values = (*args, *extra)
    return b.call(declare(b, full, out, *(v.type for v in values)), values, fastmath=flags)


def masked_load(b: Any, pointer: V, mask: V, element: Any, align: int) -> V:
    """Load a vector of `element` at `pointer`; lanes outside `mask` are 0, and not read."""
    wide = ir.VectorType(element, mask.type.count)
    name = f"llvm.masked.load.{_suffix(wide)}.p0"
    fn = declare(b, name, wide, pointer.type, I32, mask.type, wide)
    return b.call(fn, [pointer, I32(align), mask, ir.Constant(wide, None)])


def load_if(b: Any, is_inside: V, pointer: V, mask: V, element: Any, align: int) -> V:
    """Load a vector under `mask`; with a plain load where `is_inside`, as masked loads are slow on some processors.

    is_inside: i1 value, whether all of the vector lies inside the tensor. Lanes outside of the mask are arbitrary.
    """
    plain, masked, done = (b.append_basic_block(name) for name in ("plain", "masked", "loaded"))
    b.cbranch(is_inside, plain, masked)
    loaded = []
    for block in (plain, masked):
        b.position_at_end(block)
        wide = ir.VectorType(element, mask.type.count)
        value = (
            b.load(pointer, typ=wide, align=align) if block is plain else masked_load(b, pointer, mask, element, align)
        )
        loaded.append((value, b.block))
        b.branch(done)
    b.position_at_end(done)
    value = b.phi(loaded[0][0].type)
    for lane_values, block in loaded:
        value.add_incoming(lane_values, block)
    return value


def prefetch(b: Any, pointer: V, distance: V, element: Any, to_first_level: bool = True) -> None:
    """Prefetch the element that lies `distance` elements behind `pointer` into the first- or the second-level cache."""
    target = b.gep(pointer, [distance], source_etype=element)
    fn = declare(b, "llvm.prefetch.p0", ir.VoidType(), pointer.type, I32, I32, I32)
    b.call(fn, [target, I32(0), I32(3 if to_first_level else 2), I32(1)])  # for reading; locality; a data cache


def fence(b: Any) -> None:
    """Write a fence that orders streaming stores before all later stores; x86 needs it."""
    if "sse2" in features(b):
        b.call(declare(b, "llvm.x86.sse.sfence", ir.VoidType()), [])


def extreme(b: Any, op: str, x: V, y: V) -> V:
    """Take the smaller or larger float (op min or max); NaN where there is one."""
    if has_soft_floats(b):
        takes_x = b.or_(b.fcmp_ordered("<" if op == "min" else ">", x, y), b.fcmp_unordered("uno", x, x))
        return b.select(takes_x, x, y)
    return intrinsic(b, f"llvm.{op}imum", x, y, flags=("nsz",))


def extreme_number(b: Any, op: str, x: V, y: V) -> V:
    """Take the smaller or larger float (op min or max); `x` where `y` is NaN."""
    return b.select(b.fcmp_ordered(">" if op == "min" else "<", x, y), y, x)


def has_soft_floats(b: Any) -> bool:
    """Return whether floats are computed by calls, as on a RISC-V without F."""
    return features(b) & {"m", "f"} == {"m"}


def reduce_lanes(b: Any, op: str, dtype: str, vector: V, nan_free: bool = False) -> V:
    """Combine all lanes of a vector with `op` (add, mul, min, max), in any order.

    nan_free: for min and max, whether no lane is NaN, which takes fewer instructions.
    """
    element = vector.type.element
    if nan_free and vector.type.count & (vector.type.count - 1) == 0:
        return _extreme_lane(b, op, vector)
    if dtype.startswith("float") and op in ("min", "max") and has_soft_floats(b):
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
    fn = declare(b, full, element, *types)
    if not starts:
        return b.call(fn, [vector], fastmath=("nsz",) if dtype.startswith("float") else ())
    return b.call(fn, [ir.Constant(element, -0.0 if op == "add" else 1.0), vector], fastmath=("reassoc",))


def _extreme_lane(b: Any, op: str, vector: V) -> V:
    """Return the extreme (op min or max) of a power of two of lanes, none of which is NaN."""
    while (half := vector.type.count // 2) > 0:
        masks = [ir.Constant(ir.VectorType(I32, half), [*range(start, start + half)]) for start in (0, half)]
        parts = [b.shuffle_vector(vector, vector, mask) for mask in masks]
        vector = extreme_number(b, op, *parts)
    return b.extract_element(vector, I32(0))


def convert(b: Any, value: V, source: str, target: str) -> V:
    """Convert a value of element type `source` to `target`, as nodes.Cast defines it.

    Floats become integers towards zero, saturating, NaN becomes 0; integers become the nearest float.
    """
    if source == target:
        return value
    if source == "bfloat16":
        bits = b.shl(b.zext(value, vector_type_like(value, I32)), like(value, "int32", 16))
        return convert(b, b.bitcast(bits, vector_type_like(value, ir.FloatType())), "float32", target)
    if target == "bfloat16":
        single = _round_to_odd(b, value) if source == "float64" else convert(b, value, source, "float32")
        return _to_bfloat16(b, single)
    to = vector_type_like(value, llvm_type(target))
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
        return _convert_saturating(b, value, source, target)
    if to_float:
        return b.sitofp(value, to) if signed_from else b.uitofp(value, to)
    bits_from, bits_to = (LLVM_TYPES[d].width for d in (source, target))
    if bits_to < bits_from:
        return b.trunc(value, to)
    if bits_to == bits_from:
        return value
    return b.sext(value, to) if signed_from else b.zext(value, to)


def _to_bfloat16(b: Any, value: V) -> V:
    """Round a float32 to its upper half, to nearest even; NaN stays NaN."""
    bits = b.bitcast(value, vector_type_like(value, I32))
    upper = b.lshr(bits, like(bits, "int32", 16))
    odd = b.and_(upper, like(bits, "int32", 1))
    rounded = b.lshr(b.add(b.add(bits, like(bits, "int32", 0x7FFF)), odd), like(bits, "int32", 16))
    quiet = b.or_(upper, like(bits, "int32", 0x40))
    chosen = b.select(b.fcmp_unordered("uno", value, value), quiet, rounded)
    return b.trunc(chosen, vector_type_like(value, ir.IntType(16)))


def _convert_saturating(b: Any, value: V, source: str, target: str) -> V:
    """Convert a float to an integer, towards zero, saturating, NaN to 0; llvm.fptosi.sat would convert lane by lane."""
    if source == "float16":  # in which the limits of most integers are infinite
        return _convert_saturating(b, convert(b, value, source, "float32"), "float32", target)
    bits, signed = LLVM_TYPES[target].width, target.startswith("int")
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    wide = ir.IntType(max(bits, 32))
    least = like(value, source, low)
    inside = b.select(b.fcmp_ordered("<", value, like(value, source, high + 1)), value, like(value, source, 0))
    inside = b.select(b.fcmp_ordered(">", inside, least), inside, least)
    integer = (b.fptosi if signed else b.fptoui)(inside, vector_type_like(value, wide))
    integer = integer if wide.width == bits else b.trunc(integer, vector_type_like(value, LLVM_TYPES[target]))
    return b.select(b.fcmp_ordered(">=", value, like(value, source, high + 1)), like(value, target, high), integer)


def _round_to_odd(b: Any, value: V) -> V:
    """Convert float64 to float32 by rounding to odd, so that a second rounding to a narrower type is correct.

    It rounds towards zero, and sets the last bit where the result is inexact.
    """
    nearest = b.fptrunc(value, vector_type_like(value, ir.FloatType()))
    widened_again = b.fpext(nearest, value.type)
    bits = b.bitcast(nearest, vector_type_like(value, I32))
    one = ir.Constant(bits.type, [1] * bits.type.count if is_vector(bits) else 1)
    size = [intrinsic(b, "llvm.fabs", value_) for value_ in (widened_again, value)]
    bits = b.select(b.fcmp_ordered(">", *size), b.sub(bits, one), bits)
    odd = b.select(b.fcmp_ordered("!=", widened_again, value), b.or_(bits, one), bits)
    return b.bitcast(odd, nearest.type)


def convert_small(b: Any, value: V, target: str) -> V:
    """Convert a float that is known to fit int32 and `target` to that small integer type."""
    integer = b.fptosi(value, vector_type_like(value, I32))
    return integer if target == "int32" else b.trunc(integer, vector_type_like(value, llvm_type(target)))


def shift(b: Any, op: str, x: V, y: V) -> V:
    """Shift `x` by `y` bits (op shl, lshr or ashr). A shift by the width or more gives 0, or the sign for ashr."""
    width = (x.type.element if is_vector(x) else x.type).width
    dtype = f"uint{width}"
    is_in_width = b.icmp_unsigned("<", y, like(y, dtype, width))
    if op == "ashr":
        return b.ashr(x, b.select(is_in_width, y, like(y, dtype, width - 1)))
    moved = getattr(b, op)(x, b.select(is_in_width, y, like(y, dtype, 0)))
    return b.select(is_in_width, moved, like(x, dtype, 0))


def int_division(b: Any, op: str, signed: bool, x: V, y: V) -> V:
    """Divide integers: op div rounds towards zero, floordiv down; mod has the divisor's sign.

    Division by zero gives 0, and no operands trap.
    """
    width = (x.type.element if is_vector(x) else x.type).width
    dtype = f"uint{width}"
    zero, one = like(x, dtype, 0), like(x, dtype, 1)
    by_zero = b.icmp_unsigned("==", y, zero)
    if not signed:
        safe = b.select(by_zero, one, y)
        return b.select(by_zero, zero, b.urem(x, safe) if op == "mod" else b.udiv(x, safe))
    by_minus_one = b.icmp_unsigned("==", y, like(x, dtype, -1))
    safe = b.select(b.or_(by_zero, by_minus_one), one, y)
    quotient, remainder = b.sdiv(x, safe), b.srem(x, safe)
    quotient = b.select(by_minus_one, b.sub(zero, x), quotient)
    if op != "div":
        differs = b.icmp_signed("<", b.xor(remainder, safe), zero)
        move = b.and_(differs, b.icmp_unsigned("!=", remainder, zero))
        quotient = b.select(move, b.sub(quotient, one), quotient)
        remainder = b.select(move, b.add(remainder, safe), remainder)
    return b.select(by_zero, zero, remainder if op == "mod" else quotient)


def int_power(b: Any, x: V, y: V) -> V:
    """Write x**y by squaring, wrapping; a negative exponent gives the truncated float power."""
    if is_vector(x):
        out = ir.Constant(x.type, ir.Undefined)
        for lane in range(x.type.count):
            out = b.insert_element(out, int_power(b, *(b.extract_element(v, I32(lane)) for v in (x, y))), I32(lane))
        return out
    type_ = x.type
    before, head, done = b.block, b.append_basic_block("pow"), b.append_basic_block("powed")
    b.branch(head)
    b.position_at_end(head)
    result, base, exponent = b.phi(type_), b.phi(type_), b.phi(type_)
    odd = b.trunc(exponent, ir.IntType(1))
    new = b.select(odd, b.mul(result, base), result)
    square, half = b.mul(base, base), b.ashr(exponent, type_(1))
    for phi, first, following in ((result, type_(1), new), (base, x, square), (exponent, y, half)):
        phi.add_incoming(first, before)
        phi.add_incoming(following, b.block)
    b.cbranch(b.icmp_signed(">", half, type_(0)), head, done)
    b.position_at_end(done)
    unit = b.icmp_signed("==", x, type_(1))
    minus = b.icmp_signed("==", x, type_(-1))
    sign = b.select(b.trunc(y, ir.IntType(1)), type_(-1), type_(1))
    inverse = b.select(unit, type_(1), b.select(minus, sign, type_(0)))
    return b.select(b.icmp_signed("<", y, type_(0)), inverse, b.select(b.icmp_signed("==", y, type_(0)), type_(1), new))


def features(b: Any) -> frozenset[str]:
    """Return the features of the processor that the builder's module is for, in LLVM's names."""
    return getattr(b.module, "features", frozenset())


def multiply_add(b: Any, x: V, y: V, z: V) -> V:
    """Write x * y + z, rounded once where the processor can.

    Elsewhere a call of fma would take a hundred times as long; where the single rounding matters, expressions have
    `call("fma", ...)`.
    """
    once = features(b) & {"fma", "fma4", "fp-armv8", "vfp4"}
    return intrinsic(b, "llvm.fma" if once else "llvm.fmuladd", x, y, z)


NEON_LANES = 4
"""Lanes of 32 bits in a vector of NEON."""
MAX_MAGNITUDE = 2.0**20
"""Magnitude to which floats are clamped before they are rounded; larger ones saturate to the same byte."""
ROUNDING_ADDEND = 1.5 * 2**23
"""Added to a float up to MAX_MAGNITUDE, it leaves the nearest integer (ties to even) in the lowest bits."""


def requantise(b: Any, e: Cast, lanes: int, features: frozenset[str], value: Callable[[Expr], V]) -> V:
    """Write `e` if it is clip(round_even(x) + zero) as int8 or uint8 vectors on NEON; return None for other casts.

    The result is that of the general instructions, in fewer of them. value: writes a part of the expression.
    """
    match e.value:
        case Call("clamp", (Binary("add", Call("round_even", (x,)), Cast(zero, "float32")), Const(low), Const(high))):
            limits = {"int8": (-128, 127), "uint8": (0, 255)}.get(e.dtype)
            if lanes % NEON_LANES or "neon" not in features or zero.dtype != e.dtype or limits != (low, high):
                return None
            return _requantise_by_neon(b, value(x), value(zero), e.dtype == "int8", "fp-armv8" in features)
    return None


def _requantise_by_neon(b: Any, x: V, zero: V, signed: bool, is_aarch64: bool) -> V:
    """Round float32 `x`, add the zero point and narrow to bytes with saturation, eight lanes at a time.

    Returns None where `x` is a scalar or `zero` a vector.
    """
    if not is_vector(x) or is_vector(zero):
        return None
    n, bytes_ = x.type.count, ir.VectorType(I8, 2 * NEON_LANES)
    least = like(x, "float32", -MAX_MAGNITUDE)
    x = b.select(b.fcmp_ordered(">", x, least), x, least)
    narrow = (
        ("aarch64.neon.sqxtn" if signed else "aarch64.neon.sqxtun")
        if is_aarch64
        else f"arm.neon.vqmovn{'s' if signed else 'su'}"
    )
    zero_point = splat(b, (b.sext if signed else b.zext)(zero, I16), 2 * NEON_LANES)
    words = []
    for start in range(0, n, 2 * NEON_LANES):
        halves = [
            _round_to_int16(b, pick_lanes(b, x, range(lane, lane + NEON_LANES)), is_aarch64)
            for lane in range(start, min(n, start + 2 * NEON_LANES), NEON_LANES)
        ]
        eight = ir.Constant(ir.VectorType(I32, 2 * NEON_LANES), list(range(2 * NEON_LANES)))
        total = intrinsic(b, "llvm.sadd.sat", b.shuffle_vector(halves[0], halves[-1], eight), zero_point)
        packed = b.bitcast(_call_neon(b, f"{narrow}.v8i8", bytes_, total), ir.VectorType(I32, 2))
        words += [b.extract_element(packed, I32(k)) for k in range(len(halves))]
    if len(words) == 1:
        return b.bitcast(words[0], ir.VectorType(I8, NEON_LANES))
    combined = ir.Constant(ir.VectorType(I32, len(words)), ir.Undefined)
    for k, word in enumerate(words):
        combined = b.insert_element(combined, word, I32(k))
    return b.bitcast(combined, ir.VectorType(I8, n))


def _round_to_int16(b: Any, x: V, is_aarch64: bool) -> V:
    """Round four float32 to int16, to nearest even, saturating."""
    words, halves = ir.VectorType(I32, NEON_LANES), ir.VectorType(I16, NEON_LANES)
    if is_aarch64:
        return _call_neon(
            b, "aarch64.neon.sqxtn.v4i16", halves, _call_neon(b, "aarch64.neon.fcvtns.v4i32.v4f32", words, x)
        )
    limit, magic = (like(x, "float32", constant) for constant in (MAX_MAGNITUDE, ROUNDING_ADDEND))
    x = b.select(b.fcmp_ordered("<", x, limit), x, limit)
    integers = b.sub(b.bitcast(b.fadd(x, magic), words), b.bitcast(magic, words))
    return _call_neon(b, "arm.neon.vqmovns.v4i16", halves, integers)


def _call_neon(b: Any, name: str, result: Any, x: V) -> V:
    """Call NEON's intrinsic llvm.`name` of one argument, which returns type `result`."""
    return b.call(declare(b, f"llvm.{name}", result, x.type), [x])
