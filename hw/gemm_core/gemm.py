"""The unit GEMM: it walks loops, feeds the array, and adds the array's sums to accumulators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amaranth import Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import Out

from celosia.hw.gemm_core.array import Array
from celosia.hw.gemm_core.loops import Loops
from celosia.hw.lib.layout import INDEX_BITS, claim_layout, read_port, unit_members, write_port
from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import GEMM_LOOPS, OUTER_LOOPS, Opcode
from celosia.hw.spec.pipeline import claim_lead
from celosia.hw.spec.scratchpads import scratchpads

_FROM_READ = 5
"""Pipeline stages from the read of an accumulator to its write, both included."""


class Gemm(wiring.Component):
    """Execute GEMM: acc[d] (=|+=) sum of inp[s] . wgt[w] transposed, one iteration of its loops a cycle.

    The pipeline stalls only before the read of operands. Running sums stay in the array, and an accumulator is written
    once for each output. An instruction that accumulates reads its old value four cycles before that write. The writes
    of those four cycles come too late for the read, and are forwarded.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    Those of `unit_members`, and:
    inp, wgt : Out(ReadPort)    Operands.
    acc_read : Out(ReadPort)    Old values, for instructions that accumulate. Must be ready; data is used only in the
                                cycle after the read.
    acc_write : Out(WritePort)  Whole entries. Must be ready.
    claims : Out(claim_layout)  Banks of acc that `acc_read` and `acc_write` will use, so that VECTOR avoids them.

    GEMM never raises `error`. On `halt`, iterations whose operands have been read are still completed.
    """

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        pads = scratchpads(cfg)
        super().__init__({
            **unit_members(cfg, Opcode.GEMM),
            "inp": Out(read_port(pads["inp"])),
            "wgt": Out(read_port(pads["wgt"])),
            "acc_read": Out(read_port(pads["acc"])),
            "acc_write": Out(write_port(pads["acc"])),
            "claims": Out(claim_layout),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        cfg = self.cfg
        fields = self.instr.payload.fields
        loops_of = {"acc": OUTER_LOOPS, "inp": GEMM_LOOPS, "wgt": GEMM_LOOPS}
        operands = {name: (len(fields[f"{name}_base"]), loops) for name, loops in loops_of.items()}
        m.submodules.loops = loops = Loops(GEMM_LOOPS, operands, reduction=("k", "r", "s"))
        m.submodules.array = array = Array(cfg)
        first_stage = self._read_operands(m, loops)

        # In cycle 1 operands enter the array. The other values of their iteration are carried along until the write.
        pipe = [first_stage]
        for cycle in range(1, array.latency + 3):
            before, valid = Value.cast(pipe[-1]), Signal(name=f"valid{cycle}")
            carried = Reg(len(before) - 1, name=f"cycle{cycle}")
            m.d.sync += valid.eq(before[0])
            with m.If(before[0]):
                m.d.sync += carried.eq(before[1:])
            pipe.append(data.View(first_stage.shape(), Cat(valid, carried)))
        m.d.comb += [
            array.valid.eq(pipe[1].valid),
            array.first.eq(pipe[1].first),
            array.inp.eq(self.inp.data),
            array.wgt.eq(self.wgt.data),
        ]
        self._accumulate(m, pipe, array)
        self._claim_ports(m, loops, pipe)

        # The write is committed in the cycle after the last stage.
        write = pipe[-1]
        m.d.sync += [
            self.done.valid.eq(write.valid & write.end),
            self.done.payload.post.eq(write.post),
            self.done.payload.index.eq(write.index),
        ]
        in_flight = Signal()  # in one of the cycles from 1 on
        m.d.sync += in_flight.eq(Cat(stage.valid for stage in pipe[:-1]).any())
        m.d.comb += self.idle.eq(~(loops.step.valid | in_flight | self.done.valid))
        probes(self, pipe=pipe, array=array)
        return m

    def _read_operands(self, m: Module, loops: Loops) -> data.View[data.StructLayout]:
        """Accept instructions, walk their loops, and read the operands of each iteration.

        Returns the values that the pipeline carries along with an iteration: `valid`; `first` and `last` of its
        reduction; `end` of the instruction; `accumulate`; its address in acc; `post` and `index` of the instruction.
        """
        fields = self.instr.payload.fields
        widths = {"accumulate": 1, "post": 4, "index": INDEX_BITS}
        accumulate, post, index = (Reg(bits, name=name) for name, bits in widths.items())
        m.d.comb += [
            *loops.load(fields),
            loops.instr.valid.eq(self.instr.valid),
            self.instr.ready.eq(loops.instr.ready),
            loops.halt.eq(self.halt),
        ]
        with m.If(self.instr.valid & self.instr.ready):
            m.d.sync += [accumulate.eq(fields.accumulate), post.eq(fields.post), index.eq(self.instr.payload.index)]

        step = loops.step.payload
        m.d.comb += [
            self.inp.en.eq(loops.step.valid),
            self.inp.addr.eq(step.inp),
            self.wgt.en.eq(loops.step.valid),
            self.wgt.addr.eq(step.wgt),
            loops.step.ready.eq(self.inp.ready & self.wgt.ready),
            self.active.eq(loops.step.valid & loops.step.ready),
            self.stalled.eq(loops.step.valid & ~loops.step.ready),
        ]

        stage_layout = data.StructLayout({
            "valid": 1, "last": 1, "end": 1, "first": 1, "accumulate": 1, "acc": len(step.acc), "post": 4,
            "index": INDEX_BITS,
        })  # fmt: skip
        values = Cat(self.active, step.last, step.end, step.first, accumulate, step.acc, post, index)
        return data.View(stage_layout, values)

    def _accumulate(self, m: Module, pipe: Sequence[Any], array: Array) -> None:
        """Add the array's sums to accumulators, in the last five stages of `pipe`.

        reading: the accumulator is read, three cycles before its sum is complete. answer: the data read is registered,
        since memories answer late in a cycle. ahead: it is replaced if a write came too late for the read. now: the sum
        is added. write: the total is written.

        pipe: the iteration in each stage (`_read_operands`). array: gives the sum of the iteration in stage `now`.
        Registers: `kept` holds the data read; `old` the same after the replacement; `written` the last total, which
        stage `write` writes; `committed` the last total that has been written.
        """
        reading, answer, ahead, now, write = stages = pipe[-_FROM_READ:]
        writes = Signal()  # a register, as LOAD's `ready` depends on it in the same cycle
        m.d.sync += writes.eq(now.valid & now.last)
        lanes = data.ArrayLayout(signed(32), self.cfg.lanes)
        kept, old, written, committed = (Reg(lanes, name=name) for name in ("kept", "old", "written", "committed"))
        total = data.View(lanes, Value.cast(array.total))
        # missed[d]: the iteration d cycles earlier writes the same accumulator, too late for the read.
        missed = {d: Signal(name=f"missed_{d}") for d in (1, 2, 3, 4)}
        for d, stage in ((4, 0), (3, 1), (2, 1), (1, 2)):  # compared a cycle before it is needed
            this, before = stages[stage], stages[stage + d]
            m.d.sync += missed[d].eq(before.valid & before.last & (before.acc == this.acc))
        m.d.comb += [
            self.acc_read.en.eq(reading.valid & reading.last & reading.accumulate),
            self.acc_read.addr.eq(reading.acc),
            self.acc_write.en.eq(writes),
            self.acc_write.addr.eq(write.acc),
            self.acc_write.data.eq(written),
            self.acc_write.mask.eq(-1),
        ]
        with m.If(answer.valid & answer.last & answer.accumulate):
            m.d.sync += kept.eq(Mux(missed[4], committed, self.acc_read.data))
        with m.If(ahead.valid & ahead.last & ahead.accumulate):
            m.d.sync += old.eq(Mux(missed[2], written, Mux(missed[3], committed, kept)))
        with m.If(now.valid & now.last):
            for lane in range(self.cfg.lanes):
                before = Mux(missed[1], written[lane], old[lane])
                m.d.sync += written[lane].eq(total[lane] + Mux(now.accumulate, before, 0))
        with m.If(write.valid & write.last):
            m.d.sync += committed.eq(written)
        probes(self, stages=stages)

    def _claim_ports(self, m: Module, loops: Loops, pipe: Sequence[Any]) -> None:
        """Claim the ports of acc that GEMM is going to use, so that VECTOR does not use them in the same cycle.

        Writes are claimed one cycle ahead, reads `claim_lead` cycles. A small array has so few stages that its reads of
        acc are claimed before its operands are read: from `loops.ahead`.
        """
        now = pipe[-2]
        stage = len(pipe) - _FROM_READ - claim_lead(self.cfg)
        if stage >= 0:
            reading = pipe[stage]
            reads, bank = reading.valid & reading.last & reading.accumulate, reading.acc[-1]
        else:
            accumulates = Mux(loops.instr.ready, self.instr.payload.fields.accumulate, pipe[0].accumulate)
            reads, bank = loops.ahead.valid & loops.ahead.last & accumulates, loops.ahead.acc[-1]
        m.d.comb += [
            self.claims.read.eq(Mux(reads, 1 << bank, 0)),
            self.claims.write.eq(Mux(now.valid & now.last, 1 << now.acc[-1], 0)),
        ]
