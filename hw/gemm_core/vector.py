"""The vector unit: window reductions, element-wise operations, requantisation, tables and residual additions.

    read          a step of the loops. With taps: read vin and tap
    tap, product  only with taps: registers behind the memories; products
    acc           with taps: their sum. Read A and, with the last step of a reduction, B
    offset        A + a_offset
    reduce        reduce, in a register over the loops r and s
    binary        binary operation; read par
    requantise    eight stages (without: only saturate)
    clip          + zero_point, clip; read the table
    select        the table's value, or without
    add           six stages of rescale_add
    write

An item is an output entry on its way; a Stage knows whether it holds one. All of them move on together or none, but for
two cases: what comes before the read of acc waits for its port alone, and an item with a residual stays in front of
rescale_add for `residual_cycles`, while those behind it stand still and those before it go on.

Whether they move is known a cycle ahead, and so is what an item needs of its instruction: both are registers, for they
lead to every register of a stage. So GEMM says a cycle ahead which bank of acc it is going to use.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from amaranth import Cat, Const, Module, Mux, Shape, Signal, Value, signed, unsigned
from amaranth.hdl import ShapeLike
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from celosia.hw.config import Config
from celosia.hw.gemm_core.loops import Loops
from celosia.hw.gemm_core.lut import Tables
from celosia.hw.gemm_core.multiply import LOW_BITS, logic_product
from celosia.hw.gemm_core.requant import RESULT_BITS, Requantise, param_layout
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
from celosia.hw.layout import INDEX_BITS, claim_layout, part_port, read_port, unit_members, write_port
from celosia.hw.pipeline import ADD_STAGES, TAP_STAGES, ring_places, vector_stages
from celosia.hw.scratchpads import scratchpads

_REGISTER = partial(Signal, reset_less=True)


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
    """One lane of rescale_add: (v * scale_v + residual * scale_b + scale_c) / 2^shift, ties to even, clipped; or v.

    Members
    -------
    v, residual : In      Stage 0, which is `add`.
    enable : In           Bit i lets stage i take an item.
    add : In              Whether the item there is to be computed.
    passed : In           Stage 5: the result for an item that is not.
    scale_v, scale_b      Stage 0; scale_c: stage 2; bytes and bits, by which to shift: stages 3 and 4.
    low, high             Stage 5.
    result : Out          The item behind it.
    """

    def __init__(self) -> None:
        super().__init__({
            "v": In(signed(8)), "residual": In(signed(8)), "enable": In(ADD_STAGES), "add": In(ADD_STAGES),
            "scale_v": In(signed(32)), "scale_b": In(signed(32)), "scale_c": In(signed(48)),
            "bytes": In(3), "bits": In(3), "low": In(signed(8)), "high": In(signed(8)), "passed": In(signed(8)),
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
        total, moved, lost = _REGISTER(signed(50)), _REGISTER(signed(50)), _REGISTER()
        shifted, floor = Signal(signed(50)), Signal(signed(49))
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

        with m.If(self.enable[3] & self.add[3]):
            m.d.sync += moved.eq(total >> (self.bytes << 3))
            with m.Switch(self.bytes):
                for number in range(8):
                    with m.Case(number):
                        m.d.sync += lost.eq(total[: 8 * number].any())

        below = (1 << self.bits) - 1
        m.d.comb += [shifted.eq(moved >> self.bits), floor.eq(shifted >> 1)]
        with m.If(self.enable[4] & self.add[4]):
            m.d.sync += up.eq(shifted[0] & (shifted[1] | lost | (moved[:7] & below).any()))
            with m.If(floor[8:].all() | ~floor[8:].any()):
                m.d.sync += near.eq(floor)
            with m.Else():
                m.d.sync += near.eq(Mux(floor < 0, -256, 255))

        m.d.comb += nearest.eq(near + up)
        with m.If(self.enable[5]):
            with m.If(~self.add[5]):
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
        self._shape, self._places = shape, ring_places(stages)
        super().__init__({"clear": In(1), "push": In(1), "i": In(shape), "pop": In(1), "o": Out(shape)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.ring = ring = Memory(shape=self._shape, depth=self._places, init=[])
        to, of = ring.write_port(), ring.read_port(domain="comb")
        head, tail = Signal(range(self._places)), Signal(range(self._places))
        m.d.comb += [to.en.eq(self.push), to.addr.eq(head), to.data.eq(self.i), of.addr.eq(tail), self.o.eq(of.data)]
        with m.If(self.push):
            m.d.sync += head.eq(head + 1)
        with m.If(self.pop):
            m.d.sync += tail.eq(tail + 1)
        with m.If(self.clear):
            m.d.sync += [head.eq(0), tail.eq(0)]
        return m


class Stage:
    """A stage of the pipeline.

    valid: an item is here. which: the set of constants that belongs to it. whole: of an item in several parts it is the
    last one. move: what is here goes on. leaves: an item goes to the next stage; of some stages not all do.
    """

    def __init__(self, number: int, move: Signal, constants: Sequence[Any], before: Stage | None) -> None:
        self._number, self._constants, self.before = number, constants, before
        self.move = move
        self.valid, self.which = Signal(name=f"valid{number}"), _REGISTER(name=f"which{number}")
        self.whole: Value = Const(1)
        self.leaves: Value = self.valid & move
        self.registered: dict[str, Signal] = {}

    def at(self, name: str) -> Signal:
        """A constant of the instruction to which the item belongs: a register that comes with it."""
        if name not in self.registered:
            self.registered[name] = _REGISTER(self._constants[0][name].shape(), name=f"{name}_{self._number}")
        return self.registered[name]

    def take(self, m: Module) -> None:
        """Items come from the stage before, and what `at` was asked for with them."""
        before, (even, odd) = self.before, self._constants
        assert before is not None
        with m.If(before.move):
            m.d.sync += self.valid.eq(before.leaves)
        with m.If(before.enable):
            m.d.sync += self.which.eq(before.which)
            m.d.sync += [value.eq(Mux(before.which, odd[name], even[name])) for name, value in self.registered.items()]

    @property
    def enable(self) -> Value:
        """What the item leaves behind is kept for the next stage."""
        return self.valid & self.move

    @property
    def int8(self) -> Value:
        """The result of the item has 8 bits."""
        return self.valid & ~self.at("raw")

    @property
    def adds(self) -> Value:
        """The item has a residual."""
        return self.int8 & self.at("rescale_add")


class Items:
    """What is under way in the stages of the vector unit.

    back, middle, front: the stages from rescale_add on move, those from the read of acc on, and those in front of it.
    They are registers: back is 0 where the port of acc to which an item writes is GEMM's, middle also while an item
    with a residual is not through with rescale_add (hold), front also where the port from which one reads is GEMM's.
    From rescale_add on the parts of an item follow each other. complete: the last one is in the last stage.
    writes: the destination to which it goes in this cycle, by the bits of `to`; registers, too.
    """

    def __init__(self, m: Module, cfg: Config, constants: Sequence[Any], now: Any, current: Signal) -> None:
        self._m, self._cfg = m, cfg
        self.back, self.middle, self.front = (Signal(name=name, init=1) for name in ("back", "middle", "front"))
        self.hold = Signal(name="hold")
        names = vector_stages(cfg)
        self.all: list[Stage] = []
        for number in names.values():
            move = self.front if number < names["acc"] else self.middle if number < names["add"] else self.back
            stage = Stage(number, move, constants, self.all[-1] if self.all else None)
            if cfg.residual_cycles > 1 and number > names["add"]:
                stage.whole = Signal(name=f"whole{number}")
            self.all.append(stage)
        self._named = {name: self.all[number] for name, number in names.items()}
        first = self["read"]
        m.d.comb += first.which.eq(current)
        first.registered = {name: now[name] for name, _ in now.shape()}
        self["acc"].leaves = self["acc"].valid & self.front
        self.complete = self["write"].valid & self["write"].whole
        self.writes = Signal(len(now.to), name="writes")

    def __getitem__(self, name: str) -> Stage:
        return self._named[name]

    def between(self, first: str, end: str) -> list[Stage]:
        """The stages from `first` to the one in front of `end`."""
        return self.all[self.all.index(self[first]) : self.all.index(self[end])]

    def carry(self, source: Any, name: str, to: str) -> dict[str, Any]:
        """`source`, which belongs to the item in the first stage, in each stage up to `to`, by the stage's name."""
        values, way = [source], self.between("read", to)
        for stage in way:
            values.append(_REGISTER(source.shape(), name=f"{name}{len(values)}"))
            with self._m.If(stage.enable):
                self._m.d.sync += values[-1].eq(values[-2])
        names = {id(stage): name for name, stage in self._named.items()}
        return {names[id(stage)]: value for stage, value in zip([*way, self[to]], values)}

    def advance(self, halt: Value) -> None:
        """Items go from stage to stage; nothing is left after `halt`. To be called last."""
        m = self._m
        for before, after in pairwise(self.all):
            after.take(m)
            if isinstance(after.whole, Signal):
                with m.If(before.move):
                    m.d.sync += after.whole.eq(before.whole & ~self.hold if before is self["add"] else before.whole)
        with m.If(halt):
            m.d.sync += [stage.valid.eq(0) for stage in self.all[1:]]

    def stall(self, claims: Any, halt: Value, read_bank: Mapping[str, Value], write_bank: Mapping[str, Value]) -> Value:
        """Finds a cycle ahead what holds up whom. claims: which ports GEMM takes in the next cycle. read_bank,
        write_bank: of the items in the stages acc and write ("here"), and in those before them ("before"). Returns the
        number of the part of the item in front of rescale_add."""
        m, acc, write, add = self._m, self["acc"], self["write"], self["add"]
        assert acc.before is not None and write.before is not None and add.before is not None

        def reads(stage: Stage, bank: Value) -> Value:
            return stage.valid & ~stage.at("a_vin") & claims.read.bit_select(bank, 1)

        def writes(stage: Stage) -> Value:
            return stage.valid & stage.whole & stage.at("to")[Destination.ACC]

        claimed = [claims.write.bit_select(write_bank[where], 1) for where in ("before", "here")]
        read_blocks, write_blocks, holds = Signal(), Signal(), Signal()
        m.d.comb += [
            read_blocks.eq(Mux(self.front, reads(acc.before, read_bank["before"]), reads(acc, read_bank["here"]))),
            write_blocks.eq(Mux(self.back, writes(write.before) & claimed[0], writes(write) & claimed[1])),
        ]
        m.d.sync += [
            self.back.eq(halt | ~write_blocks),
            self.middle.eq(halt | ~(write_blocks | holds)),
            self.front.eq(halt | ~(write_blocks | holds | read_blocks)),
            self.hold.eq(holds & ~halt),
        ]
        # An item that could not be written to acc is still there; all others are new in the last stage.
        comes = write.before.valid & write.before.whole
        for to in range(len(self.writes)):
            goes = self.back & comes & write.before.at("to")[to]
            if to == Destination.ACC:
                goes = Mux(self.back, writes(write.before) & ~claimed[0], writes(write) & ~claimed[1])
            m.d.sync += self.writes[to].eq(goes & ~halt)

        parts = self._cfg.residual_cycles
        part = Signal(range(parts))
        if parts > 1:
            with m.If(self.middle):
                m.d.comb += holds.eq(add.before.adds)
                m.d.sync += part.eq(0)
            with m.Elif(self.back):
                m.d.comb += holds.eq(self.hold & (part != parts - 2))
                m.d.sync += part.eq(part + self.hold)
            with m.Else():
                m.d.comb += holds.eq(self.hold)
            with m.If(halt):
                m.d.sync += part.eq(0)
        return part


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
    acc_read, acc_write, vin, par, out               scratchpad ports, which must be ready, those of acc unless claimed.
                                                     With taps a read of vin gives as many entries.
    claims : In(claim_layout)                        the ports of acc that GEMM takes in the next cycle.
    lut : In(WritePort)                              through which LOAD writes the tables.
    tap                                              where the Config has taps.
    inp_write, vin_write                             where it has `forward`; must be ready. Addresses of inp count parts
                                                     of the size of an entry of vin.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        pads = scratchpads(cfg)
        members = {
            **unit_members(cfg, Opcode.VECTOR),
            "acc_read": Out(read_port(pads["acc"])),
            "acc_write": Out(write_port(pads["acc"])),
            "vin": Out(read_port(pads["vin"], max(1, cfg.taps))),
            "par": Out(read_port(pads["par"])),
            "out": Out(write_port(pads["out"])),
            "lut": In(write_port(pads["lut"])),
            "claims": In(claim_layout),
        }
        if cfg.taps:
            members["tap"] = Out(read_port(pads["tap"]))
        if cfg.forward:
            members |= {f"{name}_write": Out(part_port(pads[name], pads["out"].width)) for name in ("inp", "vin")}
        super().__init__(members)
        self._targets = {Destination.ACC: self.acc_write, Destination.OUT: self.out}
        if cfg.forward:
            self._targets |= {Destination.INP: self.inp_write, Destination.VIN: self.vin_write}
        shapes = {field.name: field for field in formats(cfg)[Opcode.VECTOR].fields}
        self._constants = data.StructLayout(
            {name: (signed if shapes[name].signed else unsigned)(shapes[name].width) for name in _COPIED}
            | {"index": INDEX_BITS, "a_vin": 1, "b_vin": 1, "weigh": 1, "raw": 1, "to": len(self._targets)}
            | {
                "b_constant": signed(32),
                "zero_point": signed(8),
                "clip_lo": signed(8),
                "add_lo": signed(8),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        cfg = self._cfg
        current, finish = Signal(), Signal()
        constants = [_REGISTER(self._constants, name=f"constants{i}") for i in range(2)]
        now = _REGISTER(self._constants, name="constants_now")
        items = Items(m, cfg, constants, now, current)
        step = self._instructions(m, constants, now, current, finish)

        read, add, write = items["read"], items["add"], items["write"]
        m.d.comb += [read.valid.eq(step.valid), step.ready.eq(items.front)]
        first, last = (items.carry(step.payload[name], name, "reduce") for name in ("first", "last"))
        items["reduce"].leaves = items["reduce"].enable & last["reduce"]
        banks = items.carry(step.payload.dst[len(self.acc_write.addr) - 1], "bank", "write")
        part = self._read(m, items, step, last, banks)

        combined = self._combine(m, items, first, last)
        self._read_par(m, items, items.carry(step.payload.par, "par_addr", "binary")["binary"])
        selected = self._look_up(m, items, self._requantise(m, items, combined))

        # What skips stages: the residual, v where it is written as it is, and the place to which it is written.
        residual = self._ring(
            m, items, "residuals", "reduce", "add", Cat(unit.residual for unit in combined),
            items["reduce"].leaves & items["reduce"].at("rescale_add"), add.adds & items.middle,
        )  # fmt: skip
        requantise = items["requantise"]
        raw = self._ring(
            m, items, "raw", "requantise", "write", Cat(unit.v for unit in combined),
            requantise.enable & requantise.at("raw"), write.enable & write.at("raw"),
        )  # fmt: skip
        place = self._ring(
            m, items, "places", "read", "write", Cat(step.payload.end, step.payload.dst),
            read.leaves & step.payload.last, items.complete & items.back,
        )  # fmt: skip
        self._write(m, items, raw, self._add(m, items, selected, residual, part), place[1:], banks["write"])
        m.d.comb += [
            finish.eq(items.complete & items.back & place[0]),
            self.active.eq(read.leaves | (items.hold & items.back)),
            self.held.eq((read.valid & ~items.front & ~items.hold) | ~items.back),
        ]
        m.d.sync += self.done.valid.eq(finish & ~self.halt)
        with m.If(finish):
            m.d.sync += [self.done.payload.post.eq(write.at("post")), self.done.payload.index.eq(write.at("index"))]
        items.advance(self.halt)
        return m

    def _instructions(self, m: Module, constants: list[Any], now: Any, current: Signal, finish: Signal) -> Any:
        """Accepts instructions, at most two of them under way; returns the steps of their loops."""
        fields = self.instr.payload.fields
        of = {"a": VECTOR_LOOPS, "b": OUTER_LOOPS, "par": OUTER_LOOPS, "dst": OUTER_LOOPS}
        of |= {"tap": TAP_LOOPS} if self._cfg.taps else {}
        operands = {name: (len(fields[f"{name}_base"]), loops) for name, loops in of.items()}
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
        # What nobody uses takes what `instr` offers, valid or not: these enables need not wait for the handshake.
        for i, held in enumerate(constants):
            with m.If(~under_way[1] & (current != i)):
                m.d.sync += self._facts(held)
        with m.If(loops.instr.ready):
            m.d.sync += self._facts(now)
        with m.If(accept != finish):
            m.d.sync += under_way.eq(under_way + accept - finish)
        with m.If(self.halt):
            m.d.sync += under_way.eq(0)
        return loops.step

    def _facts(self, held: data.View[data.StructLayout]) -> list[object]:
        """What is kept of an instruction: copies of fields, and what follows from them."""
        fields = self.instr.payload.fields
        narrow = fields.requantise | fields.lookup | fields.rescale_add | (fields.destination != Destination.ACC)
        return [
            *(held[name].eq(fields[name]) for name in _COPIED),
            held.index.eq(self.instr.payload.index),
            held.a_vin.eq(fields.a_source == ASource.VIN),
            held.b_vin.eq(fields.b_source == BSource.VIN),
            held.weigh.eq(fields.taps),
            held.to.eq(1 << fields.destination),
            held.raw.eq(~narrow),
            held.b_constant.eq(fields.imm + fields.b_offset),
            held.zero_point.eq(Mux(fields.requantise, fields.zero_point, 0)),
            # Where the limits cross, the upper one holds.
            held.clip_lo.eq(Mux(fields.clip_lo > fields.clip_hi, fields.clip_hi, fields.clip_lo)),
            held.add_lo.eq(Mux(fields.add_lo > fields.add_hi, fields.add_hi, fields.add_lo)),
        ]

    def _read(self, m: Module, items: Items, step: Any, last: dict[str, Any], banks: dict[str, Any]) -> Signal:
        """Asks for A, B and taps. Returns what `Items.stall` does."""
        cfg, payload, acc = self._cfg, step.payload, items["acc"]
        # With taps, entries of vin are on their way while they become a sum.
        source = "read" if cfg.taps else "acc"
        reads = items[source]
        of_vin = Mux(items["read"].at("a_vin"), payload.a, payload.b)
        in_vin = items.carry(of_vin[: len(self.vin.addr)], "vin_addr", source)
        in_acc = items.carry(payload.a[: len(self.acc_read.addr)], "acc_addr", "acc")
        m.d.comb += [
            self.vin.en.eq(reads.leaves & (reads.at("a_vin") | (reads.at("b_vin") & last[source]))),
            self.vin.addr.eq(in_vin[source]),
            self.acc_read.en.eq(acc.leaves & ~acc.at("a_vin")),
            self.acc_read.addr.eq(in_acc["acc"]),
        ]
        if cfg.taps:
            m.d.comb += [self.tap.en.eq(reads.leaves & reads.at("weigh")), self.tap.addr.eq(payload.tap)]
        before = {"acc": "product" if cfg.taps else "read", "write": f"add{ADD_STAGES - 1}"}
        return items.stall(
            self.claims, self.halt,
            {"before": in_acc[before["acc"]][-1], "here": in_acc["acc"][-1]},
            {"before": banks[before["write"]], "here": banks["write"]},
        )  # fmt: skip

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
                taps.weigh.eq(items["tap"].at("weigh")),
                taps.enable.eq(Cat(stage.enable for stage in items.between("tap", "offset"))),
            ]
            sums.append(taps.sum)
        return sums

    def _combine(self, m: Module, items: Items, first: dict[str, Any], last: dict[str, Any]) -> list[Combine]:
        offset, reduce, binary = (items[name] for name in ("offset", "reduce", "binary"))
        combined = []
        for lane, vin in enumerate(self._from_vin(m, items)):
            m.submodules[f"combine{lane}"] = unit = Combine(tap_sum(self._cfg.taps))
            m.d.comb += [
                unit.acc.eq(self.acc_read.data.word_select(lane, 32)),
                unit.vin.eq(vin),
                unit.enable.eq(Cat(stage.enable for stage in (offset, reduce, binary))),
                unit.last.eq(Cat(last["offset"], last["reduce"])),
                unit.a_vin.eq(offset.at("a_vin")),
                unit.a_offset.eq(offset.at("a_offset")),
                unit.first.eq(first["reduce"]),
                unit.reduce_op.eq(reduce.at("reduce_op")),
                unit.b_offset.eq(reduce.at("b_offset")),
                unit.b_vin.eq(reduce.at("b_vin")),
                unit.b_constant.eq(reduce.at("b_constant")),
                unit.binary_op.eq(binary.at("binary_op")),
            ]
            combined.append(unit)
        return combined

    def _read_par(self, m: Module, items: Items, address: Value) -> None:
        binary = items["binary"]
        m.d.comb += [self.par.en.eq(binary.enable & binary.at("requantise")), self.par.addr.eq(address)]

    def _requantise(self, m: Module, items: Items, combined: list[Combine]) -> list[Value]:
        """The results of the lanes in the stage that clips."""
        results = []
        for lane, unit in enumerate(combined):
            m.submodules[f"requantise{lane}"] = requantise = Requantise()
            m.d.comb += [
                requantise.enable.eq(Cat(stage.int8 & stage.move for stage in items.between("requantise", "clip"))),
                requantise.bypass.eq(~items["requantise"].at("requantise")),
                requantise.v.eq(unit.v),
                requantise.param.eq(self.par.data.word_select(self._channel(lane), param_layout.size)),
            ]
            results.append(requantise.result)
        return results

    def _look_up(self, m: Module, items: Items, results: list[Value]) -> Value:
        """Adds the zero point, clips, and looks up. The lanes, 8 bits each, in front of rescale_add."""
        clip, select = items["clip"], items["select"]
        low, high = clip.at("clip_lo"), clip.at("clip_hi")
        m.submodules.tables = tables = Tables(self._cfg)
        wiring.connect(m, wiring.flipped(self.lut), tables.load)
        m.d.comb += [
            tables.enable.eq(clip.int8 & clip.at("lookup") & clip.move),
            tables.table.eq(clip.at("table")),
        ]
        selected = [_REGISTER(8, name=f"selected{lane}") for lane in range(len(results))]
        for lane, result in enumerate(results):
            moved, kept = Signal(signed(RESULT_BITS + 1), name=f"moved{lane}"), _REGISTER(8, name=f"kept{lane}")
            clipped = Signal(signed(8), name=f"clipped{lane}")
            m.d.comb += [
                moved.eq(result + clip.at("zero_point")),
                clipped.eq(Mux(moved > high, high, Mux(moved < low, low, moved))),
                tables.index.word_select(lane, 8).eq(Cat(clipped[:7], ~clipped[7])),
            ]
            with m.If(clip.int8 & clip.move):
                m.d.sync += kept.eq(clipped)
            with m.If(select.int8 & select.move):
                m.d.sync += selected[lane].eq(Mux(select.at("lookup"), tables.value.word_select(lane, 8), kept))
        return Cat(selected)

    def _add(self, m: Module, items: Items, v: Value, residual: Value, part: Signal) -> Value:
        """rescale_add in as many cycles as the Config says, the lowest lanes first. The lanes in the last stage."""
        cfg, steps, write = self._cfg, items.between("add", "write"), items["write"]
        units = cfg.lanes // cfg.residual_cycles

        passed = [v, *(_REGISTER(8 * cfg.lanes, name=f"passed{i}") for i in range(ADD_STAGES - 1))]
        for stage, (before, after) in zip(steps, pairwise(passed), strict=False):
            with m.If(stage.int8 & ~stage.at("rescale_add") & stage.move):
                m.d.sync += after.eq(before)

        multiply, _, total, by_bytes, by_bits, clip = steps
        results = []
        for number in range(units):
            m.submodules[f"add{number}"] = unit = RescaleAdd()
            m.d.comb += [
                unit.v.eq(v.word_select(part, 8 * units).word_select(number, 8)),
                unit.residual.eq(residual.word_select(part, 8 * units).word_select(number, 8)),
                unit.passed.eq(passed[-1].word_select(cfg.lanes - units + number, 8)),
                unit.enable.eq(Cat(stage.int8 & stage.move for stage in steps)),
                unit.add.eq(Cat(stage.at("rescale_add") for stage in steps)),
                unit.scale_v.eq(multiply.at("scale_v")),
                unit.scale_b.eq(multiply.at("scale_b")),
                unit.scale_c.eq(total.at("scale_c")),
                unit.bytes.eq(by_bytes.at("scale_shift")[3:]),
                unit.bits.eq(by_bits.at("scale_shift")[:3]),
                unit.low.eq(clip.at("add_lo")),
                unit.high.eq(clip.at("add_hi")),
            ]
            results.append(unit.result)

        # The lanes of the parts before the last one wait here for it.
        waiting = _REGISTER(8 * (cfg.lanes - units))
        with m.If(write.enable & ~write.whole):
            m.d.sync += waiting.eq(Cat(waiting, *results)[8 * units :])
        with m.Elif(clip.int8 & ~clip.at("rescale_add") & clip.move):
            m.d.sync += waiting.eq(passed[-1])
        return Cat(waiting, *results)

    def _write(self, m: Module, items: Items, raw: Value, written: Value, address: Value, bank: Value) -> None:
        # LOAD waits for a bank of acc within the cycle: a register says which one it is.
        in_acc = Cat(address[: len(self.acc_write.addr) - 1], bank)
        for destination, port in self._targets.items():
            m.d.comb += [
                port.en.eq(items.writes[destination]),
                port.addr.eq(in_acc if destination == Destination.ACC else address),
                port.mask.eq(-1),
                port.data.eq(written),
            ]
        lanes = [written.word_select(lane, 8) for lane in range(self._cfg.lanes)]
        wide = Cat(Cat(lane, lane[7].replicate(24)) for lane in lanes)
        m.d.comb += self.acc_write.data.eq(Mux(items["write"].at("raw"), raw, wide))

    def _ring(
        self, m: Module, items: Items, name: str, leaves: str, returns: str, value: Value, push: Value, pop: Value
    ) -> Value:
        """`value` for what leaves in one stage and returns in another."""
        m.submodules[name] = ring = Bypass(len(value), len(items.between(leaves, returns)))
        m.d.comb += [ring.clear.eq(self.halt), ring.push.eq(push), ring.i.eq(value), ring.pop.eq(pop)]
        return ring.o
