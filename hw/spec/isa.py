"""The instruction set, declared once.

Decoders (RTL and simulators), the compiler's encoder and docs/isa.md derive from the `Format`s here; the meaning of
each instruction is `sim/functional/reference.py`. Fields lie from bit 0 upwards in the order of their declaration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, cached_property

from celosia.hw.spec.config import Config
from celosia.hw.spec.packing import packing
from celosia.hw.spec.scratchpads import Scratchpad, scratchpads


class Opcode(IntEnum):
    """Operation of an instruction; 0 and 5 to 7 do not exist."""

    LOAD = 1
    GEMM = 2
    VECTOR = 3
    STORE = 4


class Unit(IntEnum):
    """The units that take instructions; the bit of a unit in a wait or post mask is `1 << unit`."""

    LOAD = 0
    GEMM = 1
    VECTOR = 2
    STORE = 3


UNIT_OF = {Opcode.LOAD: Unit.LOAD, Opcode.GEMM: Unit.GEMM, Opcode.VECTOR: Unit.VECTOR, Opcode.STORE: Unit.STORE}


class Buffer(IntEnum):
    """Scratchpad that a LOAD writes."""

    INP = 0
    WGT = 1
    ACC = 2
    VIN = 3
    PAR = 4
    LUT = 5
    TAP = 6
    EXP = 7
    BOOK = 8


class ReduceOp(IntEnum):
    """Reduction of the values of a window by VECTOR."""

    ADD = 0
    MAX = 1
    MIN = 2


class BinaryOp(IntEnum):
    """Binary operation of VECTOR on A and B, in int32 that wraps."""

    NONE = 0
    ADD = 1
    MAX = 2
    MIN = 3
    MUL = 4
    SHR = 5
    BYTE = 6


class ASource(IntEnum):
    """Source of A for VECTOR: int32 of ACC, or int8 of VIN."""

    ACC = 0
    VIN = 1


class BSource(IntEnum):
    """Source of B for VECTOR: a field of the instruction, or int8 of VIN."""

    IMM = 0
    VIN = 1


class Destination(IntEnum):
    """Scratchpad that a VECTOR writes. An address in INP counts parts of the size of an entry of acc."""

    ACC = 0
    OUT = 1
    INP = 2
    VIN = 3


NEEDS: dict[type[IntEnum], dict[IntEnum, str]] = {
    ReduceOp: {ReduceOp.MIN: "alu"},
    BinaryOp: {
        **dict.fromkeys((BinaryOp.ADD, BinaryOp.MAX, BinaryOp.MIN, BinaryOp.SHR), "alu"),
        BinaryOp.BYTE: "sums",
    },
    Destination: {Destination.ACC: "int32", Destination.INP: "forward", Destination.VIN: "forward"},
}
"""Features of VECTOR that not every Config has, and the field of the Config that must be true for each."""


@dataclass(frozen=True)
class Field:
    """A field: some bits of an instruction; doc: a sentence for docs/isa.md."""

    name: str
    width: int
    doc: str
    signed: bool = False

    def check(self, value: int, format_name: str) -> int:
        """Return `value` as an unsigned bit pattern; ValueError where it does not fit."""
        low, high = (-(1 << self.width - 1), (1 << self.width - 1) - 1) if self.signed else (0, (1 << self.width) - 1)
        if not low <= value <= high:
            raise ValueError(f"{format_name}.{self.name} must be between {low} and {high}, not {value}")
        return value & ((1 << self.width) - 1)


@dataclass(frozen=True)
class Format:
    """Format of an instruction: an opcode and the fields that follow each other from bit 0."""

    opcode: Opcode
    doc: str
    fields: tuple[Field, ...]
    limit_bits: int | None = None

    def __post_init__(self) -> None:
        names = [field.name for field in self.fields]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.opcode.name} declares a field twice")
        if self.limit_bits is not None and self.width > self.limit_bits:
            raise ValueError(f"{self.opcode.name} needs {self.width} bits, an instruction has {self.limit_bits}")

    @cached_property
    def width(self) -> int:
        """Bits of all fields together."""
        return sum(field.width for field in self.fields)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The lowest bit of each field, by name."""
        offsets, position = {}, 0
        for field in self.fields:
            offsets[field.name] = position
            position += field.width
        return offsets

    def encode(self, **values: int) -> int:
        """The instruction as an integer; fields not given are 0. ValueError for unknown or too large values."""
        word = 0
        values = {"opcode": int(self.opcode), **values}
        for field in self.fields:
            word |= field.check(int(values.pop(field.name, 0)), self.opcode.name) << self.offsets[field.name]
        if values:
            raise ValueError(f"{self.opcode.name} has no field {', '.join(values)}")
        return word

    def decode(self, word: int) -> dict[str, int]:
        """The fields of `word`, signed ones as signed numbers."""
        values = {}
        for field in self.fields:
            value = word >> self.offsets[field.name] & ((1 << field.width) - 1)
            if field.signed and value >> (field.width - 1):
                value -= 1 << field.width
            values[field.name] = value
        return values


EXTENT_BITS = 12
"""Width of a loop extent; extents are stored as they are, so that 0 is illegal."""
X_BITS, YZ_BITS, PAD_BITS = 16, 12, 8
"""Sizes of what LOAD and STORE move, and of padding."""

GEMM_LOOPS = ("n", "y", "x", "k", "r", "s")
"""Loops of GEMM from the outermost: output block, row, column; the reduction: channel block, kernel row, column."""
VECTOR_LOOPS = ("n", "y", "x", "r", "s")
"""Loops of VECTOR from the outermost: block, row, column; then the reduction over a window."""
OUTER_LOOPS = ("n", "y", "x")
TAP_LOOPS = ("n", "r", "s")
"""Loops of VECTOR that move the address of its taps."""


def _header() -> tuple[Field, ...]:
    return (
        Field("opcode", 3, "Which instruction this is."),
        Field("wait", 4, "Units to take one token from before starting; bit of LOAD, GEMM, VECTOR, STORE."),
        Field("post", 4, "Units to give one token to when the last write is done."),
    )


def _extents(loops: tuple[str, ...]) -> tuple[Field, ...]:
    return tuple(Field(f"extent_{loop}", EXTENT_BITS, f"Iterations of loop {loop}, at least 1.") for loop in loops)


def _address(operand: str, bits: int, loops: tuple[str, ...], description: str) -> tuple[Field, ...]:
    strides = (Field(f"{operand}_{loop}", bits, f"Step of {operand} in loop {loop}.") for loop in loops)
    return (Field(f"{operand}_base", bits, description), *strides)


Pads = Mapping[str, Scratchpad]


def _formats(cfg: Config, limit: int | None) -> dict[Opcode, Format]:
    """Formats of all instructions. limit: the bits of an instruction, where they are known."""
    formats_made = (make(cfg, scratchpads(cfg), limit) for make in (_load, _gemm, _vector, _store))
    return {fmt.opcode: fmt for fmt in formats_made}


def _load(cfg: Config, pads: Pads, limit: int | None) -> Format:
    sram = max(pads[buffer.name.lower()].piece_bits for buffer in buffers(cfg))
    spread = [Field("spread", 1, "WGT only: half of each element comes through each read port.")] * pads["wgt"].spread
    expand = [Field("expand", 1, "WGT only: the elements lie packed in DRAM, and x_size counts whole packs of them.")]
    destinations = [buffer.name for buffer in Buffer if buffer in buffers(cfg) or buffer <= Buffer.EXP]
    named = f"Destination: {', '.join(destinations[:-1])} or {destinations[-1]}."
    return Format(
        Opcode.LOAD,
        "Copies a block of up to three dimensions from DRAM to a scratchpad, with padding around its rows and columns.",
        (
            *_header(),
            Field("buffer", max(Buffer.EXP, *buffers(cfg)).bit_length(), named),
            Field("widen", 1, "ACC only: the elements are int8 and become int32."),
            *spread,
            *expand * (cfg.weight_bits < 8),
            Field("dram_addr", 32, "First byte, relative to the DMA base."),
            Field("dram_y", 32, "Bytes from one row to the next."),
            Field("dram_z", 32, "Bytes from one plane to the next."),
            Field("x_size", X_BITS, "Elements in a row, consecutive in DRAM, at least 1."),
            Field("y_size", YZ_BITS, "Rows in a plane, at least 1."),
            Field("z_size", YZ_BITS, "Planes, at least 1."),
            Field("sram_base", sram, "First element written (of the padded block)."),
            Field("sram_x", sram, "Step between elements of a row."),
            Field("sram_y", sram, "Step between rows."),
            Field("sram_z", sram, "Step between planes."),
            Field("pad_top", PAD_BITS, "Rows of padding before the first row of each plane."),
            Field("pad_bottom", PAD_BITS, "Rows of padding after the last row."),
            Field("pad_left", PAD_BITS, "Elements of padding before each row."),
            Field("pad_right", PAD_BITS, "Elements of padding after each row."),
            Field("pad_value", 8, "What padding holds in every byte (ACC: in every int32).", signed=True),
        ),
        limit,
    )


def _gemm(cfg: Config, pads: Pads, limit: int | None) -> Format:
    return Format(
        Opcode.GEMM,
        "acc[d] (=|+=) sum of inp[s] . wgt[w] transposed, over loops k, r, s, for every n, y, x.",
        (
            *_header(),
            Field("accumulate", 1, "Add to what the accumulator holds instead of overwriting it."),
            *_extents(GEMM_LOOPS),
            *_address("acc", pads["acc"].address_bits, OUTER_LOOPS, "First accumulator entry."),
            *_address("inp", pads["inp"].address_bits, GEMM_LOOPS, "First input entry."),
            *_address("wgt", pads["wgt"].address_bits, GEMM_LOOPS, "First weight entry."),
        ),
        limit,
    )


def _vector(cfg: Config, pads: Pads, limit: int | None) -> Format:
    bits = {name: pad.address_bits for name, pad in pads.items()}
    a_bits, dst_bits = max(bits["acc"], bits["vin"]), max(bits["acc"], bits["out"])
    softmax, norm = cfg.softmax > 0, cfg.norm > 0
    of_rows = " and ".join(["softmax"] * softmax + ["norm"] * norm)
    imm = "B where b_source is IMM." + f" {of_rows}: lanes of a row's last entry that are none of it." * bool(of_rows)
    constant = "rescale_add: constant." + " norm: epsilon, see sim/functional/norm.py." * norm
    if cfg.forward:
        dst_bits = max(dst_bits, bits["vin"], pads["inp"].bits_of_parts(pads["out"].width))
    return Format(
        Opcode.VECTOR,
        "Reduces a window, combines with a second operand, requantises, looks up, adds a rescaled residual, clips.",
        (
            *_header(),
            Field("a_source", 1, "Operand A: ACC (int32) or VIN (int8)."),
            Field("b_source", 1, "Operand B: IMM or VIN; VIN only where A is ACC."),
            Field("destination", 2, "ACC (int32), or OUT, INP or VIN (int8)."),
            Field("taps", 1, "A is the sum of as many entries of VIN as the Config has taps, times an entry of TAP."),
            Field("reduce_op", max(ReduceOp).bit_length(), "How loops r and s combine A: ADD, MAX, MIN."),
            Field(
                "binary_op",
                max(BinaryOp).bit_length(),
                "v = A op B: NONE, ADD, MAX, MIN, MUL (low 16 bits of each), SHR (by B's low 5 bits), "
                "BYTE (that of B's low 2 bits, signed).",
            ),
            *([Field("softmax", 1, "Softmax of the lanes of VIN over loop n, for every x, alone.")] * softmax),
            *([Field("norm", 1, "v are the lanes of VIN over loop n, for every x, over their deviation.")] * norm),
            *([Field("centre", 1, "norm: less their mean as well.")] * norm),
            Field("requantise", 1, "Scale v per channel with the entry of par, round, add zero_point."),
            Field("lookup", 1, "Replace v, clipped to clip_lo..clip_hi, by its table entry."),
            Field("table", bits["lut"], "Which table."),
            Field(
                "rescale_add",
                1,
                "Residual: v = (v * scale_v + B * scale_b + scale_c) / 2^scale_shift, rounded; B from VIN.",
            ),
            *_extents(VECTOR_LOOPS),
            *_address("dst", dst_bits, OUTER_LOOPS, "First entry written."),
            *_address("a", a_bits, VECTOR_LOOPS, "First entry of A."),
            *_address("b", bits["vin"], OUTER_LOOPS, "First entry of B."),
            *_address("par", bits["par"], OUTER_LOOPS, "First entry of par."),
            *(_address("tap", bits["tap"], TAP_LOOPS, "First entry of tap.") if cfg.taps else ()),
            Field("a_offset", 9, "Added to every A before the reduction.", signed=True),
            Field("b_offset", 9, "Added to B in the binary operation.", signed=True),
            # Without alu 16 bits of it are multiplied: so few keep an instruction of a Config with norm in 64 bytes.
            Field("imm", 16 if norm and not cfg.alu else 32, imm, signed=True),
            Field("zero_point", 8, "Added after requantising.", signed=True),
            Field("clip_lo", 8, "Smallest value of the int8 stage.", signed=True),
            Field("clip_hi", 8, "Largest value of the int8 stage.", signed=True),
            Field("scale_v", 32, "rescale_add: factor of v.", signed=True),
            Field("scale_b", 32, "rescale_add: factor of B.", signed=True),
            Field("scale_c", 48, constant, signed=True),
            Field("scale_shift", 6, "rescale_add: right shift."),
            Field("add_lo", 8, "rescale_add: smallest result.", signed=True),
            Field("add_hi", 8, "rescale_add: largest result.", signed=True),
        ),
        limit,
    )


def _store(cfg: Config, pads: Pads, limit: int | None) -> Format:
    out = pads["out"].piece_bits
    return Format(
        Opcode.STORE,
        "Copies a block of up to three dimensions of pieces from out to DRAM.",
        (
            *_header(),
            Field("dram_addr", 32, "First byte, relative to the DMA base."),
            Field("dram_y", 32, "Bytes from one row to the next."),
            Field("dram_z", 32, "Bytes from one plane to the next."),
            Field("x_size", X_BITS, "Pieces in a row, consecutive in DRAM, at least 1."),
            Field("y_size", YZ_BITS, "Rows in a plane, at least 1."),
            Field("z_size", YZ_BITS, "Planes, at least 1."),
            Field("sram_base", out, "First piece read."),
            Field("sram_x", out, "Step between pieces of a row."),
            Field("sram_y", out, "Step between rows."),
            Field("sram_z", out, "Step between planes."),
        ),
        limit,
    )


def element_bytes(cfg: Config, buffer: Buffer, widen: bool = False, expand: bool = False) -> int:
    """Bytes in DRAM of one element of a LOAD to `buffer`. widen: int8 in DRAM become int32 in ACC. expand: of packed
    weights, with its share of a pack."""
    if expand:
        return packing(cfg).entry_bytes
    return cfg.piece_bytes if widen else scratchpads(cfg)[buffer.name.lower()].piece_bytes


def buffers(cfg: Config) -> tuple[Buffer, ...]:
    """Buffers that `cfg` has."""
    return tuple(buffer for buffer in Buffer if buffer.name.lower() in scratchpads(cfg))


def has(cfg: Config, value: IntEnum) -> bool:
    """Whether `cfg` has an operation or a destination of VECTOR.

    >>> has(Config(alu=False), BinaryOp.MUL), has(Config(alu=False), BinaryOp.SHR)
    (True, False)
    """
    need = NEEDS[type(value)].get(value)
    return need is None or bool(getattr(cfg, need))


def lanes(cfg: Config) -> tuple[tuple[Buffer, ...], ...]:
    """The buffers that LOAD fills through each port to memory; with two ports, weights and parameters by the second,
    and what is spread by both."""
    pads = {buffer: scratchpads(cfg)[buffer.name.lower()] for buffer in buffers(cfg)}
    near_buffers = [buffer for buffer, pad in pads.items() if cfg.ports == 1 or not pad.far or pad.spread]
    return (tuple(near_buffers), tuple(buffer for buffer, pad in pads.items() if pad.far))[: cfg.ports]


@cache
def instruction_bytes(cfg: Config) -> int:
    """Size of every instruction: the smallest power of two that holds the widest format."""
    widest = max(fmt.width for fmt in _formats(cfg, None).values())
    return 1 << ((widest + 7) // 8 - 1).bit_length()


@cache
def formats(cfg: Config) -> dict[Opcode, Format]:
    """The formats of `cfg`, by opcode."""
    return _formats(cfg, 8 * instruction_bytes(cfg))


def encode(cfg: Config, opcode: Opcode, **values: int) -> int:
    """An instruction of `cfg` as an integer; see `Format.encode`."""
    return formats(cfg)[opcode].encode(**values)


def opcode_of(word: int) -> Opcode | None:
    """The opcode of an instruction word, or None where it is not one."""
    try:
        return Opcode(word & 0b111)
    except ValueError:
        return None
