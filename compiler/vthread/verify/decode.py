"""Decode instructions: the places that each touches, and the rules that a single instruction must keep.

The compiler derives tokens from the accesses in `sim/functional/access.py`. This module derives accesses independently,
so that an error there is found here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from celosia.hw.spec import isa
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import (
    GEMM_LOOPS,
    OUTER_LOOPS,
    TAP_LOOPS,
    UNIT_OF,
    VECTOR_LOOPS,
    ASource,
    BSource,
    Buffer,
    Destination,
    Format,
    Opcode,
    Unit,
    formats,
    instruction_bytes,
    opcode_of,
)
from celosia.hw.spec.legality import why_illegal
from celosia.hw.spec.scratchpads import EXP_ENTRIES, scratchpads
from celosia.sim.functional.decode import decode_columns

Fields = dict[str, int]
"""Value of each field of an instruction."""
Dims = tuple[tuple[int, int], ...]
"""(extent, stride) of each loop over an address."""


class Rule(StrEnum):
    """A rule that every stream must obey."""

    WORD = "every word is a legal instruction"
    RANGE = "every scratchpad address lies inside its buffer"
    LIMIT = "every DRAM address lies inside the limits"
    WRITABLE = "a store writes activations only"
    PADDING = "only inp, vin, acc and wgt are padded"
    ONCE = "no instruction writes a place twice"
    OWN_RESULT = "no vector instruction reads an entry that it wrote itself"
    BALANCE = "every token given is taken, and every token awaited is given"
    PROGRESS = "no instruction waits forever"
    ORDER = "tokens keep the program order wherever two units touch the same place and one writes"
    WRITTEN = "every scratchpad entry is written before it is read"


class VerifyError(ValueError):
    """Raised for a broken `rule`, at instruction `index`; the message is one sentence with both."""

    def __init__(self, rule: StrEnum, index: int, what: str) -> None:
        super().__init__(f"instruction {index} {what}, but {rule}")
        self.rule, self.index = rule, index


# Places ---------------------------------------------------------------------------------------------------


class Pattern(NamedTuple):
    """The places base + i + sum of index * stride, for i < run and each index below its extent.

    end: one more than the last of them.
    """

    base: int
    run: int
    dims: Dims
    end: int

    def shifted(self, by: int) -> Pattern:
        """Return the pattern `by` places further on."""
        return Pattern(self.base + by, self.run, self.dims, self.end + by)

    def view(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return a view of the one-dimensional `array` that holds each of the places at least once, and no others."""
        if not self.dims:
            return array[self.base : self.end]
        assert self.end <= len(array) and array.flags.c_contiguous
        size = array.itemsize
        shape = (*(extent for extent, _ in self.dims), self.run)
        strides = (*(size * stride for _, stride in self.dims), size)
        return np.ndarray(shape, array.dtype, array, self.base * size, strides)


def make_pattern(base: int, dims: Iterable[tuple[int, int]], width: int = 1) -> Pattern:
    """Return the pattern of the places base + i + sum of index * stride, i < width, with loops merged where possible.

    >>> make_pattern(5, [(3, 4), (4, 1)])
    Pattern(base=5, run=12, dims=(), end=17)
    >>> make_pattern(5, [(3, 8), (2, 4), (2, 1)])
    Pattern(base=5, run=2, dims=((6, 4),), end=27)
    """
    run, outer_loops = width, list[tuple[int, int]]()
    for stride, extent in sorted((stride, extent) for extent, stride in dims if extent > 1 and stride):
        if stride <= run:  # and `outer_loops` is empty, since its strides are smaller than this one
            run += (extent - 1) * stride
        elif outer_loops and stride == prod(outer_loops[-1]):
            outer_loops[-1] = (outer_loops[-1][0] * extent, outer_loops[-1][1])
        else:
            outer_loops.append((extent, stride))
    end = base + run + sum((extent - 1) * stride for extent, stride in outer_loops)
    return Pattern(base, run, tuple(reversed(outer_loops)), end)


class InstructionTouch(NamedTuple):
    """An access to scratchpad `memory` through the fields of `operand`. Places of inp, acc, vin and out are pieces."""

    memory: str
    operand: str
    places: Pattern
    write: bool


@dataclass(frozen=True, eq=False, slots=True)
class InstructionShape:
    """Common part of instructions that differ only in base addresses and tokens.

    touches: (access with base 0, field that holds the base or None, places in each step of the base). dram: rows of
    bytes that a LOAD reads or a STORE writes: (planes, stride), (rows, stride), (bytes, 1). dram_reach: bytes from the
    first to the last. repeats: whether it writes a place twice.
    """

    touches: tuple[tuple[InstructionTouch, str | None, int], ...]
    dram: Dims
    dram_reach: int
    repeats: bool

    def at(self, f: Fields) -> list[InstructionTouch]:
        """Return the scratchpad accesses of the instruction with the fields `f`, reads first."""
        touches = []
        for (memory, operand, places, write), field, step in self.touches:
            touches.append(InstructionTouch(memory, operand, places.shifted(f[field] * step if field else 0), write))
        return touches


@dataclass(slots=True)
class Decoded:
    """One instruction with its number in the stream, its fields, and its accesses to scratchpads.

    touches: the same list object for all instructions that touch the same places in the same way.
    """

    index: int
    opcode: Opcode
    unit: Unit
    fields: Fields
    touches: list[InstructionTouch]
    shape: InstructionShape

    @property
    def dram(self) -> Dims:
        """Rows of bytes that it reads or writes in DRAM."""
        return self.shape.dram

    @property
    def name(self) -> str:
        """The unit, as messages show it."""
        return f"({self.unit.name})"


# Words ----------------------------------------------------------------------------------------------------


def decode(cfg: Config, code: NDArray[np.uint8]) -> list[Decoded]:
    """Decode the instructions of `code`, [count, instruction_bytes] uint8.

    Raises VerifyError for the first one that breaks Rule.WORD: the opcode exists, its own rules hold, and no bit is
    set beyond its fields.
    """
    size = instruction_bytes(cfg)
    if code.ndim != 2 or code.shape[1] != size or code.dtype != np.uint8:
        raise ValueError(f"code must be [count, {size}] uint8, not {list(code.shape)} {code.dtype}")
    by_opcode, bad = decode_columns(cfg, code)
    for opcode, rows in by_opcode.items():
        bad[rows.numbers] |= _has_bits_beyond(formats(cfg)[opcode], code[rows.numbers])
    if bad.any():
        _raise_for_word(cfg, int(bad.argmax()), code)
    stream: list[Any] = [None] * len(code)
    for opcode, rows in by_opcode.items():
        for i in _decode_rows(cfg, opcode, rows.numbers, rows.fields):
            stream[i.index] = i
    return stream


BASES = {
    Opcode.LOAD: ("dram_addr", "sram_base"), Opcode.GEMM: ("acc_base", "inp_base", "wgt_base"),
    Opcode.VECTOR: ("dst_base", "a_base", "b_base", "par_base", "tap_base", "table"),
    Opcode.STORE: ("dram_addr", "sram_base"),
}  # fmt: skip
"""Fields that hold base addresses."""


def _decode_rows(
    cfg: Config, opcode: Opcode, rows: NDArray[np.int64], values: dict[str, NDArray[np.int64]]
) -> Iterator[Decoded]:
    """Yield the instructions at `rows`, all of one opcode.

    Instructions that differ only in tokens and DRAM address share their list of accesses. Those that also differ in
    base addresses share an InstructionShape, so that each is computed and checked once.
    """
    names, unit, shapes = tuple(values), UNIT_OF[opcode], dict[bytes, InstructionShape]()
    placed_shapes = dict[bytes, tuple[list[InstructionTouch], InstructionShape]]()
    shape_keys, place_keys = (
        _field_keys(values, {"wait", "post", *BASES[opcode]}),
        _field_keys(values, {"wait", "post", "dram_addr"}),
    )
    value_rows = zip(*(column.tolist() for column in values.values()), strict=True)
    for index, row, shape_key, place_key in zip(rows.tolist(), value_rows, shape_keys, place_keys, strict=True):
        fields = dict(zip(names, row, strict=True))
        if place_key not in placed_shapes:
            if shape_key not in shapes:
                shapes[shape_key] = _shape_of(cfg, opcode, fields)
            placed_shapes[place_key] = shapes[shape_key].at(fields), shapes[shape_key]
        yield Decoded(index, opcode, unit, fields, *placed_shapes[place_key])


def _field_keys(values: dict[str, NDArray[np.int64]], but: set[str]) -> list[bytes]:
    """Return for each instruction a key that is equal where all fields but these are."""
    table = np.stack([column for name, column in values.items() if name not in but], axis=1)
    keys: list[bytes] = table.view(np.dtype((np.void, table.shape[1] * table.itemsize))).ravel().tolist()  # type: ignore[assignment]
    return keys


def _has_bits_beyond(form: Format, words: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return for each word whether it has bits set beyond its fields."""
    first, used = divmod(form.width, 8)
    beyond = words[:, first:].copy()
    beyond[:, :1] >>= used
    return np.asarray(beyond.any(axis=1))


def _raise_for_word(cfg: Config, index: int, code: NDArray[np.uint8]) -> None:
    """Raise VerifyError with the reason why word `index` breaks Rule.WORD."""
    word = int.from_bytes(code[index].tobytes(), "little")
    reason, opcode = why_illegal(cfg, word), opcode_of(word)
    if reason is not None or opcode is None:
        raise VerifyError(Rule.WORD, index, f"is illegal ({reason})")
    raise VerifyError(Rule.WORD, index, f"({opcode.name}) has bits beyond its {formats(cfg)[opcode].width}")


# What an instruction touches ------------------------------------------------------------------------------


@cache
def sizes(cfg: Config) -> dict[str, tuple[int, int]]:
    """Return for each scratchpad its number of entries, and the pieces of an entry."""
    return {name: (pad.depth, pad.pieces) for name, pad in scratchpads(cfg).items()}


@cache
def loop_fields(operand: str, loops: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return the names of the fields that hold each loop's extent and its stride for `operand`."""
    return tuple((f"extent_{loop}", f"{operand}_{loop}") for loop in loops)


def _shape_of(cfg: Config, opcode: Opcode, f: Fields) -> InstructionShape:
    """Return what an instruction with these fields touches, as if its base addresses were 0."""
    dram = _dram_rows(cfg, opcode, f)
    return InstructionShape(
        tuple(_list_touches(cfg, opcode, f)), dram, reach(dram), repeats(_written_dims(opcode, f, dram))
    )


def _list_touches(cfg: Config, opcode: Opcode, f: Fields) -> Iterator[tuple[InstructionTouch, str | None, int]]:
    """Yield the scratchpad accesses of an instruction, reads first; see `InstructionShape.touches`."""

    def entries(
        memory: str, operand: str, loops: tuple[str, ...], write: bool = False, pieces: int = 1, each: int = 1
    ) -> tuple[InstructionTouch, str, int]:
        """Return the access to `each` consecutive entries in every step of `loops`."""
        dims = [(f[extent], f[stride] * pieces) for extent, stride in loop_fields(operand, loops)]
        return InstructionTouch(memory, operand, make_pattern(0, dims, each * pieces), write), f"{operand}_base", pieces

    out = cfg.out_pieces
    if opcode == Opcode.STORE:
        yield InstructionTouch("out", "sram", make_pattern(0, padded_block(f)), False), "sram_base", 1
    elif opcode == Opcode.LOAD:
        yield (
            InstructionTouch(_BUFFER_NAMES[f["buffer"]], "sram", make_pattern(0, padded_block(f)), True),
            "sram_base",
            1,
        )
    elif opcode == Opcode.GEMM:
        yield entries("inp", "inp", GEMM_LOOPS, pieces=cfg.inp_pieces)
        yield entries("wgt", "wgt", GEMM_LOOPS, pieces=cfg.inp_pieces)
        if f["accumulate"]:
            yield entries("acc", "acc", OUTER_LOOPS, pieces=out)
        yield entries("acc", "acc", OUTER_LOOPS, True, out)
    else:
        a = "acc" if f["a_source"] == ASource.ACC else "vin"
        yield entries(a, "a", VECTOR_LOOPS, pieces=out, each=entries_of_a(cfg, f))
        if f["b_source"] == BSource.VIN:
            yield entries("vin", "b", OUTER_LOOPS, pieces=out)
        if f["requantise"]:
            yield entries("par", "par", OUTER_LOOPS)
        if f["taps"]:
            yield entries("tap", "tap", TAP_LOOPS)
        if f["lookup"]:
            yield InstructionTouch("lut", "table", make_pattern(0, ()), False), "table", 1
        if f.get("softmax"):  # all of it
            yield InstructionTouch("exp", "exp", make_pattern(0, (), EXP_ENTRIES), False), None, 1
        # VECTOR writes as many pieces to inp in a step as an entry of out has.
        yield entries(destination(f), "dst", OUTER_LOOPS, True, out)


def entries_of_a(cfg: Config, f: Fields) -> int:
    """Return the number of entries that a VECTOR reads as A in each step."""
    return cfg.taps if f["taps"] else 1


def destination(f: Fields) -> str:
    """Return the scratchpad that a VECTOR writes."""
    return Destination(f["destination"]).name.lower()


_BUFFER_NAMES = [buffer.name.lower() for buffer in Buffer]
"""Scratchpad of each value of field `buffer`."""


def padded_block(f: Fields) -> Dims:
    """Return the loops of a LOAD or STORE over its scratchpad, padding included: planes, rows, elements."""
    height = f["y_size"] + f.get("pad_top", 0) + f.get("pad_bottom", 0)
    width = f["x_size"] + f.get("pad_left", 0) + f.get("pad_right", 0)
    return (f["z_size"], f["sram_z"]), (height, f["sram_y"]), (width, f["sram_x"])


def element_bytes(cfg: Config, opcode: Opcode, f: Fields) -> int:
    """Return the bytes in DRAM that one step of a LOAD or STORE moves."""
    if opcode == Opcode.STORE:
        return cfg.piece_bytes
    return isa.element_bytes(cfg, Buffer(f["buffer"]), bool(f["widen"]), bool(f.get("expand")))


def _dram_rows(cfg: Config, opcode: Opcode, f: Fields) -> Dims:
    """Return the rows of bytes that a LOAD or STORE moves in DRAM: planes, rows, bytes; () for other instructions."""
    if opcode not in (Opcode.LOAD, Opcode.STORE):
        return ()
    row = f["x_size"] * element_bytes(cfg, opcode, f)
    return (f["z_size"], f["dram_z"]), (f["y_size"], f["dram_y"]), (row, 1)


def reach(dims: Dims) -> int:
    """Return the distance from the first to the last place of `dims`."""
    return sum((extent - 1) * stride for extent, stride in dims)


@lru_cache(1 << 12)
def repeats(dims: Dims) -> bool:
    """Whether two index tuples of `dims` lead to the same place."""
    span = 1
    for stride, extent in sorted((stride, extent) for extent, stride in dims if extent > 1):
        if stride < span:
            break
        span += (extent - 1) * stride
    else:
        return False  # each loop steps over all that the loops inside it reach
    places = np.zeros(1, np.int64)
    for extent, stride in dims:
        places = (places[:, None] + np.arange(extent) * stride).ravel()
    return len(np.unique(places)) < len(places)


# Rules of a single instruction ----------------------------------------------------------------------------


def check_fields(cfg: Config, i: Decoded, dram_size: int, writable: tuple[int, int], touched: bool = False) -> None:
    """Check the rules RANGE, LIMIT, WRITABLE, PADDING, ONCE and OWN_RESULT. Raises VerifyError.

    touched: whether an instruction with the same accesses has passed, so that only the rules of DRAM are left.
    """
    if touched:
        if i.dram:
            _check_dram(i, dram_size, writable)
        return
    f, limits = i.fields, sizes(cfg)
    for memory, operand, places, _ in i.touches:
        entries, pieces = limits[memory]
        if places.end > entries * pieces:
            what = f"reaches {memory} entry {(places.end - 1) // pieces} of {entries} with {operand}"
            raise VerifyError(Rule.RANGE, i.index, f"{i.name} {what}")
    if i.opcode in (Opcode.LOAD, Opcode.STORE):
        _check_dram(i, dram_size, writable)
    if i.shape.repeats:
        raise VerifyError(Rule.ONCE, i.index, f"{i.name} writes a place more than once")
    if i.opcode == Opcode.VECTOR:
        for memory, operand, _, write in i.touches:
            if memory == destination(f) and not write:
                _check_own_result(i, memory, operand, entries_of_a(cfg, f) if operand == "a" else 1)


def _check_dram(i: Decoded, dram_size: int, writable: tuple[int, int]) -> None:
    """Check the rules LIMIT, WRITABLE and PADDING. Raises VerifyError."""
    f, first = i.fields, i.fields["dram_addr"]
    end = first + i.shape.dram_reach + 1
    if end > dram_size:
        raise VerifyError(Rule.LIMIT, i.index, f"{i.name} reaches byte {end - 1} of {dram_size} in DRAM")
    if i.opcode == Opcode.STORE and not writable[0] <= first <= end <= writable[1]:
        what = f"writes bytes {first} to {end - 1} of DRAM, outside {writable[0]} to {writable[1] - 1}"
        raise VerifyError(Rule.WRITABLE, i.index, f"{i.name} {what}")
    if i.opcode == Opcode.LOAD and f["buffer"] not in PADDED and has_padding(f):
        raise VerifyError(Rule.PADDING, i.index, f"{i.name} pads {_BUFFER_NAMES[f['buffer']]}")


PADDED = (Buffer.INP, Buffer.VIN, Buffer.ACC, Buffer.WGT)
"""Scratchpads whose LOADs may have padding in compiled programs; the hardware could pad all."""


def has_padding(f: Fields) -> bool:
    """Whether a LOAD has padding."""
    return any(f[f"pad_{side}"] for side in ("top", "bottom", "left", "right"))


def _written_dims(opcode: Opcode, f: Fields, dram: Dims) -> Dims:
    """Return the loops over the places that an instruction writes; () if it accumulates and may write a place again."""
    if opcode == Opcode.STORE:
        return dram
    if opcode == Opcode.LOAD:
        return padded_block(f)
    if opcode == Opcode.GEMM and f["accumulate"]:
        return ()
    operand = "acc" if opcode == Opcode.GEMM else "dst"
    return tuple((f[extent], f[stride]) for extent, stride in loop_fields(operand, OUTER_LOOPS))


def _check_own_result(i: Decoded, memory: str, operand: str, count: int) -> None:
    """Check OWN_RESULT for `operand`, which reads `count` entries a step from the scratchpad that VECTOR writes."""
    f = i.fields

    def entries(operand: str, loops: tuple[str, ...]) -> NDArray[np.int64]:
        """Return the entry of `operand` in each step of `loops`."""
        total = np.full(1, f[f"{operand}_base"], np.int64)
        for loop in loops:
            total = (total[:, None] + np.arange(f[f"extent_{loop}"]) * f[f"{operand}_{loop}"]).ravel()
        return total

    written = entries("dst", OUTER_LOOPS)
    read = entries(operand, VECTOR_LOOPS if operand == "a" else OUTER_LOOPS)[:, None] + np.arange(count)
    steps = np.arange(len(written))
    writing_step = np.full(max(written.max(), read.max()) + 1, len(written))  # of each entry
    writing_step[written] = steps
    if (writing_step[read].reshape(len(written), -1) < steps[:, None]).any():
        what = f"reads an entry of {memory} that an earlier step of it wrote"
        raise VerifyError(Rule.OWN_RESULT, i.index, f"{i.name} {what}")
