"""How instructions enter the vector unit, and what is kept of them while their items are under way."""

from __future__ import annotations

from typing import Any

from amaranth import Cat, Const, Module, Mux, Signal, Value, signed, unsigned
from amaranth.lib import data

from celosia.hw.gemm_core.loops import Loops
from celosia.hw.lib.layout import INDEX_BITS
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import (
    OUTER_LOOPS,
    TAP_LOOPS,
    VECTOR_LOOPS,
    ASource,
    BinaryOp,
    BSource,
    Destination,
    Opcode,
    formats,
)
from celosia.hw.spec.pipeline import SOFTMAX_OFFER_CYCLES, WRITEBACK_DEPTH
from celosia.hw.spec.scratchpads import scratchpads
from celosia.hw.vector_unit.residual import BIAS
from celosia.hw.vector_unit.trail import HazardTracker

# Fields that hold during an instruction and are used as they are.
_COPIED = (
    "post", "reduce_op", "binary_op", "requantise", "lookup", "table", "rescale_add", "a_offset", "b_offset",
    "clip_hi", "scale_v", "scale_b", "scale_shift", "add_hi",
)  # fmt: skip

_RESULTS = ("to", "zero_point", "clip_lo", "clip_hi")
"""What a softmax needs of them."""


def constants_layout(cfg: Config, destinations: int) -> data.StructLayout:
    """What is kept of an instruction; `to` has a bit for each of so many destinations."""
    shapes = {field.name: field for field in formats(cfg)[Opcode.VECTOR].fields}
    return data.StructLayout(
        {name: (signed if shapes[name].signed else unsigned)(shapes[name].width) for name in _COPIED}
        | {"index": INDEX_BITS, "a_vin": 1, "b_vin": 1, "weigh": 1, "to": destinations}
        | ({"raw": 1} if cfg.int32 else {})
        | ({"norm": 1} if cfg.norm else {})
        | {
            "b_constant": signed(32),
            "scale_c": signed(49),
            "zero_point": signed(8),
            "clip_lo": signed(8),
            "add_lo": signed(8),
        }
    )


class IssueStage:
    """Lets one instruction start while the one before is still in the pipeline, and its steps where nothing will stand
    in their way: a step that has been taken goes on to its end.

    constants: of two instructions, at most so many are under way; `current` is the set of the last one. now: those of
    the instruction whose loops run. feeds: whether the last one writes acc and vin. slot: a step may be taken in this
    cycle; a register, found a cycle ahead, for it leads to many. takes: one is. bubbles: cycles still to be left behind
    one that adds a residual. queued: entries that are under way to acc. norms: a norm starts; finding: `NormEngine` is
    at work, found: for the last cycle.

    Softmaxes have no steps here. rows: one starts; rows_under_way: so many are, alone: any is. of_rows: constants of
    the oldest. room: for another one, as `SoftmaxEngine` says. Beside the last one under way others may be that leave
    alone what it reads and writes, from acc to OUT. These are told done behind it, however early they end: late is how
    many wait for that.
    """

    def __init__(self, cfg: Config, destinations: int) -> None:
        self._cfg, layout = cfg, constants_layout(cfg, destinations)
        self.under_way, self.current = Signal(2, name="under_way"), Signal(name="current")
        self.feeds = Signal(2, name="feeds")
        self.constants = [Reg(layout, name=f"constants{i}") for i in range(2)]
        self.now = Reg(layout, name="constants_now")
        self.slot, self.takes = Signal(name="slot", init=1), Signal(name="takes")
        self.bubbles = Signal(range(cfg.residual_cycles), name="bubbles")
        self.queued = Signal(range(WRITEBACK_DEPTH + 1), name="queued")
        self.norms, self.finding = Signal(name="starts_norm"), Signal(name="finding")
        self.found = Signal(name="found")
        self.rows, self.alone, self.room = Signal(name="starts_rows"), Signal(name="alone"), Signal(name="room")
        self.rows_under_way, self.late = Signal(2, name="rows_under_way"), Signal(2, name="late")
        self.of_rows = Reg(layout, name="constants_of_rows")
        self.trail = HazardTracker(cfg) if cfg.softmax and cfg.forward else None

    def steps(self, m: Module, unit: Any, finish: Value, rows_finish: Value) -> Any:
        """Accepts instructions of `unit`; returns the steps of their loops. finish: the oldest one with steps is told
        done; rows_finish: the oldest softmax is."""
        under_way, current, feeds = self.under_way, self.current, self.feeds
        fields = unit.instr.payload.fields
        of = {"a": VECTOR_LOOPS, "b": OUTER_LOOPS, "par": OUTER_LOOPS, "dst": OUTER_LOOPS}
        of |= {"tap": TAP_LOOPS} if self._cfg.taps else {}
        operands = {name: (len(fields[f"{name}_base"]), loops) for name, loops in of.items()}
        m.submodules.loops = self.loops = loops = Loops(VECTOR_LOOPS, operands, reduction=("r", "s"))
        may_start = Signal()
        accept = Signal()
        waits = Signal()
        behind = Const(0)
        to_vin = fields.destination == Destination.VIN
        to_acc = fields.destination == Destination.ACC if self._cfg.int32 else Const(0)
        reads_vin = (fields.a_source == ASource.VIN) | (fields.b_source == BSource.VIN)
        of_rows = fields.softmax if self._cfg.softmax else Const(0)
        apart = of_rows
        if self._cfg.softmax:
            behind = self.alone & ~Mux(of_rows, self._goes_along(m, unit.instr.valid), self._goes_beside(fields))
        if self._cfg.norm:
            apart |= fields.norm
            m.d.comb += self.norms.eq(accept & fields.norm)
        m.d.comb += [
            # Behind one that writes acc, whose entries may wait for GEMM, any other one waits.
            waits.eq((under_way != 0) & (feeds[0] | (feeds[1] & reads_vin) | apart)),
            may_start.eq(~unit.halt & ~under_way[1] & ~waits & ~behind),
            *loops.load(fields),
            loops.instr.valid.eq(unit.instr.valid & may_start & ~of_rows),
            loops.halt.eq(unit.halt),
            unit.instr.ready.eq(loops.instr.ready & may_start),
            accept.eq(unit.instr.valid & unit.instr.ready & ~of_rows),
            self.rows.eq(unit.instr.valid & may_start & of_rows),  # loops are ready where nothing else is under way
            unit.quiet.eq((under_way == 0) & ~self.alone & ~unit.done.valid),
        ]
        with m.If(accept):
            m.d.sync += [current.eq(~current), feeds.eq(Cat(to_acc, to_vin))]
        # What nobody uses takes what `instr` offers, valid or not: these enables need not wait for the handshake.
        for i, held in enumerate(self.constants):
            with m.If(~under_way[1] & (current != i)):
                m.d.sync += self._facts(unit.instr.payload, held)
        with m.If(loops.instr.ready):
            m.d.sync += self._facts(unit.instr.payload, self.now)
        with m.If(accept != finish):
            m.d.sync += under_way.eq(under_way + accept - finish)
        if self._cfg.softmax:
            self._count_rows(m, unit, rows_finish)
        with m.If(unit.halt):
            m.d.sync += under_way.eq(0)
        return loops.step

    def _constants(self, number: Value) -> data.View[data.StructLayout]:
        """Those of set `number`."""
        return data.View(self.now.shape(), Mux(number, *(Value.cast(held) for held in reversed(self.constants))))

    def _count_rows(self, m: Module, unit: Any, finish: Value) -> None:
        """Softmaxes that are under way, and what is kept of them: of the second one it is alike."""
        second = {name: Reg(self.of_rows[name].shape(), name=f"second_{name}") for name in ("post", "index")}
        with m.If(~self.alone):
            m.d.sync += self._facts(unit.instr.payload, self.of_rows)
        with m.Elif(finish):
            m.d.sync += [self.of_rows[name].eq(value) for name, value in second.items()]
        with m.If(~self.rows_under_way[1]):
            post, index = unit.instr.payload.fields.post, unit.instr.payload.index
            m.d.sync += [second["post"].eq(post), second["index"].eq(index)]
        if self.trail:
            self.trail.offer(m, unit, self.alone & ~self.rows_under_way[1], self.rows)
        m.d.sync += self.rows_under_way.eq(self.rows_under_way + self.rows - finish)
        with m.If(self.rows):
            m.d.sync += self.alone.eq(1)
        with m.Elif(finish & ~self.rows_under_way[1]):
            m.d.sync += self.alone.eq(0)
        with m.If(unit.halt):
            m.d.sync += [self.rows_under_way.eq(0), self.alone.eq(0)]

    def tells(self, m: Module, ends: Value, halt: Value) -> Value:
        """Whether the oldest instruction with steps is told done, if some `ends`: not while a softmax in front is under
        way."""
        tells = Signal(name="tells")
        m.d.comb += tells.eq(~self.alone & (ends | self.late.any()))
        m.d.sync += self.late.eq(Mux(halt, 0, self.late + ends - tells))
        return tells

    @property
    def oldest(self) -> data.View[data.StructLayout]:
        """Constants of the oldest instruction with steps that is under way."""
        return self._constants(self.current ^ self.under_way[1])

    def _goes_beside(self, fields: Any) -> Value:
        """Whether what is offered leaves alone what the only softmax under way reads and writes."""
        out = (fields.destination == Destination.OUT) & ~self.of_rows.to[Destination.OUT]
        acc = (fields.a_source == ASource.ACC) & (fields.b_source != BSource.VIN)
        follows = self.trail.follows if self.trail else Const(0)
        return ~self.rows_under_way[1] & ((out & acc) | follows)

    def _goes_along(self, m: Module, offered: Value) -> Value:
        """Whether what is offered, if it is a softmax, may go with the one that is under way alone."""
        # SOFTMAX_OFFER_CYCLES cycles: the set that is not used takes what is offered, and then is found to be alike.
        there = Signal()
        alike = Reg()
        coming = self._constants(~self.current)
        m.d.comb += there.eq(offered & self.alone & ~self.rows_under_way[1])
        told = [Signal(name=f"told{i}") for i in range(SOFTMAX_OFFER_CYCLES)]
        m.d.sync += Cat(told).eq(Cat(there, *(before & there for before in told[:-1])))
        m.d.sync += alike.eq(Cat(coming[name] == self.of_rows[name] for name in _RESULTS).all())
        return self.room & alike & told[-1]

    def advance(self, m: Module, unit: Any, lands: Value) -> None:
        """Finds whether the next cycle is one in which a step may be taken. lands: an entry is written to acc."""
        cfg, loops, now, bubbles = self._cfg, self.loops, self.now, self.bubbles
        step = loops.step
        a_vin = Mux(loops.instr.ready, unit.instr.payload.fields.a_source == ASource.VIN, now.a_vin)
        bank = loops.ahead.a[scratchpads(cfg)["acc"].address_bits - 1]
        blocked: Value = ~a_vin & unit.claims.read.bit_select(bank, 1)
        m.d.comb += [step.ready.eq(self.slot), self.takes.eq(step.valid & self.slot)]
        if cfg.norm:
            blocked |= Mux(loops.instr.ready, unit.instr.payload.fields.norm, self.finding & ~self.found)
        if cfg.residual_cycles > 1:
            left = Mux(
                self.takes & step.payload.last & now.rescale_add, cfg.residual_cycles - 1, bubbles - bubbles.any()
            )
            m.d.sync += bubbles.eq(Mux(unit.halt, 0, left))
            blocked |= left[: len(bubbles)].any()
        if cfg.int32:
            queued = self.queued + (self.takes & step.payload.last & now.to[Destination.ACC])
            m.d.sync += self.queued.eq(Mux(unit.halt, 0, queued - lands))
            blocked |= queued == WRITEBACK_DEPTH
        if self.trail:
            output = self.takes & step.payload.last
            accept = loops.instr.valid & loops.instr.ready
            self.trail.count(m, loops.instr.ready, accept, output)
            blocked |= self.trail.blocks(loops.instr.ready, self.alone, output)
        m.d.sync += self.slot.eq(unit.halt | ~blocked)

    def _facts(self, instr: data.View[data.StructLayout], held: data.View[data.StructLayout]) -> list[object]:
        """What is kept of an instruction: copies of fields, and what follows from them."""
        fields = instr.fields
        of_rows = fields.softmax if self._cfg.softmax else Const(0)
        facts = [
            *(held[name].eq(fields[name]) for name in _COPIED),
            held.index.eq(instr.index),
            held.a_vin.eq(fields.a_source == ASource.VIN),
            held.b_vin.eq(fields.b_source == BSource.VIN),
            held.weigh.eq(fields.taps),
            held.to.eq(1 << fields.destination),
            held.b_constant.eq(fields.imm + fields.b_offset),
            held.scale_c.eq(fields.scale_c - BIAS),
            held.zero_point.eq(Mux(fields.requantise | of_rows, fields.zero_point, 0)),
            # Where the limits cross, the upper one holds.
            held.clip_lo.eq(Mux(fields.clip_lo > fields.clip_hi, fields.clip_hi, fields.clip_lo)),
            held.add_lo.eq(Mux(fields.add_lo > fields.add_hi, fields.add_hi, fields.add_lo)),
        ]
        if self._cfg.norm:
            facts += [held.norm.eq(fields.norm), held.binary_op.eq(Mux(fields.norm, BinaryOp.MUL, fields.binary_op))]
        if self._cfg.int32:
            narrow = fields.requantise | fields.lookup | fields.rescale_add | (fields.destination != Destination.ACC)
            facts.append(held.raw.eq(~narrow))
        return facts
