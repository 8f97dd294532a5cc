"""Random legal programs: instructions in sequential order, and tokens that keep that order's meaning on the machine."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.hw.config import Config
from celosia.hw.isa import (
    GEMM_LOOPS,
    OUTER_LOOPS,
    TAP_LOOPS,
    UNIT_OF,
    VECTOR_LOOPS,
    ASource,
    BinaryOp,
    BSource,
    Buffer,
    Destination,
    Opcode,
    ReduceOp,
    Unit,
    buffers,
    encode,
    formats,
    instruction_bytes,
)
from celosia.sim.device import Device
from celosia.sim.reference import addresses, element_bytes

SMALL: dict[str, Any] = dict(
    inp_depth=64, wgt_depth=32, acc_depth=64, vin_depth=64, out_depth=64, par_depth=16, queue_depth=4
)
CONFIGS = {
    "4x4": Config(block_in=4, block_out=4, bus_bytes=8, packed=False, **SMALL),
    "8x8-bus16": Config(block_in=8, block_out=8, bus_bytes=16, **SMALL),
    "8x8-bus4-tokens2": Config(block_in=8, block_out=8, bus_bytes=4, **(SMALL | {"token_bits": 2, "queue_depth": 2})),
    "batch2": Config(batch=2, block_in=4, block_out=4, bus_bytes=8, **SMALL),
    "4x8": Config(block_in=4, block_out=8, bus_bytes=8, **SMALL),
    "8x4": Config(block_in=8, block_out=4, bus_bytes=8, **SMALL),
    "taps3": Config(block_in=4, block_out=4, taps=3, tap_depth=32, forward=True, residual_cycles=2, **SMALL),
    "8x4-batch2-taps5": Config(
        batch=2, block_in=8, block_out=4, taps=5, tap_depth=16, forward=True, residual_cycles=4, **SMALL
    ),
    "8x8-forward": Config(block_in=8, block_out=8, bus_bytes=16, forward=True, **SMALL),
    "4x4-ports2": Config(block_in=4, block_out=4, bus_bytes=8, ports=2, **SMALL),
    "2x8x4-bus16-ports2": Config(batch=2, block_in=8, block_out=4, bus_bytes=16, ports=2, **SMALL),
    "taps3-ports2": Config(
        block_in=4, block_out=4, ports=2, taps=3, tap_depth=32, forward=True, residual_cycles=2, **SMALL
    ),
}


@dataclass
class Instruction:
    opcode: Opcode
    fields: dict[str, int]

    @property
    def unit(self) -> Unit:
        return UNIT_OF[self.opcode]


@dataclass
class TestProgram:
    """DRAM image [0, size): instructions, then data, parameters, and the area that STORE writes."""

    __test__ = False
    cfg: Config
    instructions: list[Instruction]
    image: NDArray[np.uint8]
    instr_addr: int
    output: range = field(default_factory=lambda: range(0))

    def words(self) -> list[int]:
        return [encode(self.cfg, i.opcode, **i.fields) for i in self.instructions]

    def loaded(self) -> NDArray[np.uint8]:
        """The image with the instructions in it."""
        size = instruction_bytes(self.cfg)
        code = np.frombuffer(b"".join(word.to_bytes(size, "little") for word in self.words()), np.uint8)
        image = self.image.copy()
        image[self.instr_addr : self.instr_addr + len(code)] = code
        return image

    def run(self, device: Device, timeout_cycles: int = 1_000_000) -> NDArray[np.uint8]:
        """Load and run on `device`; what memory holds afterwards."""
        device.allocate(len(self.image))
        device.write(0, self.loaded())
        device.run(self.instr_addr, len(self.instructions), timeout_cycles)
        return device.read(0, len(self.image))


class Generator:
    """Draws instructions for `cfg` over a DRAM image that it lays out.

    align: multiple of which every DRAM address of LOAD and STORE is (None: the smallest power of two allowed, a piece).
    wrap: how often an address pattern runs past the end of its buffer. rich: more of what fields can hold, as long
    loops, wide padding and small scales.
    """

    def __init__(
        self, cfg: Config, rng: random.Random, count: int = 30, align: int | None = None, wrap: float = 0.05,
        rich: bool = False,
    ) -> None:  # fmt: skip
        self.cfg, self.rng, self.wrap, self.rich = cfg, rng, wrap, rich
        self.align = cfg.piece_bytes if align is None else align
        self.instr_bytes = instruction_bytes(cfg)
        page = 4096
        code = -(-(count + 20) * self.instr_bytes // page) * page
        data = 2 * page
        tables = -(-2 * cfg.par_depth * 8 * cfg.block_out // page) * page
        self.code = range(code)
        self.data = range(code, code + data)
        self.tables = range(self.data.stop, self.data.stop + tables)
        self.output = range(self.tables.stop, self.tables.stop + page + 512)
        bits = np.random.default_rng(rng.getrandbits(32))
        self.image = bits.integers(0, 256, self.output.stop, np.uint8)
        self.image[self.tables.start : self.tables.stop] = _parameters(bits, tables // 8).view(np.uint8)

    # Instructions -----------------------------------------------------------------------------------------

    def prologue(self) -> list[Instruction]:
        """Fill every scratchpad, so that nothing reads what was never written."""
        cfg = self.cfg
        fill = []
        for buffer, depth in (
            (Buffer.INP, cfg.inp_depth * cfg.inp_pieces),
            (Buffer.WGT, cfg.wgt_depth),
            (Buffer.ACC, cfg.acc_depth * cfg.out_pieces),
            (Buffer.VIN, cfg.vin_depth * cfg.out_pieces),
            (Buffer.PAR, cfg.par_depth),
            (Buffer.LUT, cfg.lut_count),
            (Buffer.TAP, cfg.tap_depth),
        ):
            if buffer not in buffers(cfg):
                continue
            widen = buffer == Buffer.ACC and self.rng.random() < 0.5
            area = self.tables if buffer == Buffer.PAR else self.data
            size = element_bytes(cfg, buffer, widen)
            rows = 1
            while depth // rows * size > len(area) // 2:
                rows *= 2
            fields = dict(
                buffer=buffer, widen=widen, dram_addr=area.start, dram_y=0, x_size=depth // rows, y_size=rows, z_size=1,
                sram_x=1, sram_y=depth // rows % depth,
            )  # fmt: skip
            fill.append(Instruction(Opcode.LOAD, fields))
        copy = dict(
            a_source=ASource.ACC, destination=Destination.OUT, requantise=1, clip_lo=-128, clip_hi=127,
            **{f"extent_{loop}": 1 for loop in VECTOR_LOOPS}, a_x=1, dst_x=1,
        )  # fmt: skip
        copy["extent_x"] = min(cfg.out_depth, cfg.acc_depth)
        for start in range(0, cfg.out_depth, copy["extent_x"]):
            fill.append(Instruction(Opcode.VECTOR, copy | {"dst_base": start}))
        return fill

    def draw(self) -> Instruction:
        opcode = self.rng.choices(list(Opcode), (3, 3, 4, 3))[0]
        draw = {Opcode.LOAD: self.load, Opcode.GEMM: self.gemm, Opcode.VECTOR: self.vector, Opcode.STORE: self.store}
        return Instruction(opcode, draw[opcode]())

    def load(self) -> dict[str, int]:
        rng, cfg = self.rng, self.cfg
        buffer = rng.choice(buffers(cfg))
        widen = int(buffer == Buffer.ACC and rng.random() < 0.5)
        size = element_bytes(cfg, buffer, bool(widen))
        depth = {
            Buffer.INP: cfg.inp_depth * cfg.inp_pieces, Buffer.WGT: cfg.wgt_depth,
            Buffer.ACC: cfg.acc_depth * cfg.out_pieces, Buffer.VIN: cfg.vin_depth * cfg.out_pieces,
            Buffer.PAR: cfg.par_depth, Buffer.LUT: cfg.lut_count, Buffer.TAP: cfg.tap_depth,
        }[buffer]  # fmt: skip
        area = self.tables if buffer == Buffer.PAR else rng.choice((self.data, self.data, self.output))
        if self.rich and buffer != Buffer.PAR and rng.random() < 0.1:
            area = self.code  # instructions are bytes, too
        # A row of parameters starts at an entry of the table: only those have normalised multipliers.
        align = max(self.align, 8 * cfg.block_out) if buffer == Buffer.PAR else self.align
        pads = [rng.choice((0, 0, 0, 1, 2, 3)) for _ in range(4)]
        if self.rich and rng.random() < 0.2:
            pads[rng.randrange(4)] = rng.choice((6, 12, 20))
        while True:
            z, y, x = rng.choice((1, 1, 2, 3)), rng.randint(1, 4), rng.choice((1, 2, 3, 5, 8, 20))
            if self.rich and rng.random() < 0.2:
                z, y = rng.choice(((5, 1), (10, 1), (18, 1), (1, 10), (1, 18)))
            block = (z, pads[0] + y + pads[1], pads[2] + x + pads[3])
            if z * y * x * size <= 2048 and prod(block) <= 3 * depth:
                break
            pads = [pad // 2 for pad in pads]
        fields = self.dram(area, (z, y), x * size, align) | dict(
            x_size=x, y_size=y, z_size=z, buffer=buffer, widen=widen
        )
        fields |= self.address("sram", ("z", "y", "x"), block, depth)
        fields |= dict(pad_top=pads[0], pad_bottom=pads[1], pad_left=pads[2], pad_right=pads[3])
        # Padding of parameters must be a normalised multiplier, too.
        fields["pad_value"] = rng.randint(-128, -1) if buffer == Buffer.PAR else rng.choice((0, rng.randint(-128, 127)))
        return fields

    def store(self) -> dict[str, int]:
        rng, cfg = self.rng, self.cfg
        size = cfg.piece_bytes
        z, y, x = rng.choice((1, 1, 2)), rng.randint(1, 4), rng.choice((1, 2, 3, 7, 20, 40))
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

    def vector(self) -> dict[str, int]:
        rng, cfg = self.rng, self.cfg
        while True:
            extents = self.extents(5, 60)
            if rng.random() < 0.5:
                extents[3:] = [1, 1]
            destination = rng.choice(destinations(cfg))
            taps = int(cfg.taps > 0 and rng.random() < 0.4)
            a_source = ASource.VIN if taps else rng.choice(list(ASource))
            b_source = BSource.IMM if a_source == ASource.VIN else rng.choice(list(BSource))
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
        scale = (rng.randint(-15, 15),) if self.rich else ()
        low, high = sorted((rng.randint(-128, 127), rng.randint(-128, 127)))
        add_low, add_high = sorted((rng.randint(-128, 127), rng.randint(-128, 127)))
        return fields | dict(
            reduce_op=rng.choice(list(ReduceOp)),
            binary_op=BinaryOp.NONE if rescale_add else rng.choice(list(BinaryOp)),
            requantise=rng.randint(0, 1),
            lookup=rng.randint(0, 1),
            table=rng.randrange(cfg.lut_count),
            a_offset=rng.choice((0, rng.randint(-256, 255), *scale)),
            b_offset=rng.choice((0, rng.randint(-256, 255), *scale)),
            imm=rng.choice((0, rng.randint(-40, 40), rng.randint(-(1 << 31), (1 << 31) - 1))),
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
        """Base and strides; inside the buffer, the `after` entries that follow each as well, but for the share `wrap`.
        Now and then dense, now and then in place."""
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
        """dram_addr, dram_y and dram_z of rows of `width` bytes inside `area`."""
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


def _parameters(bits: np.random.Generator, count: int) -> NDArray[np.uint64]:
    """Entries of par: a bias, a multiplier with its top bit set (or 0), a shift that leaves results near int8."""
    bias = bits.integers(-(1 << 16), 1 << 16, count)
    bias = np.where(bits.random(count) < 0.1, bits.integers(-(1 << 31), 1 << 31, count), bias)
    multiplier = np.where(bits.random(count) < 0.05, 0, bits.integers(1 << 23, 1 << 24, count))
    shift = np.where(bits.random(count) < 0.1, bits.integers(0, 64, count), bits.integers(28, 38, count))
    return (bias & 0xFFFFFFFF).astype(np.uint64) | (multiplier << 32).astype(np.uint64) | shift.astype(np.uint64) << 56


def destinations(cfg: Config) -> list[Destination]:
    """Those that `cfg` has."""
    return [Destination.ACC, Destination.OUT] + [Destination.INP, Destination.VIN] * cfg.forward


def places(cfg: Config, destination: int) -> int:
    """How many addresses a VECTOR's destination has."""
    parts = cfg.block_in // cfg.block_out if destination == Destination.INP else 1
    depth: int = getattr(cfg, f"{Destination(destination).name.lower()}_depth")
    return parts * depth


def _a_reads(cfg: Config, f: dict[str, int]) -> NDArray[np.int64]:
    """Entries that a VECTOR reads as A in each iteration [n, y, x, r, s, taps]."""
    depth = cfg.acc_depth if f["a_source"] == ASource.ACC else cfg.vin_depth
    first = addresses(f, "a", VECTOR_LOOPS, depth)[..., None]
    return (first + np.arange(cfg.taps if f.get("taps") else 1)) % depth


def reads_own_result(cfg: Config, f: dict[str, int]) -> bool:
    """True where an iteration of a VECTOR reads an entry that an earlier one wrote."""
    source = Destination.ACC if f["a_source"] == ASource.ACC else Destination.VIN
    reads = [_a_reads(cfg, f)] if source == f["destination"] else []
    if f["destination"] == Destination.VIN and f["b_source"] == BSource.VIN:
        reads.append(addresses(f, "b", OUTER_LOOPS, cfg.vin_depth))
    written: set[int] = set()
    for outer, dst in np.ndenumerate(addresses(f, "dst", OUTER_LOOPS, places(cfg, f["destination"]))):
        if any(written & set(np.ravel(read[outer]).tolist()) for read in reads):
            return True
        written.add(int(dst))
    return False


# Tokens ---------------------------------------------------------------------------------------------------


def _mask(index: NDArray[np.int64]) -> int:
    """A set of small numbers as one integer, so that two sets meet where `a & b`."""
    bits = np.zeros(int(index.max()) + 1, np.uint8)
    bits[index.ravel()] = 1
    return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")


def touches(cfg: Config, instruction: Instruction) -> tuple[dict[str, int], dict[str, int]]:
    """What an instruction reads and what it writes: for each memory a set of entries (of bytes for DRAM)."""
    f = formats(cfg)[instruction.opcode].decode(encode(cfg, instruction.opcode, **instruction.fields))
    reads: dict[str, int] = {}
    writes: dict[str, int] = {}

    def note(to: dict[str, int], name: str, index: NDArray[np.int64]) -> None:
        to[name] = to.get(name, 0) | _mask(index)

    if instruction.opcode in (Opcode.LOAD, Opcode.STORE):
        load = instruction.opcode == Opcode.LOAD
        buffer = Buffer(f["buffer"]) if load else None
        size = element_bytes(cfg, buffer, bool(f["widen"])) if buffer is not None else cfg.piece_bytes
        rows = f["dram_addr"] + np.arange(f["z_size"])[:, None] * f["dram_z"] + np.arange(f["y_size"]) * f["dram_y"]
        note(reads if load else writes, "dram", rows[..., None] % (1 << 32) + np.arange(f["x_size"] * size))
        height, width = f["y_size"], f["x_size"]
        if load:
            height, width = height + f["pad_top"] + f["pad_bottom"], width + f["pad_left"] + f["pad_right"]
        f |= dict(extent_z=f["z_size"], extent_y=height, extent_x=width)
        name = buffer.name.lower() if buffer is not None else "out"
        pieces = {"inp": cfg.inp_pieces, "acc": cfg.out_pieces, "vin": cfg.out_pieces, "out": cfg.out_pieces}.get(
            name, 1
        )
        depth = {"lut": cfg.lut_count}.get(name) or getattr(cfg, f"{name}_depth")
        note(writes if load else reads, name, addresses(f, "sram", ("z", "y", "x"), depth * pieces) // pieces)
    elif instruction.opcode == Opcode.GEMM:
        note(reads, "inp", addresses(f, "inp", GEMM_LOOPS, cfg.inp_depth))
        note(reads, "wgt", addresses(f, "wgt", GEMM_LOOPS, cfg.wgt_depth))
        note(reads, "acc", addresses(f, "acc", OUTER_LOOPS, cfg.acc_depth))
        note(writes, "acc", addresses(f, "acc", OUTER_LOOPS, cfg.acc_depth))
    else:
        note(reads, "acc" if f["a_source"] == ASource.ACC else "vin", _a_reads(cfg, f))
        note(reads, "vin", addresses(f, "b", OUTER_LOOPS, cfg.vin_depth))
        note(reads, "par", addresses(f, "par", OUTER_LOOPS, cfg.par_depth))
        note(reads, "lut", np.array([f["table"]]))
        if cfg.taps:
            note(reads, "tap", addresses(f | {"tap_y": 0, "tap_x": 0}, "tap", VECTOR_LOOPS, cfg.tap_depth))
        depth = places(cfg, f["destination"])
        name = Destination(f["destination"]).name.lower()
        parts = depth // getattr(cfg, f"{name}_depth")
        note(writes, name, addresses(f, "dst", OUTER_LOOPS, depth) // parts)
    return reads, writes


def synchronise(cfg: Config, instructions: list[Instruction], more: random.Random | None = None) -> None:
    """Set `wait` and `post` so that whatever conflicts happens in the order of the list.

    The n-th wait of a unit for another one takes that one's n-th token, so the pairs (post, wait) of two units are
    kept increasing in both. No more tokens are under way than a semaphore can hold. more: draws tokens that nothing
    needs.
    """
    limit = (1 << cfg.token_bits) - 1
    sets = [touches(cfg, instruction) for instruction in instructions]
    edges: dict[tuple[Unit, Unit], list[list[int]]] = {(a, b): [] for a in Unit for b in Unit}
    for i, instruction in enumerate(instructions):
        for other in Unit:
            if other == instruction.unit:
                continue
            found = next(
                (
                    j
                    for j in reversed(range(i))
                    if instructions[j].unit == other
                    and (_conflict(sets[j], sets[i]) or (more is not None and more.random() < 0.05))
                ),
                None,
            )
            pairs = edges[other, instruction.unit]
            if found is None or (pairs and pairs[-1][0] >= found):
                continue
            if sum(wait > found for _, wait in pairs) >= limit:
                pairs[-1][0] = found
            else:
                pairs.append([found, i])
    for instruction in instructions:
        instruction.fields |= dict(wait=0, post=0)
    for (source, target), pairs in edges.items():
        for post, wait in pairs:
            instructions[post].fields["post"] |= 1 << target
            instructions[wait].fields["wait"] |= 1 << source


Sets = tuple[dict[str, int], dict[str, int]]


def _conflict(first: Sets, second: Sets) -> bool:
    reads, writes = first
    later_reads, later_writes = second
    return any(writes.get(name, 0) & mask for name, mask in (*later_reads.items(), *later_writes.items())) or any(
        reads.get(name, 0) & mask for name, mask in later_writes.items()
    )


def random_program(
    cfg: Config, seed: int, count: int = 30, align: int | None = None, wrap: float = 0.05, tokens: bool = True,
    rich: bool = False,
) -> TestProgram:  # fmt: skip
    """`count` random instructions after a prologue that fills the scratchpads; the same for the same arguments."""
    rng = random.Random(seed)
    generator = Generator(cfg, rng, count, align, wrap, rich)
    instructions = generator.prologue()
    instructions += [generator.draw() for _ in range(count)]
    # What the last instructions left in out becomes visible.
    flush = dict(dram_addr=generator.output.start, x_size=cfg.out_depth * cfg.out_pieces, y_size=1, z_size=1, sram_x=1)
    if cfg.out_depth * cfg.out_pieces * cfg.piece_bytes <= len(generator.output):
        instructions.append(Instruction(Opcode.STORE, flush))
    if tokens:
        synchronise(cfg, instructions, rng if rich else None)
    return TestProgram(cfg, instructions, generator.image, 0, generator.output)
