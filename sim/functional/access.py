"""Entries of scratchpads and bytes of DRAM that each instruction reads and writes.

The simulator's checks, the timing model's demand, the compiler's tokens and the pages of reports derive from here. The
verifier (`compiler/vthread/verify/decode.py`) tells it once more on purpose: it is to find what is wrong here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
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
Columns = dict[str, Index]
"""The values of each field, of instructions of one opcode."""


class Operand(NamedTuple):
    """One operand of the instructions of an opcode. `when` tells from fields by name (numbers or arrays of them, as in
    the rules of `legality`) whether an instruction has it.

    memory: a scratchpad. loops: those that move the address; None: the block of a LOAD or STORE.
    """

    memory: str
    name: str
    loops: tuple[str, ...] | None
    write: bool
    when: Callable[[Any], Any]


def _is(field: str, value: int) -> Callable[[Any], Any]:
    return lambda f: f[field] == value


def _always(f: Any) -> Any:
    return f["opcode"] == f["opcode"]


OPERANDS: dict[Opcode, tuple[Operand, ...]] = {
    Opcode.LOAD: (
        Operand("book", "book", (), False, _is("expand", 1)),
        *(Operand(to.name.lower(), "sram", None, True, _is("buffer", to)) for to in Buffer),
    ),
    Opcode.STORE: (Operand("out", "sram", None, False, _always),),
    Opcode.GEMM: (
        Operand("inp", "inp", GEMM_LOOPS, False, _always),
        Operand("wgt", "wgt", GEMM_LOOPS, False, _always),
        Operand("acc", "acc", OUTER_LOOPS, False, _is("accumulate", 1)),
        Operand("acc", "acc", OUTER_LOOPS, True, _always),
    ),
    Opcode.VECTOR: (
        Operand("acc", "a", VECTOR_LOOPS, False, _is("a_source", ASource.ACC)),
        Operand("vin", "a", VECTOR_LOOPS, False, _is("a_source", ASource.VIN)),
        Operand("tap", "tap", TAP_LOOPS, False, _is("taps", 1)),
        Operand("vin", "b", OUTER_LOOPS, False, _is("b_source", BSource.VIN)),
        Operand("par", "par", OUTER_LOOPS, False, _is("requantise", 1)),
        Operand("lut", "table", (), False, _is("lookup", 1)),
        Operand("exp", "exp", (), False, lambda f: f["softmax"] == 1),
        *(Operand(to.name.lower(), "dst", OUTER_LOOPS, True, _is("destination", to)) for to in Destination),
    ),
}
"""Reads first."""


class Touch(NamedTuple):
    """An access to `memory` at base + sum of index * stride, over the `steps`, and at the `each - 1` addresses behind
    each.

    pieces: of a scratchpad's entry that an address counts; of inp, acc, vin and out it has several.
    """

    memory: str
    operand: str
    base: int
    steps: Steps
    each: int
    pieces: int
    write: bool

    def numbers(self, size: int) -> Index:
        """Numbers of the pieces that are accessed, each once; the memory has `size` of them, after which addresses
        wrap."""
        places = size // self.pieces
        index = (_visited(self.steps, places, self.each) + self.base) % places
        return index if self.pieces == 1 else (index[:, None] * self.pieces + np.arange(self.pieces)).ravel()

    def inside(self, size: int) -> bool:
        """Whether no address wraps around, however the strides are read; see `numbers`."""
        places = size // self.pieces
        first, last = self.base, self.base + self.each - 1
        return any(first + low >= 0 and last + high < places for _, low, high in spans(self.steps, places))

    def entries(self, pieces: int) -> tuple[int, int]:
        """Return the smallest range [first, end) of entries, of `pieces` pieces each, that holds all of the access."""
        first, end = _range(self.base, self.steps, self.each, self.pieces, pieces)
        return first, end


def _range(base: Any, steps: Any, entry_span: Any, pieces: int, of: int) -> tuple[Any, Any]:
    """Compute `Touch.entries` from numbers or from arrays of them. of: pieces of an entry."""
    end = base + entry_span
    for extent, stride in steps:
        end = end + (extent - 1) * stride
    return (base, end) if pieces == of else (base * pieces // of, -(-end * pieces // of))


@lru_cache(maxsize=8192)
def _visited(pattern: Steps, depth: int, entry_span: int) -> Index:
    """List the addresses from base 0 that steps visit, each once."""
    first = np.unique(offsets(pattern, depth))
    return first if entry_span == 1 else np.unique((first[:, None] + np.arange(entry_span)) % depth)


def touches(cfg: Config, opcode: Opcode, f: Fields) -> list[Touch]:
    """List the scratchpad entries that an instruction with the fields `f` accesses, reads first; see `complete`."""
    touched = []
    for operand, base, strides, pieces in _operands(cfg, opcode):
        if operand.when(f):
            first, entry_span = f[base] if base else 0, int(_each(cfg, operand.name, f))
            touched.append(
                Touch(operand.memory, operand.name, first, _steps(strides, f), entry_span, pieces, operand.write)
            )
    return touched


def _each(cfg: Config, operand: str, f: Any) -> Any:
    """Number of consecutive entries at each address."""
    if operand == "a":
        return np.where(f["taps"], cfg.taps, 1)
    return {"exp": EXP_ENTRIES, "book": CODEBOOKS * CODEBOOK_ENTRIES}.get(operand, 1)  # both are read as a whole


def _steps(strides: tuple[tuple[str, str], ...] | None, f: Any) -> Any:
    """Return (extent, stride) of each loop over the address, by the names of their fields; None: of the block."""
    return block(f) if strides is None else tuple([(f[extent], f[step]) for extent, step in strides])


@cache
def _operands(cfg: Config, opcode: Opcode) -> list[tuple[Operand, str | None, tuple[tuple[str, str], ...] | None, int]]:
    """Each operand with the field of its base, if it is not always 0, those of each loop's extent and stride, and the
    pieces of an address."""
    pads, entries = scratchpads(cfg), []
    for operand in OPERANDS[opcode]:
        if operand.memory in pads:
            base = {"table": "table", "exp": None, "book": None}.get(operand.name, f"{operand.name}_base")
            loops = operand.loops
            strides = None if loops is None else tuple((f"extent_{loop}", f"{operand.name}_{loop}") for loop in loops)
            # VECTOR writes parts of an entry of inp, each as large as one of out.
            of = pads["out" if operand.name == "dst" else operand.memory]
            entries.append((operand, base, strides, 1 if loops is None else of.pieces))
    return entries


class Range(NamedTuple):
    """Entries [first, end) of a scratchpad: the smallest range that holds all that an operand accesses."""

    memory: str
    first: int
    end: int
    write: bool


def ranges(cfg: Config, opcode: Opcode, f: Fields) -> list[Range]:
    """Entries of scratchpads that an instruction accesses; an entry that is read and written counts as written."""
    pads = scratchpads(cfg)
    is_write = {
        (access.memory, *access.entries(pads[access.memory].pieces)): access.write for access in touches(cfg, opcode, f)
    }
    return [Range(*entries, write) for entries, write in is_write.items()]


def all_ranges(cfg: Config, opcode: Opcode, f: Columns) -> list[list[Range]]:
    """Compute `ranges` of many instructions of an opcode at once from the values of their fields."""
    pads = scratchpads(cfg)
    is_write: list[dict[tuple[str, int, int], bool]] = [{} for _ in f["opcode"]]
    for operand, base, strides, pieces in _operands(cfg, opcode):
        bases = f[base] if base else np.zeros_like(f["opcode"])
        ends = _range(bases, _steps(strides, f), _each(cfg, operand.name, f), pieces, pads[operand.memory].pieces)
        first, end = (bound.tolist() for bound in ends)
        for number in np.flatnonzero(operand.when(f)).tolist():
            is_write[number][operand.memory, first[number], end[number]] = operand.write
    return [[Range(*entries, write) for entries, write in columns.items()] for columns in is_write]


def block(f: Fields) -> Steps:
    """Loops of a LOAD or STORE over its scratchpad, padding included: planes, rows, elements."""
    height = f["y_size"] + f.get("pad_top", 0) + f.get("pad_bottom", 0)
    width = f["x_size"] + f.get("pad_left", 0) + f.get("pad_right", 0)
    return (f["z_size"], f["sram_z"]), (height, f["sram_y"]), (width, f["sram_x"])


@cache
def _defaults(cfg: Config, opcode: Opcode) -> dict[str, int]:
    fields = {field.name: int(field.name.startswith("extent_")) for field in formats(cfg)[opcode].fields}
    return fields | {"opcode": int(opcode)}


def complete(cfg: Config, opcode: Opcode, f: Fields) -> Fields:
    """Return `f` with the fields that it leaves out: extents are 1, all others 0."""
    return _defaults(cfg, opcode) | f


def columns(cfg: Config, opcode: Opcode, instructions: Sequence[Fields]) -> Columns:
    """Values of each field of instructions of an opcode, completed."""
    return tabulated(instructions, _defaults(cfg, opcode))


def tabulated(instructions: Sequence[Fields], defaults: Fields) -> Columns:
    """Values of each of the fields in `defaults`, which gives the value where an instruction has none."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for number, fields in enumerate(instructions):
        alike.setdefault(tuple(fields), []).append(number)
    operands = {name: np.full(len(instructions), default, np.int64) for name, default in defaults.items()}
    for names, numbers in alike.items():  # few, as loops make many instructions with the same fields
        values = np.array([tuple(instructions[number].values()) for number in numbers], np.int64)
        for name, column in zip(names, values.T):
            operands[name][numbers] = column
    return operands


# DRAM -------------------------------------------------------------------------------------------------------


class DramRows(NamedTuple):
    """Bytes of DRAM: z planes of y rows, each of `row` bytes from `address + z * z_stride + y * y_stride`."""

    address: int
    row: int
    y: int
    y_stride: int
    z: int
    z_stride: int
    write: bool

    @property
    def end(self) -> int:
        """Behind the last one, where addresses do not wrap around."""
        return self.address + (self.z - 1) * self.z_stride + (self.y - 1) * self.y_stride + self.row

    def view(self, array: NDArray[Any], granule: int = 1) -> NDArray[Any]:
        """Elements of `array`, one for each granule of bytes from 0 on, as [z, y, granules of a row]. ValueError where
        it does not have them all.

        granule: of it z_stride and y_stride are multiples.
        """
        if -(-self.end // granule) > len(array):
            raise ValueError(f"rows end at byte {self.end}, beyond {len(array)} granules of {granule}")
        size, first = array.itemsize, self.address // granule
        count = -(-(self.address % granule + self.row) // granule)
        strides = size * (self.z_stride // granule), size * (self.y_stride // granule), size
        return np.ndarray((self.z, self.y, count), array.dtype, array, size * first, strides)

    def numbers(self, size: int) -> Index:
        """Numbers of the bytes below `size`; addresses wrap around at 2^32."""
        z, y = np.arange(self.z)[:, None] * self.z_stride, np.arange(self.y) * self.y_stride
        starts = (self.address + z + y) % (1 << 32)
        index = (starts.reshape(-1, 1) + np.arange(self.row)).ravel()
        return index[index < size]


def all_rows(cfg: Config, opcode: Opcode, f: Columns) -> list[DramRows] | list[None]:
    """Compute `rows` of many instructions of an opcode at once from the values of their fields."""
    if opcode not in (Opcode.LOAD, Opcode.STORE):
        return [None] * len(f["opcode"])
    write = opcode == Opcode.STORE
    row = f["x_size"] * (cfg.piece_bytes if write else element_sizes(cfg, f))
    values = f["dram_addr"], row, f["y_size"], f["dram_y"], f["z_size"], f["dram_z"]
    return [DramRows._make((*row, write)) for row in zip(*(column.tolist() for column in values), strict=True)]


def element_sizes(cfg: Config, f: Columns) -> Index:
    """Bytes in DRAM of an element of each of many LOADs."""
    sizes = np.array([element_bytes(cfg, b) if b in buffers(cfg) else 0 for b in Buffer], np.int64)
    bytes_each = np.where(f["widen"] == 1, cfg.piece_bytes, sizes[f["buffer"]])
    return np.where(f["expand"] == 1, packing(cfg).entry_bytes, bytes_each) if "expand" in f else bytes_each


def rows(cfg: Config, opcode: Opcode, f: Fields) -> DramRows | None:
    """Rows of DRAM that an instruction with the fields `f` accesses; None but for LOAD and STORE."""
    if opcode not in (Opcode.LOAD, Opcode.STORE):
        return None
    write = opcode == Opcode.STORE
    size = (
        cfg.piece_bytes if write else element_bytes(cfg, Buffer(f["buffer"]), bool(f["widen"]), bool(f.get("expand")))
    )
    return DramRows(f["dram_addr"], f["x_size"] * size, f["y_size"], f["dram_y"], f["z_size"], f["dram_z"], write)
