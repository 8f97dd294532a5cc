"""Compute what each instruction of an encoded stream asks for (steps, beats, bursts, ports), for all at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import or_

import numpy as np
from numpy.typing import NDArray

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import (
    GEMM_LOOPS,
    OUTER_LOOPS,
    UNIT_OF,
    VECTOR_LOOPS,
    ASource,
    BSource,
    Buffer,
    Destination,
    Opcode,
    instruction_bytes,
    load_channels,
)
from celosia.hw.spec.legality import why_illegal
from celosia.hw.spec.pipeline import BURST_BOUNDARY, MAX_BURST, OVERLAP_EQUAL_FIELDS
from celosia.hw.spec.scratchpads import TABLE_SIZE, scratchpads
from celosia.sim.functional.access import OPERANDS, Columns, element_sizes
from celosia.sim.functional.decode import decode_columns
from celosia.sim.timing.engine_cycles import norm_cycles, softmax_cycles

Ints = NDArray[np.int64]
IN_ACC, IN_VIN = 1, 2
"""Bits of the masks `shared_reads` and `shared_writes` of a Demand: the scratchpads acc and vin."""
INP_PORT, VIN_PORT = 1, 2
"""Values of `port` of a Demand: the write ports of inp and vin, which LOAD and VECTOR share."""
ONE_PORT, BOTH_PORTS = 1, 2
"""Values of `weight_ports` of a Demand: through how many ports to memory a LOAD reads weights."""
TABLE_PADDING = 2
"""Cycles that padding a table takes besides one for each grain: before the first and after the last grain
(`hw/vector_unit/table.py`)."""


@dataclass(frozen=True)
class Demand:
    """Work that each instruction of a stream asks for: a column for each quantity, 0 where it has no meaning.

    unit, wait, post: the unit's number and the masks of its tokens. steps: cycles of work without waits: tile
    operations, entries, writes to a scratchpad (padding included), units read from `out`.

    lead, trail, padding: steps of a LOAD that are padding before its first element, after its last one, and in all.
    padding_stall: further cycles of each of these, since a table is padded grain by grain. rows, bursts, beats: of its
    copy in DRAM. load_channel: of LOAD, the number of its port to memory; 0 where it uses both, and steps and rows are
    those of each. weight_ports: ONE_PORT or BOTH_PORTS of a LOAD of weights on a Config with both.

    outputs: entries that a GEMM or VECTOR writes. residual: whether VECTOR adds a residual to each. norm_cycles: cycles
    before the first step of a norm. softmax_entries: entries of a row of a softmax, whose steps are all its cycles.
    like_last_softmax: whether it is a softmax that may overlap the VECTOR before it, a softmax with equal fields.
    behind_softmax: not 0 for a VECTOR that may write vin while the last softmax still reads it, each entry after its
    last read: 1 + the number of entries that it writes in front of the softmax's rows.

    shared_reads, shared_writes: scratchpads that it reads, and writes for a VECTOR to read, as masks of IN_ACC and
    IN_VIN. port: INP_PORT or VIN_PORT, which LOAD and VECTOR share, where one of them writes there. read_bank,
    write_bank: the half of acc in which the first output is read and written. read_bank_outputs, write_bank_outputs:
    how many of the outputs, from the first one on, are there.
    """

    unit: NDArray[np.int64]
    wait: Ints
    post: Ints
    steps: Ints
    lead: Ints
    trail: Ints
    padding: Ints
    padding_stall: Ints
    rows: Ints
    bursts: Ints
    beats: Ints
    load_channel: Ints
    weight_ports: Ints
    outputs: Ints
    residual: Ints
    softmax_entries: Ints
    like_last_softmax: Ints
    behind_softmax: Ints
    norm_cycles: Ints
    shared_reads: Ints
    shared_writes: Ints
    port: Ints
    read_bank: Ints
    read_bank_outputs: Ints
    write_bank: Ints
    write_bank_outputs: Ints


def demand(cfg: Config, code: bytes) -> Demand:
    """Compute the demand of the instructions in `code`. ValueError where one is illegal or cut off."""
    size = instruction_bytes(cfg)
    if len(code) % size:
        raise ValueError(f"{len(code)} bytes are not whole instructions of {size} bytes")
    words = np.frombuffer(code, np.uint8).reshape(-1, size)
    by_opcode, illegal = decode_columns(cfg, words)
    for number in np.flatnonzero(illegal)[:1]:
        reason = why_illegal(cfg, int.from_bytes(words[number].tobytes(), "little"))
        raise ValueError(f"instruction {number}: {reason}")
    result: dict[str, Ints] = {name: np.zeros(len(words), np.int64) for name in Demand.__dataclass_fields__}
    for opcode, decoded in by_opcode.items():
        fields, numbers = decoded.fields, decoded.numbers
        values = {
            "wait": fields["wait"],
            "post": fields["post"],
            **_shared_scratchpads(opcode, fields),
            **_DEMAND_OF[opcode](cfg, fields),
        }
        result["unit"][numbers] = UNIT_OF[opcode]
        for name, value in values.items():
            result[name][numbers] = value
    return Demand(**result)


def _multiply_fields(f: Columns, names: Iterable[str]) -> Ints:
    """Return the product of some fields of each instruction; 1 without fields."""
    return prod((f[name] for name in names), start=np.ones_like(f["opcode"]))


def _shared_scratchpads(opcode: Opcode, f: Columns) -> dict[str, Ints]:
    """Return the scratchpads that each instruction shares with other units: masks of those read, and of those written.

    "port" is the scratchpad that LOAD and VECTOR both write, if the instruction writes it.
    """

    def combined_mask(write: bool, memories: dict[str, int]) -> Ints:
        """Return, for each instruction, the bits (`memories`) of all scratchpads that it reads (write: writes)."""
        operands = [operand for operand in OPERANDS[opcode] if operand.write == write and operand.memory in memories]
        return reduce(
            or_,
            (_value_where(operand.when(f), memories[operand.memory]) for operand in operands),
            np.zeros_like(f["opcode"]),
        )

    bits = {"acc": IN_ACC, "vin": IN_VIN}
    return {
        "shared_reads": combined_mask(False, bits), "shared_writes": combined_mask(True, bits),
        "port": combined_mask(True, {"inp": INP_PORT, "vin": VIN_PORT}),
    }  # fmt: skip


def _value_where(condition: NDArray[np.bool_], value: int) -> Ints:
    """Return `value` where the condition holds, else 0."""
    return condition.astype(np.int64) * value


def _gemm_demand(cfg: Config, f: Columns) -> dict[str, Ints]:
    """Return the columns of Demand for GEMM instructions."""
    bank, bank_outputs = _acc_banks(cfg, f, "acc")
    return {
        "steps": _multiply_fields(f, (f"extent_{loop}" for loop in GEMM_LOOPS)),
        "outputs": _multiply_fields(f, (f"extent_{loop}" for loop in OUTER_LOOPS)),
        "read_bank": bank,
        "read_bank_outputs": bank_outputs,
        "write_bank": bank,
        "write_bank_outputs": bank_outputs,
    }


def _vector_demand(cfg: Config, f: Columns) -> dict[str, Ints]:
    """Return the columns of Demand for VECTOR instructions."""
    read_bank, read_bank_outputs = _acc_banks(cfg, f, "a", f["a_source"] == ASource.ACC)
    write_bank, write_bank_outputs = _acc_banks(cfg, f, "dst", f["destination"] == Destination.ACC)
    steps = _multiply_fields(f, (f"extent_{loop}" for loop in VECTOR_LOOPS))
    row_entries = is_like_last = softmax_distances = np.zeros_like(steps)
    if cfg.softmax:
        row_entries, is_like_last = f["softmax"] * f["extent_n"], _mark_like_softmaxes(f)
        softmax_distances = _distances_behind_softmax(cfg, f)
        steps = np.where(row_entries, softmax_cycles(cfg, f["extent_x"], f["extent_n"]), steps)
    before_norm = f["norm"] * norm_cycles(cfg, f["extent_x"], f["extent_n"]) if cfg.norm else np.zeros_like(steps)
    return {
        "steps": steps,
        "outputs": _multiply_fields(f, (f"extent_{loop}" for loop in OUTER_LOOPS)),
        "norm_cycles": before_norm,
        "residual": f["rescale_add"],
        "softmax_entries": row_entries,
        "like_last_softmax": is_like_last,
        "behind_softmax": softmax_distances,
        "read_bank": read_bank,
        "read_bank_outputs": read_bank_outputs,
        "write_bank": write_bank,
        "write_bank_outputs": write_bank_outputs,
    }


def _mark_like_softmaxes(f: Columns) -> Ints:
    """Return 1 for each VECTOR that is a softmax which may overlap the softmax before it, else 0."""
    must_be_equal = [f[name] for name in ("softmax", *OVERLAP_EQUAL_FIELDS, "destination", "zero_point", "clip_hi")]
    must_be_equal.append(np.minimum(f["clip_lo"], f["clip_hi"]))
    is_like_last = f["softmax"].copy()
    is_like_last[:1] = 0
    for column in must_be_equal:
        is_like_last[1:] &= column[1:] == column[:-1]
    return is_like_last


def _distances_behind_softmax(cfg: Config, f: Columns) -> Ints:
    """Compute the column `behind_softmax` of Demand.

    A VECTOR may write vin behind a softmax if it goes from acc to consecutive entries of vin, and the rows of the
    softmax are consecutive, end inside vin, and do not begin before the entries that are written. Its value is the
    distance of both beginnings plus 1. Others get 0.
    """
    numbers = np.arange(len(f["opcode"]))
    last_softmax = np.maximum.accumulate(np.where(f["softmax"], numbers, -1))
    rows = {name: f[name][last_softmax] for name in ("a_base", "a_n", "a_x", "extent_n", "extent_x")}
    depth = scratchpads(cfg)["vin"].depth
    base = rows["a_base"] % depth
    from_acc_to_vin = (
        (f["destination"] == Destination.VIN) & (f["a_source"] == ASource.ACC) & (f["b_source"] != BSource.VIN)
    )
    is_consecutive = (f["extent_n"] == 1) & (f["extent_y"] == 1) & (f["dst_x"] == 1)
    is_consecutive &= (rows["a_n"] == 1) & (rows["a_x"] == rows["extent_n"])
    is_consecutive &= base + rows["extent_n"] * rows["extent_x"] <= depth
    in_front = base - f["dst_base"]
    may_follow = from_acc_to_vin & is_consecutive & (last_softmax >= 0) & (in_front >= 0)
    return _value_where(may_follow, 1) * (in_front + 1)


def _acc_banks(cfg: Config, f: Columns, operand: str, applies: NDArray[np.bool_] | None = None) -> tuple[Ints, Ints]:
    """Return the bank of acc of each instruction's first output, and how many outputs precede one in the other bank.

    operand: name of the operand in acc. applies: mask of the instructions whose operand is in acc, None for all;
    results for the others have no meaning.
    """
    extents = [f[f"extent_{loop}"] for loop in OUTER_LOOPS]
    strides = [f[f"{operand}_{loop}"] for loop in OUTER_LOOPS]
    base, half = f[f"{operand}_base"], scratchpads(cfg)["acc"].bank_depth
    bank, bank_outputs = base // half % 2, prod(extents, start=np.ones_like(base))
    reach = base + sum((extent - 1) * stride for extent, stride in zip(extents, strides))
    leaves = (reach // half != base // half) & (True if applies is None else applies)
    for i in np.flatnonzero(leaves).tolist():
        steps = (np.arange(extent[i]) * stride[i] for extent, stride in zip(extents, strides))
        n, y, x = np.ix_(*steps)
        in_other_bank = np.flatnonzero(((base[i] + n + y + x) // half % 2).ravel() != bank[i])
        if len(in_other_bank):
            bank_outputs[i] = in_other_bank[0]
    return bank, bank_outputs


def _load_demand(cfg: Config, f: Columns) -> dict[str, Ints]:
    """Return the columns of Demand for LOAD instructions."""
    size = element_sizes(cfg, f)
    x, y, z = f["x_size"], f["y_size"], f["z_size"]
    left, top = f["pad_left"], f["pad_top"]
    width = left + x + f["pad_right"]
    elements = x * y * z
    channel_of_buffer = np.array(
        [max((n for n, buffers in enumerate(load_channels(cfg)) if b in buffers), default=0) for b in Buffer], np.int64
    )
    padding = z * width * (top + y + f["pad_bottom"]) - elements
    spread = f["spread"] if "spread" in f else np.zeros_like(x)
    could_be_spread = (f["buffer"] == Buffer.WGT) & ("spread" in f)
    writes_per_element = np.maximum(1, (size >> spread) // cfg.bus_bytes)
    is_packed = f["expand"] == 1 if "expand" in f else np.zeros(len(x), np.bool_)
    return {
        "steps": padding + np.where(is_packed, elements * size // cfg.bus_bytes, elements * writes_per_element),
        "lead": top * width + left,
        "trail": f["pad_bottom"] * width + f["pad_right"],
        "padding": padding,
        "padding_stall": _value_where(f["buffer"] == Buffer.LUT, TABLE_SIZE // cfg.bus_bytes + TABLE_PADDING - 1),
        "load_channel": channel_of_buffer[f["buffer"]] * (1 - spread),
        "weight_ports": _value_where(could_be_spread, ONE_PORT) + spread,
        **_dram_demand(cfg, f, size, spread),
    }


def _store_demand(cfg: Config, f: Columns) -> dict[str, Ints]:
    """Return the columns of Demand for STORE instructions."""
    elements = f["x_size"] * f["y_size"] * f["z_size"]
    size = np.full(len(elements), cfg.piece_bytes, np.int64)
    steps = elements * max(1, cfg.piece_bytes // cfg.bus_bytes)
    return {"steps": steps, **_dram_demand(cfg, f, size, np.zeros_like(elements))}


def _dram_demand(cfg: Config, f: Columns, size: Ints, spread: Ints) -> dict[str, Ints]:
    """Return the columns `rows`, `beats` and `bursts` of Demand. Rows without gaps between them count as one.

    size: bytes of an element. spread: 1 for spread weights, where half of each element is a row of its own.
    """
    row_bytes = f["x_size"] * size
    merged = row_bytes == f["dram_y"]
    if "expand" in f:
        merged = merged & (f["expand"] == 0)
    in_plane = np.where(merged, 1, f["y_size"])
    row_bytes = np.where(merged, row_bytes * f["y_size"], row_bytes)
    in_row = np.where(spread == 1, row_bytes // size, 1)
    row_bytes = np.where(spread == 1, size // 2, row_bytes)
    rows = in_row * in_plane * f["z_size"]
    # One value for each row of all instructions; owner: the row's instruction, number: the row's number in it.
    owner: Ints = np.repeat(np.arange(len(rows)), rows)
    number: Ints = np.arange(len(owner)) - (np.cumsum(rows) - rows)[owner]
    row, x = number // in_row[owner], number % in_row[owner]
    z, y = row // in_plane[owner], row % in_plane[owner]
    offset = f["dram_addr"][owner] + z * f["dram_z"][owner] + y * f["dram_y"][owner] + x * size[owner]
    offset &= 0xFFFFFFFF
    beats, bursts = count_beats_and_bursts(cfg.bus_bytes, offset, row_bytes[owner])
    return {
        "rows": rows,
        "beats": np.bincount(owner, beats, len(rows)).astype(np.int64),
        "bursts": np.bincount(owner, bursts, len(rows)).astype(np.int64),
    }


def count_beats_and_bursts(bus_bytes: int, offset: Ints, size: Ints) -> tuple[Ints, Ints]:
    """Count the beats and the bursts of rows of `size` bytes from byte `offset` on.

    A burst has at most MAX_BURST beats and does not cross a multiple of BURST_BOUNDARY.
    """
    beats = (offset % bus_bytes + size - 1) // bus_bytes + 1
    page = BURST_BOUNDARY // bus_bytes
    first = np.minimum(beats, page - offset // bus_bytes % page)
    whole_pages, last = np.divmod(beats - first, page)
    bursts = -(-first // MAX_BURST) + whole_pages * (page // MAX_BURST) + -(-last // MAX_BURST)
    return beats, bursts


_DEMAND_OF = {
    Opcode.LOAD: _load_demand,
    Opcode.GEMM: _gemm_demand,
    Opcode.VECTOR: _vector_demand,
    Opcode.STORE: _store_demand,
}
