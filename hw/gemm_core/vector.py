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

An item is an output entry on its way; `valid` says where there are items, and all of them move on together or none.
"""

from __future__ import annotations

from functools import cache, partial

from amaranth import Cat, Module, Mux, Signal, signed, unsigned
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

REQUANTISE, CLIP, SELECT, ADD = 4, 4 + STAGES, 5 + STAGES, 6 + STAGES
ADD_STAGES = 5
WRITE = ADD + ADD_STAGES
_REGISTER = partial(Signal, reset_less=True)


class Combine(wiring.Component):
    """One lane of stages 1 to 3: v = reduction of (A + a_offset), combined with B + b_offset. All wraps at 32 bits.

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

    def __init__(self) -> None:
        super().__init__({
            "acc": In(signed(32)), "vin": In(signed(8)), "enable": In(3), "last": In(2),
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
    add : In(5)           Whether the item there is to be computed; else v passes unchanged.
    scale_v, scale_b      Stage 14; scale_c: stage 16; shift and ones, which is 2^shift - 1: stage 17.
    low, high             Stage 18.
    result : Out          The item in stage 19.
    """

    def __init__(self) -> None:
        super().__init__({
            "v": In(signed(8)), "residual": In(signed(8)), "enable": In(ADD_STAGES), "add": In(ADD_STAGES),
            "scale_v": In(signed(32)), "scale_b": In(signed(32)), "scale_c": In(signed(48)),
            "shift": In(6), "ones": In(63), "low": In(signed(8)), "high": In(signed(8)),
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
        passed = [_REGISTER(signed(8), name=f"passed{i}") for i in range(ADD_STAGES - 1)]

        for i, before in enumerate((self.v, *passed[:-1])):
            with m.If(self.enable[i] & ~self.add[i]):
                m.d.sync += passed[i].eq(before)

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
                m.d.sync += self.result.eq(passed[-1])
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


# Fields that hold during an instruction and are used as they are.
_COPIED = (
    "post", "reduce_op", "binary_op", "requantise", "lookup", "table", "rescale_add", "a_offset", "b_offset",
    "clip_hi", "scale_v", "scale_b", "scale_c", "scale_shift", "add_hi",
)  # fmt: skip


class Vector(wiring.Component):
    """Executes VECTOR: one entry of A a cycle, across instructions as well.

    The constants of two instructions are kept, so that one can start while the one before is still in the pipeline;
    only after an instruction that writes ACC does the next one wait until that is done.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    instr, done, error, active, held, quiet, halt    see `unit_members`; there are no errors.
    acc_read, acc_write, vin, par, out               scratchpad ports.
    lut : In(WritePort)                              through which LOAD writes the tables.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        width = widths(cfg)
        super().__init__({
            **unit_members(cfg, Opcode.VECTOR),
            "acc_read": Out(ReadPort(cfg.acc_bits, width["acc"])),
            "acc_write": Out(WritePort(cfg.acc_bits, width["acc"], 32)),
            "vin": Out(ReadPort(cfg.vin_bits, width["vin"])),
            "par": Out(ReadPort(cfg.par_bits, width["par"])),
            "out": Out(WritePort(cfg.out_bits, width["out"], width["out"])),
            "lut": In(load_port(cfg, "lut")),
        })  # fmt: skip
        shapes = {field.name: field for field in formats(cfg)[Opcode.VECTOR].fields}
        self._constants = data.StructLayout(
            {name: (signed if shapes[name].signed else unsigned)(shapes[name].width) for name in _COPIED}
            | {"index": INDEX_BITS, "a_vin": 1, "b_vin": 1, "to_out": 1, "raw": 1}
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
        cfg, lanes = self._cfg, range(self._cfg.lanes)
        fields = self.instr.payload.fields
        dst_bits = len(fields.dst_base)

        # Instructions: at most two are under way, each with its constants in one of two sets.
        m.submodules.loops = loops = Loops(
            VECTOR_LOOPS,
            {
                "a": (len(fields.a_base), VECTOR_LOOPS),
                "b": (cfg.vin_bits, OUTER_LOOPS),
                "par": (cfg.par_bits, OUTER_LOOPS),
                "dst": (dst_bits, OUTER_LOOPS),
            },
            reduction=("r", "s"),
        )
        constants = [_REGISTER(self._constants, name=f"constants{i}") for i in range(2)]
        current, under_way, to_acc, may_start = Signal(), Signal(2), Signal(), Signal()
        accept, finish = Signal(), Signal()
        m.d.comb += [
            may_start.eq(~self.halt & ~under_way[1] & ((under_way == 0) | ~to_acc)),
            *loops.load(fields),
            loops.instr.valid.eq(self.instr.valid & may_start),
            loops.halt.eq(self.halt),
            self.instr.ready.eq(loops.instr.ready & may_start),
            accept.eq(self.instr.valid & self.instr.ready),
        ]
        with m.If(accept):
            m.d.sync += [current.eq(~current), to_acc.eq(fields.destination == Destination.ACC)]
            for i, held in enumerate(constants):
                with m.If(current != i):
                    m.d.sync += [held[name].eq(fields[name]) for name in _COPIED]
                    m.d.sync += self._derive(held)
        with m.If(accept != finish):
            m.d.sync += under_way.eq(under_way + accept - finish)

        # Items.
        valid = [Signal(name=f"valid{stage}") for stage in range(WRITE + 1)]
        which = [_REGISTER(name=f"which{stage}") for stage in range(WRITE + 1)]
        go, issue = Signal(), Signal()

        @cache
        def at(stage: int, name: str) -> Signal:
            """A constant of the instruction to which the item in `stage` belongs."""
            value = Signal.like(constants[0][name], name=f"{name}_{stage}")
            m.d.comb += value.eq(Mux(which[stage], constants[1][name], constants[0][name]))
            return value

        step = loops.step.payload
        first, last = [_REGISTER(name=f"first{i}") for i in (1, 2)], [_REGISTER(name=f"last{i}") for i in (1, 2)]
        int8 = [Signal(name=f"int8_{stage}") for stage in range(WRITE + 1)]
        add = [Signal(name=f"add{stage}") for stage in range(WRITE + 1)]
        m.d.comb += [valid[0].eq(loops.step.valid), which[0].eq(current), loops.step.ready.eq(issue)]
        for stage in range(REQUANTISE, WRITE + 1):
            m.d.comb += int8[stage].eq(valid[stage] & ~at(stage, "raw"))
            m.d.comb += add[stage].eq(int8[stage] & at(stage, "rescale_add"))
        with m.If(go):
            m.d.sync += valid[1].eq(issue)
            for stage in range(1, WRITE):
                m.d.sync += valid[stage + 1].eq(valid[stage] & last[1] if stage == 2 else valid[stage])
                with m.If(valid[stage]):
                    m.d.sync += which[stage + 1].eq(which[stage])
            with m.If(issue):
                m.d.sync += [first[0].eq(step.first), last[0].eq(step.last), which[1].eq(current)]
            with m.If(valid[1]):
                m.d.sync += [first[1].eq(first[0]), last[1].eq(last[0])]

        # Stage 0: A and B. Each port asks where the other one is ready; only one of them is used for A.
        a_vin, reads_b, acc_ok, vin_ok = Signal(), Signal(), Signal(), Signal()
        m.d.comb += [
            a_vin.eq(at(0, "a_vin")),
            reads_b.eq(at(0, "b_vin") & step.last),
            acc_ok.eq(a_vin | self.acc_read.ready),
            vin_ok.eq(~(a_vin | reads_b) | self.vin.ready),
            self.acc_read.en.eq(valid[0] & ~a_vin & go & vin_ok),
            self.acc_read.addr.eq(step.a),
            self.vin.en.eq(valid[0] & (a_vin | reads_b) & go & acc_ok),
            self.vin.addr.eq(Mux(a_vin, step.a, step.b)),
            issue.eq(valid[0] & go & acc_ok & vin_ok),
        ]
        m.submodules.places = places = Bypass(data.StructLayout({"address": dst_bits, "end": 1}), WRITE)
        m.d.comb += [
            places.push.eq(issue & step.last),
            places.i.address.eq(step.dst),
            places.i.end.eq(step.end),
        ]

        # Stages 1 to 3.
        par_addr = [_REGISTER(cfg.par_bits, name=f"par_addr{stage}") for stage in (1, 2, 3)]
        with m.If(go):
            for stage, (target, source) in enumerate(zip(par_addr, (step.par, *par_addr))):
                with m.If(valid[stage]):
                    m.d.sync += target.eq(source)
        combine = [Combine() for _ in lanes]
        for lane, unit in enumerate(combine):
            m.submodules[f"combine{lane}"] = unit
            m.d.comb += [
                unit.acc.eq(self.acc_read.data.word_select(lane, 32)),
                unit.vin.eq(self.vin.data.word_select(lane, 8)),
                unit.enable.eq(Cat(valid[1:4]) & go.replicate(3)),
                unit.last.eq(Cat(last)),
                unit.a_vin.eq(at(1, "a_vin")),
                unit.a_offset.eq(at(1, "a_offset")),
                unit.first.eq(first[1]),
                unit.reduce_op.eq(at(2, "reduce_op")),
                unit.b_offset.eq(at(2, "b_offset")),
                unit.binary_op.eq(at(3, "binary_op")),
                unit.b_vin.eq(at(2, "b_vin")),
                unit.b_constant.eq(at(2, "b_constant")),
            ]

        # What skips the int8 stages: the residual, and v where it is written as it is.
        m.submodules.residuals = residuals = Bypass(8 * cfg.lanes, ADD - 2)
        m.submodules.raw = raw = Bypass(32 * cfg.lanes, WRITE - REQUANTISE)
        m.d.comb += [
            residuals.push.eq(valid[2] & last[1] & at(2, "rescale_add") & go),
            residuals.i.eq(Cat(unit.residual for unit in combine)),
            residuals.pop.eq(add[ADD] & go),
            raw.push.eq(valid[REQUANTISE] & at(REQUANTISE, "raw") & go),
            raw.i.eq(Cat(unit.v for unit in combine)),
            raw.pop.eq(valid[WRITE] & at(WRITE, "raw") & go),
        ]

        # Stages 3 to 12.
        reads_par, par_blocks, write_blocks = Signal(), Signal(), Signal()
        m.d.comb += [
            reads_par.eq(valid[3] & at(3, "requantise")),
            par_blocks.eq(reads_par & ~self.par.ready),
            self.par.en.eq(reads_par & ~write_blocks),
            self.par.addr.eq(par_addr[-1]),
        ]
        results = []
        for lane, unit in enumerate(combine):
            piece, place = divmod(lane, cfg.piece_bytes)
            channel = piece * cfg.group + place % cfg.group
            m.submodules[f"requantise{lane}"] = requantise = Requantise()
            m.d.comb += [
                requantise.enable.eq(Cat(int8[REQUANTISE:CLIP]) & go.replicate(STAGES)),
                requantise.bypass.eq(~at(REQUANTISE, "requantise")),
                requantise.v.eq(unit.v),
                requantise.param.eq(self.par.data.word_select(channel, param_layout.size)),
            ]
            results.append(requantise.result)

        # Stages 12 and 13.
        low, high = at(CLIP, "clip_lo"), at(CLIP, "clip_hi")
        m.submodules.tables = tables = Tables(cfg)
        wiring.connect(m, wiring.flipped(self.lut), tables.load)
        m.d.comb += [tables.enable.eq(int8[CLIP] & at(CLIP, "lookup") & go), tables.table.eq(at(CLIP, "table"))]
        clipped = [Signal(signed(8), name=f"clipped{lane}") for lane in lanes]
        selected = [_REGISTER(signed(8), name=f"selected{lane}") for lane in lanes]
        for lane in lanes:
            moved, kept = Signal(signed(RESULT_BITS + 1), name=f"moved{lane}"), _REGISTER(8, name=f"kept{lane}")
            m.d.comb += [
                moved.eq(results[lane] + at(CLIP, "zero_point")),
                clipped[lane].eq(Mux(moved > high, high, Mux(moved < low, low, moved))),
                tables.index.word_select(lane, 8).eq(Cat(clipped[lane][:7], ~clipped[lane][7])),
            ]
            with m.If(int8[CLIP] & go):
                m.d.sync += kept.eq(clipped[lane])
            with m.If(int8[SELECT] & go):
                m.d.sync += selected[lane].eq(Mux(at(SELECT, "lookup"), tables.value.word_select(lane, 8), kept))

        # Stages 14 to 18.
        written = []
        for lane in lanes:
            m.submodules[f"add{lane}"] = rescale = RescaleAdd()
            m.d.comb += [
                rescale.v.eq(selected[lane]),
                rescale.residual.eq(residuals.o.word_select(lane, 8)),
                rescale.enable.eq(Cat(int8[ADD:WRITE]) & go.replicate(ADD_STAGES)),
                rescale.add.eq(Cat(add[ADD:WRITE])),
                rescale.scale_v.eq(at(ADD, "scale_v")),
                rescale.scale_b.eq(at(ADD, "scale_b")),
                rescale.scale_c.eq(at(ADD + 2, "scale_c")),
                rescale.shift.eq(at(ADD + 3, "scale_shift")),
                rescale.ones.eq(at(ADD + 3, "scale_ones")),
                rescale.low.eq(at(ADD + 4, "add_lo")),
                rescale.high.eq(at(ADD + 4, "add_hi")),
            ]
            written.append(rescale.result)

        # Stage 19.
        to_out = Signal()
        m.d.comb += [
            to_out.eq(at(WRITE, "to_out")),
            write_blocks.eq(valid[WRITE] & ~Mux(to_out, self.out.ready, self.acc_write.ready)),
            go.eq(~write_blocks & ~par_blocks),
            self.out.en.eq(valid[WRITE] & to_out & ~par_blocks),
            self.out.addr.eq(places.o.address),
            self.out.mask.eq(-1),
            self.out.data.eq(Cat(written)),
            self.acc_write.en.eq(valid[WRITE] & ~to_out & ~par_blocks),
            self.acc_write.addr.eq(places.o.address),
            self.acc_write.mask.eq(-1),
            self.acc_write.data.eq(
                Mux(at(WRITE, "raw"), raw.o, Cat(Cat(value, value[7].replicate(24)) for value in written))
            ),
            places.pop.eq(valid[WRITE] & go),
            finish.eq(valid[WRITE] & go & places.o.end),
        ]
        m.d.sync += self.done.valid.eq(finish)
        with m.If(finish):
            m.d.sync += [self.done.payload.post.eq(at(WRITE, "post")), self.done.payload.index.eq(at(WRITE, "index"))]

        m.d.comb += [
            self.active.eq(issue),
            self.held.eq((valid[0] & ~issue) | ~go),
            self.quiet.eq((under_way == 0) & ~self.done.valid),
        ]
        for bypass in (places, residuals, raw):
            m.d.comb += bypass.clear.eq(self.halt)
        with m.If(self.halt):
            m.d.sync += [under_way.eq(0), self.done.valid.eq(0), *(v.eq(0) for v in valid[1:])]
        return m

    def _derive(self, held: data.View[data.StructLayout]) -> list[object]:
        """The constants that are not copies of a field."""
        fields = self.instr.payload.fields
        narrow = fields.requantise | fields.lookup | fields.rescale_add | (fields.destination == Destination.OUT)
        return [
            held.index.eq(self.instr.payload.index),
            held.a_vin.eq(fields.a_source == ASource.VIN),
            held.b_vin.eq(fields.b_source == BSource.VIN),
            held.to_out.eq(fields.destination == Destination.OUT),
            held.raw.eq(~narrow),
            held.scale_ones.eq((1 << fields.scale_shift) - 1),
            held.b_constant.eq(fields.imm + fields.b_offset),
            held.zero_point.eq(Mux(fields.requantise, fields.zero_point, 0)),
            # Where the limits cross, the upper one holds.
            held.clip_lo.eq(Mux(fields.clip_lo > fields.clip_hi, fields.clip_hi, fields.clip_lo)),
            held.add_lo.eq(Mux(fields.add_lo > fields.add_hi, fields.add_hi, fields.add_lo)),
        ]
