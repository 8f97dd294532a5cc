"""What a stream of encoded instructions asks of the machine: steps, bytes and bursts of each, computed all at once."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from celosia.hw.config import Config
from celosia.hw.isa import (
    GEMM_LOOPS,
    OUTER_LOOPS,
    UNIT_OF,
    VECTOR_LOOPS,
    ASource,
    BSource,
    Buffer,
    Destination,
    Format,
    Opcode,
    buffers,
    element_bytes,
    formats,
    instruction_bytes,
    lanes,
    rules,
)
from celosia.hw.pipeline import BOUNDARY, MAX_BURST
from celosia.hw.scratchpads import scratchpads

Ints = NDArray[np.int64]
IN_ACC, IN_VIN = 1, 2
INP_PORT, VIN_PORT = 1, 2


@dataclass(frozen=True)
class Demand:
    """One entry for each instruction of a stream; 0 where its unit has no such thing.

    unit, wait, post: the unit's number and the masks of its tokens.
    steps: cycles for which the unit works if nothing holds it up: tile operations, entries, writes to a scratchpad
    (padding too), units read from `out`.
    lead, trail: those of a LOAD's steps that are padding before its first and after its last element.
    rows, bursts, beats: of its copy in DRAM. lane: of LOAD, the number of its port to memory.
    outputs: entries that a GEMM or VECTOR writes; residual: whether VECTOR adds one to each. reads, feeds: what it
    reads, and writes for a VECTOR to read, of IN_ACC and IN_VIN. port: INP_PORT or VIN_PORT, which LOAD and VECTOR
    share, where one of them writes there.
    read_bank, write_bank: in which half of acc the first output is read and written; read_here, write_here: how many of
    the outputs, from the first one on, are there.
    """

    unit: NDArray[np.int64]
    wait: Ints
    post: Ints
    steps: Ints
    lead: Ints
    trail: Ints
    rows: Ints
    bursts: Ints
    beats: Ints
    lane: Ints
    outputs: Ints
    residual: Ints
    reads: Ints
    feeds: Ints
    port: Ints
    read_bank: Ints
    read_here: Ints
    write_bank: Ints
    write_here: Ints


def demand(cfg: Config, code: bytes) -> Demand:
    """The demand of the instructions in `code`. ValueError where one is illegal or cut off."""
    size = instruction_bytes(cfg)
    if len(code) % size:
        raise ValueError(f"{len(code)} bytes are not whole instructions of {size} bytes")
    words: NDArray[np.uint64] = np.frombuffer(code, "<u8").astype(np.uint64).reshape(-1, size // 8)
    count = len(words)
    result: dict[str, Ints] = {name: np.zeros(count, np.int64) for name in Demand.__dataclass_fields__}
    opcode = (words[:, 0] & np.uint64(0b111)).astype(np.int64)
    for number in np.flatnonzero(~np.isin(opcode, list(Opcode)))[:1]:
        raise ValueError(f"instruction {number}: opcode {opcode[number]} does not exist")
    for each in Opcode:
        which = np.flatnonzero(opcode == each)
        fields = _Fields(formats(cfg)[each], words[which])
        for rule, broken in rules(cfg)[each].items():
            for number in which[np.flatnonzero(broken(fields))[:1]]:
                raise ValueError(f"instruction {number}: {each.name}: {rule}")
        values = {"wait": fields["wait"], "post": fields["post"], **_OF[each](cfg, fields)}
        result["unit"][which] = UNIT_OF[each]
        for name, value in values.items():
            result[name][which] = value
    return Demand(**result)


class _Fields:
    """The fields of instructions of one format, each as an array; taken as unsigned."""

    def __init__(self, fmt: Format, words: NDArray[np.uint64]) -> None:
        self._widths = {field.name: field.width for field in fmt.fields}
        self._fmt, self._words = fmt, words

    def __getitem__(self, name: str) -> Ints:
        width = self._widths[name]
        column, shift = divmod(self._fmt.offsets[name], 64)
        value = self._words[:, column] >> np.uint64(shift)
        if shift + width > 64:
            value = value | self._words[:, column + 1] << np.uint64(64 - shift)
        return (value & np.uint64((1 << width) - 1)).astype(np.int64)

    def product(self, names: list[str]) -> Ints:
        return prod((self[name] for name in names), start=np.ones(len(self._words), np.int64))


def _where(condition: NDArray[np.bool_], value: int) -> Ints:
    """`value` where the condition holds, else 0."""
    return condition.astype(np.int64) * value


def _gemm(cfg: Config, f: _Fields) -> dict[str, Ints]:
    bank, here = _banks(cfg, f, "acc")
    return {
        "steps": f.product([f"extent_{loop}" for loop in GEMM_LOOPS]),
        "outputs": f.product([f"extent_{loop}" for loop in OUTER_LOOPS]),
        "reads": _where(f["accumulate"] == 1, IN_ACC),
        "feeds": np.full_like(bank, IN_ACC),
        "read_bank": bank,
        "read_here": here,
        "write_bank": bank,
        "write_here": here,
    }


def _vector(cfg: Config, f: _Fields) -> dict[str, Ints]:
    to, a_vin = f["destination"], f["a_source"] == ASource.VIN
    to_vin = to == Destination.VIN
    read_bank, read_here = _banks(cfg, f, "a", ~a_vin)
    write_bank, write_here = _banks(cfg, f, "dst", to == Destination.ACC)
    return {
        "steps": f.product([f"extent_{loop}" for loop in VECTOR_LOOPS]),
        "outputs": f.product([f"extent_{loop}" for loop in OUTER_LOOPS]),
        "residual": f["rescale_add"],
        "reads": _where(~a_vin, IN_ACC) | _where(a_vin | (f["b_source"] == BSource.VIN), IN_VIN),
        "feeds": _where(to == Destination.ACC, IN_ACC) | _where(to_vin, IN_VIN),
        "port": _where(to == Destination.INP, INP_PORT) | _where(to_vin, VIN_PORT),
        "read_bank": read_bank,
        "read_here": read_here,
        "write_bank": write_bank,
        "write_here": write_here,
    }


def _banks(cfg: Config, f: _Fields, operand: str, which: NDArray[np.bool_] | None = None) -> tuple[Ints, Ints]:
    """In which bank of acc the first output lies, and how many from it on; for the instructions `which` alone."""
    extents = [f[f"extent_{loop}"] for loop in OUTER_LOOPS]
    strides = [f[f"{operand}_{loop}"] for loop in OUTER_LOOPS]
    base, half = f[f"{operand}_base"], scratchpads(cfg)["acc"].bank_depth
    bank, here = base // half % 2, prod(extents, start=np.ones_like(base))
    reach = base + sum((extent - 1) * stride for extent, stride in zip(extents, strides))
    leaves = (reach // half != base // half) & (True if which is None else which)
    for i in np.flatnonzero(leaves).tolist():
        steps = (np.arange(extent[i]) * stride[i] for extent, stride in zip(extents, strides))
        n, y, x = np.ix_(*steps)
        other = np.flatnonzero(((base[i] + n + y + x) // half % 2).ravel() != bank[i])
        here[i] = other[0] if len(other) else here[i]
    return bank, here


def _load(cfg: Config, f: _Fields) -> dict[str, Ints]:
    sizes = np.array([element_bytes(cfg, buffer) for buffer in buffers(cfg)], np.int64)
    size = np.where(f["widen"] == 1, cfg.piece_bytes, sizes[f["buffer"]])
    x, y, z = f["x_size"], f["y_size"], f["z_size"]
    left, top = f["pad_left"], f["pad_top"]
    width = left + x + f["pad_right"]
    elements = x * y * z
    lane = np.array([next((n for n, own in enumerate(lanes(cfg)) if b in own), 0) for b in range(8)], np.int64)
    padding = z * width * (top + y + f["pad_bottom"]) - elements
    return {
        "steps": padding + elements * np.maximum(1, size // cfg.bus_bytes),
        "lead": top * width + left,
        "trail": f["pad_bottom"] * width + f["pad_right"],
        "lane": lane[f["buffer"]],
        "port": _where(f["buffer"] == Buffer.INP, INP_PORT) | _where(f["buffer"] == Buffer.VIN, VIN_PORT),
        **_rows(cfg, f, size),
    }


def _store(cfg: Config, f: _Fields) -> dict[str, Ints]:
    elements = f["x_size"] * f["y_size"] * f["z_size"]
    size = np.full(len(elements), cfg.piece_bytes, np.int64)
    return {"steps": elements * max(1, cfg.piece_bytes // cfg.bus_bytes), **_rows(cfg, f, size)}


def _rows(cfg: Config, f: _Fields, size: Ints) -> dict[str, Ints]:
    """Rows of DRAM, where the rows of a plane that touch are one, and what they are on the bus.

    size: bytes of an element.
    """
    row_bytes = f["x_size"] * size
    merged = row_bytes == f["dram_y"]
    in_plane = np.where(merged, 1, f["y_size"])
    row_bytes = np.where(merged, row_bytes * f["y_size"], row_bytes)
    rows = in_plane * f["z_size"]
    owner: Ints = np.repeat(np.arange(len(rows)), rows)
    number: Ints = np.arange(len(owner)) - (np.cumsum(rows) - rows)[owner]
    z, y = number // in_plane[owner], number % in_plane[owner]
    offset = (f["dram_addr"][owner] + z * f["dram_z"][owner] + y * f["dram_y"][owner]) & 0xFFFFFFFF
    beats, bursts = on_the_bus(cfg.bus_bytes, offset, row_bytes[owner])
    total = np.bincount(owner, beats, len(rows)), np.bincount(owner, bursts, len(rows))
    return {"rows": rows, "beats": total[0].astype(np.int64), "bursts": total[1].astype(np.int64)}


def on_the_bus(bus_bytes: int, offset: Ints, size: Ints) -> tuple[Ints, Ints]:
    """Beats and bursts of rows of `size` bytes from `offset`: bursts of up to MAX_BURST, none across BOUNDARY."""
    beats = (offset % bus_bytes + size - 1) // bus_bytes + 1
    page = BOUNDARY // bus_bytes
    first = np.minimum(beats, page - offset // bus_bytes % page)
    whole, last = np.divmod(beats - first, page)
    bursts = -(-first // MAX_BURST) + whole * (page // MAX_BURST) + -(-last // MAX_BURST)
    return beats, bursts


_OF = {Opcode.LOAD: _load, Opcode.GEMM: _gemm, Opcode.VECTOR: _vector, Opcode.STORE: _store}
