"""Instructions for sums of byte products: dot4(x, w) of four uint8 and four int8, pairs(x0, x1, w0, w1) of int8 pairs.

dot4(x, w) = x0*w0 + x1*w1 + x2*w2 + x3*w3; all bytes lie in a uint32 (uint16 for pairs), the first one lowest.

  VNNI, AVX-VNNI   vpdpbusd does it for int32 lanes
  i8mm (Arm)       usdot does it
  dotprod (Arm)    udot takes w + 128, and 128 * x is subtracted
  AVX2             vpmaddwd multiplies pairs of int16 exactly (vpmaddubsw would saturate)
  NEON             int16 products of two bytes, then pairwise sums to int32 (sadalp, vpadal); pairs adds two products of
                   int8 (smull, smlal) first where they fit
  others           byte by byte

Where w is four ones, neighbours are only added (uaddlp, vpaddl, or vpmaddubsw, which then does not saturate): zero
points need the sums of a row's bytes (ops/integer.py).

In all functions `b` is the IRBuilder that writes the instructions; acc, x, w are LLVM values of one number of lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from llvmlite import ir

from celosia.compiler.expr.math_functions import ONES
from celosia.compiler.target import dot_instructions, target

V = Any
"""An LLVM value; llvmlite has no types."""
I8, I16, I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)


def features() -> frozenset[str]:
    """Return the features of the target processor, in LLVM's names."""
    return target().features


def dot4(b: Any, acc: V, x: V, w: V, features_: frozenset[str]) -> V:
    """Write acc + dot4(x, w), lane by lane, in the instructions of the processor with `features_`.

    Vectors that are wider than an instruction are split; narrower ones are padded with arbitrary lanes.
    """
    kind, widths = dot_instructions(features_)
    lanes = acc.type.count if isinstance(acc.type, ir.VectorType) else 1
    if kind == "bytes" or lanes < 4:
        return _dot_by_bytes(b, acc, x, w)
    is_aarch64 = "fp-armv8" in features_
    instruction: Callable[[Any, V, V, V], V] = {
        "vnni": _dot_by_vnni, "pairs": _dot_by_int16_pairs, "i8mm": _dot_by_i8mm, "dotprod": _dot_by_dotprod,
        "neon": _dot_by_neon if is_aarch64 else _dot_by_neon_of_armv7,
    }[kind]  # fmt: skip
    if isinstance(w, ir.Constant) and w.constant == [I32(ONES)] * lanes:
        instruction = {"pairs": _sum_by_pairs, "neon": _sum_by_neon if is_aarch64 else _sum_by_neon_of_armv7}.get(
            kind, instruction
        )
    width = next((n for n in reversed(widths) if n >= lanes), widths[0])
    if width == lanes:
        return instruction(b, acc, x, w)
    parts = []
    for start in range(0, lanes, width):
        lanes_of_part = [min(start + k, lanes) for k in range(width)]  # lane `lanes` stands for an arbitrary value
        parts.append(instruction(b, *(_pick_lanes(b, v, lanes_of_part) for v in (acc, x, w))))
    return _concatenate(b, parts, lanes)


def _pick_lanes(b: Any, v: V, lanes: list[int]) -> V:
    """Return the vector of these lanes of `v`; a number beyond the last lane gives an arbitrary value."""
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
    return b.shuffle_vector(v, ir.Constant(v.type, ir.Undefined), mask)


def _concatenate(b: Any, parts: list[V], lanes: int) -> V:
    """Concatenate vectors, and keep the first `lanes` lanes."""
    while len(parts) > 1:
        pairs = [parts[k : k + 2] for k in range(0, len(parts), 2)]
        parts = []
        for first, *rest in pairs:
            n = first.type.count
            second = rest[0] if rest else ir.Constant(first.type, ir.Undefined)
            parts.append(b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, 2 * n), list(range(2 * n)))))
    return _pick_lanes(b, parts[0], list(range(lanes)))


def _declare(b: Any, name: str, result: Any, *types: Any) -> V:
    """Return the declaration of LLVM's intrinsic `name` with these types of result and arguments."""
    return b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(result, types), name)


def _dot_by_vnni(b: Any, acc: V, x: V, w: V) -> V:
    """Write acc + dot4(x, w) as vpdpbusd."""
    lanes = acc.type.count
    quads = ir.VectorType(I8, 4 * lanes)
    fn = _declare(b, f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", acc.type, acc.type, quads, quads)
    return b.call(fn, [acc, b.bitcast(x, quads), b.bitcast(w, quads)])


_MULTIPLY_PAIRS = {16: "llvm.x86.avx512.pmaddw.d.512", 8: "llvm.x86.avx2.pmadd.wd", 4: "llvm.x86.sse2.pmadd.wd"}
"""Lanes of int32 -> instruction that adds the products of neighbouring int16."""


def _dot_by_int16_pairs(b: Any, acc: V, x: V, w: V) -> V:
    """Write acc + dot4(x, w) as two vpmaddwd: one for even and one for odd bytes."""
    lanes = acc.type.count
    pairs = ir.VectorType(I16, 2 * lanes)
    fn = _declare(b, _MULTIPLY_PAIRS[lanes], acc.type, pairs, pairs)
    even, odd = (b.call(fn, factors) for factors in _even_and_odd_bytes(b, x, w))
    return b.add(acc, b.add(even, odd))


def _even_and_odd_bytes(b: Any, x: V, w: V) -> list[tuple[V, V]]:
    """Return bytes 0 and 2 of both operands as int16, then bytes 1 and 3."""
    pairs = ir.VectorType(I16, 2 * x.type.count)
    eight, low = (ir.Constant(pairs, [value] * pairs.count) for value in (8, 255))
    x, w = b.bitcast(x, pairs), b.bitcast(w, pairs)
    return [(b.and_(x, low), b.ashr(b.shl(w, eight), eight)), (b.lshr(x, eight), b.ashr(w, eight))]


def _dot_by_neon(b: Any, acc: V, x: V, w: V) -> V:
    """Write acc + dot4(x, w) with products in int16, in which they fit: -32640 <= x * w <= 32385."""
    pairs = ir.VectorType(I16, 8)
    fn = _declare(b, "llvm.aarch64.neon.saddlp.v4i32.v8i16", acc.type, pairs)
    for factors in _even_and_odd_bytes(b, x, w):
        acc = b.add(acc, b.call(fn, [b.mul(*factors)]))
    return acc


def _dot_by_neon_of_armv7(b: Any, acc: V, x: V, w: V) -> V:
    """Write acc + dot4(x, w) like `_dot_by_neon`, with an instruction that adds pairs to an accumulator."""
    fn = _declare(b, "llvm.arm.neon.vpadals.v4i32.v8i16", acc.type, acc.type, ir.VectorType(I16, 8))
    for factors in _even_and_odd_bytes(b, x, w):
        acc = b.call(fn, [acc, b.mul(*factors)])
    return acc


_MULTIPLY_BYTES = {
    16: "llvm.x86.avx512.pmaddubs.w.512", 8: "llvm.x86.avx2.pmadd.ub.sw", 4: "llvm.x86.ssse3.pmadd.ub.sw.128"
}  # fmt: skip
"""Lanes of int32 -> instruction that adds the products of neighbouring uint8 and int8 as int16."""


def _sum_by_pairs(b: Any, acc: V, x: V, w: V) -> V:
    """Write acc + dot4(x, ONES), the sum of four bytes: vpmaddubsw adds neighbours, vpmaddwd pairs of sums."""
    lanes = acc.type.count
    quads, pairs = ir.VectorType(I8, 4 * lanes), ir.VectorType(I16, 2 * lanes)
    multiply = _declare(b, _MULTIPLY_BYTES[lanes], pairs, quads, quads)
    halves = b.call(multiply, [b.bitcast(x, quads), b.bitcast(w, quads)])
    units = ir.Constant(pairs, [1] * pairs.count)
    return b.add(acc, b.call(_declare(b, _MULTIPLY_PAIRS[lanes], acc.type, pairs, pairs), [halves, units]))


def _sum_by_neon(b: Any, acc: V, x: V, w: V) -> V:
    """Write acc + dot4(x, ONES), the sum of four bytes: uaddlp adds neighbours twice."""
    quads, pairs = ir.VectorType(I8, 16), ir.VectorType(I16, 8)
    halves = b.call(_declare(b, "llvm.aarch64.neon.uaddlp.v8i16.v16i8", pairs, quads), [b.bitcast(x, quads)])
    return b.add(acc, b.call(_declare(b, "llvm.aarch64.neon.uaddlp.v4i32.v8i16", acc.type, pairs), [halves]))


def _sum_by_neon_of_armv7(b: Any, acc: V, x: V, w: V) -> V:
    """Write acc + dot4(x, ONES), the sum of four bytes: vpaddl adds neighbours, vpadal adds pairs to `acc`."""
    quads, pairs = ir.VectorType(I8, 16), ir.VectorType(I16, 8)
    halves = b.call(_declare(b, "llvm.arm.neon.vpaddlu.v8i16.v16i8", pairs, quads), [b.bitcast(x, quads)])
    return b.call(_declare(b, "llvm.arm.neon.vpadalu.v4i32.v8i16", acc.type, acc.type, pairs), [acc, halves])


def _dot_by_i8mm(b: Any, acc: V, x: V, w: V) -> V:
    """Write acc + dot4(x, w) as usdot."""
    quads = ir.VectorType(I8, 16)
    fn = _declare(b, "llvm.aarch64.neon.usdot.v4i32.v16i8", acc.type, acc.type, quads, quads)
    return b.call(fn, [acc, b.bitcast(x, quads), b.bitcast(w, quads)])


def _dot_by_dotprod(b: Any, acc: V, x: V, w: V) -> V:
    """Write acc + dot4(x, w) as udot: dot4(x, w + 128) - dot4(x, 128), with w + 128 as uint8."""
    quads = ir.VectorType(I8, 16)
    fn = _declare(b, "llvm.aarch64.neon.udot.v4i32.v16i8", acc.type, acc.type, quads, quads)
    x, top = b.bitcast(x, quads), ir.Constant(quads, [-128] * 16)
    excess = b.call(fn, [ir.Constant(acc.type, None), x, top])
    return b.sub(b.call(fn, [acc, x, b.xor(b.bitcast(w, quads), top)]), excess)


def _dot_by_bytes(b: Any, acc: V, x: V, w: V) -> V:
    """Write acc + dot4(x, w) with shifts and masks, for processors without such an instruction."""

    def constant(number: int) -> V:
        """Return a constant with as many lanes as `acc`."""
        lanes = getattr(acc.type, "count", 0)
        return ir.Constant(acc.type, [number] * lanes) if lanes else I32(number)

    for k in range(4):
        byte = b.and_(b.lshr(x, constant(8 * k)), constant(255))
        factor = b.ashr(b.shl(w, constant(24 - 8 * k)), constant(24))
        acc = b.add(acc, b.mul(byte, factor))
    return acc


def pairs(b: Any, acc: V, x0: V, x1: V, w0: V, w1: V, features_: frozenset[str], narrow: bool = False) -> V:
    """Write acc + pairs(x0, x1, w0, w1), lane by lane. narrow: the sum of two products fits int16."""
    if dot_instructions(features_)[0] != "neon" or getattr(acc.type, "count", 0) != 4:
        return _pairs_by_bytes(b, acc, ((x0, w0), (x1, w1)))
    is_aarch64, eight, bytes_ = "fp-armv8" in features_, ir.VectorType(I16, 8), ir.VectorType(I8, 8)
    multiply = _declare(
        b, f"llvm.{'aarch64.neon.smull' if is_aarch64 else 'arm.neon.vmulls'}.v8i16", eight, bytes_, bytes_
    )
    first, second = (b.call(multiply, [b.bitcast(x, bytes_), b.bitcast(w, bytes_)]) for x, w in ((x0, w0), (x1, w1)))
    for products in [b.add(first, second)] if narrow else [first, second]:
        if is_aarch64:
            add = _declare(b, "llvm.aarch64.neon.saddlp.v4i32.v8i16", acc.type, eight)
            acc = b.add(acc, b.call(add, [products]))
        else:
            add = _declare(b, "llvm.arm.neon.vpadals.v4i32.v8i16", acc.type, acc.type, eight)
            acc = b.call(add, [acc, products])
    return acc


def can_load_pair(lanes: int, features_: frozenset[str]) -> bool:
    """Return whether one instruction broadcasts two uint16 from memory to this number of lanes."""
    return lanes == 4 and dot_instructions(features_)[0] == "neon"


def load_pair(b: Any, pointer: V, features_: frozenset[str]) -> list[V]:
    """Load the uint16 at `pointer` and the one behind it, each broadcast to four lanes."""
    lanes = ir.VectorType(I16, 4)
    result = ir.LiteralStructType((lanes, lanes))
    if "fp-armv8" in features_:
        loaded = b.call(_declare(b, "llvm.aarch64.neon.ld2r.v4i16.p0", result, pointer.type), [pointer])
    else:
        loaded = b.call(_declare(b, "llvm.arm.neon.vld2dup.v4i16.p0", result, pointer.type, I32), [pointer, I32(2)])
    return [b.extract_value(loaded, k) for k in range(2)]


def _pairs_by_bytes(b: Any, acc: V, factors: tuple[tuple[V, V], ...]) -> V:
    """Write acc + pairs(...) with shifts, for processors without such an instruction."""

    def byte(value: V, k: int) -> V:
        """Return byte `k` of a uint16, sign-extended to int32."""
        wide = b.sext(value, acc.type)
        lanes = getattr(acc.type, "count", 0)
        by = [ir.Constant(acc.type, [bits] * lanes) if lanes else I32(bits) for bits in (24 - 8 * k, 24)]
        return b.ashr(b.shl(wide, by[0]), by[1])

    for x, w in factors:
        for k in range(2):
            acc = b.add(acc, b.mul(byte(x, k), byte(w, k)))
    return acc


DOTS: Mapping[str, Callable[..., V]] = {"dot4": dot4, "pairs": pairs, "narrow_pairs": partial(pairs, narrow=True)}
"""Intrinsic -> writer of the sum of products, with the accumulator first."""
