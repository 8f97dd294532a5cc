"""Sums of products of bytes: the instructions of each processor, and Intel's tiles (AMX).

dot4(x, w) = x0*w0 + x1*w1 + x2*w2 + x3*w3 of four uint8 and four int8. pairs(x0, x1, w0, w1) takes pairs of int8. All
bytes lie in a uint32 (uint16 for pairs), the first one lowest.

  VNNI, AVX-VNNI   vpdpbusd does it for int32 lanes
  i8mm (Arm)       usdot does it
  dotprod (Arm)    udot takes w + 128, and 128 * x is subtracted
  AVX2             vpmaddwd multiplies pairs of int16 exactly (vpmaddubsw would saturate)
  NEON             int16 products of two bytes, then pairwise sums to int32 (sadalp, vpadal); pairs adds two products of
                   int8 (smull, smlal) first where they fit
  others           byte by byte

Where w is four ones, neighbours are only added (uaddlp, vpaddl, or vpmaddubsw, which then does not saturate): zero
points need the sums of a row's bytes (ops/integer.py).

AMX computes a complete nest of loops; see `match_amx`.

In all functions `b` is the IRBuilder that writes the instructions; acc, x, w are LLVM values of one number of lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir

from celosia.compiler.cpu.llvm.operations import I8, I16, I32, I64, V, declare, pick_lanes
from celosia.compiler.expr.affine import coefficient, flatten, linear
from celosia.compiler.expr.loops import For, Update
from celosia.compiler.expr.math_functions import ONES
from celosia.compiler.expr.nodes import Call, Expr, Load, Tensor, Var
from celosia.compiler.target import AMX_FEATURES, TILE_COLUMNS, TILE_ROWS, TILE_STEPS, dot_instructions


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
        parts.append(instruction(b, *(pick_lanes(b, v, lanes_of_part) for v in (acc, x, w))))
    return _concatenate(b, parts, lanes)


def _concatenate(b: Any, parts: list[V], lanes: int) -> V:
    """Concatenate vectors, and keep the first `lanes` lanes."""
    while len(parts) > 1:
        pairs = [parts[k : k + 2] for k in range(0, len(parts), 2)]
        parts = []
        for first, *rest in pairs:
            n = first.type.count
            second = rest[0] if rest else ir.Constant(first.type, ir.Undefined)
            parts.append(b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, 2 * n), list(range(2 * n)))))
    return pick_lanes(b, parts[0], list(range(lanes)))


def _dot_by_vnni(b: Any, acc: V, x: V, w: V) -> V:
    """Write acc + dot4(x, w) as vpdpbusd."""
    lanes = acc.type.count
    quads = ir.VectorType(I8, 4 * lanes)
    fn = declare(b, f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", acc.type, acc.type, quads, quads)
    return b.call(fn, [acc, b.bitcast(x, quads), b.bitcast(w, quads)])


_MULTIPLY_PAIRS = {16: "llvm.x86.avx512.pmaddw.d.512", 8: "llvm.x86.avx2.pmadd.wd", 4: "llvm.x86.sse2.pmadd.wd"}
"""Lanes of int32 -> instruction that adds the products of neighbouring int16."""


def _dot_by_int16_pairs(b: Any, acc: V, x: V, w: V) -> V:
    """Write acc + dot4(x, w) as two vpmaddwd: one for even and one for odd bytes."""
    lanes = acc.type.count
    pairs = ir.VectorType(I16, 2 * lanes)
    fn = declare(b, _MULTIPLY_PAIRS[lanes], acc.type, pairs, pairs)
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
    fn = declare(b, "llvm.aarch64.neon.saddlp.v4i32.v8i16", acc.type, pairs)
    for factors in _even_and_odd_bytes(b, x, w):
        acc = b.add(acc, b.call(fn, [b.mul(*factors)]))
    return acc


def _dot_by_neon_of_armv7(b: Any, acc: V, x: V, w: V) -> V:
    """Write acc + dot4(x, w) like `_dot_by_neon`, with an instruction that adds pairs to an accumulator."""
    fn = declare(b, "llvm.arm.neon.vpadals.v4i32.v8i16", acc.type, acc.type, ir.VectorType(I16, 8))
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
    multiply = declare(b, _MULTIPLY_BYTES[lanes], pairs, quads, quads)
    halves = b.call(multiply, [b.bitcast(x, quads), b.bitcast(w, quads)])
    units = ir.Constant(pairs, [1] * pairs.count)
    return b.add(acc, b.call(declare(b, _MULTIPLY_PAIRS[lanes], acc.type, pairs, pairs), [halves, units]))


def _sum_by_neon(b: Any, acc: V, x: V, w: V) -> V:
    """Write acc + dot4(x, ONES), the sum of four bytes: uaddlp adds neighbours twice."""
    quads, pairs = ir.VectorType(I8, 16), ir.VectorType(I16, 8)
    halves = b.call(declare(b, "llvm.aarch64.neon.uaddlp.v8i16.v16i8", pairs, quads), [b.bitcast(x, quads)])
    return b.add(acc, b.call(declare(b, "llvm.aarch64.neon.uaddlp.v4i32.v8i16", acc.type, pairs), [halves]))


def _sum_by_neon_of_armv7(b: Any, acc: V, x: V, w: V) -> V:
    """Write acc + dot4(x, ONES), the sum of four bytes: vpaddl adds neighbours, vpadal adds pairs to `acc`."""
    quads, pairs = ir.VectorType(I8, 16), ir.VectorType(I16, 8)
    halves = b.call(declare(b, "llvm.arm.neon.vpaddlu.v8i16.v16i8", pairs, quads), [b.bitcast(x, quads)])
    return b.call(declare(b, "llvm.arm.neon.vpadalu.v4i32.v8i16", acc.type, acc.type, pairs), [acc, halves])


def _dot_by_i8mm(b: Any, acc: V, x: V, w: V) -> V:
    """Write acc + dot4(x, w) as usdot."""
    quads = ir.VectorType(I8, 16)
    fn = declare(b, "llvm.aarch64.neon.usdot.v4i32.v16i8", acc.type, acc.type, quads, quads)
    return b.call(fn, [acc, b.bitcast(x, quads), b.bitcast(w, quads)])


def _dot_by_dotprod(b: Any, acc: V, x: V, w: V) -> V:
    """Write acc + dot4(x, w) as udot: dot4(x, w + 128) - dot4(x, 128), with w + 128 as uint8."""
    quads = ir.VectorType(I8, 16)
    fn = declare(b, "llvm.aarch64.neon.udot.v4i32.v16i8", acc.type, acc.type, quads, quads)
    x, top = b.bitcast(x, quads), ir.Constant(quads, [-128] * 16)
    excess = b.call(fn, [ir.Constant(acc.type, None), x, top])
    return b.sub(b.call(fn, [acc, x, b.xor(b.bitcast(w, quads), top)]), excess)


def _dot_by_bytes(b: Any, acc: V, x: V, w: V) -> V:
    """Write acc + dot4(x, w) with shifts and masks, for processors without a dot-product instruction."""

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
    multiply = declare(
        b, f"llvm.{'aarch64.neon.smull' if is_aarch64 else 'arm.neon.vmulls'}.v8i16", eight, bytes_, bytes_
    )
    first, second = (b.call(multiply, [b.bitcast(x, bytes_), b.bitcast(w, bytes_)]) for x, w in ((x0, w0), (x1, w1)))
    for products in [b.add(first, second)] if narrow else [first, second]:
        if is_aarch64:
            add = declare(b, "llvm.aarch64.neon.saddlp.v4i32.v8i16", acc.type, eight)
            acc = b.add(acc, b.call(add, [products]))
        else:
            add = declare(b, "llvm.arm.neon.vpadals.v4i32.v8i16", acc.type, acc.type, eight)
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
        loaded = b.call(declare(b, "llvm.aarch64.neon.ld2r.v4i16.p0", result, pointer.type), [pointer])
    else:
        loaded = b.call(declare(b, "llvm.arm.neon.vld2dup.v4i16.p0", result, pointer.type, I32), [pointer, I32(2)])
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


TILE_A, TILE_B = 6, 7
"""Numbers of the tiles with the operands; tiles 0 to 5 are accumulators."""


@dataclass(frozen=True)
class AmxNest:
    """A loop nest that tiles can compute.

    k: variable of the reduction loop, of `steps` iterations. rows: number of rows. columns: the loop over columns of
    accumulators, if there is one. x, w, acc: operands and sum. x_row, acc_row: elements from one row to the next.
    w_step: elements from one step to the next. zero: variables of the loops over rows and lanes, which are 0 at a
    tile's start.
    """

    k: Var
    steps: int
    rows: int
    columns: For | None
    x: Load
    w: Load
    acc: tuple[Tensor, tuple[Expr, ...]]
    x_row: int
    w_step: int
    acc_row: int
    zero: tuple[Var, ...]

    @property
    def width(self) -> int:
        """Number of columns of accumulator tiles, 1 without a loop over them."""
        return 1 if self.columns is None else self.columns.extent


def match_amx(nest: For, features: frozenset[str]) -> AmxNest | None:
    """Return `nest` as tile products; None where it computes something else or the processor has no tiles.

        for k in steps:
          unrolled rows (at most 16):  [unrolled columns (at most 6):]
            vectorized 16:  acc[row, column, lane] sum= dot4(x[row, k], w[k, column, lane])

    is such a nest where 16 steps lie behind each other in x. Its rows are those of tile A and of the accumulators, its
    steps are the rows of tile B (Intel, "64 and IA-32 Architectures Software Developer's Manual", TDPBUSD). features:
    of the processor, in LLVM's names.
    """
    if not features >= AMX_FEATURES or nest.kind != "serial" or nest.extent < TILE_STEPS:
        return None
    loops: list[For] = []
    body: Any = nest.body
    while isinstance(body, For):
        loops.append(body)
        body = body.body
    match body:
        case Update("sum", tensor, index, Call("dot4", (Load() as x, Load() as w))):
            pass
        case _:
            return None
    if [loop.kind for loop in loops] not in (["unrolled", "vectorized"], ["unrolled", "unrolled", "vectorized"]):
        return None
    rows, *middle, lanes = loops
    columns = middle[0] if middle else None
    if rows.extent not in TILE_ROWS or lanes.extent != 16 or (columns and columns.extent > TILE_COLUMNS):
        return None
    xs, ws, accs = (linear(flatten(t.shape, i)) for t, i in ((x.tensor, x.index), (w.tensor, w.index), (tensor, index)))

    def strides(loop: Var) -> tuple[int | None, int | None, int | None]:
        """Return the elements of x, w and acc from one iteration of a loop to the next."""
        return coefficient(xs, loop), coefficient(ws, loop), coefficient(accs, loop)

    of_k, of_rows, of_lanes = strides(nest.var), strides(rows.var), strides(lanes.var)
    if of_k[0] != 1 or not of_k[1] or of_k[2] != 0 or of_lanes != (0, 1, 1):
        return None
    if not of_rows[0] or of_rows[1] != 0 or not of_rows[2]:
        return None
    if columns is not None and (strides(columns.var)[0] != 0 or None in strides(columns.var)):
        return None
    return AmxNest(
        nest.var, nest.extent, rows.extent, columns, x, w, (tensor, index), of_rows[0], of_k[1], of_rows[2],
        (rows.var, lanes.var),
    )  # fmt: skip


def configure_tiles(b: Any, rows: int) -> None:
    """Write the instruction that gives all tiles `rows` rows of 64 bytes, except B, which has 16 rows."""
    name = f"tiles.{rows}"
    if name not in b.module.globals:
        sizes = [64, 0] * 8 + [0] * 16  # bytes of a row of tiles 0 to 15, as 16 bits each
        counts = [rows] * TILE_B + [TILE_STEPS] + [0] * 8
        values = [1, 0, *[0] * 14, *sizes, *counts]
        table = ir.GlobalVariable(b.module, ir.ArrayType(I8, 64), name)
        table.initializer = ir.Constant(table.value_type, values)
        table.global_constant = True
        table.linkage = "internal"
        table.align = 64
    b.call(declare(b, "llvm.x86.ldtilecfg", ir.VoidType(), ir.PointerType()), [_as_pointer(b.module.globals[name])])


def release_tiles(b: Any) -> None:
    """Write the instruction that releases all tiles."""
    b.call(declare(b, "llvm.x86.tilerelease", ir.VoidType()), [])


def load_tile(b: Any, tile: int, pointer: V, row_bytes: int) -> None:
    """Write the load of a tile whose rows are `row_bytes` apart from `pointer` on."""
    fn = declare(b, "llvm.x86.tileloadd64", ir.VoidType(), I8, ir.PointerType(), I64)
    b.call(fn, [I8(tile), pointer, I64(row_bytes)])


def store_tile(b: Any, tile: int, pointer: V, row_bytes: int) -> None:
    """Write the store of a tile whose rows are `row_bytes` apart from `pointer` on."""
    fn = declare(b, "llvm.x86.tilestored64", ir.VoidType(), I8, ir.PointerType(), I64)
    b.call(fn, [I8(tile), pointer, I64(row_bytes)])


def multiply_tiles(b: Any, tile: int) -> None:
    """Write tile += A * B, the products of four uint8 of A and four int8 of B added to an int32."""
    b.call(declare(b, "llvm.x86.tdpbusd", ir.VoidType(), I8, I8, I8), [I8(tile), I8(TILE_A), I8(TILE_B)])


def _as_pointer(variable: V) -> V:
    """Return a global variable as an opaque pointer, which llvmlite's own type for it is not."""
    variable.type = ir.PointerType()
    return variable
