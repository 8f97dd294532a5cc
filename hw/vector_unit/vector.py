"""The vector unit: window reductions, element-wise operations, requantisation, tables and residual additions.

    read          takes a step of the loops; with taps, reads vin and tap
    tap, product  only with taps: register the data read; multiply
    acc           with taps, adds the products; reads A and, in the last step of a reduction, B
    offset        adds a_offset to A
    reduce        accumulates over the loops r and s, in a register
    binary        does the binary operation of A and B; reads par
    requantise    eight stages; items without requantisation only saturate
    clip          adds zero_point and clips; reads the table
    select        takes the table's value, or the clipped one
    add           six stages of rescale_add
    write         writes the entry

An item is an entry of A on its way to an output entry. No stage stalls: `IssueStage` issues a step only in a cycle from
which its item meets no structural hazard. A hazard is GEMM reading the same bank of acc, which it claims early enough,
or an item with a residual, which occupies stage `add` for `residual_cycles`, or a full `WritebackQueue`, in which
results for acc wait until GEMM leaves the port. The decision and the constants of each stage are computed a cycle
ahead, in registers, because of their fan-out.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from amaranth import Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.layout import claim_layout, part_port, read_port, unit_members, write_port
from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Destination, Opcode
from celosia.hw.spec.pipeline import ADD_STAGES, softmax_span
from celosia.hw.spec.scratchpads import scratchpads
from celosia.hw.vector_unit.combine import Combine
from celosia.hw.vector_unit.delay_queue import DelayQueue
from celosia.hw.vector_unit.depthwise import DepthwiseSum, depthwise_shape
from celosia.hw.vector_unit.issue import IssueStage
from celosia.hw.vector_unit.norm.engine import NormEngine
from celosia.hw.vector_unit.requantise import RESULT_BITS, Requantise, param_layout
from celosia.hw.vector_unit.residual import RescaleAdd
from celosia.hw.vector_unit.softmax.engine import SoftmaxEngine
from celosia.hw.vector_unit.softmax_tracker import SoftmaxProgress
from celosia.hw.vector_unit.stages import PipelineStages, vin_stage
from celosia.hw.vector_unit.table import Tables
from celosia.hw.vector_unit.writeback import WritebackQueue


@dataclass(frozen=True)
class NormValues:
    """Inputs of all lanes (`Combine`) in Configs with `norm`: for items of a norm from the factors of their row.

    a_offset, twice : in stage `offset`.
    pairs, b_constant : in stage `reduce`.
    rest : in stage `binary`.

    For other items a_offset and b_constant are those of the instruction, twice and rest 0, and pairs is unused.
    """

    a_offset: Value
    twice: Value
    pairs: Value
    b_constant: Value
    rest: Value


def _bytes_layout(lanes: int, entries: int = 0) -> data.ArrayLayout:
    """Return the layout of the bytes of an entry with `lanes` lanes, or of `entries` such entries if that is not 0."""
    entry = data.ArrayLayout(signed(8), lanes)
    return data.ArrayLayout(entry, entries) if entries else entry


class Vector(wiring.Component):
    """Execute VECTOR: one entry of A a cycle, without a gap between instructions.

    Two instructions may be in the pipeline at once. An instruction waits for an earlier one that writes ACC, or that
    writes VIN if it reads VIN itself.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    instr, done, error, active, stalled, idle, halt    See `unit_members`; VECTOR never raises `error`.
    acc_read : Out(ReadPort)        Must be ready unless claimed. Data of all ports is used in the cycle after the read.
    vin, par : Out(ReadPort)        Must be ready. With taps, a read of vin returns `taps` entries.
    out : Out(WritePort)            Must be ready.
    acc_write : Out(WritePort)      With `int32`; must be ready unless claimed.
    claims : In(claim_layout)       Ports of acc that GEMM is going to use.
    lut : In(WritePort)             LOAD writes the tables.
    tap : Out(ReadPort)             With `taps`; must be ready.
    exp : In(WritePort)             With `softmax`: LOAD writes powers.
    inp_write, vin_write : Out(WritePort)   With `forward`; must be ready. Addresses of inp count parts as large as an
                                    entry of vin.

    Attributes
    ----------
    reads, writes : the read ports of scratchpads but acc, and the write ports of inp and vin, by scratchpad.
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
        """Build issue, the pipeline's stages and the lanes, and connect them to each other and to the scratchpads.

        `issue.ends` pulses when the last item of an instruction is written, `issue.lands` when an item is in acc.
        """
        m = Module()
        cfg = self._cfg
        m.submodules.issue = issue = IssueStage(cfg)
        m.submodules.items = items = PipelineStages(cfg)
        wiring.connect(m, wiring.flipped(self.instr), issue.instr)
        wiring.connect(m, issue.done, wiring.flipped(self.done))
        m.d.comb += [
            issue.halt.eq(self.halt), issue.claimed.eq(self.claims.read), items.halt.eq(self.halt),
            *(constants.eq(kept) for constants, kept in zip(items.constant_sets, issue.sets, strict=True)),
            self.active.eq(issue.active), self.stalled.eq(issue.stalled), self.idle.eq(issue.idle & ~self.done.valid),
        ]  # fmt: skip
        self._drive_first_stage(m, items, issue)
        self._drive_reads(m, items, issue.step)

        norm = self._build_norm(m, items, issue) if cfg.norm else None
        combined = self._build_combine(m, items, norm)
        selected = self._build_clip_and_tables(m, items, self._build_requantisers(m, items, combined))

        # Values that skip stages: the residual; whether an item is the last one of its instruction, and the address to
        # which it is written.
        residual = self._skip_stages(
            m, items, "residuals", "reduce", "add", Cat(unit.residual for unit in combined),
            items.reduce.fire & items.reduce.constants.rescale_add, items.added,
        )  # fmt: skip
        ends_and_dst = self._skip_stages(
            m, items, "places", "read", "write", Cat(issue.step.end, issue.step.dst),
            issue.fire & issue.step.last, items.complete,
        )  # fmt: skip
        is_end, dst = ends_and_dst[0], ends_and_dst[1:]
        result = self._build_rescale_add(m, items, selected, residual)
        softmax = self._build_softmax(m, issue) if cfg.softmax else None
        self._drive_writes(m, items, issue, result, dst, softmax)
        write, ends = items.write.constants, items.complete & is_end
        if cfg.int32:
            queue = self._build_writeback(m, items, combined, result, is_end, dst)
            ends = (ends & ~write.to[Destination.ACC]) | queue.last
            m.d.comb += issue.lands.eq(queue.write.en)
        m.d.comb += [issue.ends.eq(ends), issue.ended.post.eq(write.post), issue.ended.index.eq(write.index)]
        probes(self, items=items, issue=issue, is_end=is_end, dst=dst)
        return m

    def _drive_first_stage(self, m: Module, items: PipelineStages, issue: IssueStage) -> None:
        """Drive the first stage with the step that issue offers."""
        read, step, now = items.read, issue.step, issue.now
        vin_addr = Mux(now.a_vin, step.a, step.b)
        addresses = {"vin_addr": vin_addr, "acc_addr": step.a, "par_addr": step.par}
        values = {"first": step.first, "last": step.last, **addresses}
        m.d.comb += [
            read.valid.eq(issue.valid), read.fire.eq(issue.fire),
            read.constants_set.eq(issue.current), read.completes_entry.eq(1),
            *(read.constants[name].eq(now[name]) for name, _ in read.constants.shape()),
            *(read.carried[name].eq(value) for name, value in values.items()),
        ]  # fmt: skip

    def _drive_reads(self, m: Module, items: PipelineStages, step: data.View[data.StructLayout]) -> None:
        """Drive the read ports: A, B, taps and requantisation parameters, each a stage before the one that uses it."""
        reads, acc, binary = getattr(items, vin_stage(self._cfg)), items.acc, items.binary
        m.d.comb += [
            self.vin.en.eq(reads.fire & (reads.constants.a_vin | (reads.constants.b_vin & reads.carried.last))),
            self.vin.addr.eq(reads.carried.vin_addr),
            self.acc_read.en.eq(acc.fire & ~acc.constants.a_vin),
            self.acc_read.addr.eq(acc.carried.acc_addr),
            self.par.en.eq(binary.valid & binary.constants.requantise),
            self.par.addr.eq(binary.carried.par_addr),
        ]
        if self._cfg.taps:
            m.d.comb += [self.tap.en.eq(reads.fire & reads.constants.weigh), self.tap.addr.eq(step.tap)]

    def _channel_of_lane(self, lane: int) -> int:
        """Return the output channel of a lane within its entry. Lanes are ordered by piece, batch and channel."""
        piece, place = divmod(lane, self._cfg.piece_bytes)
        return piece * self._cfg.group + place % self._cfg.group

    def _values_from_vin(self, m: Module, items: PipelineStages) -> list[Value]:
        """Return each lane's value from vin in stage `offset`: its byte of the entry, or its sum of taps."""
        cfg = self._cfg
        entries = data.View(_bytes_layout(cfg.lanes, max(1, cfg.taps)), self.vin.data)
        if not cfg.taps:
            return [entries[0][lane] for lane in range(cfg.lanes)]
        layout = _bytes_layout(cfg.block_out, cfg.taps)
        tap_bytes = data.View(layout, self.tap.data[: layout.size])
        sums = []
        for lane in range(cfg.lanes):
            m.submodules[f"taps{lane}"] = taps = DepthwiseSum(cfg.taps, lane)
            for number in range(cfg.taps):
                m.d.comb += [
                    taps.entries[number].eq(entries[number][lane]),
                    taps.taps[number].eq(tap_bytes[number][self._channel_of_lane(lane)]),
                ]
            m.d.comb += [
                taps.weigh.eq(items.tap.constants.weigh),
                taps.enable.eq(Cat(stage.valid for stage in items.stages_from("tap", "offset"))),
            ]
            sums.append(taps.sum)
        return sums

    def _build_combine(self, m: Module, items: PipelineStages, norm: NormValues | None) -> list[Combine]:
        """Build stages `offset` to `binary` of each lane, which reduce A and combine it with B.

        norm: inputs of the lanes in Configs with `norm`; else None.
        """
        offset, reduce, binary = items.offset, items.reduce, items.binary
        acc = data.View(data.ArrayLayout(signed(32), self._cfg.lanes), self.acc_read.data)
        combined = []
        for lane, vin in enumerate(self._values_from_vin(m, items)):
            m.submodules[f"combine{lane}"] = unit = Combine(self._cfg, depthwise_shape(self._cfg.taps))
            m.d.comb += [
                unit.acc.eq(acc[lane]),
                unit.vin.eq(vin),
                unit.enable.eq(Cat(stage.valid for stage in (offset, reduce, binary))),
                unit.last.eq(Cat(offset.carried.last, reduce.carried.last)),
                unit.a_vin.eq(offset.constants.a_vin),
                unit.a_offset.eq(norm.a_offset if norm else offset.constants.a_offset),
                unit.first.eq(reduce.carried.first),
                unit.reduce_op.eq(reduce.constants.reduce_op),
                unit.b_offset.eq(reduce.constants.b_offset),
                unit.b_vin.eq(reduce.constants.b_vin),
                unit.b_constant.eq(norm.b_constant if norm else reduce.constants.b_constant),
                unit.binary_op.eq(binary.constants.binary_op),
            ]
            if norm:
                m.d.comb += [
                    unit.twice.eq(norm.twice),
                    unit.norm.eq(reduce.constants.norm),
                    unit.pairs.eq(norm.pairs),
                    unit.times.eq(binary.constants.norm),
                    unit.rest.eq(norm.rest),
                ]
            combined.append(unit)
        return combined

    def _build_requantisers(self, m: Module, items: PipelineStages, combined: list[Combine]) -> list[Value]:
        """Build the requantiser of each lane. Returns the lanes' results in stage `clip`."""
        params = data.View(data.ArrayLayout(param_layout, self._cfg.block_out), self.par.data)
        results = []
        for lane, unit in enumerate(combined):
            m.submodules[f"requantise{lane}"] = requantise = Requantise()
            m.d.comb += [
                requantise.enable.eq(Cat(stage.int8 for stage in items.stages_from("requantise", "clip"))),
                requantise.bypass.eq(~items.requantise.constants.requantise),
                requantise.v.eq(unit.v),
                requantise.param.eq(params[self._channel_of_lane(lane)]),
            ]
            results.append(requantise.result)
        return results

    def _build_clip_and_tables(self, m: Module, items: PipelineStages, results: list[Value]) -> Signal:
        """Build stages `clip` and `select`: zero point, clipping, tables. Returns each lane's byte in stage `add`."""
        clip, select = items.clip, items.select
        low, high = clip.constants.clip_lo, clip.constants.clip_hi
        m.submodules.tables = tables = Tables(self._cfg)
        wiring.connect(m, wiring.flipped(self.lut), tables.load)
        m.d.comb += [
            tables.enable.eq(clip.int8 & clip.constants.lookup),
            tables.table.eq(clip.constants.table),
        ]
        selected = Reg(data.ArrayLayout(8, len(results)))
        for lane, result in enumerate(results):
            shifted, unmapped = Signal(signed(RESULT_BITS + 1), name=f"moved{lane}"), Reg(8, name=f"kept{lane}")
            clipped = Signal(signed(8), name=f"clipped{lane}")
            m.d.comb += [
                shifted.eq(result + clip.constants.zero_point),
                clipped.eq(Mux(shifted > high, high, Mux(shifted < low, low, shifted))),
                tables.index[lane].eq(Cat(clipped[:7], ~clipped[7])),
            ]
            with m.If(clip.int8):
                m.d.sync += unmapped.eq(clipped)
            with m.If(select.int8):
                m.d.sync += selected[lane].eq(Mux(select.constants.lookup, tables.value[lane], unmapped))
        return selected

    def _build_rescale_add(self, m: Module, items: PipelineStages, v: Value, residual: Value) -> Value:
        """Build rescale_add, which takes `residual_cycles` cycles for an entry with a residual, lowest lanes first.

        v, residual: bytes of all lanes in stage `add`. Returns the bytes of all lanes in stage `write`. Items without a
        residual pass unchanged, in one cycle.
        """
        cfg, stages, write = self._cfg, items.stages_from("add", "write"), items.write
        units = cfg.lanes // cfg.residual_cycles
        parts = data.ArrayLayout(data.ArrayLayout(8, units), cfg.residual_cycles)

        passed = [Value.cast(v), *(Reg(8 * cfg.lanes, name=f"passed{i}") for i in range(ADD_STAGES - 1))]
        for stage, (before, after) in zip(stages, pairwise(passed), strict=False):
            with m.If(stage.int8 & ~stage.constants.rescale_add):
                m.d.sync += after.eq(before)

        multiply, _, total, by_bytes, by_bits, clip = (stage.constants for stage in stages)
        part_of_v, part_of_residual = (data.View(parts, Value.cast(lanes))[items.part] for lanes in (v, residual))
        passed_last = data.View(parts, passed[-1])[cfg.residual_cycles - 1]
        results = []
        for number in range(units):
            m.submodules[f"add{number}"] = unit = RescaleAdd()
            m.d.comb += [
                unit.v.eq(part_of_v[number]),
                unit.residual.eq(part_of_residual[number]),
                unit.passed.eq(passed_last[number]),
                unit.enable.eq(Cat(stage.int8 for stage in stages)),
                unit.add.eq(Cat(stage.constants.rescale_add for stage in stages)),
                unit.scale_v.eq(multiply.scale_v),
                unit.scale_b.eq(multiply.scale_b),
                unit.scale_c.eq(total.scale_c),
                unit.bytes.eq(by_bytes.scale_shift[3:]),
                unit.bits.eq(by_bits.scale_shift[:3]),
                unit.low.eq(clip.add_lo),
                unit.high.eq(clip.add_hi),
            ]
            results.append(unit.result)

        # Results of an entry's earlier parts wait here for the last part.
        waiting = Reg(8 * (cfg.lanes - units))
        with m.If(write.valid & ~write.completes_entry):
            m.d.sync += waiting.eq(Cat(waiting, *results)[8 * units :])
        with m.Elif(stages[-1].int8 & ~clip.rescale_add):
            m.d.sync += waiting.eq(passed[-1])
        return Cat(waiting, *results)

    def _build_softmax(self, m: Module, issue: IssueStage) -> SoftmaxEngine:
        """Build and connect the engine that executes softmaxes. While one is under way, it has the read port of vin."""
        m.submodules.softmax = engine = SoftmaxEngine(self._cfg)
        wiring.connect(m, wiring.flipped(self.exp), engine.exp)
        constants, entry = issue.oldest_softmax, len(engine.vin.data)
        m.d.comb += [
            engine.start.eq(issue.starts_softmax),
            *(engine.fields[name].eq(self.instr.payload.fields[name]) for name, _ in engine.fields.shape()),
            *(getattr(issue.softmax, name).eq(getattr(engine, name)) for name in SoftmaxProgress().members),
            engine.zero_point.eq(constants.zero_point),
            engine.low.eq(constants.clip_lo),
            engine.high.eq(constants.clip_hi),
            engine.vin.ready.eq(self.vin.ready),
            engine.vin.data.eq(self.vin.data[:entry]),
            engine.halt.eq(self.halt),
        ]
        with m.If(issue.softmax_under_way):
            m.d.comb += [self.vin.en.eq(engine.vin.en), self.vin.addr.eq(engine.vin.addr)]
        return engine

    def _build_norm(self, m: Module, items: PipelineStages, issue: IssueStage) -> NormValues:
        """Build the engine that computes the factors of a norm's rows. While it does, it has the read port of vin.

        Returns the inputs of the lanes, selected for the item in each stage.
        """
        m.submodules.norm = engine = NormEngine(self._cfg)
        acc, offset, reduce = items.acc, items.offset, items.reduce
        m.d.comb += [
            engine.start.eq(issue.starts_norm),
            issue.norm_busy.eq(engine.busy),
            issue.norm_ends.eq(engine.ends),
            *(engine.fields[name].eq(self.instr.payload.fields[name]) for name, _ in engine.fields.shape()),
            engine.vin.ready.eq(self.vin.ready),
            engine.vin.data.eq(self.vin.data[: len(engine.vin.data)]),
            engine.takes.eq(issue.fire & issue.now.norm),
            engine.halt.eq(self.halt),
            items.read.carried.row.eq(engine.number),
            engine.wanted.eq(acc.carried.row),
        ]
        with m.If(engine.busy):
            m.d.comb += [self.vin.en.eq(engine.vin.en), self.vin.addr.eq(engine.vin.addr)]
        row = engine.row
        for_offset, for_reduce, for_binary = (
            Reg(row.shape(), name=f"row_{name}") for name in ("offset", "reduce", "binary")
        )
        a_offset = Reg(row.offset.shape())
        b_constant = Reg(signed(32))
        with m.If(acc.valid):
            m.d.sync += [
                for_offset.eq(row),
                a_offset.eq(Mux(acc.constants.norm, row.offset, acc.constants.a_offset)),
                for_offset.twice.eq(row.twice & acc.constants.norm),
            ]
        with m.If(offset.valid):
            constant = Mux(offset.constants.norm, for_offset.factor, offset.constants.b_constant)
            m.d.sync += [for_reduce.eq(for_offset), b_constant.eq(constant)]
        with m.If(reduce.valid):
            m.d.sync += for_binary.rest.eq(Mux(reduce.constants.norm, for_reduce.rest, 0))
        return NormValues(a_offset, for_offset.twice, for_reduce.pairs, b_constant, for_binary.rest)

    def _drive_writes(
        self,
        m: Module,
        items: PipelineStages,
        issue: IssueStage,
        result: Value,
        address: Value,
        softmax: SoftmaxEngine | None,
    ) -> None:
        """Drive the write ports of all destinations but acc: results of items, or of a softmax that writes there.

        result, address: bytes of all lanes in stage `write`, and the entry's address. softmax: its engine, if any.
        """
        for destination, port in self._targets.items():
            if destination != Destination.ACC:
                m.d.comb += [
                    port.en.eq(items.writes[destination]),
                    port.mask.eq(-1),
                    port.addr.eq(address),
                    port.data.eq(result),
                ]
                if softmax is not None:
                    with m.If(issue.softmax_under_way & issue.oldest_softmax.to[destination]):
                        m.d.comb += [
                            port.en.eq(softmax.write),
                            port.addr.eq(softmax.addr),
                            port.data.eq(softmax.data),
                        ]
                        if softmax_span(self._cfg) > 1:
                            m.d.comb += port.mask.eq((~softmax.spare).replicate(len(port.mask)))

    def _build_writeback(
        self, m: Module, items: PipelineStages, combined: list[Combine], result: Value, is_end: Value, dst: Value
    ) -> WritebackQueue:
        """Build the queue of results for acc: int32 results from stage `requantise`, int8 ones from stage `write`.

        int8 results are sign-extended. Results of both kinds cannot mix, as the next instruction waits for one that
        writes acc. result, is_end, dst: bytes of all lanes in stage `write`, whether the entry is its instruction's
        last one, and its address.
        """
        requantise, write, writes_acc = items.requantise, items.write, items.writes[Destination.ACC]
        raw = requantise.valid & requantise.constants.raw
        lanes = data.View(_bytes_layout(self._cfg.lanes), result)
        m.submodules.writeback = queue = WritebackQueue(self._cfg)
        for lane, unit in enumerate(combined):
            m.d.comb += queue.data[lane].eq(Mux(raw, unit.v, lanes[lane]))
        m.d.comb += [
            queue.put.eq(raw | (writes_acc & ~write.constants.raw)),
            queue.arrive.eq(writes_acc),
            queue.end.eq(is_end),
            queue.addr.eq(dst),
            queue.claims.eq(self.claims.write),
            queue.clear.eq(self.halt),
        ]
        wiring.connect(m, queue.write, wiring.flipped(self.acc_write))
        probes(self, writeback=queue, raw=raw)
        return queue

    def _skip_stages(
        self,
        m: Module,
        items: PipelineStages,
        name: str,
        leaves: str,
        returns: str,
        value: Value,
        push: Value,
        pop: Value,
    ) -> Value:
        """Return `value` of stage `leaves`, delayed until its item is in stage `returns`.

        A queue, submodule `name`, holds the values, so that the stages between need no registers for them. push, pop:
        an item leaves stage `leaves`, or stage `returns`.
        """
        m.submodules[name] = queue = DelayQueue(len(value), len(items.stages_from(leaves, returns)))
        m.d.comb += [queue.clear.eq(self.halt), queue.push.eq(push), queue.i.eq(value), queue.pop.eq(pop)]
        probes(self, **{name: queue})
        return queue.o
