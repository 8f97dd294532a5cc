"""The vector unit: window reductions, element-wise operations, requantisation, tables and residual additions.

    stage  0   read A; with the last step of a reduction also B
           1   A + a_offset
           2   reduce, in a register over the loops r and s
           3   binary operation; read par
           4-11  requantise (without: only saturate)
           12  + zero_point, clip; read the table
           13  select
           14-18  rescale_add
           19  write

With taps there are three stages more, between the reads of vin and of acc; all others come that much later:

           0   read vin and tap
           1   registers behind the memories
           2   products
           3   their sum; read acc

An item is an output entry on its way; `valid` says where there are items. All of them move on together or none, but for
two cases: what comes before the read of acc waits for its port alone, and an item with a residual stays in front of
rescale_add for `residual_cycles`, while those behind it stand still and those before it go on.
"""

from __future__ import annotations

import operator
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

from amaranth import Cat, Const, Module, Mux, Shape, Signal, Value, signed, unsigned
from amaranth.hdl import ShapeLike
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from celosia.hw.config import Config
from celosia.hw.gemm_core.loops import Loops
from celosia.hw.gemm_core.lut import Tables
from celosia.hw.gemm_core.multiply import LOW_BITS, logic_product
from celosia.hw.gemm_core.requant import RESULT_BITS, STAGES, Requantise, param_layout
from celosia.hw.isa import (
    OUTER_LOOPS,
    TAP_LOOPS,
    VECTOR_LOOPS,
    ASource,
    BinaryOp,
    BSource,
    Destination,
    Opcode,
    ReduceOp,
    formats,
)
from celosia.hw.layout import INDEX_BITS, ReadPort, WritePort, load_port, unit_members, widths

TAP_STAGES, ADD_STAGES = 3, 5
_REGISTER = partial(Signal, reset_less=True)


class Stages(NamedTuple):
    """Numbers of the stages in which something begins."""

    acc: int
    offset: int
    reduce: int
    binary: int
    requantise: int
    clip: int
    select: int
    add: int
    write: int


def stages(cfg: Config) -> Stages:
    acc = TAP_STAGES if cfg.taps else 0
    clip = acc + 4 + STAGES
    return Stages(acc, acc + 1, acc + 2, acc + 3, acc + 4, clip, clip + 1, clip + 2, clip + 2 + ADD_STAGES)


class Taps(wiring.Component):
    """One lane of stages 1 to 3 with taps: the sum of entries, each times its tap; or the first entry.

    Parameters
    ----------
    taps : how many.
    lane : its number. Of the multipliers half are DSP blocks, in turn, for a device has few of them beside the array's.

    Members
    -------
    entries, taps : In      8 bits of each. Stage 1.
    weigh : In(1)           Stage 1: whether the taps count.
    enable : In(3)          Bit i lets stage 1 + i take an item.
    sum : Out(signed)       The item in stage 4.
    """

    def __init__(self, taps: int, lane: int) -> None:
        self._taps, self._lane = taps, lane
        super().__init__({
            "entries": In(8 * taps), "taps": In(8 * taps), "weigh": In(1), "enable": In(TAP_STAGES),
            "sum": Out(tap_sum(taps)),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        products = []
        for number in range(self._taps):
            entry, tap = (_REGISTER(signed(8), name=f"{name}{number}") for name in ("entry", "tap"))
            product = _REGISTER(signed(16), name=f"product{number}")
            times = logic_product if (self._lane + number) % 2 else operator.mul
            with m.If(self.enable[0]):
                m.d.sync += entry.eq(self.entries.word_select(number, 8))
                m.d.sync += tap.eq(Mux(self.weigh, self.taps.word_select(number, 8), int(number == 0)))
            with m.If(self.enable[1]):
                m.d.sync += product.eq(times(entry, tap))
            products.append(product)
        with m.If(self.enable[2]):
            m.d.sync += self.sum.eq(sum(products[1:], products[0]))
        return m


def tap_sum(taps: int) -> Shape:
    """What Taps gives; without taps an entry of vin as it is."""
    return signed(16 + (taps - 1).bit_length() if taps else 8)


class Combine(wiring.Component):
    """One lane of stages 1 to 3: v = reduction of (A + a_offset), combined with B + b_offset. All wraps at 32 bits.

    Stages are those of a Config without taps, here and below.

    Parameters
    ----------
    vin : shape of what comes from vin.

    Members
    -------
    acc, vin : In         What the scratchpads gave: A from one of them, or A from acc and B from vin.
    enable : In(3)        Bit i lets stage 1 + i take an item.
    last : In(2)          Stages 1 and 2: the item ends its reduction, so that its B is there.
    a_vin, a_offset       Stage 1.
    first, reduce_op, b_offset, b_vin, b_constant   Stage 2; b_constant is imm + b_offset.
    binary_op             Stage 3.
    residual : Out        B of the item in stage 2, without offset.
    v : Out               The item in stage 4.
    """

    def __init__(self, vin: Shape) -> None:
        super().__init__({
            "acc": In(signed(32)), "vin": In(vin), "enable": In(3), "last": In(2),
            "a_vin": In(1), "a_offset": In(signed(9)),
            "first": In(1), "reduce_op": In(ReduceOp), "b_offset": In(signed(9)),
            "binary_op": In(BinaryOp), "b_vin": In(1), "b_constant": In(signed(32)),
            "residual": Out(signed(8)), "v": Out(signed(32)),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        a, reduced = _REGISTER(signed(32)), _REGISTER(signed(32))
        residual, b = _REGISTER(signed(8)), _REGISTER(signed(32))
        m.d.comb += self.residual.eq(residual)

        with m.If(self.enable[0]):
            m.d.sync += a.eq(Mux(self.a_vin, self.vin, self.acc) + self.a_offset)
            with m.If(self.last[0]):
                m.d.sync += residual.eq(self.vin)

        with m.If(self.enable[1]):
            with m.If(self.first):
                m.d.sync += reduced.eq(a)
            with m.Elif(self.reduce_op == ReduceOp.ADD):
                m.d.sync += reduced.eq(reduced + a)
            with m.Elif((a < reduced) == (self.reduce_op == ReduceOp.MIN)):
                m.d.sync += reduced.eq(a)
            with m.If(self.last[1]):
                m.d.sync += b.eq(Mux(self.b_vin, residual + self.b_offset, self.b_constant))

        with m.If(self.enable[2]), m.Switch(self.binary_op):
            with m.Case(BinaryOp.ADD):
                m.d.sync += self.v.eq(reduced + b)
            with m.Case(BinaryOp.MAX):
                m.d.sync += self.v.eq(Mux(reduced < b, b, reduced))
            with m.Case(BinaryOp.MIN):
                m.d.sync += self.v.eq(Mux(reduced < b, reduced, b))
            with m.Case(BinaryOp.MUL):
                m.d.sync += self.v.eq(reduced[:16].as_signed() * b[:16].as_signed())
            with m.Case(BinaryOp.SHR):
                m.d.sync += self.v.eq(reduced >> b[:5])
            with m.Default():
                m.d.sync += self.v.eq(reduced)
        return m


class RescaleAdd(wiring.Component):
    """One lane of stages 14 to 18: (v * scale_v + residual * scale_b + scale_c) / 2^shift, ties to even, clipped; or v.

    Members
    -------
    v, residual : In      Stage 14.
    enable : In(5)        Bit i lets stage 14 + i take an item.
    add : In(5)           Whether the item there is to be computed.
    passed : In           Stage 18: the result for an item that is not.
    scale_v, scale_b      Stage 14; scale_c: stage 16; shift and ones, which is 2^shift - 1: stage 17.
    low, high             Stage 18.
    result : Out          The item in stage 19.
    """

    def __init__(self) -> None:
        super().__init__({
            "v": In(signed(8)), "residual": In(signed(8)), "enable": In(ADD_STAGES), "add": In(ADD_STAGES),
            "scale_v": In(signed(32)), "scale_b": In(signed(32)), "scale_c": In(signed(48)),
            "shift": In(6), "ones": In(63), "low": In(signed(8)), "high": In(signed(8)), "passed": In(signed(8)),
            "result": Out(signed(8)),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        # The sum is below 2^47 + 2 * 2^38 in magnitude. One more bit, so that there is a half behind the point.
        of_v, of_b = _REGISTER(signed(33)), _REGISTER(signed(33))
        low_v, low_b, by_low = (
            _REGISTER(signed(LOW_BITS + 8)),
            _REGISTER(signed(LOW_BITS + 8)),
            Signal(signed(LOW_BITS + 9)),
        )
        scaled = _REGISTER(signed(LOW_BITS + 34))
        total, shifted, floor = _REGISTER(signed(50)), Signal(signed(50)), Signal(signed(49))
        near, up, nearest = _REGISTER(signed(9)), _REGISTER(), Signal(signed(10))

        # A DSP block takes 25 bits of a scale, and the sum.
        with m.If(self.enable[0] & self.add[0]):
            m.d.sync += [
                of_v.eq(self.v * self.scale_v[LOW_BITS:].as_signed()),
                of_b.eq(self.residual * self.scale_b[LOW_BITS:].as_signed()),
                low_v.eq(logic_product(self.v, self.scale_v[:LOW_BITS])),
                low_b.eq(logic_product(self.residual, self.scale_b[:LOW_BITS])),
            ]
        m.d.comb += by_low.eq(low_v + low_b)
        with m.If(self.enable[1] & self.add[1]):
            m.d.sync += scaled.eq(Cat(by_low[:LOW_BITS], of_v + by_low[LOW_BITS:].as_signed() + of_b).as_signed())
        with m.If(self.enable[2] & self.add[2]):
            m.d.sync += total.eq((scaled + self.scale_c) << 1)

        m.d.comb += [shifted.eq(total >> self.shift), floor.eq(shifted >> 1)]
        with m.If(self.enable[3] & self.add[3]):
            m.d.sync += up.eq(shifted[0] & (shifted[1] | (total & self.ones).any()))
            with m.If(floor[8:].all() | ~floor[8:].any()):
                m.d.sync += near.eq(floor)
            with m.Else():
                m.d.sync += near.eq(Mux(floor < 0, -256, 255))

        m.d.comb += nearest.eq(near + up)
        with m.If(self.enable[4]):
            with m.If(~self.add[4]):
                m.d.sync += self.result.eq(self.passed)
            with m.Elif(nearest > self.high):
                m.d.sync += self.result.eq(self.high)
            with m.Elif(nearest < self.low):
                m.d.sync += self.result.eq(self.low)
            with m.Else():
                m.d.sync += self.result.eq(nearest)
        return m


class Bypass(wiring.Component):
    """A ring of words for what skips `stages` of the pipeline: pushed where it leaves, popped where it returns."""

    def __init__(self, shape: ShapeLike, stages: int) -> None:
        self._shape, self._bits = shape, (stages - 1).bit_length()
        super().__init__({"clear": In(1), "push": In(1), "i": In(shape), "pop": In(1), "o": Out(shape)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.ring = ring = Memory(shape=self._shape, depth=1 << self._bits, init=[])
        to, of = ring.write_port(), ring.read_port(domain="comb")
        head, tail = Signal(self._bits), Signal(self._bits)
        m.d.comb += [to.en.eq(self.push), to.addr.eq(head), to.data.eq(self.i), of.addr.eq(tail), self.o.eq(of.data)]
        with m.If(self.push):
            m.d.sync += head.eq(head + 1)
        with m.If(self.pop):
            m.d.sync += tail.eq(tail + 1)
        with m.If(self.clear):
            m.d.sync += [head.eq(0), tail.eq(0)]
        return m


class Items:
    """What is under way in the stages of the vector unit.

    valid[i]: an item is in stage i. which[i]: the set of constants that belongs to it.
    move[i]: what is in stage i goes on. It is one of back, middle and front, from the last stage to the first.
    write_blocks, par_blocks: an item waits for the port to which it writes, or for par.
    hold: an item with a residual is not through with rescale_add yet. From there on its parts follow each other;
    whole[i]: the one in stage i is the last of them. complete: the last one is in the last stage.
    """

    def __init__(self, m: Module, cfg: Config, constants: list[Any], current: Signal) -> None:
        self._m, self._stage, self._constants = m, stages(cfg), constants
        stage = self._stage
        numbers = range(stage.write + 1)
        self.back, self.middle, self.front = (Signal(name=name) for name in ("back", "middle", "front"))
        self.write_blocks, self.par_blocks, self.hold = (
            Signal(name=name) for name in ("write_blocks", "par_blocks", "hold")
        )
        m.d.comb += [
            self.back.eq(~self.write_blocks & ~self.par_blocks),
            self.middle.eq(self.back & ~self.hold),
        ]
        self.valid = [Signal(name=f"valid{i}") for i in numbers]
        self.which = [current, *(_REGISTER(name=f"which{i}") for i in numbers[1:])]
        parts = cfg.residual_cycles > 1
        self.whole = [_REGISTER(name=f"whole{i}") if parts and i > stage.add else Const(1) for i in numbers]
        self.complete = self.valid[-1] & self.whole[-1]
        self.move = [self.front if i < stage.acc else self.middle if i < stage.add else self.back for i in numbers]
        self.at = cache(self._at)
        self.int8 = cache(self._int8)
        self.add = cache(self._add)

    def _at(self, stage: int, name: str) -> Signal:
        """A constant of the instruction to which the item in `stage` belongs."""
        value = Signal.like(self._constants[0][name], name=f"{name}_{stage}")
        self._m.d.comb += value.eq(Mux(self.which[stage], self._constants[1][name], self._constants[0][name]))
        return value

    def _int8(self, stage: int) -> Signal:
        """An item whose result has 8 bits is in `stage`."""
        value = Signal(name=f"int8_{stage}")
        self._m.d.comb += value.eq(self.valid[stage] & ~self.at(stage, "raw"))
        return value

    def _add(self, stage: int) -> Signal:
        """An item with a residual is in `stage`."""
        value = Signal(name=f"add{stage}")
        self._m.d.comb += value.eq(self.int8(stage) & self.at(stage, "rescale_add"))
        return value

    def enable(self, first: int, end: int) -> Value:
        """A bit for each of these stages: an item leaves it."""
        return Cat(self.valid[i] & self.move[i] for i in range(first, end))

    def enable_int8(self, first: int, end: int) -> Value:
        return Cat(self.int8(i) & self.move[i] for i in range(first, end))

    def carry(self, source: Any, name: str, to: int) -> list[Any]:
        """`source`, which belongs to the item in stage 0, in each stage up to `to`."""
        values = [source]
        for i in range(to):
            values.append(_REGISTER(source.shape(), name=f"{name}{i + 1}"))
            with self._m.If(self.valid[i] & self.move[i]):
                self._m.d.sync += values[-1].eq(values[-2])
        return values

    def advance(self, leaving: dict[int, Value]) -> None:
        """What moves. leaving: whether the item of a stage leaves it, where more than `valid` and `move` are needed."""
        m = self._m
        for i in range(self._stage.write):
            with m.If(self.move[i]):
                m.d.sync += self.valid[i + 1].eq(leaving.get(i, self.valid[i]))
                if isinstance(self.whole[i + 1], Signal):
                    m.d.sync += self.whole[i + 1].eq(
                        self.whole[i] & ~self.hold if i == self._stage.add else self.whole[i]
                    )
                with m.If(self.valid[i]):
                    m.d.sync += self.which[i + 1].eq(self.which[i])

    def drop(self) -> None:
        self._m.d.sync += [valid.eq(0) for valid in self.valid[1:]]


# Fields that hold during an instruction and are used as they are.
_COPIED = (
    "post", "reduce_op", "binary_op", "requantise", "lookup", "table", "rescale_add", "a_offset", "b_offset",
    "clip_hi", "scale_v", "scale_b", "scale_c", "scale_shift", "add_hi",
)  # fmt: skip


class Vector(wiring.Component):
    """Executes VECTOR: one entry of A a cycle, across instructions as well.

    The constants of two instructions are kept, so that one can start while the one before is still in the pipeline;
    only after an instruction that writes what VECTOR reads, ACC or VIN, does the next one wait until that is done.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    instr, done, error, active, held, quiet, halt    see `unit_members`; there are no errors.
    acc_read, acc_write, vin, par, out               scratchpad ports. With taps a read of vin gives as many entries.
    lut : In(WritePort)                              through which LOAD writes the tables.
    tap                                              where the Config has taps.
    inp_write, vin_write                             where it has `forward`. Addresses of inp count parts of the size of
                                                     an entry of vin.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg, self._stage = cfg, stages(cfg)
        width = widths(cfg)
        members = {
            **unit_members(cfg, Opcode.VECTOR),
            "acc_read": Out(ReadPort(cfg.acc_bits, width["acc"])),
            "acc_write": Out(WritePort(cfg.acc_bits, width["acc"], 32)),
            "vin": Out(ReadPort(cfg.vin_bits, max(1, cfg.taps) * width["vin"])),
            "par": Out(ReadPort(cfg.par_bits, width["par"])),
            "out": Out(WritePort(cfg.out_bits, width["out"], width["out"])),
            "lut": In(load_port(cfg, "lut")),
        }
        if cfg.taps:
            members["tap"] = Out(ReadPort(cfg.tap_bits, width["tap"]))
        if cfg.forward:
            members["inp_write"] = Out(WritePort(cfg.inp_part_bits, width["out"], width["out"]))
            members["vin_write"] = Out(WritePort(cfg.vin_bits, width["vin"], width["vin"]))
        super().__init__(members)
        self._targets = {Destination.ACC: self.acc_write, Destination.OUT: self.out}
        if cfg.forward:
            self._targets |= {Destination.INP: self.inp_write, Destination.VIN: self.vin_write}
        shapes = {field.name: field for field in formats(cfg)[Opcode.VECTOR].fields}
        self._constants = data.StructLayout(
            {name: (signed if shapes[name].signed else unsigned)(shapes[name].width) for name in _COPIED}
            | {"index": INDEX_BITS, "a_vin": 1, "b_vin": 1, "weigh": 1, "raw": 1, "to": len(self._targets)}
            | {
                "scale_ones": 63,
                "b_constant": signed(32),
                "zero_point": signed(8),
                "clip_lo": signed(8),
                "add_lo": signed(8),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        cfg, stage = self._cfg, self._stage
        current, finish = Signal(), Signal()
        constants = [_REGISTER(self._constants, name=f"constants{i}") for i in range(2)]
        items = Items(m, cfg, constants, current)
        step = self._instructions(m, constants, current, finish)

        read, issue = self._read(m, items, step)
        first = items.carry(step.payload.first, "first", stage.reduce)
        last = items.carry(step.payload.last, "last", stage.reduce)
        reduced = items.valid[stage.reduce] & last[stage.reduce]
        items.advance({0: read, stage.acc: issue, stage.reduce: reduced})

        combined = self._combine(m, items, first, last)
        self._read_par(m, items, items.carry(step.payload.par, "par_addr", stage.binary)[-1])
        selected = self._look_up(m, items, self._requantise(m, items, combined))

        # What skips stages: the residual, v where it is written as it is, and the place to which it is written.
        residual = self._ring(
            m, "residuals", stage.add - stage.reduce, Cat(unit.residual for unit in combined),
            reduced & items.at(stage.reduce, "rescale_add") & items.middle, items.add(stage.add) & items.middle,
        )  # fmt: skip
        raw = self._ring(
            m, "raw", stage.write - stage.requantise, Cat(unit.v for unit in combined),
            items.valid[stage.requantise] & items.at(stage.requantise, "raw") & items.middle,
            items.valid[stage.write] & items.at(stage.write, "raw") & items.back,
        )  # fmt: skip
        place = self._ring(
            m, "places", stage.write, Cat(step.payload.end, step.payload.dst), read & step.payload.last,
            items.complete & items.back,
        )  # fmt: skip
        self._write(m, items, raw, self._add(m, items, selected, residual), place[1:])
        m.d.comb += [
            finish.eq(items.complete & items.back & place[0]),
            self.active.eq(read | (items.hold & items.back)),
            self.held.eq((items.valid[0] & ~read & ~items.hold) | ~items.back),
        ]
        self._finish(m, items, finish)
        return m

    def _instructions(self, m: Module, constants: list[Any], current: Signal, finish: Signal) -> Any:
        """Accepts instructions, at most two of them under way; returns the steps of their loops."""
        cfg, fields = self._cfg, self.instr.payload.fields
        operands = {
            "a": (len(fields.a_base), VECTOR_LOOPS),
            "b": (cfg.vin_bits, OUTER_LOOPS),
            "par": (cfg.par_bits, OUTER_LOOPS),
            "dst": (len(fields.dst_base), OUTER_LOOPS),
        } | ({"tap": (cfg.tap_bits, TAP_LOOPS)} if cfg.taps else {})
        m.submodules.loops = loops = Loops(VECTOR_LOOPS, operands, reduction=("r", "s"))
        under_way, may_start, accept = Signal(2), Signal(), Signal()
        # Whether the last instruction writes, and this one reads, acc and vin.
        feeds, reads = Signal(2), Signal(2)
        to_acc, to_vin = (fields.destination == to for to in (Destination.ACC, Destination.VIN))
        of_vin = fields.a_source == ASource.VIN
        m.d.comb += [
            reads.eq(Cat(~of_vin, of_vin | (fields.b_source == BSource.VIN))),
            may_start.eq(~self.halt & ~under_way[1] & ((under_way == 0) | ~(feeds & reads).any())),
            *loops.load(fields),
            loops.instr.valid.eq(self.instr.valid & may_start),
            loops.halt.eq(self.halt),
            self.instr.ready.eq(loops.instr.ready & may_start),
            accept.eq(self.instr.valid & self.instr.ready),
            self.quiet.eq((under_way == 0) & ~self.done.valid),
        ]
        with m.If(accept):
            m.d.sync += [current.eq(~current), feeds.eq(Cat(to_acc, to_vin))]
            for i, held in enumerate(constants):
                with m.If(current != i):
                    m.d.sync += [held[name].eq(fields[name]) for name in _COPIED]
                    m.d.sync += self._derive(held)
        with m.If(accept != finish):
            m.d.sync += under_way.eq(under_way + accept - finish)
        with m.If(self.halt):
            m.d.sync += under_way.eq(0)
        return loops.step

    def _finish(self, m: Module, items: Items, finish: Value) -> None:
        last = self._stage.write
        m.d.sync += self.done.valid.eq(finish)
        with m.If(finish):
            m.d.sync += [
                self.done.payload.post.eq(items.at(last, "post")),
                self.done.payload.index.eq(items.at(last, "index")),
            ]
        with m.If(self.halt):
            m.d.sync += self.done.valid.eq(0)
            items.drop()

    def _derive(self, held: data.View[data.StructLayout]) -> list[object]:
        """The constants that are not copies of a field."""
        fields = self.instr.payload.fields
        narrow = fields.requantise | fields.lookup | fields.rescale_add | (fields.destination != Destination.ACC)
        return [
            held.index.eq(self.instr.payload.index),
            held.a_vin.eq(fields.a_source == ASource.VIN),
            held.b_vin.eq(fields.b_source == BSource.VIN),
            held.weigh.eq(fields.taps),
            held.to.eq(1 << fields.destination),
            held.raw.eq(~narrow),
            held.scale_ones.eq((1 << fields.scale_shift) - 1),
            held.b_constant.eq(fields.imm + fields.b_offset),
            held.zero_point.eq(Mux(fields.requantise, fields.zero_point, 0)),
            # Where the limits cross, the upper one holds.
            held.clip_lo.eq(Mux(fields.clip_lo > fields.clip_hi, fields.clip_hi, fields.clip_lo)),
            held.add_lo.eq(Mux(fields.add_lo > fields.add_hi, fields.add_hi, fields.add_lo)),
        ]

    def _read(self, m: Module, items: Items, step: Any) -> tuple[Signal, Signal]:
        """Asks for A, B and taps. Returns whether an item leaves stage 0, and the one that reads acc.

        Without taps they are the same, and each port asks where the other one is ready; only one of them is used for A.
        """
        stage, at, valid, payload = self._stage, items.at, items.valid, step.payload
        read, issue, reads_vin, reads_acc, vin_ok, acc_ok = (
            Signal(name=name) for name in ("read", "issue", "reads_vin", "reads_acc", "vin_ok", "acc_ok")
        )
        m.d.comb += [
            valid[0].eq(step.valid),
            step.ready.eq(read),
            reads_vin.eq(at(0, "a_vin") | (at(0, "b_vin") & payload.last)),
            reads_acc.eq(~at(stage.acc, "a_vin")),
            vin_ok.eq(~reads_vin | self.vin.ready),
            acc_ok.eq(~reads_acc | self.acc_read.ready),
            self.vin.addr.eq(Mux(at(0, "a_vin"), payload.a, payload.b)),
            self.acc_read.addr.eq(items.carry(payload.a, "acc_addr", stage.acc)[-1]),
        ]
        asks_vin, asks_acc = valid[0] & items.move[0], valid[stage.acc] & items.middle
        if not self._cfg.taps:
            m.d.comb += [
                self.vin.en.eq(asks_vin & reads_vin & acc_ok),
                self.acc_read.en.eq(asks_acc & reads_acc & vin_ok),
                read.eq(asks_vin & vin_ok & acc_ok),
                issue.eq(read),
            ]
            return read, issue
        weighs, tap_ok = at(0, "weigh"), Signal()
        m.d.comb += [
            tap_ok.eq(~weighs | self.tap.ready),
            self.vin.en.eq(asks_vin & reads_vin & tap_ok),
            self.tap.en.eq(asks_vin & weighs & vin_ok),
            self.tap.addr.eq(payload.tap),
            read.eq(asks_vin & vin_ok & tap_ok),
            items.front.eq(items.middle & (acc_ok | ~valid[stage.acc])),
            self.acc_read.en.eq(asks_acc & reads_acc),
            issue.eq(asks_acc & acc_ok),
        ]
        return read, issue

    def _channel(self, lane: int) -> int:
        piece, place = divmod(lane, self._cfg.piece_bytes)
        return piece * self._cfg.group + place % self._cfg.group

    def _from_vin(self, m: Module, items: Items) -> list[Value]:
        """For each lane what vin gives to the stage that adds a_offset."""
        cfg = self._cfg
        if not cfg.taps:
            return [self.vin.data.word_select(lane, 8).as_signed() for lane in range(cfg.lanes)]
        sums = []
        for lane in range(cfg.lanes):
            m.submodules[f"taps{lane}"] = taps = Taps(cfg.taps, lane)
            bytes_ = range(cfg.taps)
            m.d.comb += [
                taps.entries.eq(Cat(self.vin.data.word_select(i * cfg.lanes + lane, 8) for i in bytes_)),
                taps.taps.eq(
                    Cat(self.tap.data.word_select(i * cfg.block_out + self._channel(lane), 8) for i in bytes_)
                ),
                taps.weigh.eq(items.at(1, "weigh")),
                taps.enable.eq(items.enable(1, 1 + TAP_STAGES)),
            ]
            sums.append(taps.sum)
        return sums

    def _combine(self, m: Module, items: Items, first: list[Any], last: list[Any]) -> list[Combine]:
        stage, at = self._stage, items.at
        combined = []
        for lane, vin in enumerate(self._from_vin(m, items)):
            m.submodules[f"combine{lane}"] = unit = Combine(tap_sum(self._cfg.taps))
            m.d.comb += [
                unit.acc.eq(self.acc_read.data.word_select(lane, 32)),
                unit.vin.eq(vin),
                unit.enable.eq(items.enable(stage.offset, stage.requantise)),
                unit.last.eq(Cat(last[stage.offset : stage.binary])),
                unit.a_vin.eq(at(stage.offset, "a_vin")),
                unit.a_offset.eq(at(stage.offset, "a_offset")),
                unit.first.eq(first[stage.reduce]),
                unit.reduce_op.eq(at(stage.reduce, "reduce_op")),
                unit.b_offset.eq(at(stage.reduce, "b_offset")),
                unit.b_vin.eq(at(stage.reduce, "b_vin")),
                unit.b_constant.eq(at(stage.reduce, "b_constant")),
                unit.binary_op.eq(at(stage.binary, "binary_op")),
            ]
            combined.append(unit)
        return combined

    def _read_par(self, m: Module, items: Items, address: Value) -> None:
        reads = Signal(name="reads_par")
        m.d.comb += [
            reads.eq(items.valid[self._stage.binary] & items.at(self._stage.binary, "requantise")),
            items.par_blocks.eq(reads & ~self.par.ready),
            self.par.en.eq(reads & ~items.write_blocks & ~items.hold),
            self.par.addr.eq(address),
        ]

    def _requantise(self, m: Module, items: Items, combined: list[Combine]) -> list[Value]:
        """The results of the lanes in the stage that clips."""
        first, end = self._stage.requantise, self._stage.clip
        results = []
        for lane, unit in enumerate(combined):
            m.submodules[f"requantise{lane}"] = requantise = Requantise()
            m.d.comb += [
                requantise.enable.eq(items.enable_int8(first, end)),
                requantise.bypass.eq(~items.at(first, "requantise")),
                requantise.v.eq(unit.v),
                requantise.param.eq(self.par.data.word_select(self._channel(lane), param_layout.size)),
            ]
            results.append(requantise.result)
        return results

    def _look_up(self, m: Module, items: Items, results: list[Value]) -> Value:
        """Adds the zero point, clips, and looks up. The lanes, 8 bits each, in front of rescale_add."""
        clip, select = self._stage.clip, self._stage.select
        low, high = items.at(clip, "clip_lo"), items.at(clip, "clip_hi")
        m.submodules.tables = tables = Tables(self._cfg)
        wiring.connect(m, wiring.flipped(self.lut), tables.load)
        m.d.comb += [
            tables.enable.eq(items.int8(clip) & items.at(clip, "lookup") & items.middle),
            tables.table.eq(items.at(clip, "table")),
        ]
        selected = [_REGISTER(8, name=f"selected{lane}") for lane in range(len(results))]
        for lane, result in enumerate(results):
            moved, kept = Signal(signed(RESULT_BITS + 1), name=f"moved{lane}"), _REGISTER(8, name=f"kept{lane}")
            clipped = Signal(signed(8), name=f"clipped{lane}")
            m.d.comb += [
                moved.eq(result + items.at(clip, "zero_point")),
                clipped.eq(Mux(moved > high, high, Mux(moved < low, low, moved))),
                tables.index.word_select(lane, 8).eq(Cat(clipped[:7], ~clipped[7])),
            ]
            with m.If(items.int8(clip) & items.middle):
                m.d.sync += kept.eq(clipped)
            with m.If(items.int8(select) & items.middle):
                m.d.sync += selected[lane].eq(Mux(items.at(select, "lookup"), tables.value.word_select(lane, 8), kept))
        return Cat(selected)

    def _add(self, m: Module, items: Items, v: Value, residual: Value) -> Value:
        """rescale_add in as many cycles as the Config says, the lowest lanes first. The lanes in the last stage."""
        cfg, stage, at = self._cfg, self._stage, items.at
        units = cfg.lanes // cfg.residual_cycles
        part = Signal(range(cfg.residual_cycles))
        adds = items.add(stage.add)
        m.d.comb += items.hold.eq(adds & (part != cfg.residual_cycles - 1))
        with m.If(self.halt):
            m.d.sync += part.eq(0)
        with m.Elif(adds & items.back):
            m.d.sync += part.eq(part + 1)

        passed = [v, *(_REGISTER(8 * cfg.lanes, name=f"passed{i}") for i in range(ADD_STAGES - 1))]
        for i, (before, after) in enumerate(pairwise(passed), stage.add):
            with m.If(items.int8(i) & ~items.add(i) & items.back):
                m.d.sync += after.eq(before)

        results = []
        for number in range(units):
            m.submodules[f"add{number}"] = unit = RescaleAdd()
            m.d.comb += [
                unit.v.eq(v.word_select(part, 8 * units).word_select(number, 8)),
                unit.residual.eq(residual.word_select(part, 8 * units).word_select(number, 8)),
                unit.passed.eq(passed[-1].word_select(cfg.lanes - units + number, 8)),
                unit.enable.eq(items.enable_int8(stage.add, stage.write)),
                unit.add.eq(Cat(items.add(i) for i in range(stage.add, stage.write))),
                unit.scale_v.eq(at(stage.add, "scale_v")),
                unit.scale_b.eq(at(stage.add, "scale_b")),
                unit.scale_c.eq(at(stage.add + 2, "scale_c")),
                unit.shift.eq(at(stage.add + 3, "scale_shift")),
                unit.ones.eq(at(stage.add + 3, "scale_ones")),
                unit.low.eq(at(stage.add + 4, "add_lo")),
                unit.high.eq(at(stage.add + 4, "add_hi")),
            ]
            results.append(unit.result)

        # The lanes of the parts before the last one wait here for it.
        waiting = _REGISTER(8 * (cfg.lanes - units))
        last = stage.write
        with m.If(items.back & items.valid[last] & ~items.whole[last]):
            m.d.sync += waiting.eq(Cat(waiting, *results)[8 * units :])
        with m.Elif(items.back & items.int8(last - 1) & ~items.add(last - 1)):
            m.d.sync += waiting.eq(passed[-1])
        return Cat(waiting, *results)

    def _write(self, m: Module, items: Items, raw: Value, written: Value, address: Value) -> None:
        to = items.at(self._stage.write, "to")
        ready = Cat(port.ready for port in self._targets.values())
        m.d.comb += items.write_blocks.eq(items.complete & ~(to & ready).any())
        for destination, port in self._targets.items():
            m.d.comb += [
                port.en.eq(items.complete & to[destination] & ~items.par_blocks),
                port.addr.eq(address),
                port.mask.eq(-1),
                port.data.eq(written),
            ]
        lanes = [written.word_select(lane, 8) for lane in range(self._cfg.lanes)]
        wide = Cat(Cat(lane, lane[7].replicate(24)) for lane in lanes)
        m.d.comb += self.acc_write.data.eq(Mux(items.at(self._stage.write, "raw"), raw, wide))

    def _ring(self, m: Module, name: str, stages: int, value: Value, push: Value, pop: Value) -> Value:
        """`value` for what leaves and returns `stages` later."""
        m.submodules[name] = ring = Bypass(len(value), stages)
        m.d.comb += [ring.clear.eq(self.halt), ring.push.eq(push), ring.i.eq(value), ring.pop.eq(pop)]
        return ring.o
