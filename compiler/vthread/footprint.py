"""Which entries of which scratchpad, and which bytes of DRAM, an instruction touches: closed forms over its fields."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from celosia.hw.config import Config
from celosia.hw.isa import (
    GEMM_LOOPS,
    OUTER_LOOPS,
    TAP_LOOPS,
    VECTOR_LOOPS,
    ASource,
    BSource,
    Buffer,
    Destination,
    Opcode,
    element_bytes,
)
from celosia.hw.scratchpads import scratchpads


class Access(NamedTuple):
    """Entries [first, end) of a scratchpad, the smallest range that holds all that is touched."""

    buffer: str
    first: int
    end: int
    write: bool


class DramAccess(NamedTuple):
    """Rows of bytes: z planes of y rows, each of `row` bytes from `address + z * z_stride + y * y_stride`."""

    address: int
    row: int
    y: int
    y_stride: int
    z: int
    z_stride: int
    write: bool

    @property
    def end(self) -> int:
        """The address behind its last byte."""
        return self.address + (self.z - 1) * self.z_stride + (self.y - 1) * self.y_stride + self.row


def _range(buffer: str, f: dict[str, int], operand: str, loops: tuple[str, ...], write: bool) -> Access:
    base, names = _names(operand, loops)
    first = end = f.get(base, 0)
    for extent, step in names:
        if step in f:
            end += (f.get(extent, 1) - 1) * f[step]
    return Access(buffer, first, end + 1, write)


@cache
def _names(operand: str, loops: tuple[str, ...]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The fields of an address: its base, and (extent, step) of each loop."""
    return f"{operand}_base", tuple((f"extent_{loop}", f"{operand}_{loop}") for loop in loops)


def _dram(f: dict[str, int], element: int, write: bool) -> DramAccess:
    return DramAccess(
        f["dram_addr"], f["x_size"] * element, f["y_size"], f.get("dram_y", 0), f["z_size"], f.get("dram_z", 0), write
    )


def _transfer_range(buffer: str, f: dict[str, int], pieces: int, write: bool) -> Access:
    width = f.get("pad_left", 0) + f["x_size"] + f.get("pad_right", 0)
    height = f.get("pad_top", 0) + f["y_size"] + f.get("pad_bottom", 0)
    first = f.get("sram_base", 0)
    last = (
        first
        + (width - 1) * f.get("sram_x", 0)
        + (height - 1) * f.get("sram_y", 0)
        + (f["z_size"] - 1) * f.get("sram_z", 0)
    )
    return Access(buffer, first // pieces, last // pieces + 1, write)


def load_element_bytes(cfg: Config, f: dict[str, int]) -> int:
    """Bytes of one element of a LOAD in DRAM."""
    return element_bytes(cfg, Buffer(f["buffer"]), bool(f.get("widen", 0)))


def footprint(cfg: Config, opcode: Opcode, f: dict[str, int]) -> tuple[list[Access], DramAccess | None]:
    """Scratchpad ranges and DRAM rows that the instruction with fields `f` (absent ones are 0) touches."""
    if opcode == Opcode.LOAD:
        buffer = Buffer(f["buffer"])
        name = buffer.name.lower()
        access = _transfer_range(name, f, scratchpads(cfg)[name].pieces, True)
        return [access], _dram(f, load_element_bytes(cfg, f), False)
    if opcode == Opcode.STORE:
        return [_transfer_range("out", f, cfg.out_pieces, False)], _dram(f, cfg.piece_bytes, True)
    if opcode == Opcode.GEMM:
        accesses = [
            _range("inp", f, "inp", GEMM_LOOPS, False),
            _range("wgt", f, "wgt", GEMM_LOOPS, False),
            _range("acc", f, "acc", OUTER_LOOPS, True),
        ]
        return accesses, None
    a = "vin" if f.get("a_source", 0) == ASource.VIN else "acc"
    read = _range(a, f, "a", VECTOR_LOOPS, False)
    written = _range(Destination(f.get("destination", 0)).name.lower(), f, "dst", OUTER_LOOPS, True)
    if written.buffer == "inp":
        parts = cfg.inp_pieces // cfg.out_pieces
        written = written._replace(first=written.first // parts, end=-(-written.end // parts))
    accesses = [read, written]
    if f.get("taps", 0):
        accesses[0] = read._replace(end=read.end + cfg.taps - 1)
        accesses.append(_range("tap", f, "tap", TAP_LOOPS, False))
    if f.get("b_source", 0) == BSource.VIN:
        accesses.append(_range("vin", f, "b", OUTER_LOOPS, False))
    if f.get("requantise", 0):
        accesses.append(_range("par", f, "par", OUTER_LOOPS, False))
    if f.get("lookup", 0):
        accesses.append(Access("lut", f.get("table", 0), f.get("table", 0) + 1, False))
    return accesses, None
