"""Loop nests whose sizes are arguments, so that LLVM compiles them once and every layer of every model shares them.

The CPU backend's own kernels have fixed sizes, and one takes tens of milliseconds: too long for each convolution that
is only to be checked. `products` is the instruction GEMM for one Config, of which a launch may have thousands.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from celosia.compiler.cpu.llvm import compile as llvm_compile
from celosia.compiler.cpu.llvm import dot, machine
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.target import dot_instructions
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import GEMM_LOOPS
from celosia.hw.spec.scratchpads import scratchpads
from celosia.sim.functional.decode import Instruction
from celosia.sim.functional.reference import State

UInt8 = NDArray[np.uint8]
ROWS, COLUMNS, DEPTH, LANES = 8, 16, 4, 64
"""Rows and columns of a tile of `dots`, bytes of its innermost product, and bytes that `largest` takes at a time."""

VECTOR = 16
"""Lanes of int32 of which `products` multiplies one, or several, at a time."""
MOST_VECTORS = 8
"""Most vectors that hold sums at once."""

I8, I32, I64, F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
V = Any  # an LLVM value; llvmlite has no types


def pack_columns(matrix: NDArray[np.int8]) -> NDArray[np.int8]:
    """matrix [columns, length] as `dots` reads it, [columns/16, length/4, 16, 4], zeros beyond both."""
    columns, length = matrix.shape
    padded = np.zeros((_up(columns, COLUMNS), _up(length, DEPTH)), np.int8)
    padded[:columns, :length] = matrix
    quads = padded.view(np.int32).reshape(-1, COLUMNS, padded.shape[1] // DEPTH)
    return np.ascontiguousarray(quads.transpose(0, 2, 1)).view(np.int8).reshape(len(quads), -1, COLUMNS, DEPTH)


def rows_for(rows: int, length: int) -> UInt8:
    """An array for `dots` to read, [rows, length] and what rounds it up; its contents beyond do not matter."""
    return np.empty((_up(rows, ROWS), _up(length, DEPTH)), np.uint8)


def dots(
    x: UInt8, zero_x: int, w: NDArray[np.int8], bias: NDArray[np.int32], scale: NDArray[np.float32], zero_y: int
) -> UInt8:
    """clip(rne(f32((x - zero_x) · wᵀ + bias) * scale) + zero_y, 0, 255), sums modulo 2^32.

    x: [rows, length] from `rows_for`. w: from `pack_columns`. bias, scale: [columns]. Returns [rows, columns].
    """
    rows, length = x.shape
    blocks = len(w)
    assert w.shape == (blocks, length // DEPTH, COLUMNS, DEPTH) and x.flags.c_contiguous and rows % ROWS == 0
    biases, scales = np.zeros(blocks * COLUMNS, np.int32), np.zeros(blocks * COLUMNS, np.float32)
    biases[: len(bias)], scales[: len(scale)] = bias, scale
    y = np.empty((rows, blocks * COLUMNS), np.uint8)
    pointers = [array.ctypes.data for array in (x, w, biases, scales, y)]
    _functions()["dots"](*pointers, zero_x, float(zero_y), rows, blocks, length // DEPTH)
    return y[:, : len(bias)]


def largest(x: UInt8) -> UInt8:
    """The largest of each column of x [taps, count], C-contiguous, count a multiple of LANES."""
    taps, count = x.shape
    assert x.flags.c_contiguous and count % LANES == 0
    y = np.empty(count, np.uint8)
    _functions()["largest"](x.ctypes.data, y.ctypes.data, taps, count)
    return y


_OPERANDS = {"acc": GEMM_LOOPS[:3], "inp": GEMM_LOOPS, "wgt": GEMM_LOOPS}
"""What GEMM addresses, and the loops that move it."""
_FIELDS = (
    *(f"extent_{loop}" for loop in GEMM_LOOPS), "accumulate",
    *(f"{operand}_{at}" for operand, loops in _OPERANDS.items() for at in ("base", *loops)),
)  # fmt: skip
"""Operands of GEMM, in the order in which its kernel reads them."""


def products(state: State) -> Callable[[Instruction], None] | None:
    """What executes a GEMM on `state` as `sim.reference.gemm` does; None where entries of its Config fill no vectors,
    or this processor has no instruction for products of bytes."""
    cfg = state.cfg
    row = cfg.group * cfg.block_in
    fits = 8 <= cfg.block_in <= 4 * VECTOR <= row and (cfg.batch == 1 or cfg.inp_pieces == 1)
    if not fits or not dot_instructions(dot.features())[1]:
        return None
    function, code = _products(cfg)
    pointers = [getattr(state, operand).ctypes.data for operand in _OPERANDS]
    taken: Callable[[Sequence[int]], tuple[int, ...]] | None = None

    def execute(instruction: Instruction) -> None:
        nonlocal taken
        if taken is None:  # of all GEMMs in the same places
            taken = itemgetter(*(instruction.names.index(name) for name in _FIELDS))
        fields = array("q", taken(instruction.values))
        function(fields.buffer_info()[0], *pointers)
        assert code is not None  # which lives as long as this

    return execute


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


# Code ------------------------------------------------------------------------------------------------------------


@cache
def _functions() -> dict[str, Any]:
    """The two as functions of ctypes, for this processor."""
    module = ir.Module("selfcheck")
    module.features = dot.features()
    _dots(module)
    _largest(module)
    linked = _linked(module, ["dots", "largest"])
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    types: dict[str, list[Any]] = {
        "dots": [pointer] * 5 + [ctypes.c_int32, ctypes.c_float] + [number] * 3,
        "largest": [pointer] * 2 + [number] * 2,
    }
    functions: dict[str, Any] = {name: ctypes.CFUNCTYPE(None, *args)(linked[name]) for name, args in types.items()}
    return functions | {"code": linked}  # which lives as long as they do


@cache
def _products(cfg: Config) -> tuple[Any, Any]:
    """(GEMM of `cfg` as a function of ctypes, for this processor; what keeps its code)."""
    module = ir.Module("selfcheck")
    module.features = dot.features()
    _gemm(module, cfg)
    linked = _linked(module, ["gemm"])
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4)(linked["gemm"]), linked


def _linked(module: Any, names: list[str]) -> Any:
    """Addresses of the functions of `module`, by name, and what keeps their code."""
    text = str(module)

    def make() -> CompiledKernel:
        return CompiledKernel(names[0], (), (), 0, machine.optimise(text, level=0, unroll=False)[1], machine.host())

    return machine.link(names, llvm_compile.cached(text, "", make).code)


def _function(module: Any, name: str, types: list[Any]) -> tuple[Any, list[V]]:
    """(what writes its body, its arguments); pointers, which come first, do not overlap."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), types), name)
    function.attributes.add("nounwind")
    for argument in function.args:
        if isinstance(argument.type, ir.PointerType):
            argument.add_attribute("noalias")
    return ir.IRBuilder(function.append_basic_block()), list(function.args)


@contextmanager
def _loop(b: Any, count: V, carried: list[V] | None = None) -> Iterator[V]:
    """The body runs for 0, 1, … below `count`, at least once; what it puts into `carried` its next run finds there."""
    values = [] if carried is None else carried
    before, head = b.block, b.append_basic_block("loop")
    b.branch(head)
    b.position_at_end(head)
    index, *phis = (b.phi(kind) for kind in (I64, *(value.type for value in values)))
    for phi, first in zip((index, *phis), (I64(0), *values)):
        phi.add_incoming(first, before)
    values[:] = phis
    yield index
    after = b.add(index, I64(1))
    for phi, last in zip((index, *phis), (after, *values)):
        phi.add_incoming(last, b.block)
    done = b.append_basic_block("done")
    b.cbranch(b.icmp_unsigned("<", after, count), head, done)
    b.position_at_end(done)


def _at(b: Any, base: V, index: V, element: Any) -> V:
    return b.gep(base, [index], source_etype=element)


def _splat(b: Any, value: V, lanes: int) -> V:
    wide = ir.VectorType(value.type, lanes)
    one = b.insert_element(ir.Constant(wide, ir.Undefined), value, I32(0))
    return b.shuffle_vector(one, ir.Constant(wide, ir.Undefined), ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def _dots(module: Any) -> None:
    """Tiles of ROWS x COLUMNS: a lane for each column, an accumulator for each row."""
    pointer = ir.PointerType()
    types = [pointer] * 5 + [I32, F32] + [I64] * 3
    b, (x, w, bias, scale, y, zero_x, zero_y, rows, blocks, depth) = _function(module, "dots", types)
    ints, floats, bytes_ = (ir.VectorType(kind, COLUMNS) for kind in (I32, F32, I8))
    tile = b.alloca(ir.ArrayType(ints, ROWS))
    tile.type = pointer  # llvmlite would compare the type of what is stored with that of the array
    zeros, ones = _splat(b, zero_y, COLUMNS), _splat(b, I32(0x01010101), COLUMNS)
    with _loop(b, blocks) as block:
        factor = b.load(_at(b, scale, block, floats), typ=floats, align=4)
        columns = _at(b, w, b.mul(block, depth), ints)
        sums = [ir.Constant(ints, [0] * COLUMNS)]
        with _loop(b, depth, sums) as k:
            sums[0] = dot.dot4(b, sums[0], ones, b.load(_at(b, columns, k, ints), typ=ints, align=1), module.features)
        offset = b.load(_at(b, bias, block, ints), typ=ints, align=4)
        offset = b.sub(offset, b.mul(sums[0], _splat(b, zero_x, COLUMNS)))
        with _loop(b, b.udiv(rows, I64(ROWS))) as part:
            first = b.mul(part, I64(ROWS))
            lines = [_at(b, x, b.mul(b.add(first, I64(row)), depth), I32) for row in range(ROWS)]
            sums = [offset] * ROWS
            with _loop(b, depth, sums) as k:
                right = b.load(_at(b, columns, k, ints), typ=ints, align=1)
                for row, line in enumerate(lines):
                    left = _splat(b, b.load(_at(b, line, k, I32), typ=I32, align=1), COLUMNS)
                    sums[row] = dot.dot4(b, sums[row], left, right, module.features)
            for row, total in enumerate(sums):
                b.store(total, _at(b, tile, I64(row), ints))
            with _loop(b, I64(ROWS)) as row:
                value = b.fmul(b.sitofp(b.load(_at(b, tile, row, ints), typ=ints), floats), factor)
                value = b.fadd(_call(b, "llvm.rint", value), zeros)
                for name, limit in (("llvm.maxnum", 0.0), ("llvm.minnum", 255.0)):
                    value = _call(b, name, value, ir.Constant(floats, [limit] * COLUMNS))
                at = b.add(b.mul(b.add(first, row), blocks), block)
                b.store(b.trunc(b.fptosi(value, ints), bytes_), _at(b, y, at, bytes_), align=1)
    b.ret_void()


def _call(b: Any, name: str, *values: V) -> V:
    """An intrinsic of LLVM on floats or bytes."""
    kind = values[0].type
    suffix = f"v{kind.count}{'f32' if kind.element == F32 else 'i8'}"
    function = b.module.globals.get(f"{name}.{suffix}")
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(kind, [kind] * len(values)), f"{name}.{suffix}")
    return b.call(function, values)


def _largest(module: Any) -> None:
    pointer, wide = ir.PointerType(), ir.VectorType(I8, LANES)
    b, (x, y, taps, count) = _function(module, "largest", [pointer, pointer, I64, I64])
    parts = b.udiv(count, I64(LANES))
    with _loop(b, parts) as part:
        best = [ir.Constant(wide, [0] * LANES)]
        with _loop(b, taps, best) as tap:
            value = b.load(_at(b, x, b.add(b.mul(tap, parts), part), wide), typ=wide, align=1)
            best[0] = _call(b, "llvm.umax", best[0], value)
        b.store(best[0], _at(b, y, part, wide), align=1)
    b.ret_void()


def _gemm(module: Any, cfg: Config) -> None:
    """GEMM, its fields and scratchpads being arguments: lanes for four bytes of an input and a weight each."""
    pointer, wide = ir.PointerType(), ir.VectorType(I32, VECTOR)
    b, (given, acc, inp, wgt) = _function(module, "gemm", [pointer] * 4)
    fields = {name: b.load(_at(b, given, I64(place), I64), typ=I64) for place, name in enumerate(_FIELDS)}
    vectors = min(MOST_VECTORS, cfg.group * cfg.block_in // (4 * VECTOR))
    signs, ones = (_splat(b, I32(each), VECTOR) for each in (0x80808080 - (1 << 32), 0x01010101))
    index: dict[str, V] = {}

    def entry(operand: str) -> V:
        """The entry of an operand in the loops so far."""
        at = fields[f"{operand}_base"]
        for loop in index.keys() & set(_OPERANDS[operand]):
            at = b.add(at, b.mul(index[loop], fields[f"{operand}_{loop}"]))
        return b.and_(at, I64(scratchpads(cfg)[operand].depth - 1))

    with ExitStack() as loops:
        for loop in GEMM_LOOPS[:3]:
            index[loop] = loops.enter_context(_loop(b, fields[f"extent_{loop}"]))
        sample = loops.enter_context(_loop(b, I64(cfg.batch)))
        part = loops.enter_context(_loop(b, I64(cfg.block_out * cfg.block_in // (4 * VECTOR * vectors))))
        sums = [ir.Constant(wide, [0] * VECTOR)] * (vectors + 1)  # the last one of inputs alone
        with ExitStack() as inner:
            for loop in GEMM_LOOPS[3:]:
                index[loop] = inner.enter_context(_loop(b, fields[f"extent_{loop}"], sums))
            quads = cfg.block_in // 4
            few = ir.VectorType(I32, quads)
            at = b.add(b.mul(entry("inp"), I64(cfg.batch)), sample)
            x = b.load(_at(b, inp, at, few), typ=few, align=1)
            mask = ir.Constant(ir.VectorType(I32, VECTOR), [lane % quads for lane in range(VECTOR)])
            x = b.shuffle_vector(x, ir.Constant(few, ir.Undefined), mask)
            at = b.add(b.mul(entry("wgt"), I64(cfg.block_out * cfg.block_in)), b.mul(part, I64(4 * VECTOR * vectors)))
            rows = _at(b, wgt, at, I8)
            for place in range(vectors):
                w = b.xor(b.load(_at(b, rows, I64(place), wide), typ=wide, align=1), signs)  # plus 128
                sums[place] = dot.dot4(b, sums[place], w, x, module.features)
            sums[-1] = dot.dot4(b, sums[-1], ones, x, module.features)
        for loop in GEMM_LOOPS[3:]:
            del index[loop]
        less = b.shl(sums.pop(), _splat(b, I32(7), VECTOR))
        column = b.mul(part, I64(vectors * VECTOR // quads))
        at = b.add(b.mul(entry("acc"), I64(cfg.out_pieces)), b.udiv(column, I64(cfg.group)))
        at = b.add(b.mul(at, I64(cfg.batch)), sample)
        at = b.add(b.mul(at, I64(cfg.group)), b.urem(column, I64(cfg.group)))
        _add_up(b, [b.sub(each, less) for each in sums], quads, _at(b, acc, at, I32), fields["accumulate"])
    b.ret_void()


def _add_up(b: Any, sums: list[V], quads: int, to: V, accumulate: V) -> None:
    """Store the sums of each `quads` lanes, added to what is there where `accumulate` is not 0."""
    count = VECTOR // quads
    few, nothing = ir.VectorType(I32, count), ir.Constant(sums[0].type, ir.Undefined)
    for place, each in enumerate(sums):
        at = _at(b, to, I64(place), few)
        old = b.select(
            b.icmp_signed("!=", accumulate, I64(0)), b.load(at, typ=few, align=4), ir.Constant(few, [0] * count)
        )
        for quad in range(quads):
            mask = ir.Constant(few, [column * quads + quad for column in range(count)])
            old = b.add(old, b.shuffle_vector(each, nothing, mask))
        b.store(old, at, align=4)
