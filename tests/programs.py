"""Generate random legal programs: instructions in sequential order, and tokens that make units keep that order."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cache
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from celosia.hw.spec.config import Config, ConfigError, field_values
from celosia.hw.spec.isa import (
    EXTENT_BITS,
    GEMM_LOOPS,
    OUTER_LOOPS,
    TAP_LOOPS,
    UNIT_OF,
    VECTOR_LOOPS,
    X_BITS,
    YZ_BITS,
    ASource,
    BinaryOp,
    BSource,
    Buffer,
    Destination,
    Opcode,
    ReduceOp,
    Unit,
    buffers,
    element_bytes,
    encode,
    formats,
    instruction_bytes,
    is_supported,
)
from celosia.hw.spec.packing import CODEBOOK_ENTRIES, CODEBOOKS, packing
from celosia.hw.spec.pipeline import MAX_NORM_ELEMENTS, softmax_span
from celosia.hw.spec.scratchpads import EXP_ENTRIES, scratchpads, total_bytes
from celosia.sim.device import Device

MAX_MACS, LARGE_MACS, MAX_BYTES = 64, 512, 1 << 15
"""Limits of random Configs, so that simulators are built in minutes.

MAX_MACS: MACs per cycle; every LARGE_EVERY-th Config may have LARGE_MACS. MAX_BYTES: bytes of all memories.
"""
LARGE_EVERY = 5
EVENT_BYTES = 8
"""Size of an entry of the event trace, in bytes."""


def random_config(seed: int) -> Config:
    """Draw any legal Config within the limits above; small values are more frequent.

    Consecutive seeds take batches and bus widths in turn; every second seed has batch = 1, which softmax and norm need.
    """
    rng = random.Random(f"config {seed}")
    values = {field.name: field_values(field.name) for field in fields(Config) if field.name != "name"}
    batches, buses = values["batch"], values["bus_bytes"]
    turn = seed // 2
    values["batch"] = [batches[1 + turn % (len(batches) - 1)] if seed % 2 else batches[0]]
    values["bus_bytes"] = [buses[turn % len(buses)]]
    max_macs = LARGE_MACS if seed % LARGE_EVERY == LARGE_EVERY - 1 else MAX_MACS
    smallest = {name: field_range[0] for name, field_range in values.items()} | {"weight_bits": 8}
    cfg = Config(**smallest, name=f"random-{seed}")
    # Change one field after the other, the array first: it bounds the others. Two rounds reach every legal combination.
    array = ["block_in", "block_out"]
    others = [name for name in values if name not in array]
    for name in 2 * array + 2 * rng.sample(others, len(others)):
        cfg = _redrawn(rng, cfg, name, values[name], max_macs)
    return cfg


def _redrawn(rng: random.Random, cfg: Config, name: str, values: Sequence[int], max_macs: int) -> Config:
    """Return `cfg` with a new legal value of field `name`, most often a small one; the value may be the old one."""
    while True:
        value = rng.choice(values[:4]) if rng.random() < 0.5 else rng.choice(values)
        if rng.random() < 0.3:
            value = 1 << value.bit_length() >> 1  # in some ranges only powers of two are legal
        try:
            drawn = replace(cfg, **{name: value})
        except ConfigError:
            continue
        memories = total_bytes(drawn) + EVENT_BYTES * drawn.trace_depth
        if drawn.macs_per_cycle <= max_macs and memories <= MAX_BYTES:
            return drawn


@dataclass
class Instruction:
    opcode: Opcode
    fields: dict[str, int]

    @property
    def unit(self) -> Unit:
        return UNIT_OF[self.opcode]

    def word(self, cfg: Config) -> int:
        """Encode the instruction, like `isa.encode`, but in a third of its time.

        Raise ValueError if a value does not fit its field.
        """
        fields, word = _fields(cfg, self.opcode), int(self.opcode)
        for name, value in self.fields.items():
            if name not in fields or not fields[name].low <= value <= fields[name].high:
                return encode(cfg, self.opcode, **self.fields)  # raises the error with its message
            word |= (value & fields[name].mask) << fields[name].offset
        return word


class _FieldPosition(NamedTuple):
    """The position of a field in an instruction word, and the values that it can hold.

    offset: its first bit. mask: a mask of its width. low, high: its least and its greatest value.
    """

    offset: int
    mask: int
    low: int
    high: int


@cache
def _fields(cfg: Config, opcode: Opcode) -> dict[str, _FieldPosition]:
    """Return the position of every field of an instruction except its opcode, by name."""
    form = formats(cfg)[opcode]
    positions = {}
    for form_field in form.fields[1:]:
        mask = (1 << form_field.width) - 1
        low = -(1 << form_field.width - 1) if form_field.signed else 0
        positions[form_field.name] = _FieldPosition(form.offsets[form_field.name], mask, low, low + mask)
    return positions


@dataclass
class TestProgram:
    """A program and its DRAM image.

    Bytes [0, size) hold instructions, data, parameters, and the area that STORE writes.
    """

    __test__ = False
    cfg: Config
    instructions: list[Instruction]
    image: NDArray[np.uint8]
    instr_addr: int
    output: range = field(default_factory=lambda: range(0))

    def words(self) -> list[int]:
        return [instruction.word(self.cfg) for instruction in self.instructions]

    def loaded(self) -> NDArray[np.uint8]:
        """Return a copy of the image with the instructions in it."""
        size = instruction_bytes(self.cfg)
        code = np.frombuffer(b"".join(word.to_bytes(size, "little") for word in self.words()), np.uint8)
        image = self.image.copy()
        image[self.instr_addr : self.instr_addr + len(code)] = code
        return image

    def run(
        self, device: Device, timeout_cycles: int = 1_000_000, loaded: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        """Run the program on `device` and return what memory holds afterwards, one byte per element.

        loaded: the result of `loaded()`, if the caller has it already.
        """
        device.allocate(len(self.image))
        device.write(0, self.loaded() if loaded is None else loaded)
        device.run(self.instr_addr, len(self.instructions), timeout_cycles)
        return device.read(0, len(self.image))


T = TypeVar("T")
_MIX = (Opcode.LOAD,) * 3 + (Opcode.GEMM,) * 3 + (Opcode.VECTOR,) * 4 + (Opcode.STORE,) * 3
STORE_ROWS = (1, 2, 3, 7, 20, 40)
"""Numbers of pieces that a row of a random STORE may have."""
_A_SOURCES, _B_SOURCES = tuple(ASource), tuple(BSource)


class Draws(random.Random):
    """Draw small random numbers in a fifth of the time of random.Random.

    For equal seeds, the two draw different numbers.
    """

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        assert step == 1
        return int(self.random() * start) if stop is None else start + int(self.random() * (stop - start))

    def randint(self, a: int, b: int) -> int:
        return a + int(self.random() * (b - a + 1))

    def choice(self, seq: Sequence[T]) -> T:  # type: ignore[override]
        return seq[int(self.random() * len(seq))]


class Generator:
    """Draw random instructions for `cfg`, over a DRAM image that the generator lays out.

    align: every DRAM address of LOAD and STORE is a multiple of this (None: of a piece, the smallest value allowed).
    wrap: probability that an address pattern runs past the end of its buffer.
    rich: draw more of the values that fields can hold, such as long loops, wide padding and small scales.
    """

    def __init__(
        self, cfg: Config, rng: random.Random, count: int = 30, align: int | None = None, wrap: float = 0.05,
        rich: bool = False,
    ) -> None:  # fmt: skip
        self.cfg, self.rng, self.wrap, self.rich = cfg, rng, wrap, rich
        self.last_softmax: dict[str, int] = {}
        self.align = cfg.piece_bytes if align is None else align
        self.instr_bytes = instruction_bytes(cfg)
        elements = [element_bytes(cfg, buffer) for buffer in buffers(cfg)]
        self.load_bytes = max(2048, *elements, packing(cfg).pack_bytes if cfg.weight_bits < 8 else 0)
        code = _pages((count + 20) * self.instr_bytes)
        data = _pages(4 * self.load_bytes)
        tables = _pages(2 * cfg.par_depth * 8 * cfg.block_out)
        self.code = range(code)
        self.data = range(code, code + data)
        self.tables = range(self.data.stop, self.data.stop + tables)
        self.powers = range(self.tables.stop, self.tables.stop + (4 * EXP_ENTRIES if cfg.softmax else 0))
        self.output = range(self.powers.stop, self.powers.stop + _pages(max(STORE_ROWS) * cfg.piece_bytes) + 512)
        bits = np.random.default_rng(rng.getrandbits(32))
        self.image = bits.integers(0, 256, self.output.stop, np.uint8)
        self.image[self.tables.start : self.tables.stop] = _parameters(bits, tables // 8).view(np.uint8)
        if cfg.softmax and rng.random() < 0.8:
            self.image[self.powers.start : self.powers.stop] = _powers(bits).view(np.uint8)

    # Instructions -----------------------------------------------------------------------------------------

    def prologue(self) -> list[Instruction]:
        """Return instructions that fill every scratchpad, so that no later instruction reads an unwritten entry."""
        cfg = self.cfg
        fill = []
        for buffer, depth in (
            (Buffer.INP, cfg.inp_depth * cfg.inp_pieces),
            (Buffer.WGT, cfg.wgt_depth * cfg.inp_pieces),
            (Buffer.ACC, cfg.acc_depth * cfg.out_pieces),
            (Buffer.VIN, cfg.vin_depth * cfg.out_pieces),
            (Buffer.PAR, cfg.par_depth),
            (Buffer.LUT, cfg.lut_count),
            (Buffer.TAP, cfg.tap_depth),
            (Buffer.EXP, EXP_ENTRIES),
            (Buffer.BOOK, CODEBOOKS * CODEBOOK_ENTRIES),
        ):
            if buffer not in buffers(cfg):
                continue
            widen = buffer == Buffer.ACC and (not cfg.int32 or self.rng.random() < 0.5)
            area = {Buffer.PAR: self.tables, Buffer.EXP: self.powers}.get(buffer, self.data)
            size = element_bytes(cfg, buffer, widen)
            x, y, z = depth, 1, 1
            while x * size > len(area) // (1 if buffer == Buffer.EXP else 2) or x >= 1 << X_BITS:
                x //= 2
                y, z = (2 * y, z) if y < 1 << YZ_BITS - 1 else (y, 2 * z)
            fields = dict(
                buffer=buffer, widen=widen, dram_addr=area.start, x_size=x, y_size=y, z_size=z,
                sram_x=1, sram_y=x % depth, sram_z=x * y % depth,
            )  # fmt: skip
            fill.append(Instruction(Opcode.LOAD, fields))
        copy = dict(
            a_source=ASource.ACC, destination=Destination.OUT, requantise=1, clip_lo=-128, clip_hi=127,
            **{f"extent_{loop}": 1 for loop in VECTOR_LOOPS}, a_x=1, dst_x=1,
        )  # fmt: skip
        copy["extent_x"] = min(cfg.out_depth, cfg.acc_depth, 1 << EXTENT_BITS - 1)
        for start in range(0, cfg.out_depth, copy["extent_x"]):
            fill.append(Instruction(Opcode.VECTOR, copy | {"dst_base": start}))
        return fill

    def draw(self) -> Instruction:
        opcode = self.rng.choice(_MIX)
        draw = {Opcode.LOAD: self.load, Opcode.GEMM: self.gemm, Opcode.VECTOR: self.vector, Opcode.STORE: self.store}
        return Instruction(opcode, draw[opcode]())

    def load(self) -> dict[str, int]:
        rng, cfg = self.rng, self.cfg
        buffer = rng.choice(buffers(cfg))
        widen = int(buffer == Buffer.ACC and (not cfg.int32 or rng.random() < 0.5))
        expand = int(cfg.weight_bits < 8 and buffer == Buffer.WGT and rng.random() < 0.6)
        step = packing(cfg).pieces if expand else 1
        size = element_bytes(cfg, buffer, bool(widen), bool(expand))
        depth = {
            Buffer.INP: cfg.inp_depth * cfg.inp_pieces, Buffer.WGT: cfg.wgt_depth * cfg.inp_pieces,
            Buffer.ACC: cfg.acc_depth * cfg.out_pieces, Buffer.VIN: cfg.vin_depth * cfg.out_pieces,
            Buffer.PAR: cfg.par_depth, Buffer.LUT: cfg.lut_count, Buffer.TAP: cfg.tap_depth, Buffer.EXP: EXP_ENTRIES,
            Buffer.BOOK: CODEBOOKS * CODEBOOK_ENTRIES,
        }[buffer]  # fmt: skip
        area = self.tables if buffer == Buffer.PAR else rng.choice((self.data, self.data, self.output))
        if self.rich and buffer != Buffer.PAR and rng.random() < 0.1 and step * size < len(self.code) // 2:
            area = self.code  # instructions are bytes, too
        # Rows of parameters start at entries of the table, because only these have normalised multipliers.
        align = max(self.align, 8 * cfg.block_out) if buffer == Buffer.PAR else self.align
        pads = [rng.choice((0, 0, 0, 1, 2, 3)) for _ in range(4)]
        if self.rich and rng.random() < 0.2:
            pads[rng.randrange(4)] = rng.choice((6, 12, 20))
        while True:
            z, y, x = rng.choice((1, 1, 2, 3)), rng.randint(1, 4), rng.choice((1, 2, 3, 5, 8, 20))
            if self.rich and rng.random() < 0.2:
                z, y = rng.choice(((5, 1), (10, 1), (18, 1), (1, 10), (1, 18)))
            x = -(-x // step) * step
            block = (z, pads[0] + y + pads[1], pads[2] + x + pads[3])
            if z * y * x * size <= min(self.load_bytes, len(area) // 2) and prod(block) <= 3 * depth:
                break
            pads = [pad // 2 for pad in pads]
        fields = self.dram(area, (z, y), x * size, align) | dict(
            x_size=x, y_size=y, z_size=z, buffer=buffer, widen=widen
        )
        if scratchpads(cfg)["wgt"].spread:
            fields["spread"] = int(buffer == Buffer.WGT and not expand and rng.random() < 0.5)
        if cfg.weight_bits < 8:
            fields["expand"] = expand
        fields |= self.address("sram", ("z", "y", "x"), block, depth)
        fields |= dict(pad_top=pads[0], pad_bottom=pads[1], pad_left=pads[2], pad_right=pads[3])
        # Padding of parameters must be a normalised multiplier, too.
        fields["pad_value"] = rng.randint(-128, -1) if buffer == Buffer.PAR else rng.choice((0, rng.randint(-128, 127)))
        return fields

    def store(self) -> dict[str, int]:
        rng, cfg = self.rng, self.cfg
        size = cfg.piece_bytes
        z, y, x = rng.choice((1, 1, 2)), rng.randint(1, 4), rng.choice(STORE_ROWS)
        if self.rich and rng.random() < 0.3:
            z, y, x = rng.choice(((5, 1, 2), (10, 1, 1), (18, 1, 1), (1, 10, 2), (1, 18, 1), (1, 1, 12)))
        fields = self.dram(self.output, (z, y), x * size, self.align) | dict(x_size=x, y_size=y, z_size=z)
        return fields | self.address("sram", ("z", "y", "x"), (z, y, x), cfg.out_depth * cfg.out_pieces)

    def gemm(self) -> dict[str, int]:
        cfg = self.cfg
        extents = self.extents(6, 200)
        fields = dict(accumulate=self.rng.randint(0, 1))
        fields |= {f"extent_{loop}": e for loop, e in zip(GEMM_LOOPS, extents)}
        fields |= self.address("acc", OUTER_LOOPS, extents[:3], cfg.acc_depth)
        fields |= self.address("inp", GEMM_LOOPS, extents, cfg.inp_depth)
        fields |= self.address("wgt", GEMM_LOOPS, extents, cfg.wgt_depth)
        return fields

    def softmax(self) -> dict[str, int]:
        """Return the fields of a softmax whose results go to OUT or INP: a new one, or a variant of the last one."""
        rng, cfg = self.rng, self.cfg
        if (last := self.last_softmax) and rng.random() < 0.5:
            own = {name: rng.randint(0, last[name]) for name in ("a_base", "dst_base")}
            return last | own | {"extent_x": rng.randint(1, last["extent_x"])}
        n, x = self.extents(2, 60)
        destination = rng.choice([option for option in choices(cfg, Destination) if option.name in ("OUT", "INP")])
        low, high = sorted((rng.randint(-128, 127), rng.randint(-128, 127)))
        fields = {f"extent_{loop}": 1 for loop in VECTOR_LOOPS} | dict(extent_n=n, extent_x=x)
        while True:
            fields |= self.address("a", OUTER_LOOPS, (n, 1, x), cfg.vin_depth)
            if rng.random() < 0.5:
                fields |= dict(a_n=1, a_x=n % cfg.vin_depth)
            if softmax_span(cfg) == 1 or fields["a_n"] == 1:  # pairs lie side by side
                break
        fields |= self.address("dst", OUTER_LOOPS, (n, 1, x), places(cfg, destination))
        self.last_softmax = fields | dict(
            softmax=1, a_source=ASource.VIN, destination=destination, imm=rng.randrange(cfg.block_out),
            zero_point=rng.choice((-128, 0, rng.randint(-128, 127))), clip_lo=rng.choice((-128, low)),
            clip_hi=rng.choice((127, high)),
        )  # fmt: skip
        return self.last_softmax.copy()

    def behind(self, fields: dict[str, int]) -> dict[str, int]:
        """Change `fields` of a VECTOR from acc: it writes vin near the rows of the last softmax."""
        cfg, extents = self.cfg, [1, 1, self.rng.randint(1, 60)]
        base = self.last_softmax["a_base"] - self.rng.choice((0, 0, -1, 5))
        fields = fields | dict(zip((f"extent_{loop}" for loop in OUTER_LOOPS), extents))
        fields |= self.address(
            "a", VECTOR_LOOPS, [*extents, *(fields[f"extent_{loop}"] for loop in "rs")], cfg.acc_depth
        )
        fields |= self.address("par", OUTER_LOOPS, extents, cfg.par_depth)
        return fields | dict(destination=Destination.VIN, dst_base=base % cfg.vin_depth, dst_x=1)

    def norm(self) -> dict[str, int]:
        """Return the fields of a norm over several rows of several entries, with arbitrary data."""
        rng, cfg = self.rng, self.cfg
        while True:
            n, x = self.extents(2, 60)
            n = min(n, MAX_NORM_ELEMENTS // cfg.block_out)
            destination = rng.choice(choices(cfg, Destination))
            fields = {f"extent_{loop}": 1 for loop in VECTOR_LOOPS} | dict(extent_n=n, extent_x=x)
            fields |= dict(a_source=ASource.VIN, b_source=BSource.IMM, destination=destination, rescale_add=0)
            fields |= self.address("a", VECTOR_LOOPS, (n, 1, x, 1, 1), cfg.vin_depth)
            fields |= self.address("dst", OUTER_LOOPS, (n, 1, x), places(cfg, destination))
            fields |= self.address("par", OUTER_LOOPS, (n, 1, x), cfg.par_depth)
            if not reads_own_result(cfg, fields):
                break
        return fields | dict(
            norm=1, centre=rng.randrange(2), imm=rng.randrange(cfg.block_out), requantise=1,
            a_offset=rng.choice((0, rng.randint(-128, 128))), scale_c=rng.getrandbits(rng.randrange(48)),
            zero_point=rng.randint(-128, 127), clip_lo=-128, clip_hi=127,
        )  # fmt: skip

    def vector(self) -> dict[str, int]:
        rng, cfg = self.rng, self.cfg
        if cfg.norm and rng.random() < 0.3:
            return self.norm()
        if cfg.softmax and rng.random() < 0.3:
            return self.softmax()
        while True:
            extents = self.extents(5, 60)
            if rng.random() < 0.5:
                extents[3:] = [1, 1]
            destination = rng.choice(choices(cfg, Destination))
            taps = int(cfg.taps > 0 and rng.random() < 0.4)
            a_source = ASource.VIN if taps else rng.choice(_A_SOURCES)
            b_source = BSource.IMM if a_source == ASource.VIN else rng.choice(_B_SOURCES)
            rescale_add = int(b_source == BSource.VIN and rng.random() < 0.4)
            fields = {f"extent_{loop}": e for loop, e in zip(VECTOR_LOOPS, extents)}
            fields |= dict(a_source=a_source, b_source=b_source, destination=destination, rescale_add=rescale_add)
            depth = cfg.acc_depth if a_source == ASource.ACC else cfg.vin_depth
            fields |= self.address("a", VECTOR_LOOPS, extents, depth, after=cfg.taps - 1 if taps else 0)
            fields |= self.address("dst", OUTER_LOOPS, extents[:3], places(cfg, destination))
            fields |= self.address("b", OUTER_LOOPS, extents[:3], cfg.vin_depth)
            fields |= self.address("par", OUTER_LOOPS, extents[:3], cfg.par_depth)
            if cfg.taps:
                fields["taps"] = taps
                fields |= self.address("tap", TAP_LOOPS, [extents[0], *extents[3:]], cfg.tap_depth)
            if not reads_own_result(cfg, fields):
                break
        reads_only_acc = (a_source, b_source) == (ASource.ACC, BSource.IMM)
        if reads_only_acc and self.last_softmax and cfg.forward and rng.random() < 0.5:
            fields = self.behind(fields)
        scale = (rng.randint(-15, 15),) if self.rich else ()
        low, high = sorted((rng.randint(-128, 127), rng.randint(-128, 127)))
        add_low, add_high = sorted((rng.randint(-128, 127), rng.randint(-128, 127)))
        (bits,) = (field.width for field in formats(cfg)[Opcode.VECTOR].fields if field.name == "imm")
        imm_limit = 1 << bits - 1
        return fields | dict(
            reduce_op=rng.choice(choices(cfg, ReduceOp)),
            binary_op=BinaryOp.NONE if rescale_add else rng.choice(choices(cfg, BinaryOp)),
            requantise=rng.randint(0, 1),
            lookup=rng.randint(0, 1),
            table=rng.randrange(cfg.lut_count),
            a_offset=rng.choice((0, rng.randint(-256, 255), *scale)),
            b_offset=rng.choice((0, rng.randint(-256, 255), *scale)),
            imm=rng.choice((0, rng.randint(-40, 40), rng.randint(-imm_limit, imm_limit - 1))),
            zero_point=rng.randint(-128, 127),
            clip_lo=rng.choice((-128, low)),
            clip_hi=rng.choice((127, high)),
            scale_v=rng.choice((1, rng.randint(-(1 << 20), 1 << 20), rng.randint(-(1 << 31), (1 << 31) - 1), *scale)),
            scale_b=rng.choice((1, rng.randint(-(1 << 20), 1 << 20), rng.randint(-(1 << 31), (1 << 31) - 1), *scale)),
            scale_c=rng.choice((0, rng.randint(-(1 << 24), 1 << 24), rng.randint(-(1 << 47), (1 << 47) - 1), *scale)),
            scale_shift=rng.choice((0, 1, rng.randint(8, 24), rng.randint(0, 63))),
            add_lo=rng.choice((-128, add_low)),
            add_hi=rng.choice((127, add_high)),
        )

    # Parts of instructions --------------------------------------------------------------------------------

    def extents(self, loops: int, most: int) -> list[int]:
        while True:
            extents = [self.rng.choice((1, 1, 2, 3, 4, 7)) for _ in range(loops)]
            if self.rich and self.rng.random() < 0.5:
                extents = [1] * loops
                extents[self.rng.randrange(loops)] = self.rng.choice((9, 14, 20, 33))
            if prod(extents) <= most:
                return extents

    def address(
        self, operand: str, loops: tuple[str, ...], extents: tuple[int, ...] | list[int], depth: int, after: int = 0
    ) -> dict[str, int]:
        """Return random base and strides of `operand`: sometimes dense, sometimes in place.

        All entries, and the `after` entries behind each, lie inside the buffer, except with probability `wrap`.
        """
        rng = self.rng
        if rng.random() < self.wrap:
            return {f"{operand}_base": rng.randrange(depth)} | {f"{operand}_{l}": rng.randrange(depth) for l in loops}
        while True:
            dense = 1
            strides: list[int] = []
            for extent in reversed(extents):
                strides.insert(0, rng.choice((0, 1, dense % depth, dense % depth, rng.randint(-3, 3))))
                dense *= extent
            ends = [stride * (extent - 1) for stride, extent in zip(strides, extents)]
            low, high = sum(e for e in ends if e < 0), sum(e for e in ends if e > 0)
            if high - low + after < depth:
                base = rng.randint(-low, depth - 1 - high - after)
                return {f"{operand}_base": base} | {f"{operand}_{l}": s % depth for l, s in zip(loops, strides)}

    def dram(self, area: range, extents: tuple[int, int], width: int, align: int) -> dict[str, int]:
        """Return dram_addr, dram_y and dram_z of rows of `width` bytes inside `area`."""
        rng = self.rng
        while True:
            strides = [rng.choice((0, 1, -1, 2, rng.randint(-40, 40))) * align for _ in extents]
            strides[1] = rng.choice((strides[1], -(-width // align) * align))
            ends = [stride * (extent - 1) for stride, extent in zip(strides, extents)]
            low, high = sum(e for e in ends if e < 0), sum(e for e in ends if e > 0)
            if high - low + width <= len(area):
                first = -(-(area.start - low) // align)
                last = (area.stop - high - width) // align
                if first <= last:
                    start = align * rng.randint(first, last)
                    return dict(dram_addr=start, dram_z=strides[0] % (1 << 32), dram_y=strides[1] % (1 << 32))


def _pages(size: int) -> int:
    """Round `size` in bytes up to whole pages of 4096 bytes."""
    return -(-size // 4096) * 4096


def _parameters(bits: np.random.Generator, count: int) -> NDArray[np.uint64]:
    """Return `count` random entries of par.

    Each has a bias, a multiplier that is 0 or has its top bit set, and a shift that brings most results near int8.
    """
    bias = bits.integers(-(1 << 16), 1 << 16, count)
    bias = np.where(bits.random(count) < 0.1, bits.integers(-(1 << 31), 1 << 31, count), bias)
    multiplier = np.where(bits.random(count) < 0.05, 0, bits.integers(1 << 23, 1 << 24, count))
    shift = np.where(bits.random(count) < 0.1, bits.integers(0, 64, count), bits.integers(28, 38, count))
    return (bias & 0xFFFFFFFF).astype(np.uint64) | (multiplier << 32).astype(np.uint64) | shift.astype(np.uint64) << 56


def _powers(bits: np.random.Generator) -> NDArray[np.float32]:
    """Return random content of exp, as for softmax over rows of a random length with random scales."""
    scale, steps = 10 ** bits.uniform(-3, 0.5), bits.integers(1, 257)
    powers = np.exp((np.arange(-255, 1) + bits.uniform(0, 80 / scale)) * scale)
    return np.concatenate([powers, powers * steps]).astype(np.float32)


E = TypeVar("E", bound=IntEnum)


@cache
def choices(cfg: Config, kind: type[E]) -> list[E]:
    """Return the operations or destinations of VECTOR that `cfg` supports."""
    return [value for value in kind if is_supported(cfg, value)]


def places(cfg: Config, destination: int) -> int:
    """Return the number of addresses of a VECTOR's destination."""
    parts = cfg.block_in // cfg.block_out if destination == Destination.INP else 1
    depth: int = getattr(cfg, f"{Destination(destination).name.lower()}_depth")
    return parts * depth


def reads_own_result(cfg: Config, f: dict[str, int]) -> bool:
    """Return True if an iteration of a VECTOR reads an entry that an earlier iteration wrote."""
    source = Destination.ACC if f["a_source"] == ASource.ACC else Destination.VIN
    depth = cfg.acc_depth if f["destination"] == Destination.ACC else cfg.vin_depth  # of the destination
    # Entries that the first iteration of the outer loops reads as A and as B; later iterations read shifted sets.
    a_entries = _visited(f["a_base"], [*_steps(f, "a", ("r", "s")), (cfg.taps if f.get("taps") else 1, 1)], depth)
    reads = [("a", a_entries)] if source == f["destination"] else []
    if f["destination"] == Destination.VIN and f["b_source"] == BSource.VIN:
        reads.append(("b", _visited(f["b_base"], (), cfg.vin_depth)))
    if not reads:
        return False
    written = 0
    for index in np.ndindex(*(f[f"extent_{loop}"] for loop in OUTER_LOOPS)):
        for operand, entries in reads:
            if written & _rotated(entries, _offset(f, operand, index), depth):
                return True
        written |= 1 << (f["dst_base"] + _offset(f, "dst", index)) % depth
    return False


def _offset(f: dict[str, int], operand: str, index: tuple[int, ...]) -> int:
    """Return how far `operand` has moved in iteration `index` of the outer loops, in entries."""
    return sum(i * f[f"{operand}_{loop}"] for i, loop in zip(index, OUTER_LOOPS))


# Tokens ---------------------------------------------------------------------------------------------------


def _rotated(bits: int, step: int, depth: int) -> int:
    """Move each entry of the set `bits` by `step`, modulo `depth`."""
    step %= depth
    return (bits << step | bits >> (depth - step)) & ((1 << depth) - 1)


def _visited(base: int, loops: Iterable[tuple[int, int]], depth: int, first: int = 1) -> int:
    """Return the entries base + sum of index * stride, modulo `depth`, as a bit set.

    loops: (extent, stride) of each loop. first: bit set of the entries that each iteration visits, relative to its
    base.
    """
    bits = _rotated(first, base, depth)
    for extent, stride in loops:
        done = 1
        while done < extent:
            more = min(done, extent - done)
            bits |= _rotated(bits, more * stride, depth)
            done += more
    return bits


def _steps(f: dict[str, int], operand: str, loops: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return (extent, stride) of each loop of `operand`."""
    return [(f[f"extent_{loop}"], f[f"{operand}_{loop}"]) for loop in loops]


class _Space(NamedTuple):
    """The numbers of a memory's pieces, in one numbering of the pieces of all memories.

    start: the number of its first piece. size: its number of pieces. pieces: pieces of one entry.
    """

    start: int
    size: int
    pieces: int


@cache
def _spaces(cfg: Config) -> dict[str, _Space]:
    """Return the numbers of the pieces of each memory, by its name. Bytes of DRAM come last, from `dram` on."""
    spaces, start = {}, 0
    for name, depth, pieces in (
        ("inp", cfg.inp_depth, cfg.inp_pieces), ("wgt", cfg.wgt_depth, cfg.inp_pieces),
        ("acc", cfg.acc_depth, cfg.out_pieces), ("vin", cfg.vin_depth, cfg.out_pieces),
        ("out", cfg.out_depth, cfg.out_pieces), ("par", cfg.par_depth, 1),
        ("lut", cfg.lut_count, 1), ("tap", cfg.tap_depth, 1), ("exp", EXP_ENTRIES, 1),
        ("book", CODEBOOKS * CODEBOOK_ENTRIES, 1),
    ):  # fmt: skip
        spaces[name] = _Space(start, depth * pieces, pieces)
        start += depth * pieces
    return spaces | {"dram": _Space(start, 1 << 32, 1)}


def touches(cfg: Config, instruction: Instruction) -> tuple[int, int]:
    """Return the pieces that an instruction reads and those that it writes.

    Both are bit sets over the pieces of all memories (see `_spaces`).
    """
    f = defaultdict(int, instruction.fields)
    spaces = _spaces(cfg)

    def entries(name: str, operand: str, loops: tuple[str, ...], after: int = 0, pieces: int = 0) -> int:
        """Return the pieces that `operand` visits in memory `name`, and the `after` entries behind each.

        pieces: pieces of one visit (0: of an entry).
        """
        space = spaces[name]
        pieces = pieces or space.pieces
        steps = [(extent, stride * pieces) for extent, stride in _steps(f, operand, loops)]
        if after:
            steps.append((after + 1, pieces))
        return _visited(f[f"{operand}_base"] * pieces, steps, space.size, (1 << pieces) - 1) << space.start

    if instruction.opcode in (Opcode.LOAD, Opcode.STORE):
        load = instruction.opcode == Opcode.LOAD
        buffer = Buffer(f["buffer"]) if load else None
        sizes = element_bytes(cfg, buffer, bool(f["widen"]), bool(f["expand"])) if buffer is not None else 0
        size = sizes or cfg.piece_bytes
        dram, row = 0, (1 << f["x_size"] * size) - 1
        for z in range(f["z_size"]):
            for y in range(f["y_size"]):
                dram |= row << (f["dram_addr"] + z * f["dram_z"] + y * f["dram_y"]) % (1 << 32)
        dram <<= spaces["dram"].start
        f["extent_z"] = f["z_size"]
        f["extent_y"] = f["pad_top"] + f["y_size"] + f["pad_bottom"]
        f["extent_x"] = f["pad_left"] + f["x_size"] + f["pad_right"]
        block = entries(buffer.name.lower() if buffer is not None else "out", "sram", ("z", "y", "x"), pieces=1)
        return (dram, block) if load else (block, dram)
    if instruction.opcode == Opcode.GEMM:
        acc = entries("acc", "acc", OUTER_LOOPS)
        return entries("inp", "inp", GEMM_LOOPS) | entries("wgt", "wgt", GEMM_LOOPS) | acc, acc
    reads = entries(
        "acc" if f["a_source"] == ASource.ACC else "vin", "a", VECTOR_LOOPS, cfg.taps - 1 if f["taps"] else 0
    )
    reads |= entries("vin", "b", OUTER_LOOPS) | entries("par", "par", OUTER_LOOPS)
    reads |= 1 << spaces["lut"].start + f["table"] % cfg.lut_count
    if cfg.taps:
        reads |= entries("tap", "tap", TAP_LOOPS)
    if f["softmax"]:
        reads |= ((1 << EXP_ENTRIES) - 1) << spaces["exp"].start
    name = Destination(f["destination"]).name.lower()
    return reads, entries(name, "dst", OUTER_LOOPS, pieces=cfg.out_pieces)


def synchronise(cfg: Config, instructions: list[Instruction], more: random.Random | None = None) -> None:
    """Set `wait` and `post` so that conflicting accesses happen in the order of the list.

    The n-th wait of a unit for another unit takes that unit's n-th token. Therefore the pairs (post, wait) of two units
    increase in both numbers. No more tokens are under way than a semaphore can hold.
    more: draws additional tokens that no access needs.
    """
    limit = (1 << cfg.token_bits) - 1
    sets = [touches(cfg, instruction) for instruction in instructions]
    earlier: dict[Unit, list[int]] = {unit: [] for unit in Unit}
    edges: dict[tuple[Unit, Unit], list[list[int]]] = {(a, b): [] for a in Unit for b in Unit}
    for i, instruction in enumerate(instructions):
        reads, writes = sets[i]
        for other in Unit:
            if other == instruction.unit:
                continue
            pairs = edges[other, instruction.unit]
            last_post = pairs[-1][0] if pairs else -1
            for j in reversed(earlier[other]):
                if j <= last_post:
                    break  # an earlier token orders these two already
                if sets[j][1] & (reads | writes) or sets[j][0] & writes or (more is not None and more.random() < 0.05):
                    if sum(wait > j for _, wait in pairs) >= limit:
                        pairs[-1][0] = j
                    else:
                        pairs.append([j, i])
                    break
        earlier[instruction.unit].append(i)
    for instruction in instructions:
        instruction.fields |= dict(wait=0, post=0)
    for (source, target), pairs in edges.items():
        for post, wait in pairs:
            instructions[post].fields["post"] |= 1 << target
            instructions[wait].fields["wait"] |= 1 << source


def random_program(
    cfg: Config, seed: int, count: int = 30, align: int | None = None, wrap: float = 0.05, tokens: bool = True,
    rich: bool = False,
) -> TestProgram:  # fmt: skip
    """Return a prologue that fills the scratchpads, `count` random instructions, and a STORE of all of out.

    Equal arguments give equal programs.
    """
    rng = Draws(seed)
    generator = Generator(cfg, rng, count, align, wrap, rich)
    instructions = generator.prologue()
    instructions += [generator.draw() for _ in range(count)]
    # Store all of out, so that results of the last instructions can be compared.
    flush = dict(dram_addr=generator.output.start, x_size=cfg.out_depth * cfg.out_pieces, y_size=1, z_size=1, sram_x=1)
    if cfg.out_depth * cfg.out_pieces * cfg.piece_bytes <= len(generator.output):
        instructions.append(Instruction(Opcode.STORE, flush))
    if tokens:
        synchronise(cfg, instructions, rng if rich else None)
    return TestProgram(cfg, instructions, generator.image, 0, generator.output)
