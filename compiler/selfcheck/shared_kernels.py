"""Kernels with sizes as arguments, so that LLVM compiles them once for all layers of all models.

The CPU backend's kernels have fixed sizes, and compiling one takes tens of milliseconds: too long for a check of each
convolution. `compiled_gemm` is the instruction GEMM for one Config, of which a launch may have thousands.
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

from celosia.compiler.cpu.llvm import byte_products, machine
from celosia.compiler.cpu.llvm import compile_loops as llvm_compile
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.target import dot_instructions, target
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import GEMM_LOOPS
from celosia.hw.spec.scratchpads import scratchpads
from celosia.sim.functional.decode import Instruction
from celosia.sim.functional.reference import State

UInt8 = NDArray[np.uint8]
ROWS, COLUMNS, DEPTH = 8, 16, 4
"""Rows and columns of a register tile of `matrix_product`, and bytes that one dot-product instruction multiplies."""
LANES = 64
"""Bytes that `column_maxima` compares at once."""

GEMM_LANES = 16
"""Lanes of int32 in a vector of the compiled GEMM."""
MAX_VECTORS = 8
"""Limit of the vectors of sums that the compiled GEMM holds in registers."""

I8, I32, I64, F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
V = Any  # an LLVM value; llvmlite has no types


def pack_columns(matrix: NDArray[np.int8]) -> NDArray[np.int8]:
    """Pack weights [columns, length] for `matrix_product`: [columns/16, length/4, 16, 4], padded with zeros."""
    columns, length = matrix.shape
    padded = np.zeros((_round_up(columns, COLUMNS), _round_up(length, DEPTH)), np.int8)
    padded[:columns, :length] = matrix
    quads = padded.view(np.int32).reshape(-1, COLUMNS, padded.shape[1] // DEPTH)
    return np.ascontiguousarray(quads.transpose(0, 2, 1)).view(np.int8).reshape(len(quads), -1, COLUMNS, DEPTH)


def rows_for(rows: int, length: int) -> UInt8:
    """Allocate the left operand of `matrix_product`, [rows, length] rounded up. What the padding holds does not
    matter.
    """
    return np.empty((_round_up(rows, ROWS), _round_up(length, DEPTH)), np.uint8)


def matrix_product(
    x: UInt8, zero_x: int, w: NDArray[np.int8], bias: NDArray[np.int32], scale: NDArray[np.float32], zero_y: int
) -> UInt8:
    """Multiply and requantise: clip(rne(f32((x - zero_x) · wᵀ + bias) * scale) + zero_y, 0, 255), sums modulo 2^32.

    x: [rows, length] from `rows_for`. w: from `pack_columns`. bias, scale: [columns]. Returns [rows, columns].
    """
    rows, length = x.shape
    blocks = len(w)
    assert w.shape == (blocks, length // DEPTH, COLUMNS, DEPTH) and x.flags.c_contiguous and rows % ROWS == 0
    biases, scales = np.zeros(blocks * COLUMNS, np.int32), np.zeros(blocks * COLUMNS, np.float32)
    biases[: len(bias)], scales[: len(scale)] = bias, scale
    y = np.empty((rows, blocks * COLUMNS), np.uint8)
    pointers = [array.ctypes.data for array in (x, w, biases, scales, y)]
    _linked_functions()["dots"](*pointers, zero_x, float(zero_y), rows, blocks, length // DEPTH)
    return y[:, : len(bias)]


def column_maxima(x: UInt8) -> UInt8:
    """Return the maximum of each column of x [taps, count], C-contiguous, count a multiple of LANES."""
    taps, count = x.shape
    assert x.flags.c_contiguous and count % LANES == 0
    y = np.empty(count, np.uint8)
    _linked_functions()["largest"](x.ctypes.data, y.ctypes.data, taps, count)
    return y


ADDRESS_LOOPS = {"acc": GEMM_LOOPS[:3], "inp": GEMM_LOOPS, "wgt": GEMM_LOOPS}
"""The scratchpads that GEMM addresses, each with the loops that advance the address."""
GEMM_FIELDS = (
    *(f"extent_{loop}" for loop in GEMM_LOOPS), "accumulate",
    *(f"{operand}_{at}" for operand, loops in ADDRESS_LOOPS.items() for at in ("base", *loops)),
)  # fmt: skip
"""Fields of GEMM, in the order in which its kernel reads them."""


def compiled_gemm(state: State) -> Callable[[Instruction], None] | None:
    """Return a function that executes a GEMM instruction on `state` as the functional simulator does, but faster.

    None where entries of the Config fill no vectors, or where this processor has no dot-product instruction for bytes.
    """
    cfg = state.cfg
    is_supported = 8 <= cfg.group <= 4 * GEMM_LANES <= cfg.group**2
    if not is_supported or not dot_instructions(target().features)[1]:
        return None
    function, code = _link_gemm(cfg)
    pointers = [getattr(state, operand).ctypes.data for operand in ADDRESS_LOOPS]
    pick_fields: Callable[[Sequence[int]], tuple[int, ...]] | None = None

    def execute(instruction: Instruction) -> None:
        """Execute one GEMM instruction."""
        nonlocal pick_fields
        if pick_fields is None:  # all GEMMs have their fields at the same positions
            pick_fields = itemgetter(*(instruction.names.index(name) for name in GEMM_FIELDS))
        fields = array("q", pick_fields(instruction.values))
        function(fields.buffer_info()[0], *pointers)
        assert code is not None  # keeps the machine code alive

    return execute


def _round_up(size: int, step: int) -> int:
    """Round `size` up to a multiple of `step`."""
    return -(-size // step) * step


# Code ------------------------------------------------------------------------------------------------------------


@cache
def _linked_functions() -> dict[str, Any]:
    """Compile and link the two kernels for this processor. Returns them as functions of ctypes by name."""
    module = ir.Module("selfcheck")
    module.features = target().features
    _write_matrix_product(module)
    _write_column_maxima(module)
    linked = _link(module, ["dots", "largest"])
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    types: dict[str, list[Any]] = {
        "dots": [pointer] * 5 + [ctypes.c_int32, ctypes.c_float] + [integer] * 3,
        "largest": [pointer] * 2 + [integer] * 2,
    }
    functions: dict[str, Any] = {name: ctypes.CFUNCTYPE(None, *args)(linked[name]) for name, args in types.items()}
    return functions | {"code": linked}  # keeps the machine code alive


@cache
def _link_gemm(cfg: Config) -> tuple[Any, Any]:
    """Compile and link the GEMM of `cfg` for this processor. Returns the function, and the owner of its machine
    code.
    """
    module = ir.Module("selfcheck")
    module.features = target().features
    _write_gemm(module, cfg)
    linked = _link(module, ["gemm"])
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4)(linked["gemm"]), linked


def _link(module: Any, names: list[str]) -> Any:
    """Compile and link a module, with a cache on disk. Returns the addresses of its functions by name; the result owns
    their code.
    """
    text = str(module)

    def make() -> CompiledKernel:
        """Compile the module, where it is not in the cache."""
        return CompiledKernel(names[0], (), (), 0, machine.optimise(text, level=0, unroll=False)[1], machine.host())

    return machine.link(names, llvm_compile.read_or_compile(text, "", make).code)


def _new_function(module: Any, name: str, types: list[Any]) -> tuple[Any, list[V]]:
    """Create a function whose pointers do not overlap. Returns an LLVM builder and the arguments."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), types), name)
    function.attributes.add("nounwind")
    for argument in function.args:
        if isinstance(argument.type, ir.PointerType):
            argument.add_attribute("noalias")
    return ir.IRBuilder(function.append_basic_block()), list(function.args)


@contextmanager
def _write_loop(b: Any, count: V, carried: list[V] | None = None) -> Iterator[V]:
    """Write a loop over 0, 1, … below `count`, which runs at least once. carried: values that each iteration hands to
    the next one; the list is updated in place.
    """
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


def _element_pointer(b: Any, base: V, index: V, element: Any) -> V:
    """Write the address of element `index` of an array at `base`."""
    return b.gep(base, [index], source_etype=element)


def _broadcast(b: Any, value: V, lanes: int) -> V:
    """Write a vector whose lanes all hold `value`."""
    wide = ir.VectorType(value.type, lanes)
    first_lane = b.insert_element(ir.Constant(wide, ir.Undefined), value, I32(0))
    return b.shuffle_vector(
        first_lane, ir.Constant(wide, ir.Undefined), ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    )


def _write_matrix_product(module: Any) -> None:
    """Write `matrix_product` in register tiles of ROWS x COLUMNS: a lane for each column, an accumulator for each
    row.
    """
    pointer = ir.PointerType()
    types = [pointer] * 5 + [I32, F32] + [I64] * 3
    b, (x, w, bias, scale, y, zero_x, zero_y, rows, blocks, depth) = _new_function(module, "dots", types)
    ints, floats, bytes_ = (ir.VectorType(kind, COLUMNS) for kind in (I32, F32, I8))
    tile = b.alloca(ir.ArrayType(ints, ROWS))
    tile.type = pointer  # else llvmlite would refuse to store another type than the array
    zeros, ones = _broadcast(b, zero_y, COLUMNS), _broadcast(b, I32(0x01010101), COLUMNS)
    with _write_loop(b, blocks) as block:
        factor = b.load(_element_pointer(b, scale, block, floats), typ=floats, align=4)
        columns = _element_pointer(b, w, b.mul(block, depth), ints)
        sums = [ir.Constant(ints, [0] * COLUMNS)]
        with _write_loop(b, depth, sums) as k:
            sums[0] = byte_products.dot4(
                b, sums[0], ones, b.load(_element_pointer(b, columns, k, ints), typ=ints, align=1), module.features
            )
        offset = b.load(_element_pointer(b, bias, block, ints), typ=ints, align=4)
        offset = b.sub(offset, b.mul(sums[0], _broadcast(b, zero_x, COLUMNS)))
        with _write_loop(b, b.udiv(rows, I64(ROWS))) as part:
            first = b.mul(part, I64(ROWS))
            lines = [_element_pointer(b, x, b.mul(b.add(first, I64(row)), depth), I32) for row in range(ROWS)]
            sums = [offset] * ROWS
            with _write_loop(b, depth, sums) as k:
                right = b.load(_element_pointer(b, columns, k, ints), typ=ints, align=1)
                for row, line in enumerate(lines):
                    left = _broadcast(b, b.load(_element_pointer(b, line, k, I32), typ=I32, align=1), COLUMNS)
                    sums[row] = byte_products.dot4(b, sums[row], left, right, module.features)
            for row, total in enumerate(sums):
                b.store(total, _element_pointer(b, tile, I64(row), ints))
            with _write_loop(b, I64(ROWS)) as row:
                value = b.fmul(b.sitofp(b.load(_element_pointer(b, tile, row, ints), typ=ints), floats), factor)
                value = b.fadd(_call_intrinsic(b, "llvm.rint", value), zeros)
                for name, limit in (("llvm.maxnum", 0.0), ("llvm.minnum", 255.0)):
                    value = _call_intrinsic(b, name, value, ir.Constant(floats, [limit] * COLUMNS))
                position = b.add(b.mul(b.add(first, row), blocks), block)
                b.store(b.trunc(b.fptosi(value, ints), bytes_), _element_pointer(b, y, position, bytes_), align=1)
    b.ret_void()


def _call_intrinsic(b: Any, name: str, *values: V) -> V:
    """Write a call of an LLVM intrinsic on vectors of floats or bytes."""
    kind = values[0].type
    suffix = f"v{kind.count}{'f32' if kind.element == F32 else 'i8'}"
    function = b.module.globals.get(f"{name}.{suffix}")
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(kind, [kind] * len(values)), f"{name}.{suffix}")
    return b.call(function, values)


def _write_column_maxima(module: Any) -> None:
    """Write `column_maxima`, LANES columns at a time."""
    pointer, wide = ir.PointerType(), ir.VectorType(I8, LANES)
    b, (x, y, taps, count) = _new_function(module, "largest", [pointer, pointer, I64, I64])
    parts = b.udiv(count, I64(LANES))
    with _write_loop(b, parts) as part:
        best = [ir.Constant(wide, [0] * LANES)]
        with _write_loop(b, taps, best) as tap:
            value = b.load(_element_pointer(b, x, b.add(b.mul(tap, parts), part), wide), typ=wide, align=1)
            best[0] = _call_intrinsic(b, "llvm.umax", best[0], value)
        b.store(best[0], _element_pointer(b, y, part, wide), align=1)
    b.ret_void()


def _write_gemm(module: Any, cfg: Config) -> None:
    """Write the instruction GEMM, with its fields and scratchpads as arguments. A lane multiplies four bytes of an
    input by four of a weight. Weights are made unsigned for the dot product by adding 128; 128 times the sum of inputs
    is subtracted at the end.
    """
    pointer, wide = ir.PointerType(), ir.VectorType(I32, GEMM_LANES)
    b, (field_values, acc, inp, wgt) = _new_function(module, "gemm", [pointer] * 4)
    fields = {
        name: b.load(_element_pointer(b, field_values, I64(vector), I64), typ=I64)
        for vector, name in enumerate(GEMM_FIELDS)
    }
    vectors = min(MAX_VECTORS, cfg.group**2 // (4 * GEMM_LANES))
    signs, ones = (_broadcast(b, I32(factor), GEMM_LANES) for factor in (0x80808080 - (1 << 32), 0x01010101))
    index: dict[str, V] = {}

    def entry(operand: str) -> V:
        """Write the address of an operand's entry in the loops that are open."""
        address = fields[f"{operand}_base"]
        for loop in index.keys() & set(ADDRESS_LOOPS[operand]):
            address = b.add(address, b.mul(index[loop], fields[f"{operand}_{loop}"]))
        return b.and_(address, I64(scratchpads(cfg)[operand].depth - 1))

    with ExitStack() as loops:
        for loop in GEMM_LOOPS[:3]:
            index[loop] = loops.enter_context(_write_loop(b, fields[f"extent_{loop}"]))
        sample = loops.enter_context(_write_loop(b, I64(cfg.batch)))
        part = loops.enter_context(_write_loop(b, I64(cfg.block_out * cfg.group // (4 * GEMM_LANES * vectors))))
        sums = [ir.Constant(wide, [0] * GEMM_LANES)] * (vectors + 1)  # the last one adds up inputs only
        with ExitStack() as inner:
            for loop in GEMM_LOOPS[3:]:
                index[loop] = inner.enter_context(_write_loop(b, fields[f"extent_{loop}"], sums))
            piece = inner.enter_context(_write_loop(b, I64(cfg.inp_pieces), sums))
            quads = cfg.group // 4
            few = ir.VectorType(I32, quads)
            inp_piece, wgt_piece = (b.add(b.mul(entry(name), I64(cfg.inp_pieces)), piece) for name in ("inp", "wgt"))
            address = b.add(b.mul(inp_piece, I64(cfg.batch)), sample)
            x = b.load(_element_pointer(b, inp, address, few), typ=few, align=1)
            mask = ir.Constant(ir.VectorType(I32, GEMM_LANES), [lane % quads for lane in range(GEMM_LANES)])
            x = b.shuffle_vector(x, ir.Constant(few, ir.Undefined), mask)
            address = b.add(
                b.mul(wgt_piece, I64(cfg.block_out * cfg.group)), b.mul(part, I64(4 * GEMM_LANES * vectors))
            )
            rows = _element_pointer(b, wgt, address, I8)
            for vector in range(vectors):
                w = b.xor(b.load(_element_pointer(b, rows, I64(vector), wide), typ=wide, align=1), signs)  # adds 128
                sums[vector] = byte_products.dot4(b, sums[vector], w, x, module.features)
            sums[-1] = byte_products.dot4(b, sums[-1], ones, x, module.features)
        for loop in GEMM_LOOPS[3:]:
            del index[loop]
        correction = b.shl(sums.pop(), _broadcast(b, I32(7), GEMM_LANES))
        column = b.mul(part, I64(vectors * GEMM_LANES // quads))
        address = b.add(b.mul(entry("acc"), I64(cfg.out_pieces)), b.udiv(column, I64(cfg.group)))
        address = b.add(b.mul(address, I64(cfg.batch)), sample)
        address = b.add(b.mul(address, I64(cfg.group)), b.urem(column, I64(cfg.group)))
        _write_lane_sums(
            b,
            [b.sub(factor, correction) for factor in sums],
            quads,
            _element_pointer(b, acc, address, I32),
            fields["accumulate"],
        )
    b.ret_void()


def _write_lane_sums(b: Any, sums: list[V], quads: int, target: V, accumulate: V) -> None:
    """Write the sums of each `quads` neighbouring lanes to `target`, added to its old values where `accumulate` is not
    0.
    """
    count = GEMM_LANES // quads
    few, nothing = ir.VectorType(I32, count), ir.Constant(sums[0].type, ir.Undefined)
    for position, vector_sum in enumerate(sums):
        pointer = _element_pointer(b, target, I64(position), few)
        old = b.select(
            b.icmp_signed("!=", accumulate, I64(0)), b.load(pointer, typ=few, align=4), ir.Constant(few, [0] * count)
        )
        for quad in range(quads):
            mask = ir.Constant(few, [column * quads + quad for column in range(count)])
            old = b.add(old, b.shuffle_vector(vector_sum, nothing, mask))
        b.store(old, pointer, align=4)
