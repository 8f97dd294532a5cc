"""The meaning of each instruction, in plain numpy.

This is the specification: RTL, functional simulator and compiler are held to it. It favours plainness over speed.
An address that runs past its buffer wraps around (depths are powers of two); compiled programs never rely on that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

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
    formats,
    opcode_of,
)
from celosia.hw.spec.legality import why_illegal
from celosia.hw.spec.regs import Error
from celosia.hw.spec.scratchpads import PAR_FIELDS, scratchpads
from celosia.sim.functional.norm import normalise_rows
from celosia.sim.functional.softmax import softmax_rows
from celosia.sim.functional.unpacking import expand_packs

Int8 = NDArray[np.int8]
Int32 = NDArray[np.int32]
Fields = dict[str, int]
"""The values of an instruction's fields, by name."""


class ExecutionError(RuntimeError):
    """An instruction that ends the run with an error: `code` says which, the message names the instruction."""

    def __init__(self, code: Error, index: int, message: str) -> None:
        super().__init__(f"instruction {index}: {message}")
        self.code, self.index = code, index


@dataclass
class State:
    """Scratchpads of one accelerator. All but `par_*` and `lut` are arrays of entries.

    inp [depth, block_in/group, batch, group] int8; wgt [depth, block_in/group, block_out, group] int8;
    acc [depth, block_out/group, batch, group] int32; vin, out likewise int8;
    par [depth, block_out] uint64, see `PAR_FIELDS`; lut [count, 256] int8;
    tap [depth, slots, block_out] int8, of slots at least `taps`; [0, ...] where the Config has no taps.
    exp [depth, 1] float32, see `FLOAT`; [0, 1] where the Config has no softmax.
    book [depth, weights of half a byte] int8, see `hw/spec/packing.py`; [0, 1] where the Config has weight_bits = 8.
    """

    cfg: Config
    inp: Int8 = field(init=False)
    wgt: Int8 = field(init=False)
    acc: Int32 = field(init=False)
    vin: Int8 = field(init=False)
    out: Int8 = field(init=False)
    par: NDArray[np.uint64] = field(init=False)
    lut: Int8 = field(init=False)
    tap: Int8 = field(init=False)
    exp: NDArray[np.float32] = field(init=False)
    book: Int8 = field(init=False)

    def __post_init__(self) -> None:
        for name, pad in scratchpads(self.cfg).items():
            setattr(self, name, np.zeros((pad.depth, *pad.shape), pad.element))
        if not self.cfg.taps:
            self.tap = np.zeros((0, 1, self.cfg.block_out), np.int8)
        if not self.cfg.softmax:
            self.exp = np.zeros((0, 1), np.float32)
        if self.cfg.weight_bits == 8:
            self.book = np.zeros((0, 1), np.int8)

    def randomise(self, rng: np.random.Generator) -> None:
        """Fill all scratchpads with random bytes, as silicon may hold before anything is written."""
        for buffer in vars(self).values():
            if isinstance(buffer, np.ndarray):
                buffer.reshape(-1).view(np.uint8)[...] = rng.integers(0, 256, buffer.nbytes, np.uint8)

    def elements(self, buffer: Buffer) -> NDArray[Any]:
        """Return a view of `buffer` as [elements, values]: an element is what one step of LOAD writes."""
        name = buffer.name.lower()
        array: NDArray[Any] = getattr(self, name)
        return array.reshape(len(array) * scratchpads(self.cfg)[name].pieces, -1)


def addresses(f: Fields, operand: str, loops: tuple[str, ...], depth: int) -> NDArray[np.int64]:
    """Return the entry of `operand` in each iteration: base + sum of index * stride, modulo `depth`.

    The result has an axis for each of `loops`, as long as the loop's extent.
    """
    total = np.full((1,) * len(loops), f[f"{operand}_base"], np.int64)
    for axis, loop in enumerate(loops):
        shape = [1] * len(loops)
        shape[axis] = f[f"extent_{loop}"]
        total = total + (np.arange(f[f"extent_{loop}"]) * f[f"{operand}_{loop}"]).reshape(shape)
    return total % depth


def _dram_rows(f: Fields, row_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield (plane, row, address of its first byte) for each row that a LOAD or STORE accesses, in order.

    Addresses wrap at 2^32.
    """
    for z in range(f["z_size"]):
        for y in range(f["y_size"]):
            yield z, y, (f["dram_addr"] + z * f["dram_z"] + y * f["dram_y"]) % (1 << 32)


def load(state: State, dram: NDArray[np.uint8], f: Fields) -> None:
    """Execute a LOAD. `dram` holds the bytes from the DMA base to the limit. IndexError where a row leaves it."""
    cfg, buffer, widen = state.cfg, Buffer(f["buffer"]), bool(f["widen"])
    expands = bool(f.get("expand"))
    size = element_bytes(cfg, buffer, widen, expands)
    target = state.elements(buffer)
    dtype = np.dtype(np.int8) if widen else target.dtype
    width = f["pad_left"] + f["x_size"] + f["pad_right"]
    height = f["pad_top"] + f["y_size"] + f["pad_bottom"]
    pad = (
        np.int32(f["pad_value"]) if buffer == Buffer.ACC else np.frombuffer(bytes([f["pad_value"] & 255]) * 8, dtype)[0]
    )
    block = np.full((f["z_size"], height, width, target.shape[1]), pad, target.dtype)
    for z, y, start in _dram_rows(f, f["x_size"] * size):
        stop = start + f["x_size"] * size
        if stop > len(dram):
            raise IndexError(f"LOAD reads bytes {start} to {stop - 1}, the limit is {len(dram)}")
        bytes_ = dram[start:stop]
        row = expand_packs(cfg, bytes_, state.book) if expands else bytes_.view(dtype).reshape(f["x_size"], -1)
        block[z, f["pad_top"] + y, f["pad_left"] : f["pad_left"] + f["x_size"]] = row
    for z, y, x in np.ndindex(block.shape[:3]):
        target[(f["sram_base"] + z * f["sram_z"] + y * f["sram_y"] + x * f["sram_x"]) % len(target)] = block[z, y, x]


def store(state: State, dram: NDArray[np.uint8], f: Fields) -> None:
    """Execute a STORE. Writes `dram` in place. IndexError where a row leaves it."""
    pieces = state.out.reshape(-1, state.cfg.piece_bytes)
    size = state.cfg.piece_bytes
    for z, y, start in _dram_rows(f, f["x_size"] * size):
        stop = start + f["x_size"] * size
        if stop > len(dram):
            raise IndexError(f"STORE writes bytes {start} to {stop - 1}, the limit is {len(dram)}")
        index = f["sram_base"] + z * f["sram_z"] + y * f["sram_y"] + np.arange(f["x_size"]) * f["sram_x"]
        dram[start:stop] = pieces[index % len(pieces)].reshape(-1).view(np.uint8)


def gemm(state: State, f: Fields) -> None:
    """Execute a GEMM. Sums wrap at 32 bits.

    Outputs are computed one after the other, so that one with the accumulator of an earlier one adds to its sum.
    """
    cfg = state.cfg
    acc = addresses(f, "acc", OUTER_LOOPS, len(state.acc))
    inp = addresses(f, "inp", GEMM_LOOPS, len(state.inp))
    wgt = addresses(f, "wgt", GEMM_LOOPS, len(state.wgt))
    for outer in np.ndindex(acc.shape):
        # [steps, block_in/group, batch, group] -> [batch, steps * block_in], against weights
        # [steps, block_in/group, block_out, group] -> [block_out, steps * block_in]
        left = state.inp[inp[outer].ravel()].transpose(2, 0, 1, 3).reshape(cfg.batch, -1).astype(np.int64)
        right = state.wgt[wgt[outer].ravel()].transpose(2, 0, 1, 3).reshape(cfg.block_out, -1).astype(np.int64)
        total = (left @ right.T).reshape(cfg.batch, cfg.out_pieces, cfg.group).transpose(1, 0, 2)
        if f["accumulate"]:
            total = total + state.acc[acc[outer]]
        state.acc[acc[outer]] = total.astype(np.int32)


def requantise(v: Int32, bias: Int32, multiplier: NDArray[np.int64], shift: NDArray[np.int64]) -> NDArray[np.int64]:
    """Round (v + bias) * multiplier / 2^shift as a float32 product would be rounded, then to an integer, ties to even.

    v + bias wraps at 32 bits; its magnitude above 2^24 is first rounded to 24 significant bits, as the conversion of an
    int32 to float32 does. The float32 product would round an exact product to 24 significant bits as well: what lies
    within half a unit of the last of these bits from a tie counts as the tie. All arrays broadcast; |result| < 2^56.
    """
    total = (v.astype(np.int64) + bias).astype(np.int32).astype(np.int64)
    magnitude = np.abs(total)
    lost = np.maximum(_bit_length(magnitude) - 24, 0)
    magnitude = _round_half_even(magnitude, lost, np.zeros((), np.int64), keep_scale=True)
    product = magnitude * multiplier
    half_ulp = np.where(_bit_length(product) > 24, np.int64(1) << np.maximum(_bit_length(product) - 25, 0), 0)
    rounded = _round_half_even(product, shift, half_ulp)
    return np.where(total < 0, -rounded, rounded)


def _bit_length(value: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of bits of non-negative values below 2^53."""
    return np.frexp(value.astype(np.float64))[1].astype(np.int64)


def _round_half_even(
    value: NDArray[np.int64], shift: NDArray[np.int64], slack: NDArray[np.int64], keep_scale: bool = False
) -> NDArray[np.int64]:
    """Round the non-negative numbers value / 2^shift to the nearest integers, ties to even.

    slack: a value within this distance of a tie counts as the tie. keep_scale: return the integer times 2^shift.
    """
    floor = value >> shift
    fraction = value - (floor << shift)
    half = np.where(shift > 0, np.int64(1) << np.maximum(shift - 1, 0), 0)
    tie = (np.abs(fraction - half) <= slack) & (shift > 0)
    up = np.where(tie, floor & 1, (fraction > half) & (shift > 0))
    result = floor + up
    return result << shift if keep_scale else result


def vector(state: State, f: Fields) -> None:
    """Execute a VECTOR. An instruction must not read an accumulator that it wrote itself."""
    cfg = state.cfg
    if f.get("softmax"):
        return softmax(state, f)
    residual = state.vin[addresses(f, "b", OUTER_LOOPS, len(state.vin))].astype(np.int64)
    v = _normalise(state, f) if f.get("norm") else _reduce_and_combine(state, f, residual)
    if f["requantise"]:
        par = state.par[addresses(f, "par", OUTER_LOOPS, len(state.par))].reshape(*v.shape[:4], 1, cfg.group)
        bias = PAR_FIELDS["bias"].of(par).astype(np.uint32).view(np.int32)
        multiplier, shift = (PAR_FIELDS[name].of(par).astype(np.int64) for name in ("multiplier", "shift"))
        v = requantise(v.astype(np.int32), bias, multiplier, shift) + f["zero_point"]
    if f["requantise"] or f["lookup"] or f["rescale_add"] or f["destination"] != Destination.ACC:
        v = np.minimum(np.maximum(v, f["clip_lo"]), f["clip_hi"])
    if f["lookup"]:
        v = state.lut[f["table"] % len(state.lut)][v + 128].astype(np.int64)
    if f["rescale_add"]:
        total = v * f["scale_v"] + residual * f["scale_b"] + f["scale_c"]
        v = _round_signed(total, f["scale_shift"])
        v = np.minimum(np.maximum(v, f["add_lo"]), f["add_hi"])
    target = destination(state, Destination(f["destination"]))
    index = addresses(f, "dst", OUTER_LOOPS, len(target))
    for outer in np.ndindex(index.shape):
        target[index[outer]] = v[outer].astype(target.dtype)


def _reduce_and_combine(state: State, f: Fields, residual: NDArray[np.int64]) -> NDArray[np.int64]:
    """Reduce each window of A over its loops r and s, and apply the binary operation with B.

    This is the first half of a VECTOR, before it requantises. residual: B as read from vin, [n, y, x, block_out/group,
    batch, group], which is also the shape of the result. B is the constant `imm` where it does not come from vin.
    """
    loops = VECTOR_LOOPS
    if f["taps"]:
        a = _sum_taps(state, f)
    elif f["a_source"] == ASource.ACC:
        a = state.acc[addresses(f, "a", loops, len(state.acc))].astype(np.int64)
    else:
        a = state.vin[addresses(f, "a", loops, len(state.vin))].astype(np.int64)
    reduce: Any = {ReduceOp.ADD: np.sum, ReduceOp.MAX: np.max, ReduceOp.MIN: np.min}[ReduceOp(f["reduce_op"])]
    v = _wrap(reduce(_wrap(a + f["a_offset"]), axis=(3, 4)))
    b = residual if f["b_source"] == BSource.VIN else np.full_like(residual, f["imm"])
    return _apply_binary(BinaryOp(f["binary_op"]), v, _wrap(b + f["b_offset"]))


def _normalise(state: State, f: Fields) -> NDArray[np.int64]:
    """Return the normalised entries of vin that a VECTOR with norm reads, [n, 1, x, block_out/group, 1, group].

    For each x, the lanes of all n are a row, without the last `imm` lanes.
    """
    entries = state.vin[addresses(f, "a", OUTER_LOOPS, len(state.vin))]
    return norm_entries(state.cfg, entries, f).astype(np.int64)


def norm_entries(cfg: Config, entries: NDArray[Any], f: Fields) -> Int32:
    """Normalise entries [n, 1, x, block_out/group, 1, group] of a VECTOR with norm; for each x, all n are a row.

    It needs no State, so that the fast simulator (vectorised.py) uses it, too. Field a_offset holds the zero point,
    scale_c the epsilon.
    """
    rows = entries[:, 0].swapaxes(0, 1)  # [x, n, block_out/group, 1, group]
    count = f["extent_n"] * cfg.block_out - f["imm"]
    normalised = normalise_rows(rows.reshape(len(rows), -1), count, f["a_offset"], bool(f["centre"]), f["scale_c"])
    return normalised.reshape(rows.shape).swapaxes(0, 1)[:, None]


def softmax(state: State, f: Fields) -> None:
    """Execute a VECTOR with softmax. For each x, the lanes of all n are a row, without the last `imm` lanes.

    Those last lanes get the result of a share of 0: zero_point, clipped.
    """
    cfg = state.cfg
    a = state.vin[addresses(f, "a", OUTER_LOOPS, len(state.vin))[:, 0]]  # [n, x, block_out/group, 1, group]
    rows = np.swapaxes(a, 0, 1).reshape(f["extent_x"], -1)
    limits = f["zero_point"], f["clip_lo"], f["clip_hi"]
    powers, shares = np.split(state.exp.ravel().view(np.uint32), 2)
    result = np.full(rows.shape, min(max(f["zero_point"], f["clip_lo"]), f["clip_hi"]), np.int8)
    count = rows.shape[1] - f["imm"]
    result[:, :count] = softmax_rows(rows[:, :count], powers, shares, *limits)
    target = destination(state, Destination(f["destination"]))
    index = addresses(f, "dst", OUTER_LOOPS, len(target))[:, 0]
    for x, n in np.ndindex(index.T.shape):  # row by row
        target[index[n, x]] = result[x].reshape(len(index), cfg.out_pieces, 1, cfg.group)[n]


def destination(state: State, kind: Destination) -> NDArray[Any]:
    """Return a view of the scratchpad that a VECTOR writes, as [places, block_out/group, batch, group].

    A place holds what VECTOR writes in one step, the channels of an entry of acc; an entry of inp may hold several.
    """
    array: NDArray[Any] = getattr(state, kind.name.lower())
    return array.reshape(-1, *state.acc.shape[1:])


def _sum_taps(state: State, f: Fields) -> NDArray[np.int64]:
    """Compute A of a VECTOR with taps: each iteration adds up `taps` consecutive entries of vin, times an entry of tap.

    The result is [n, y, x, r, s, block_out/group, batch, group].
    """
    cfg = state.cfg
    first = addresses(f, "a", VECTOR_LOOPS, len(state.vin))
    # The fields of `tap` have no loops y and x.
    weights = state.tap[addresses(f | {"tap_y": 0, "tap_x": 0}, "tap", VECTOR_LOOPS, len(state.tap))].astype(np.int64)
    total = np.zeros((*first.shape, *state.vin.shape[1:]), np.int64)
    for tap in range(cfg.taps):
        lanes = weights[..., tap, :].reshape(*first.shape, cfg.out_pieces, 1, cfg.group)
        total += state.vin[(first + tap) % len(state.vin)].astype(np.int64) * lanes
    return total


def _wrap(value: NDArray[np.int64]) -> NDArray[np.int64]:
    """Wrap values to 32 bits, as the accumulators do."""
    return value.astype(np.int32).astype(np.int64)


def _apply_binary(op: BinaryOp, a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    """Compute a op b in int32 that wraps.

    MUL multiplies the low 16 bits of both, as signed numbers, since the hardware's multiplier takes no more. SHR shifts
    by the low 5 bits of b. BYTE selects one of the four bytes of a by the low 2 bits of b, as a signed number.
    """
    if op == BinaryOp.MUL:
        return _wrap(a.astype(np.int16).astype(np.int64) * b.astype(np.int16).astype(np.int64))
    results: dict[BinaryOp, Callable[[], NDArray[np.int64]]] = {
        BinaryOp.NONE: lambda: a,
        BinaryOp.ADD: lambda: a + b,
        BinaryOp.MAX: lambda: np.maximum(a, b),
        BinaryOp.MIN: lambda: np.minimum(a, b),
        BinaryOp.SHR: lambda: a >> (b & 31),
        BinaryOp.BYTE: lambda: (a >> 8 * (b & 3)).astype(np.int8).astype(np.int64),
    }
    return _wrap(results[op]())


def _round_signed(value: NDArray[np.int64], shift: int) -> NDArray[np.int64]:
    """Round value / 2^shift to the nearest integer, ties to even."""
    if shift == 0:
        return value
    floor = value >> shift
    fraction = value - (floor << shift)
    half = 1 << (shift - 1)
    return floor + np.where(fraction == half, floor & 1, fraction > half)


def execute(state: State, dram: NDArray[np.uint8], word: int, index: int = 0) -> None:
    """Execute one instruction word. `dram` holds the bytes from the DMA base to the limit. Raises ExecutionError."""
    reason = why_illegal(state.cfg, word)
    if reason is not None:
        raise ExecutionError(Error.ILLEGAL_INSTRUCTION, index, reason)
    opcode = opcode_of(word)
    assert opcode is not None
    f = formats(state.cfg)[opcode].decode(word)
    try:
        if opcode == Opcode.LOAD:
            load(state, dram, f)
        elif opcode == Opcode.STORE:
            store(state, dram, f)
        elif opcode == Opcode.GEMM:
            gemm(state, f)
        else:
            vector(state, f)
    except IndexError as error:
        raise ExecutionError(Error.ADDRESS, index, str(error)) from None
