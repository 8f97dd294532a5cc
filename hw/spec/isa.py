"""The instruction set: fields, widths and bit positions of LOAD, GEMM, VECTOR and STORE.

Decoders (RTL and simulators), the compiler's encoder and docs/isa.md derive from the `Format`s here. What an
instruction computes is defined by `sim/functional/reference.py`. Fields lie from bit 0 upwards in the order of their
declaration.
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
    """Opcode of an instruction, in its lowest 3 bits; 0 and 5 to 7 are illegal."""

    LOAD = 1
    GEMM = 2
    VECTOR = 3
    STORE = 4


class Unit(IntEnum):
    """Execution units, each with an instruction queue. In a `wait` or `post` mask, the bit of a unit is `1 << unit`."""

    LOAD = 0
    GEMM = 1
    VECTOR = 2
    STORE = 3


UNIT_OF = {Opcode.LOAD: Unit.LOAD, Opcode.GEMM: Unit.GEMM, Opcode.VECTOR: Unit.VECTOR, Opcode.STORE: Unit.STORE}
"""Unit that executes each instruction."""


class Buffer(IntEnum):
    """Scratchpads that LOAD can write, as its field `buffer` names them."""

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
    """Reductions of VECTOR over the values of a window (loops r and s)."""

    ADD = 0
    MAX = 1
    MIN = 2


class BinaryOp(IntEnum):
    """Operations of VECTOR on operands A and B, in int32 that wraps around."""

    NONE = 0
    ADD = 1
    MAX = 2
    MIN = 3
    MUL = 4
    SHR = 5
    BYTE = 6


class ASource(IntEnum):
    """Source of VECTOR's operand A: int32 of ACC, or int8 of VIN."""

    ACC = 0
    VIN = 1


class BSource(IntEnum):
    """Source of VECTOR's operand B: field `imm` of the instruction, or int8 of VIN."""

    IMM = 0
    VIN = 1


class Destination(IntEnum):
    """Scratchpad that VECTOR writes. In INP, an address counts parts of an entry, each as large as an entry of OUT."""

    ACC = 0
    OUT = 1
    INP = 2
    VIN = 3


REQUIRED_SWITCH: dict[type[IntEnum], dict[IntEnum, str]] = {
    ReduceOp: {ReduceOp.MIN: "alu"},
    BinaryOp: {
        **dict.fromkeys((BinaryOp.ADD, BinaryOp.MAX, BinaryOp.MIN, BinaryOp.SHR), "alu"),
        BinaryOp.BYTE: "sums",
    },
    Destination: {Destination.ACC: "int32", Destination.INP: "forward", Destination.VIN: "forward"},
}
"""Values of VECTOR's fields that only some Configs support, and the Config field that must be true for each."""


@dataclass(frozen=True)
class Field:
    """Declaration of one field of an instruction.

    name : the field's name.
    width : bits.
    doc : its meaning, a sentence for docs/isa.md.
    signed : the bits are a two's complement number.
    """

    name: str
    width: int
    doc: str
    signed: bool = False

    def check(self, value: int, format_name: str) -> int:
        """Check that `value` fits this field, and return it as an unsigned bit pattern; ValueError if it does not fit.

        format_name: the instruction's name, for the error.
        """
        low, high = (-(1 << self.width - 1), (1 << self.width - 1) - 1) if self.signed else (0, (1 << self.width) - 1)
        if not low <= value <= high:
            raise ValueError(f"{format_name}.{self.name} must be between {low} and {high}, not {value}")
        return value & ((1 << self.width) - 1)


@dataclass(frozen=True)
class Format:
    """Encoding of one instruction: its opcode, and its fields from bit 0 upwards.

    opcode : which instruction.
    doc : what it does, a sentence for docs/isa.md.
    fields : all fields, the opcode first.
    limit_bits : size of an instruction in bits, which the fields must not exceed; None: not yet known.
    """

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
        """Sum of the widths of all fields, in bits."""
        return sum(field.width for field in self.fields)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Position of the lowest bit of each field, by the field's name."""
        offsets, position = {}, 0
        for field in self.fields:
            offsets[field.name] = position
            position += field.width
        return offsets

    def encode(self, **values: int) -> int:
        """Return the instruction with these field values as an integer; missing fields are 0.

        ValueError for an unknown field, or a value that does not fit its field.
        """
        word = 0
        values = {"opcode": int(self.opcode), **values}
        for field in self.fields:
            word |= field.check(int(values.pop(field.name, 0)), self.opcode.name) << self.offsets[field.name]
        if values:
            raise ValueError(f"{self.opcode.name} has no field {', '.join(values)}")
        return word

    def decode(self, word: int) -> dict[str, int]:
        """Return the value of each field of instruction `word`, by the field's name."""
        values = {}
        for field in self.fields:
            value = word >> self.offsets[field.name] & ((1 << field.width) - 1)
            if field.signed and value >> (field.width - 1):
                value -= 1 << field.width
            values[field.name] = value
        return values


EXTENT_BITS = 12
"""Bits of a loop extent. An extent is stored unchanged, not less one, so that 0 is illegal."""
X_BITS, YZ_BITS, PAD_BITS = 16, 12, 8
"""Bits of the sizes of a LOAD's or STORE's block along x, and along y and z; bits of a LOAD's padding."""

GEMM_LOOPS = ("n", "y", "x", "k", "r", "s")
"""Loops of GEMM from the outermost: output channel block, row, column; then the reduction: input channel block, kernel
row, kernel column."""
VECTOR_LOOPS = ("n", "y", "x", "r", "s")
"""Loops of VECTOR from the outermost: channel block, row, column; then row and column of the window it reduces."""
OUTER_LOOPS = ("n", "y", "x")
"""Loops of GEMM and VECTOR that move the address of the result."""
TAP_LOOPS = ("n", "r", "s")
"""Loops of VECTOR that move the address of its weights in the scratchpad tap."""


def _header_fields() -> tuple[Field, ...]:
    """Declare the fields that every instruction begins with: opcode and token masks."""
    return (
        Field("opcode", 3, "The instruction: see [Values of fields](#values-of-fields)."),
        Field("wait", 4, "The instruction takes one token from each of these units before it starts. Bit i is unit i."),
        Field(
            "post",
            4,
            "The instruction gives one token to each of these units when its last write is done. Bit i is unit i.",
        ),
    )


def _extent_fields(loops: tuple[str, ...]) -> tuple[Field, ...]:
    """Declare a field for the extent (number of iterations) of each of `loops`."""
    return tuple(Field(f"extent_{loop}", EXTENT_BITS, f"Iterations of loop {loop}, at least 1.") for loop in loops)


def _address_fields(operand: str, bits: int, loops: tuple[str, ...], base_doc: str) -> tuple[Field, ...]:
    """Declare the base address of `operand`, of `bits` bits, and its stride in each of `loops`."""
    strides = (Field(f"{operand}_{loop}", bits, f"Step of {operand} in loop {loop}.") for loop in loops)
    return (Field(f"{operand}_base", bits, base_doc), *strides)


Pads = Mapping[str, Scratchpad]
"""Scratchpads of a Config by name."""


def _formats(cfg: Config, limit: int | None) -> dict[Opcode, Format]:
    """Declare the four formats of `cfg`, by opcode. limit: see `Format.limit_bits`."""
    declarations = (_load_format, _gemm_format, _vector_format, _store_format)
    return {fmt.opcode: fmt for fmt in (declare(cfg, scratchpads(cfg), limit) for declare in declarations)}


def _load_format(cfg: Config, pads: Pads, limit: int | None) -> Format:
    """Declare the format of LOAD. All its scratchpad addresses are as wide as the largest scratchpad needs."""
    address_bits = max(pads[buffer.name.lower()].piece_bits for buffer in buffers(cfg))
    spread = [Field("spread", 1, "WGT only: each read port brings half of each element.")] * pads["wgt"].spread
    expand = [
        Field(
            "expand",
            1,
            "WGT only: the elements are packed weights in DRAM; x_size is a multiple of the elements in a pack.",
        )
    ]
    destinations = [buffer.name for buffer in Buffer if buffer in buffers(cfg) or buffer <= Buffer.EXP]
    buffer_doc = f"Destination: {', '.join(destinations[:-1])} or {destinations[-1]}."
    if cfg.weight_bits == 8:
        buffer_doc += " Configs with `weight_bits` below 8 add BOOK and a fourth bit."
    return Format(
        Opcode.LOAD,
        "Copies a block of up to three dimensions from DRAM to a scratchpad, with padding around its rows and columns.",
        (
            *_header_fields(),
            Field("buffer", max(Buffer.EXP, *buffers(cfg)).bit_length(), buffer_doc),
            Field("widen", 1, "ACC only: the elements are int8 in DRAM, and become int32."),
            *spread,
            *expand * (cfg.weight_bits < 8),
            Field("dram_addr", 32, "First byte, relative to the DMA base."),
            Field("dram_y", 32, "Bytes from one row to the next."),
            Field("dram_z", 32, "Bytes from one plane to the next."),
            Field("x_size", X_BITS, "Elements in a row, consecutive in DRAM, at least 1."),
            Field("y_size", YZ_BITS, "Rows in a plane, at least 1."),
            Field("z_size", YZ_BITS, "Planes, at least 1."),
            Field("sram_base", address_bits, "Address of the first element of the block with its padding."),
            Field("sram_x", address_bits, "Step between elements of a row."),
            Field("sram_y", address_bits, "Step between rows."),
            Field("sram_z", address_bits, "Step between planes."),
            Field("pad_top", PAD_BITS, "Rows of padding before the first row of each plane."),
            Field("pad_bottom", PAD_BITS, "Rows of padding after the last row."),
            Field("pad_left", PAD_BITS, "Elements of padding before each row."),
            Field("pad_right", PAD_BITS, "Elements of padding after each row."),
            Field("pad_value", 8, "Value of each byte of padding, or of each int32 for ACC.", signed=True),
        ),
        limit,
    )


def _gemm_format(cfg: Config, pads: Pads, limit: int | None) -> Format:
    """Declare the format of GEMM."""
    return Format(
        Opcode.GEMM,
        "Multiplies matrices. In each iteration of loops n, y and x, it sums the products `inp · wgtᵀ` over loops"
        " k, r and s. The sum overwrites an entry of acc, or is added to it.",
        (
            *_header_fields(),
            Field("accumulate", 1, "Add to the entry of acc instead of overwriting it."),
            *_extent_fields(GEMM_LOOPS),
            *_address_fields("acc", pads["acc"].address_bits, OUTER_LOOPS, "First accumulator entry."),
            *_address_fields("inp", pads["inp"].address_bits, GEMM_LOOPS, "First input entry."),
            *_address_fields("wgt", pads["wgt"].address_bits, GEMM_LOOPS, "First weight entry."),
        ),
        limit,
    )


def _vector_format(cfg: Config, pads: Pads, limit: int | None) -> Format:
    """Declare the format of VECTOR. Some fields exist only in Configs with softmax, norm or taps."""
    bits = {name: pad.address_bits for name, pad in pads.items()}
    a_bits, dst_bits = max(bits["acc"], bits["vin"]), max(bits["acc"], bits["out"])
    softmax, norm = cfg.softmax > 0, cfg.norm > 0
    row_operations = " and ".join(["softmax"] * softmax + ["norm"] * norm)
    imm = "Operand B if b_source is IMM." + f" {row_operations}: unused values of a row's last entry." * bool(
        row_operations
    )
    constant = "rescale_add: constant." + " norm: epsilon, see sim/functional/norm.py." * norm
    if cfg.forward:
        dst_bits = max(dst_bits, bits["vin"], pads["inp"].part_address_bits(pads["out"].width))
    return Format(
        Opcode.VECTOR,
        "Computes one result in each iteration of loops n, y and x. Loops r and s reduce a window of operand A to"
        " a value v. The other operations change v, in this order: combine it with operand B, requantise, clip, "
        "look up in a table, add a rescaled residual.",
        (
            *_header_fields(),
            Field("a_source", 1, "Operand A: ACC (int32) or VIN (int8)."),
            Field("b_source", 1, "Operand B: IMM or VIN; VIN only if A is ACC."),
            Field(
                "destination",
                2,
                "Scratchpad of the result: ACC (int32), or OUT, INP or VIN (int8). In INP, an address counts parts of"
                " an entry that are as large as an entry of OUT.",
            ),
            Field(
                "taps",
                1,
                "A is a sum over as many neighbouring entries of VIN as the Config has `taps`. Each entry is "
                "multiplied by its weights in an entry of TAP.",
            ),
            Field(
                "reduce_op", max(ReduceOp).bit_length(), "Operation that reduces A over loops r and s: ADD, MAX or MIN."
            ),
            Field(
                "binary_op",
                max(BinaryOp).bit_length(),
                "Operation that combines v with B: NONE (v stays), ADD, MAX, MIN, MUL (of the low 16 bits of "
                "each, signed), SHR (right shift by B's low 5 bits), BYTE (the byte of v whose number, from 0 to "
                "3, is B's low 2 bits; the byte is a signed value).",
            ),
            *(
                [
                    Field(
                        "softmax",
                        1,
                        "Softmax of the values of VIN over loop n, for every x, without other operations.",
                    )
                ]
                * softmax
            ),
            *(
                [
                    Field(
                        "norm",
                        1,
                        "v is each value of VIN over the deviation of its row, the values over loop n, for every x.",
                    )
                ]
                * norm
            ),
            *([Field("centre", 1, "norm: subtract the mean of the row first.")] * norm),
            Field(
                "requantise",
                1,
                "Replace v by (v + bias) * multiplier / 2^shift, round it, and add zero_point. Each channel has its "
                "own bias, multiplier and shift in an entry of par.",
            ),
            Field("lookup", 1, "Replace v, clipped to clip_lo..clip_hi, by its value in the table."),
            Field("table", bits["lut"], "Number of the table for lookup."),
            Field(
                "rescale_add",
                1,
                "Add a residual: v = (v * scale_v + B * scale_b + scale_c) / 2^scale_shift, rounded; B from VIN.",
            ),
            *_extent_fields(VECTOR_LOOPS),
            *_address_fields("dst", dst_bits, OUTER_LOOPS, "First entry written."),
            *_address_fields("a", a_bits, VECTOR_LOOPS, "First entry of A."),
            *_address_fields("b", bits["vin"], OUTER_LOOPS, "First entry of B."),
            *_address_fields("par", bits["par"], OUTER_LOOPS, "First entry of par."),
            *(_address_fields("tap", bits["tap"], TAP_LOOPS, "First entry of tap.") if cfg.taps else ()),
            Field("a_offset", 9, "Number added to each value of A before the reduction.", signed=True),
            Field("b_offset", 9, "Number added to B before the binary operation.", signed=True),
            # Without alu, only MUL uses imm, and MUL takes 16 bits. 16 bits keep an instruction with norm in 64 bytes.
            Field("imm", 16 if norm and not cfg.alu else 32, imm, signed=True),
            Field("zero_point", 8, "Number that requantise adds.", signed=True),
            Field(
                "clip_lo",
                8,
                "Smallest v after the clip. The clip is left out only if VECTOR writes ACC without requantise, lookup"
                " and rescale_add.",
                signed=True,
            ),
            Field("clip_hi", 8, "Largest v after the clip.", signed=True),
            Field("scale_v", 32, "rescale_add: factor of v.", signed=True),
            Field("scale_b", 32, "rescale_add: factor of B.", signed=True),
            Field("scale_c", 48, constant, signed=True),
            Field("scale_shift", 6, "rescale_add: right shift."),
            Field("add_lo", 8, "rescale_add: smallest result.", signed=True),
            Field("add_hi", 8, "rescale_add: largest result.", signed=True),
        ),
        limit,
    )


def _store_format(cfg: Config, pads: Pads, limit: int | None) -> Format:
    """Declare the format of STORE."""
    address_bits = pads["out"].piece_bits
    return Format(
        Opcode.STORE,
        "Copies a block of pieces, of up to three dimensions, from scratchpad out to DRAM.",
        (
            *_header_fields(),
            Field("dram_addr", 32, "First byte, relative to the DMA base."),
            Field("dram_y", 32, "Bytes from one row to the next."),
            Field("dram_z", 32, "Bytes from one plane to the next."),
            Field("x_size", X_BITS, "Pieces in a row, consecutive in DRAM, at least 1."),
            Field("y_size", YZ_BITS, "Rows in a plane, at least 1."),
            Field("z_size", YZ_BITS, "Planes, at least 1."),
            Field("sram_base", address_bits, "First piece read."),
            Field("sram_x", address_bits, "Step between pieces of a row."),
            Field("sram_y", address_bits, "Step between rows."),
            Field("sram_z", address_bits, "Step between planes."),
        ),
        limit,
    )


def element_bytes(cfg: Config, buffer: Buffer, widen: bool = False, expand: bool = False) -> int:
    """Return the bytes in DRAM of one element of a LOAD to `buffer`.

    widen: the elements are int8 in DRAM and int32 in ACC. expand: the elements are packed weights; their size includes
    a share of the pack's head.
    """
    if expand:
        return packing(cfg).piece_bytes
    return cfg.piece_bytes if widen else scratchpads(cfg)[buffer.name.lower()].piece_bytes


def buffers(cfg: Config) -> tuple[Buffer, ...]:
    """Return the scratchpads that LOAD can write in `cfg`."""
    return tuple(buffer for buffer in Buffer if buffer.name.lower() in scratchpads(cfg))


def is_supported(cfg: Config, value: IntEnum) -> bool:
    """Return whether the hardware of `cfg` has a reduction, a binary operation or a destination of VECTOR.

    >>> is_supported(Config(alu=False), BinaryOp.MUL), is_supported(Config(alu=False), BinaryOp.SHR)
    (True, False)
    """
    required_field = REQUIRED_SWITCH[type(value)].get(value)
    return required_field is None or bool(getattr(cfg, required_field))


def load_channels(cfg: Config) -> tuple[tuple[Buffer, ...], ...]:
    """Return the scratchpads that each channel of LOAD fills; channel i reads through memory port i.

    With one port there is one channel for all. With two, the second channel fills weights and parameters, and both fill
    wgt if LOAD can spread it.
    """
    pads = {buffer: scratchpads(cfg)[buffer.name.lower()] for buffer in buffers(cfg)}
    first = [buffer for buffer, pad in pads.items() if cfg.ports == 1 or not pad.on_second_port or pad.spread]
    return (tuple(first), tuple(buffer for buffer, pad in pads.items() if pad.on_second_port))[: cfg.ports]


@cache
def instruction_bytes(cfg: Config) -> int:
    """Return the size of every instruction: the smallest power of two of bytes that holds the widest format."""
    widest = max(fmt.width for fmt in _formats(cfg, None).values())
    return 1 << ((widest + 7) // 8 - 1).bit_length()


@cache
def formats(cfg: Config) -> dict[Opcode, Format]:
    """Return the formats of the instructions of `cfg`, by opcode; they are checked to fit `instruction_bytes`."""
    return _formats(cfg, 8 * instruction_bytes(cfg))


def encode(cfg: Config, opcode: Opcode, **values: int) -> int:
    """Encode an instruction of `cfg` as an integer; see `Format.encode`."""
    return formats(cfg)[opcode].encode(**values)


def opcode_of(word: int) -> Opcode | None:
    """Return the opcode of an instruction word, or None if its opcode bits are illegal."""
    try:
        return Opcode(word & 0b111)
    except ValueError:
        return None
