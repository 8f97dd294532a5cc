"""Fast version of `reference.py` with numpy and BLAS: a few calls for each instruction, not for each entry.

Each function does to the state and to DRAM exactly what its namesake in `reference.py` does. Instructions without a
quick form (rows whose addresses wrap around at 2^32, operands that take too much memory) go to the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import (
    GEMM_LOOPS,
    OUTER_LOOPS,
    VECTOR_LOOPS,
    ASource,
    BinaryOp,
    BSource,
    Buffer,
    Destination,
    Opcode,
    ReduceOp,
    element_bytes,
)
from celosia.hw.spec.scratchpads import PAR_FIELDS, depths, scratchpads
from celosia.sim.functional import reference
from celosia.sim.functional.patterns import Steps, gather, scatter, spans, squeeze_broadcast_loops
from celosia.sim.functional.reference import Fields, Int32, State, destination
from celosia.sim.functional.unpacking import expand_packs

Array = NDArray[Any]
CHUNK = 1024
"""Longest sum of int8 products whose every partial sum is exact in float32: 1024 * 128 * 128 = 2^24."""

LARGEST_GATHER = 1 << 27
"""Elements of a gathered operand beyond which the reference, which needs little memory, takes over."""


class _GemmPlan(NamedTuple):
    """How all GEMMs with certain extents and strides become one matrix product, or one for each outer iteration.

    acc, inp, wgt: patterns of the three operands. left_axes, left_shape: the transposition and the shape that make the
    gathered inputs the left matrices. right_axes, right_shape: likewise for weights, the right matrices. total_shape,
    total_axes: the shape and the transposition that make the products entries of acc.
    """

    acc: Steps
    inp: Steps
    wgt: Steps
    left_axes: tuple[int, ...]
    right_axes: tuple[int, ...]
    left_shape: tuple[int, ...]
    right_shape: tuple[int, ...]
    total_shape: tuple[int, ...]
    total_axes: tuple[int, ...]


_gemm_key = itemgetter(
    *(f"extent_{loop}" for loop in GEMM_LOOPS),
    *(f"{operand}_{loop}" for operand in ("acc", "inp", "wgt") for loop in GEMM_LOOPS[: 3 if operand == "acc" else 6]),
)
"""Returns the fields of a GEMM that its plan depends on."""


@lru_cache(maxsize=8192)
def _plan_gemm(cfg: Config, key: tuple[int, ...]) -> _GemmPlan | None:
    """Return the plan for a GEMM with the fields `key` of `_gemm_key`; None where only the reference can execute it."""
    extents = key[:6]
    acc, inp, wgt = (
        tuple((e, stride if e > 1 else 0) for e, stride in zip(extents, strides))
        for strides in (key[6:9], key[9:15], key[15:])
    )
    depth = depths(cfg)
    has_shared_inputs = inp[0][1] % depth["inp"] == 0  # every output block reads the same inputs
    has_shared_weights = wgt[1][1] % depth["wgt"] == 0 and wgt[2][1] % depth["wgt"] == 0  # all pixels use the same
    # Outer loops along which both operands change must be separate products; the others are rows or columns of one.
    product_loops = 0 if has_shared_weights and has_shared_inputs else 1 if has_shared_weights else 3
    inp = inp if product_loops else inp[1:]
    wgt = wgt if product_loops == 3 else (wgt[0], *wgt[3:])
    rows = prod(extent for extent, _ in inp) * scratchpads(cfg)["inp"].entry_bytes
    columns = prod(extent for extent, _ in wgt) * scratchpads(cfg)["wgt"].entry_bytes
    if max(rows, columns) > LARGEST_GATHER:
        return None
    (n, y, x), length = extents[:3], prod(extents[3:]) * cfg.block_in
    # Entries [..., block_in/group, batch or block_out, group] become rows [..., batch or block_out][k, r, s, block_in].
    i, w = len(inp) - 3, len(wgt) - 3  # numbers of outer loops of inputs and weights
    products = (prod(extents[:product_loops]),) if product_loops else ()
    total = ((n, y, x, cfg.batch) if product_loops else (y, x, cfg.batch, n)) + (cfg.out_pieces, cfg.group)
    return _GemmPlan(
        acc, inp, wgt,
        (*range(i), i + 4, i, i + 1, i + 2, i + 3, i + 5), (*range(w), w + 4, w, w + 1, w + 2, w + 3, w + 5),
        (*products, -1, length), (*products, -1, length), total,
        (0, 1, 2, 4, 3, 5) if product_loops else (3, 0, 1, 4, 2, 5),
    )  # fmt: skip


def gemm(state: State, f: Fields) -> None:
    """Execute a GEMM, as `reference.gemm` does."""
    plan = _plan_gemm(state.cfg, _gemm_key(f))
    if plan is None:
        return reference.gemm(state, f)
    left = _to_floats(gather(state.inp, f["inp_base"], plan.inp), plan.left_axes).reshape(plan.left_shape)
    right = _to_floats(gather(state.wgt, f["wgt_base"], plan.wgt), plan.right_axes).reshape(plan.right_shape)
    total = _multiply(left, right).reshape(plan.total_shape).transpose(plan.total_axes)
    scatter(state.acc, f["acc_base"], plan.acc, total, add=bool(f["accumulate"]))


def _to_floats(array: Array, axes: tuple[int, ...]) -> Array:
    """Transpose the int8 `array` to the order `axes`, in which the last axis stays last, and convert it to float32."""
    wide = _WIDE.get(array.shape[-1] & -array.shape[-1], _WIDE[16])  # several bytes move at a time
    transposed: Array = np.ascontiguousarray(array.view(wide).transpose(axes))
    return transposed.view(np.int8).astype(np.float32)


_WIDE: dict[int, Any] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}
"""A numpy type of each size in bytes, for moves of that many bytes at a time."""


def _multiply(left: Array, right: Array) -> Int32:
    """Multiply left [..., P, K] by right [..., C, K] transposed: [..., P, C], with sums that wrap at 32 bits.

    Both hold whole numbers from -128 to 127 as float32. Products are split along K at CHUNK, so that they are exact.
    """
    right = np.swapaxes(right, -1, -2)
    total = None
    for start in range(0, left.shape[-1], CHUNK):
        part = (left[..., start : start + CHUNK] @ right[..., start : start + CHUNK, :]).astype(np.int32)
        total = part if total is None else np.add(total, part, out=total)
    assert total is not None
    return total


class _VectorPlan(NamedTuple):
    """Patterns of the operands of all VECTORs with certain extents and strides."""

    dst: Steps
    a: Steps
    b: Steps
    par: Steps


_vector_key = itemgetter(
    *(f"extent_{loop}" for loop in VECTOR_LOOPS), *(f"dst_{loop}" for loop in OUTER_LOOPS),
    *(f"a_{loop}" for loop in VECTOR_LOOPS), *(f"{operand}_{loop}" for operand in ("b", "par") for loop in OUTER_LOOPS),
)  # fmt: skip
"""Returns the fields of a VECTOR that its plan depends on."""


@lru_cache(maxsize=8192)
def _plan_vector(cfg: Config, key: tuple[int, ...], depth: int) -> _VectorPlan | None:
    """Return the plan for a VECTOR with the fields `key` of `_vector_key`; None if only the reference can execute it.

    depth: entries of the buffer that it writes.
    """
    dst, a, b, par = (
        tuple((e, stride if e > 1 else 0) for e, stride in zip(key[:5], strides))
        for strides in (key[5:8], key[8:13], key[13:16], key[16:])
    )
    if prod(key[:5]) * cfg.lanes > LARGEST_GATHER:
        return None
    return _VectorPlan(dst, a, b, squeeze_broadcast_loops(par, depths(cfg)["par"]))


def vector(state: State, f: Fields) -> None:
    """Execute a VECTOR, as `reference.vector` does."""
    cfg = state.cfg
    if f.get("softmax"):
        return softmax(state, f)
    narrow = f["destination"] != Destination.ACC
    target: Array = destination(state, Destination(f["destination"]))
    plan = _plan_vector(cfg, _vector_key(f), len(target))
    if plan is None:
        return reference.vector(state, f)

    v: Array
    if f["taps"]:
        v = _sum_taps(state, f, plan.a)
    else:
        v = gather(state.acc if f["a_source"] == ASource.ACC else state.vin, f["a_base"], plan.a)
    if f.get("norm"):
        v = reference.norm_entries(cfg, v[:, :, :, 0, 0], f)
    else:
        v = _reduce(f["reduce_op"], v, f["a_offset"])
    b = gather(state.vin, f["b_base"], plan.b) if f["b_source"] == BSource.VIN else None
    if f["binary_op"] != BinaryOp.NONE:
        if b is None:
            operand = np.array([f["imm"]], np.int32) + np.int32(f["b_offset"])
        else:
            operand = b + np.int32(f["b_offset"])
        v = _apply_binary(BinaryOp(f["binary_op"]), v.astype(np.int32), operand)

    if f["requantise"]:
        par = gather(state.par, f["par_base"], plan.par)
        v = _requantise(v, par.reshape(*par.shape[:3], cfg.out_pieces, 1, cfg.group))
        v += np.float32(f["zero_point"])
    if f["requantise"] or f["lookup"] or f["rescale_add"] or narrow:
        v = np.minimum(np.maximum(v, v.dtype.type(f["clip_lo"])), v.dtype.type(f["clip_hi"])).astype(np.int8)
    if f["lookup"]:
        v = state.lut[f["table"] % len(state.lut)].take(v.view(np.uint8) ^ np.uint8(0x80))
    if f["rescale_add"]:
        # Every term is a whole number below 2^48, so the sum and its scaling are exact in float64.
        assert b is not None
        total = v * np.float64(f["scale_v"])
        total += b * np.float64(f["scale_b"])
        total += np.float64(f["scale_c"])
        total *= 2.0 ** -f["scale_shift"]
        np.rint(total, out=total)
        v = np.minimum(np.maximum(total, f["add_lo"]), f["add_hi"])
    scatter(target, f["dst_base"], plan.dst, v)


def softmax(state: State, f: Fields) -> None:
    """Execute a softmax, as `reference.softmax` does."""
    powers, shares = np.split(state.exp.ravel(), 2)
    count = f["extent_n"] * state.cfg.block_out - f["imm"]
    is_ordinary = np.isfinite(state.exp).all() and not np.signbit(state.exp).any() and powers[-1] > 0
    if not is_ordinary or float(powers.max()) * count >= float(np.finfo(np.float32).max):
        return reference.softmax(state, f)  # float32 would overflow or divide by 0, unlike the hardware
    n, x = f["extent_n"], f["extent_x"]
    loops = (n, f["a_n"] if n > 1 else 0), (x, f["a_x"] if x > 1 else 0)
    rows = np.swapaxes(gather(state.vin, f["a_base"], loops), 0, 1).reshape(x, -1)
    index = 255 + rows[:, :count].astype(np.int64) - rows[:, :count].max(axis=1, keepdims=True)  # into both tables
    total = np.zeros(x, np.float32)
    for k in range(count):
        total += powers[index[:, k]]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        rounded = np.rint(shares[index] / total[:, None]) + np.float32(f["zero_point"])
    result = np.full(rows.shape, f["zero_point"], np.float32)
    result[:, :count] = rounded
    clipped = np.minimum(np.maximum(result, f["clip_lo"]), f["clip_hi"]).astype(np.int8)
    entries = clipped.reshape(x, n, state.cfg.out_pieces, 1, state.cfg.group)
    out = (x, f["dst_x"] if x > 1 else 0), (n, f["dst_n"] if n > 1 else 0)
    scatter(destination(state, Destination(f["destination"])), f["dst_base"], out, entries)


def _sum_taps(state: State, f: Fields, a: Steps) -> Int32:
    """Compute A of a VECTOR with taps, as `reference._sum_taps` does.

    a: pattern of A. Returns [n, y, x, r, s, block_out/group, batch, group].
    """
    cfg = state.cfg
    loops = tuple((f[f"extent_{loop}"], 0 if loop in "yx" else f[f"tap_{loop}"]) for loop in VECTOR_LOOPS)
    weights = gather(state.tap, f["tap_base"], squeeze_broadcast_loops(loops, len(state.tap))).astype(np.int32)
    total: Int32 | None = None
    for tap in range(cfg.taps):
        lanes = weights[..., tap, :].reshape(*weights.shape[:5], cfg.out_pieces, 1, cfg.group)
        part = gather(state.vin, f["a_base"] + tap, a) * lanes
        total = part if total is None else np.add(total, part, out=total)
    assert total is not None
    return total


def _reduce(op: int, a: Array, offset: int) -> Array:
    """Reduce a [n, y, x, r, s, ...] int8 or int32 over r and s, in int32 that wraps."""
    if a.shape[3:5] == (1, 1):
        return a[:, :, :, 0, 0] + np.int32(offset) if offset else a[:, :, :, 0, 0]
    combine = {ReduceOp.ADD: np.add, ReduceOp.MAX: np.maximum, ReduceOp.MIN: np.minimum}[ReduceOp(op)]
    # One window position after the other: numpy's own reduction over inner axes is several times slower.
    result: Array | None = None
    for r, s in np.ndindex(a.shape[3:5]):
        part = a[:, :, :, r, s] + np.int32(offset) if offset else a[:, :, :, r, s]
        if result is None:
            result = part.astype(np.int32)
        else:
            combine(result, part, out=result)
    assert result is not None
    return result


def _apply_binary(op: BinaryOp, a: Int32, b: Int32) -> Int32:
    """Compute a op b in int32 that wraps, as `reference._apply_binary` does: MUL takes the low 16 bits of both."""
    if op == BinaryOp.MUL:
        return a.astype(np.int16).astype(np.int32) * b.astype(np.int16).astype(np.int32)
    if op == BinaryOp.SHR:
        return a >> (b & np.int32(31))
    if op == BinaryOp.BYTE:
        return (a >> np.int32(8) * (b & np.int32(3))).astype(np.int8).astype(np.int32)
    operation: Callable[[Int32, Int32], Int32] = {
        BinaryOp.ADD: np.add, BinaryOp.MAX: np.maximum, BinaryOp.MIN: np.minimum,
    }[op]  # fmt: skip
    return operation(a, b)


def _requantise(v: Array, par: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Requantise by the float32 product that `reference.requantise` describes. Equal to it for results below 2^20.

    Beyond that both are far outside int8, on the same side, so that the clip that follows makes them equal.
    """
    bias, factor = _requantise_parameters(par.tobytes())
    result = (v.astype(np.int32, copy=False) + bias.reshape(par.shape)).astype(np.float32)
    result *= factor.reshape(par.shape)
    return np.rint(result, out=result)


@lru_cache(maxsize=1024)
def _requantise_parameters(entries: bytes) -> tuple[Int32, NDArray[np.float32]]:
    """Return the bias and the factor multiplier / 2^shift of each entry of par in these bytes, which are hashable."""
    par = np.frombuffer(entries, np.uint64)
    bias, multiplier, shift = (part.of(par) for part in PAR_FIELDS.values())
    factor = np.ldexp(multiplier.astype(np.float32), -shift.astype(np.int32))
    return bias.astype(np.uint32).view(np.int32), factor


def _locate_dram_rows(dram: Array, f: Fields, size: int, verb: str) -> tuple[int, Steps]:
    """Return the first byte and the (extent, signed stride) of the planes and rows of a LOAD or STORE.

    size: bytes of an element. verb: "LOAD reads" or "STORE writes", for the message. IndexError for the first row that
    is not inside DRAM. NotImplementedError where addresses of rows wrap around, which only the reference can execute.
    """
    start, width = f["dram_addr"], f["x_size"] * size
    for rows, low, high in _signed_rows(_pair_loops(f["z_size"], f["dram_z"], f["y_size"], f["dram_y"])):
        if start + low >= 0 and start + high + width <= len(dram):
            return start, rows
    for _, _, start in reference._dram_rows(f, width):
        if start + width > len(dram):
            raise IndexError(f"{verb} bytes {start} to {start + width - 1}, the limit is {len(dram)}")
    raise NotImplementedError  # rows inside DRAM whose addresses wrap around at 2^32


@lru_cache(maxsize=8192)
def _pair_loops(*loops: int) -> Steps:
    """Return the numbers extent, stride, extent, stride, ... as pairs.

    A loop that runs once gets stride 0, so that patterns with equal addresses are equal keys of the caches.
    """
    return tuple((extent, stride if extent > 1 else 0) for extent, stride in zip(loops[::2], loops[1::2]))


@lru_cache(maxsize=8192)
def _signed_rows(rows: Steps) -> tuple[tuple[Steps, int, int], ...]:
    """Return the ways to read the strides of rows in DRAM as signed numbers, as `spans` does.

    Each is (extent and signed stride of both loops, lowest offset, highest offset).
    """
    return tuple(
        (tuple((extent, step) for (extent, _), step in zip(rows, signed, strict=True)), low, high)
        for signed, low, high in spans(rows, 1 << 32)
    )


def _dram_view(dram: NDArray[np.uint8], start: int, rows: Steps, count: int, size: int, dtype: Any) -> Array:
    """View rows of DRAM as [planes, rows, count, values of an element] of `dtype`.

    A row is `count` consecutive elements of `size` bytes. start: first byte. rows: (extent, signed stride) of planes
    and of rows.
    """
    item = np.dtype(dtype).itemsize
    (z, dram_z), (y, dram_y) = rows
    return np.ndarray((z, y, count, size // item), dtype, dram, start, (dram_z, dram_y, size, item))


def load(state: State, dram: NDArray[np.uint8], f: Fields) -> None:
    """Execute a LOAD, as `reference.load` does."""
    buffer, widen = Buffer(f["buffer"]), bool(f["widen"])
    expands = bool(f.get("expand"))
    size = element_bytes(state.cfg, buffer, widen, expands)
    target: Array = state.elements(buffer)
    width = f["pad_left"] + f["x_size"] + f["pad_right"]
    height = f["pad_top"] + f["y_size"] + f["pad_bottom"]
    block = _pair_loops(f["z_size"], f["sram_z"], height, f["sram_y"], width, f["sram_x"])
    try:
        start, rows = _locate_dram_rows(dram, f, size, "LOAD reads")
    except NotImplementedError:
        return reference.load(state, dram, f)
    if expands:
        packed = _dram_view(dram, start, rows, f["x_size"], size, np.uint8)
        values: Array = expand_packs(state.cfg, packed.reshape(*packed.shape[:2], -1), state.book)
    else:
        values = _dram_view(dram, start, rows, f["x_size"], size, np.int8 if widen else target.dtype)
    if (height, width) != (f["y_size"], f["x_size"]):
        padding = f["pad_value"] if buffer == Buffer.ACC else _repeat_byte(f["pad_value"], target.dtype)
        padded = np.full((f["z_size"], height, width, target.shape[1]), padding, target.dtype)
        top, left = f["pad_top"], f["pad_left"]
        padded[:, top : top + f["y_size"], left : left + f["x_size"]] = values
        values = padded
    scatter(target, f["sram_base"], block, values)


def _repeat_byte(value: int, dtype: np.dtype[Any]) -> np.generic:
    """Return a number of `dtype` whose every byte is `value`: pad_value is one byte for entries of any type."""
    return np.full(dtype.itemsize, value, np.int8).view(dtype)[0]  # type: ignore[no-any-return]


def store(state: State, dram: NDArray[np.uint8], f: Fields) -> None:
    """Execute a STORE, as `reference.store` does."""
    size = state.cfg.piece_bytes
    pieces = state.out.reshape(-1, size)
    try:
        start, rows = _locate_dram_rows(dram, f, size, "STORE writes")
    except NotImplementedError:
        return reference.store(state, dram, f)
    block = _pair_loops(f["z_size"], f["sram_z"], f["y_size"], f["sram_y"], f["x_size"], f["sram_x"])
    target, values = _dram_view(dram, start, rows, f["x_size"], size, np.int8), gather(pieces, f["sram_base"], block)
    if _rows_overlap(rows, f["x_size"] * size):
        for row in np.ndindex(target.shape[:2]):  # in order, so that the last row stays where rows overlap
            target[row] = values[row]
    else:
        target[...] = values


@lru_cache(maxsize=8192)
def _rows_overlap(rows: Steps, width: int) -> bool:
    """Return whether rows of `width` bytes may share a byte, so that they must be written in order."""
    reach = width
    for extent, stride in sorted(rows, key=lambda loop: abs(loop[1])):
        if extent > 1:
            if abs(stride) < reach:
                return True
            reach += abs(stride) * (extent - 1)
    return False


def execute(state: State, dram: NDArray[np.uint8], opcode: Opcode, f: Fields) -> None:
    """Execute one legal, decoded instruction. IndexError where it leaves DRAM."""
    if opcode == Opcode.LOAD:
        load(state, dram, f)
    elif opcode == Opcode.STORE:
        store(state, dram, f)
    elif opcode == Opcode.GEMM:
        gemm(state, f)
    else:
        vector(state, f)
