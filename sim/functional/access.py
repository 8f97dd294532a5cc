"""Entries of scratchpads and bytes of DRAM that each instruction reads and writes.

The simulator's checks, the timing model's demand, the compiler's tokens and the pages of reports derive from here. The
verifier (`compiler/vthread/verify/decode.py`) repeats these rules on purpose, so that it also finds mistakes made here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import (
    GEMM_LOOPS,
    OUTER_LOOPS,
    TAP_LOOPS,
    VECTOR_LOOPS,
    ASource,
    BSource,
    Buffer,
    Destination,
    Opcode,
    buffers,
    element_bytes,
    formats,
)
from celosia.hw.spec.packing import CODEBOOK_ENTRIES, CODEBOOKS, packing
from celosia.hw.spec.scratchpads import EXP_ENTRIES, scratchpads
from celosia.sim.functional.patterns import Steps, offsets, spans
from celosia.sim.functional.reference import Fields

Index = NDArray[np.int64]
"""Numbers of entries, pieces or bytes, or values of a field, one for each of many instructions."""
Columns = dict[str, Index]
"""Instructions of one opcode as columns: for each field by name, its value in each instruction."""


class Operand(NamedTuple):
    """One scratchpad operand of the instructions of an opcode.

    memory: the scratchpad. name: prefix of the operand's fields. loops: the loops that move its address; None: those of
    the block of a LOAD or STORE. write: whether the operand is written. when: function from fields by name (numbers, or
    arrays of them, as in the rules of `legality`) to whether an instruction has the operand.
    """

    memory: str
    name: str
    loops: tuple[str, ...] | None
    write: bool
    when: Callable[[Any], Any]


def _field_equals(field: str, value: int) -> Callable[[Any], Any]:
    """Return a function for `Operand.when` that tests whether `field` has this value."""
    return lambda f: f[field] == value


def _always_true(f: Any) -> Any:
    """Return True for one instruction, or an array of True for columns of many, as every `Operand.when` does."""
    return f["opcode"] == f["opcode"]


OPERANDS: dict[Opcode, tuple[Operand, ...]] = {
    Opcode.LOAD: (
        Operand("book", "book", (), False, _field_equals("expand", 1)),
        *(Operand(to.name.lower(), "sram", None, True, _field_equals("buffer", to)) for to in Buffer),
    ),
    Opcode.STORE: (Operand("out", "sram", None, False, _always_true),),
    Opcode.GEMM: (
        Operand("inp", "inp", GEMM_LOOPS, False, _always_true),
        Operand("wgt", "wgt", GEMM_LOOPS, False, _always_true),
        Operand("acc", "acc", OUTER_LOOPS, False, _field_equals("accumulate", 1)),
        Operand("acc", "acc", OUTER_LOOPS, True, _always_true),
    ),
    Opcode.VECTOR: (
        Operand("acc", "a", VECTOR_LOOPS, False, _field_equals("a_source", ASource.ACC)),
        Operand("vin", "a", VECTOR_LOOPS, False, _field_equals("a_source", ASource.VIN)),
        Operand("tap", "tap", TAP_LOOPS, False, _field_equals("taps", 1)),
        Operand("vin", "b", OUTER_LOOPS, False, _field_equals("b_source", BSource.VIN)),
        Operand("par", "par", OUTER_LOOPS, False, _field_equals("requantise", 1)),
        Operand("lut", "table", (), False, _field_equals("lookup", 1)),
        Operand("exp", "exp", (), False, lambda f: f["softmax"] == 1),
        *(Operand(to.name.lower(), "dst", OUTER_LOOPS, True, _field_equals("destination", to)) for to in Destination),
    ),
}
"""The scratchpad operands of each opcode; operands that are read come before those that are written."""


class Touch(NamedTuple):
    """All accesses of one operand of one instruction to the scratchpad `memory`.

    operand: its name. base, steps: an iteration of the loops `steps` accesses the address base + sum of index * stride,
    and the `entry_span - 1` addresses that follow it. pieces: pieces that lie at one address; depending on the operand,
    an address counts single pieces or whole entries, which in inp, acc, vin and out may hold several pieces. write:
    whether the accesses are writes.
    """

    memory: str
    operand: str
    base: int
    steps: Steps
    entry_span: int
    pieces: int
    write: bool

    def piece_numbers(self, size: int) -> Index:
        """Return the numbers of all pieces that are accessed, each once.

        size: pieces of the scratchpad, at which addresses wrap.
        """
        depth = size // self.pieces
        index = (_distinct_addresses(self.steps, depth, self.entry_span) + self.base) % depth
        return index if self.pieces == 1 else (index[:, None] * self.pieces + np.arange(self.pieces)).ravel()

    def is_inside(self, size: int) -> bool:
        """Return whether all addresses lie inside a scratchpad of `size` pieces, without wrapping around.

        Strides may be negative: it is enough if they fit in one of their readings as signed numbers (`spans`).
        """
        depth = size // self.pieces
        first, last = self.base, self.base + self.entry_span - 1
        return any(first + low >= 0 and last + high < depth for _, low, high in spans(self.steps, depth))

    def entries(self, pieces: int) -> tuple[int, int]:
        """Return the smallest range [first, end) of entries that holds all accesses.

        pieces: pieces of an entry of the scratchpad.
        """
        first, end = _entry_range(self.base, self.steps, self.entry_span, self.pieces, pieces)
        return first, end


def _entry_range(base: Any, steps: Any, entry_span: Any, pieces: int, entry_pieces: int) -> tuple[Any, Any]:
    """Compute `Touch.entries` from numbers, or from arrays of them for many instructions.

    entry_span: consecutive addresses of each access. pieces: pieces of an address. entry_pieces: pieces of an entry.
    """
    end = base + entry_span
    for extent, stride in steps:
        end = end + (extent - 1) * stride
    if pieces == entry_pieces:
        return base, end
    return base * pieces // entry_pieces, -(-end * pieces // entry_pieces)


@lru_cache(maxsize=8192)
def _distinct_addresses(pattern: Steps, depth: int, entry_span: int) -> Index:
    """Return the addresses, modulo `depth`, that an operand with base 0 accesses, each once.

    entry_span: consecutive addresses that each iteration of `pattern` accesses.
    """
    first = np.unique(offsets(pattern, depth))
    return first if entry_span == 1 else np.unique((first[:, None] + np.arange(entry_span)) % depth)


def touches(cfg: Config, opcode: Opcode, f: Fields) -> list[Touch]:
    """List the accesses to scratchpads of an instruction with all fields `f` (`complete_fields`), reads first."""
    accesses = []
    for operand, base, strides, pieces in _operands_of(cfg, opcode):
        if operand.when(f):
            first, entry_span = f[base] if base else 0, int(_entry_span(cfg, operand.name, f))
            loops = _address_loops(strides, f)
            accesses.append(Touch(operand.memory, operand.name, first, loops, entry_span, pieces, operand.write))
    return accesses


def _entry_span(cfg: Config, operand: str, f: Any) -> Any:
    """Return the number of consecutive entries that `operand` accesses in each iteration of its loops.

    f: fields of an instruction, or columns of many.
    """
    if operand == "a":
        return np.where(f["taps"], cfg.taps, 1)
    return {"exp": EXP_ENTRIES, "book": CODEBOOKS * CODEBOOK_ENTRIES}.get(operand, 1)  # both are read as a whole


def _address_loops(strides: tuple[tuple[str, str], ...] | None, f: Any) -> Any:
    """Return (extent, stride) of each loop that moves an operand's address, as numbers or columns.

    strides: names of the two fields of each loop; None: the loops of the block of a LOAD or STORE. f: fields of an
    instruction, or columns of many.
    """
    return block_loops(f) if strides is None else tuple([(f[extent], f[step]) for extent, step in strides])


@cache
def _operands_of(
    cfg: Config, opcode: Opcode
) -> list[tuple[Operand, str | None, tuple[tuple[str, str], ...] | None, int]]:
    """Return (operand, base, strides, pieces) for each operand of an opcode whose scratchpad exists in `cfg`.

    base: name of the field of its base address; None: the base is 0. strides: names of the fields of extent and stride
    of each loop; None: the loops of a block. pieces: pieces of one address.
    """
    pads, operands = scratchpads(cfg), []
    for operand in OPERANDS[opcode]:
        if operand.memory in pads:
            base = {"table": "table", "exp": None, "book": None}.get(operand.name, f"{operand.name}_base")
            loops = operand.loops
            strides = None if loops is None else tuple((f"extent_{loop}", f"{operand.name}_{loop}") for loop in loops)
            # VECTOR writes parts of an entry of inp, each as large as one of out.
            pad = pads["out" if operand.name == "dst" else operand.memory]
            operands.append((operand, base, strides, 1 if loops is None else pad.pieces))
    return operands


class Range(NamedTuple):
    """Entries [first, end) of a scratchpad: the smallest range that holds all that an operand accesses."""

    memory: str
    first: int
    end: int
    write: bool


def ranges(cfg: Config, opcode: Opcode, f: Fields) -> list[Range]:
    """Return the ranges of scratchpad entries that an instruction accesses, for the compiler's tokens.

    A range that is both read and written counts as written.
    """
    pads = scratchpads(cfg)
    is_write = {
        (access.memory, *access.entries(pads[access.memory].pieces)): access.write for access in touches(cfg, opcode, f)
    }
    return [Range(*entries, write) for entries, write in is_write.items()]


class RangeColumns(NamedTuple):
    """Ranges [first, end) of entries of scratchpad `memory` that one operand of many instructions accesses.

    numbers: of the instructions that have the operand, counted among those of the opcode.
    """

    memory: str
    numbers: Index
    first: Index
    end: Index
    write: bool


def all_ranges(cfg: Config, opcode: Opcode, f: Columns) -> list[RangeColumns]:
    """Compute the ranges of each operand of many instructions of an opcode at once from the values of their fields.

    Unlike with `ranges`, a range that an instruction reads and writes counts as both.
    """
    pads, result = scratchpads(cfg), []
    for operand, base, strides, pieces in _operands_of(cfg, opcode):
        numbers = np.flatnonzero(operand.when(f))
        if not len(numbers):
            continue
        bases = f[base] if base else np.zeros_like(f["opcode"])
        loops, entry_span = _address_loops(strides, f), _entry_span(cfg, operand.name, f)
        first, end = _entry_range(bases, loops, entry_span, pieces, pads[operand.memory].pieces)
        result.append(RangeColumns(operand.memory, numbers, first[numbers], end[numbers], operand.write))
    return result


def block_loops(f: Fields) -> Steps:
    """Return (extent, stride) of the loops of a LOAD or STORE over its scratchpad: planes, rows, elements.

    Extents include the padding.
    """
    height = f["y_size"] + f.get("pad_top", 0) + f.get("pad_bottom", 0)
    width = f["x_size"] + f.get("pad_left", 0) + f.get("pad_right", 0)
    return (f["z_size"], f["sram_z"]), (height, f["sram_y"]), (width, f["sram_x"])


@cache
def _default_fields(cfg: Config, opcode: Opcode) -> dict[str, int]:
    """Return the values of the fields that an instruction leaves out: extents are 1, all others 0."""
    fields = {field.name: int(field.name.startswith("extent_")) for field in formats(cfg)[opcode].fields}
    return fields | {"opcode": int(opcode)}


def complete_fields(cfg: Config, opcode: Opcode, f: Fields) -> Fields:
    """Return `f` with the fields that it leaves out: extents are 1, all others 0."""
    return _default_fields(cfg, opcode) | f


def columns(cfg: Config, opcode: Opcode, instructions: Sequence[Fields]) -> Columns:
    """Return instructions of an opcode as columns; fields that an instruction leaves out are filled in.

    The defaults are extents of 1 and 0 for all other fields.
    """
    return tabulate(instructions, _default_fields(cfg, opcode))


def tabulate(instructions: Sequence[Fields], defaults: Fields) -> Columns:
    """Convert instructions to columns: for each field in `defaults`, its value in each instruction.

    An instruction without the field gets its value in `defaults`.
    """
    numbers_by_names: dict[tuple[str, ...], list[int]] = {}
    for number, fields in enumerate(instructions):
        numbers_by_names.setdefault(tuple(fields), []).append(number)
    table = {name: np.full(len(instructions), default, np.int64) for name, default in defaults.items()}
    for names, numbers in numbers_by_names.items():  # few, as loops make many instructions with the same fields
        values = chain.from_iterable(instructions[number].values() for number in numbers)
        by_instruction = np.fromiter(values, np.int64, len(numbers) * len(names)).reshape(len(numbers), -1)
        for name, column in zip(names, by_instruction.T):
            table[name][numbers] = column
    return table


# DRAM -------------------------------------------------------------------------------------------------------


class DramRows(NamedTuple):
    """Bytes of DRAM that a LOAD reads or a STORE writes: z planes of y rows of `row` bytes.

    Row number j of plane number i begins at byte `address + i * z_stride + j * y_stride`. write: whether it is a STORE.
    """

    address: int
    row: int
    y: int
    y_stride: int
    z: int
    z_stride: int
    write: bool

    @property
    def end(self) -> int:
        """Address behind the last byte, if no address wraps around."""
        return self.address + (self.z - 1) * self.z_stride + (self.y - 1) * self.y_stride + self.row

    def view(self, array: NDArray[Any], granule: int = 1) -> NDArray[Any]:
        """View the rows in `array`, which has one element for each `granule` bytes of DRAM from address 0 on.

        Returns [z, y, granules of a row]. The strides are multiples of `granule`. ValueError if `array` ends before the
        rows do.
        """
        if -(-self.end // granule) > len(array):
            raise ValueError(f"rows end at byte {self.end}, beyond {len(array)} granules of {granule}")
        size, first = array.itemsize, self.address // granule
        count = -(-(self.address % granule + self.row) // granule)
        strides = size * (self.z_stride // granule), size * (self.y_stride // granule), size
        return np.ndarray((self.z, self.y, count), array.dtype, array, size * first, strides)

    def byte_addresses(self, size: int) -> Index:
        """Return the addresses of all bytes of the rows, without those at or above `size`.

        Addresses wrap around at 2^32.
        """
        z, y = np.arange(self.z)[:, None] * self.z_stride, np.arange(self.y) * self.y_stride
        starts = (self.address + z + y) % (1 << 32)
        index = (starts.reshape(-1, 1) + np.arange(self.row)).ravel()
        return index[index < size]


def all_rows(cfg: Config, opcode: Opcode, f: Columns) -> list[DramRows] | list[None]:
    """Compute `rows` of many instructions of an opcode at once from their columns."""
    if opcode not in (Opcode.LOAD, Opcode.STORE):
        return [None] * len(f["opcode"])
    write = opcode == Opcode.STORE
    row = f["x_size"] * (cfg.piece_bytes if write else element_sizes(cfg, f))
    values = f["dram_addr"], row, f["y_size"], f["dram_y"], f["z_size"], f["dram_z"]
    return [DramRows._make((*row, write)) for row in zip(*(column.tolist() for column in values), strict=True)]


def element_sizes(cfg: Config, f: Columns) -> Index:
    """Return the bytes that an element takes in DRAM, for each of many LOADs."""
    sizes = np.array([element_bytes(cfg, b) if b in buffers(cfg) else 0 for b in Buffer], np.int64)
    bytes_each = np.where(f["widen"] == 1, cfg.piece_bytes, sizes[f["buffer"]])
    return np.where(f["expand"] == 1, packing(cfg).piece_bytes, bytes_each) if "expand" in f else bytes_each


def rows(cfg: Config, opcode: Opcode, f: Fields) -> DramRows | None:
    """Return the rows of DRAM that an instruction with the fields `f` accesses; None for GEMM and VECTOR."""
    if opcode not in (Opcode.LOAD, Opcode.STORE):
        return None
    write = opcode == Opcode.STORE
    if write:
        size = cfg.piece_bytes
    else:
        size = element_bytes(cfg, Buffer(f["buffer"]), bool(f["widen"]), bool(f.get("expand")))
    return DramRows(f["dram_addr"], f["x_size"] * size, f["y_size"], f["dram_y"], f["z_size"], f["dram_z"], write)
