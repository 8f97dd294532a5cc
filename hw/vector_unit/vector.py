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

An item is an output entry on its way; a Stage knows whether it holds one. Nothing stands in its way: a step is taken
only in a cycle from which its item meets neither a read of acc by GEMM, which says early enough which bank it is going
to read, nor one in front of it with a residual, which stays in front of rescale_add for `residual_cycles`. What is
written to acc waits there, behind the pipeline, for GEMM's writes (`landing.py`); that there is room is part of the
same decision. It falls a cycle ahead, and so does what an item needs of its instruction: both are registers, for they
lead to many.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from amaranth import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.layout import claim_layout, part_port, read_port, unit_members, write_port
from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Destination, Opcode
from celosia.hw.spec.pipeline import ADD_STAGES, softmax_span
from celosia.hw.spec.scratchpads import scratchpads
from celosia.hw.vector_unit.combine import Combine
from celosia.hw.vector_unit.issue import IssueStage
from celosia.hw.vector_unit.items import DelayQueue, PipelineTracker
from celosia.hw.vector_unit.landing import WritebackQueue
from celosia.hw.vector_unit.norm.engine import NormEngine
from celosia.hw.vector_unit.requantise import RESULT_BITS, Requantise, param_layout
from celosia.hw.vector_unit.residual import RescaleAdd
from celosia.hw.vector_unit.softmax.engine import SoftmaxEngine
from celosia.hw.vector_unit.table import Tables
from celosia.hw.vector_unit.taps import Taps, tap_sum


class Vector(wiring.Component):
    """Executes VECTOR: one entry of A a cycle, across instructions as well.

    The constants of two instructions are kept, so that one can start while the one before is still in the pipeline;
    only after an instruction that writes ACC, or VIN where it reads that, does it wait until that one is done.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    instr, done, error, active, stalled, idle, halt    see `unit_members`; there are no errors.
    acc_read, vin, par, out                          scratchpad ports, which must be ready, that of acc unless claimed;
                                                     data is used in the cycle after the read.
                                                     With taps a read of vin gives as many entries.
    acc_write                                        where the Config has `int32`; must be ready unless claimed.
    claims : In(claim_layout)                        the ports of acc that GEMM takes.
    lut : In(WritePort)                              through which LOAD writes the tables.
    tap                                              where the Config has taps.
    exp : In(WritePort)                              through which LOAD writes powers, where it has `softmax`.
    inp_write, vin_write                             where it has `forward`; must be ready. Addresses of inp count parts
                                                     of the size of an entry of vin.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        pads = scratchpads(cfg)
        members = {
            **unit_members(cfg, Opcode.VECTOR),
            "acc_read": Out(read_port(pads["acc"])),
            "vin": Out(read_port(pads["vin"], max(1, cfg.taps))),
            "par": Out(read_port(pads["par"])),
            "out": Out(write_port(pads["out"])),
            "lut": In(write_port(pads["lut"])),
            "claims": In(claim_layout),
        }
        if cfg.taps:
            members["tap"] = Out(read_port(pads["tap"]))
        if cfg.int32:
            members["acc_write"] = Out(write_port(pads["acc"]))
        if cfg.softmax:
            members["exp"] = In(write_port(pads["exp"]))
        if cfg.forward:
            members |= {f"{name}_write": Out(part_port(pads[name], pads["out"].width)) for name in ("inp", "vin")}
        super().__init__(members)
        self.reads = {"vin": self.vin, "par": self.par} | ({"tap": self.tap} if cfg.taps else {})
        self.writes = {"inp": self.inp_write, "vin": self.vin_write} if cfg.forward else {}
        self._targets = {Destination.OUT: self.out} | ({Destination.ACC: self.acc_write} if cfg.int32 else {})
        self._targets |= {Destination[name.upper()]: port for name, port in self.writes.items()}

    def elaborate(self, platform: object) -> Module:
        m = Module()
        cfg = self._cfg
        finish = Signal()
        rows_finish = Signal() if cfg.softmax else Const(0)
        issue = IssueStage(cfg, max(self._targets) + 1)
        items = PipelineTracker(m, cfg, issue.constants, issue.now, issue.current)
        step = issue.steps(m, self, finish, rows_finish)

        read, add, write = items["read"], items["add"], items["write"]
        m.d.comb += read.valid.eq(step.valid)
        read.leaves = issue.takes
        first, last = (items.carry(step.payload[name], name, "reduce") for name in ("first", "last"))
        items["reduce"].leaves = items["reduce"].valid & last["reduce"]
        self._read(m, items, step, last)

        combined = self._combine(m, items, first, last)
        if cfg.norm:
            self._norm(m, items, issue, combined)
        self._read_par(m, items, items.carry(step.payload.par, "par_addr", "binary")["binary"])
        selected = self._look_up(m, items, self._requantise(m, items, combined))

        # What skips stages: the residual, and the place to which an item is written.
        residual = self._ring(
            m, items, "residuals", "reduce", "add", Cat(unit.residual for unit in combined),
            items["reduce"].leaves & items["reduce"].at("rescale_add"), add.adds & items.last_part,
        )  # fmt: skip
        place = self._ring(
            m, items, "places", "read", "write", Cat(step.payload.end, step.payload.dst),
            read.leaves & step.payload.last, items.complete,
        )  # fmt: skip
        result = self._add(m, items, selected, residual)
        rows = self._rows(m, issue) if cfg.softmax else None
        self._write(m, items, issue, result, place[1:], rows)
        ends, lands = items.complete & place[0], Const(0)
        if cfg.int32:
            landing = self._land(m, items, combined, result, place)
            ends, lands = (ends & ~write.at("to")[Destination.ACC]) | landing.last, landing.write.en
        issue.advance(m, self, lands)
        told = {name: write.at(name) for name in ("post", "index")}
        if rows is not None:
            m.d.comb += rows_finish.eq(rows.finish)
            late = {name: Mux(issue.late.any(), issue.oldest[name], value) for name, value in told.items()}
            told = {name: Mux(issue.alone, issue.of_rows[name], value) for name, value in late.items()}
        m.d.comb += [
            finish.eq(ends if rows is None else issue.tells(m, ends, self.halt)),
            self.active.eq(issue.takes | issue.bubbles.any() | issue.alone),
            self.stalled.eq(step.valid & ~issue.slot & ~issue.bubbles.any()),
        ]
        if cfg.norm:
            with m.If(issue.finding):
                m.d.comb += [self.active.eq(1), self.stalled.eq(0)]
        tells = finish if rows is None else finish | rows_finish
        m.d.sync += self.done.valid.eq(tells & ~self.halt)
        with m.If(tells):
            m.d.sync += [self.done.payload[name].eq(value) for name, value in told.items()]
        items.advance(self.halt)
        probes(self, items=items, last=last, issue=issue, step=step, place=place, finish=finish)
        return m

    def _read(self, m: Module, items: PipelineTracker, step: Any, last: dict[str, Any]) -> None:
        """Asks for A, B and taps."""
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
        probes(self, in_acc=in_acc)

    def _channel(self, lane: int) -> int:
        piece, place = divmod(lane, self._cfg.piece_bytes)
        return piece * self._cfg.group + place % self._cfg.group

    def _from_vin(self, m: Module, items: PipelineTracker) -> list[Value]:
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
                taps.enable.eq(Cat(stage.valid for stage in items.between("tap", "offset"))),
            ]
            sums.append(taps.sum)
        return sums

    def _combine(self, m: Module, items: PipelineTracker, first: dict[str, Any], last: dict[str, Any]) -> list[Combine]:
        offset, reduce, binary = (items[name] for name in ("offset", "reduce", "binary"))
        combined = []
        for lane, vin in enumerate(self._from_vin(m, items)):
            m.submodules[f"combine{lane}"] = unit = Combine(self._cfg, tap_sum(self._cfg.taps))
            m.d.comb += [
                unit.acc.eq(self.acc_read.data.word_select(lane, 32)),
                unit.vin.eq(vin),
                unit.enable.eq(Cat(stage.valid for stage in (offset, reduce, binary))),
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

    def _read_par(self, m: Module, items: PipelineTracker, address: Value) -> None:
        binary = items["binary"]
        m.d.comb += [self.par.en.eq(binary.valid & binary.at("requantise")), self.par.addr.eq(address)]

    def _requantise(self, m: Module, items: PipelineTracker, combined: list[Combine]) -> list[Value]:
        """The results of the lanes in the stage that clips."""
        results = []
        for lane, unit in enumerate(combined):
            m.submodules[f"requantise{lane}"] = requantise = Requantise()
            m.d.comb += [
                requantise.enable.eq(Cat(stage.int8 for stage in items.between("requantise", "clip"))),
                requantise.bypass.eq(~items["requantise"].at("requantise")),
                requantise.v.eq(unit.v),
                requantise.param.eq(self.par.data.word_select(self._channel(lane), param_layout.size)),
            ]
            results.append(requantise.result)
        return results

    def _look_up(self, m: Module, items: PipelineTracker, results: list[Value]) -> Value:
        """Adds the zero point, clips, and looks up. The lanes, 8 bits each, in front of rescale_add."""
        clip, select = items["clip"], items["select"]
        low, high = clip.at("clip_lo"), clip.at("clip_hi")
        m.submodules.tables = tables = Tables(self._cfg)
        wiring.connect(m, wiring.flipped(self.lut), tables.load)
        m.d.comb += [
            tables.enable.eq(clip.int8 & clip.at("lookup")),
            tables.table.eq(clip.at("table")),
        ]
        selected = [Reg(8, name=f"selected{lane}") for lane in range(len(results))]
        for lane, result in enumerate(results):
            moved, kept = Signal(signed(RESULT_BITS + 1), name=f"moved{lane}"), Reg(8, name=f"kept{lane}")
            clipped = Signal(signed(8), name=f"clipped{lane}")
            m.d.comb += [
                moved.eq(result + clip.at("zero_point")),
                clipped.eq(Mux(moved > high, high, Mux(moved < low, low, moved))),
                tables.index.word_select(lane, 8).eq(Cat(clipped[:7], ~clipped[7])),
            ]
            with m.If(clip.int8):
                m.d.sync += kept.eq(clipped)
            with m.If(select.int8):
                m.d.sync += selected[lane].eq(Mux(select.at("lookup"), tables.value.word_select(lane, 8), kept))
        return Cat(selected)

    def _add(self, m: Module, items: PipelineTracker, v: Value, residual: Value) -> Value:
        """rescale_add in as many cycles as the Config says, the lowest lanes first. The lanes in the last stage."""
        cfg, steps, write = self._cfg, items.between("add", "write"), items["write"]
        units = cfg.lanes // cfg.residual_cycles

        passed = [v, *(Reg(8 * cfg.lanes, name=f"passed{i}") for i in range(ADD_STAGES - 1))]
        for stage, (before, after) in zip(steps, pairwise(passed), strict=False):
            with m.If(stage.int8 & ~stage.at("rescale_add")):
                m.d.sync += after.eq(before)

        multiply, _, total, by_bytes, by_bits, clip = steps
        results = []
        for number in range(units):
            m.submodules[f"add{number}"] = unit = RescaleAdd()
            m.d.comb += [
                unit.v.eq(v.word_select(items.part, 8 * units).word_select(number, 8)),
                unit.residual.eq(residual.word_select(items.part, 8 * units).word_select(number, 8)),
                unit.passed.eq(passed[-1].word_select(cfg.lanes - units + number, 8)),
                unit.enable.eq(Cat(stage.int8 for stage in steps)),
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
        waiting = Reg(8 * (cfg.lanes - units))
        with m.If(write.valid & ~write.whole):
            m.d.sync += waiting.eq(Cat(waiting, *results)[8 * units :])
        with m.Elif(clip.int8 & ~clip.at("rescale_add")):
            m.d.sync += waiting.eq(passed[-1])
        return Cat(waiting, *results)

    def _rows(self, m: Module, issue: IssueStage) -> SoftmaxEngine:
        """What runs instructions with `softmax`, and takes the read port of vin for them."""
        m.submodules.softmax = rows = SoftmaxEngine(self._cfg)
        wiring.connect(m, wiring.flipped(self.exp), rows.exp)
        now, entry = issue.of_rows, len(rows.vin.data)
        m.d.comb += [
            rows.start.eq(issue.rows),
            issue.room.eq(rows.room),
            *(rows.fields[name].eq(self.instr.payload.fields[name]) for name, _ in rows.fields.shape()),
            rows.zero_point.eq(now.zero_point),
            rows.low.eq(now.clip_lo),
            rows.high.eq(now.clip_hi),
            rows.vin.ready.eq(self.vin.ready),
            rows.vin.data.eq(self.vin.data[:entry]),
            rows.halt.eq(self.halt),
        ]
        if issue.trail:
            told = ("walked", "over", "entries", "comes")
            m.d.comb += [getattr(issue.trail, name).eq(getattr(rows, name)) for name in told]
        with m.If(issue.alone):
            m.d.comb += [self.vin.en.eq(rows.vin.en), self.vin.addr.eq(rows.vin.addr)]
        return rows

    def _norm(self, m: Module, items: PipelineTracker, issue: IssueStage, combined: list[Combine]) -> None:
        """What finds the factors of a norm's rows, and takes the read port of vin for them; and for each item those of
        its row, in the stages that need them."""
        m.submodules.norm = norm = NormEngine(self._cfg)
        m.d.comb += [
            norm.start.eq(issue.norms),
            issue.finding.eq(norm.busy),
            issue.found.eq(norm.ends),
            *(norm.fields[name].eq(self.instr.payload.fields[name]) for name, _ in norm.fields.shape()),
            norm.vin.ready.eq(self.vin.ready),
            norm.vin.data.eq(self.vin.data[: len(norm.vin.data)]),
            norm.takes.eq(issue.takes & issue.now.norm),
            norm.halt.eq(self.halt),
            norm.wanted.eq(items.carry(norm.number, "row_number", "acc")["acc"]),
        ]
        with m.If(norm.busy):
            m.d.comb += [self.vin.en.eq(norm.vin.en), self.vin.addr.eq(norm.vin.addr)]
        acc, offset, reduce, binary = (items[name] for name in ("acc", "offset", "reduce", "binary"))
        row, facts = norm.row, [Reg(norm.row.shape(), name=f"row_{name}") for name in ("offset", "reduce", "binary")]
        a_offset = Reg(row.offset.shape())
        b_constant = Reg(signed(32))
        with m.If(acc.valid):
            m.d.sync += [facts[0].eq(row), a_offset.eq(Mux(acc.at("norm"), row.offset, acc.at("a_offset")))]
            m.d.sync += facts[0].twice.eq(row.twice & acc.at("norm"))
        with m.If(offset.valid):
            constant = Mux(offset.at("norm"), facts[0].factor, offset.at("b_constant"))
            m.d.sync += [facts[1].eq(facts[0]), b_constant.eq(constant)]
        with m.If(reduce.valid):
            m.d.sync += facts[2].rest.eq(Mux(reduce.at("norm"), facts[1].rest, 0))
        for unit in combined:
            m.d.comb += [
                unit.a_offset.eq(a_offset),
                unit.twice.eq(facts[0].twice),
                unit.norm.eq(reduce.at("norm")),
                unit.pairs.eq(facts[1].pairs),
                unit.b_constant.eq(b_constant),
                unit.times.eq(binary.at("norm")),
                unit.rest.eq(facts[2].rest),
            ]

    def _write(
        self,
        m: Module,
        items: PipelineTracker,
        issue: IssueStage,
        written: Value,
        address: Value,
        rows: SoftmaxEngine | None,
    ) -> None:
        for destination, port in self._targets.items():
            if destination != Destination.ACC:
                m.d.comb += [
                    port.en.eq(items.writes[destination]),
                    port.mask.eq(-1),
                    port.addr.eq(address),
                    port.data.eq(written),
                ]
                if rows is not None:
                    with m.If(issue.alone & issue.of_rows.to[destination]):
                        m.d.comb += [
                            port.en.eq(rows.write),
                            port.addr.eq(rows.addr),
                            port.data.eq(rows.data),
                        ]
                        if softmax_span(self._cfg) > 1:
                            m.d.comb += port.mask.eq((~rows.spare).replicate(len(port.mask)))

    def _land(
        self, m: Module, items: PipelineTracker, combined: list[Combine], written: Value, place: Value
    ) -> WritebackQueue:
        """What goes to acc: v as soon as it is there, where it is written as it is, or the int8 that was made of it,
        with its sign. Entries of two instructions are never under way there."""
        requantise, write, arrives = items["requantise"], items["write"], items.writes[Destination.ACC]
        raw = requantise.valid & requantise.at("raw")
        lanes = [written.word_select(lane, 8) for lane in range(self._cfg.lanes)]
        wide = Cat(Cat(lane, lane[7].replicate(24)) for lane in lanes)
        m.submodules.landing = landing = WritebackQueue(self._cfg)
        m.d.comb += [
            landing.put.eq(raw | (arrives & ~write.at("raw"))),
            landing.data.eq(Mux(raw, Cat(unit.v for unit in combined), wide)),
            landing.arrive.eq(arrives),
            landing.end.eq(place[0]),
            landing.addr.eq(place[1:]),
            landing.claims.eq(self.claims.write),
            landing.clear.eq(self.halt),
        ]
        wiring.connect(m, landing.write, wiring.flipped(self.acc_write))
        probes(self, landing=landing, raw=raw)
        return landing

    def _ring(
        self,
        m: Module,
        items: PipelineTracker,
        name: str,
        leaves: str,
        returns: str,
        value: Value,
        push: Value,
        pop: Value,
    ) -> Value:
        """`value` for what leaves in one stage and returns in another."""
        m.submodules[name] = ring = DelayQueue(len(value), len(items.between(leaves, returns)))
        m.d.comb += [ring.clear.eq(self.halt), ring.push.eq(push), ring.i.eq(value), ring.pop.eq(pop)]
        probes(self, **{name: ring})
        return ring.o
