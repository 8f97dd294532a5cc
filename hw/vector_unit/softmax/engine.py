"""Engine that executes softmaxes of rows of int8, bit for bit as onnxruntime's QLinearSoftmax computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from amaranth import Cat, Elaboratable, Module, Mux, ResetInserter, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.lib.layout import read_port, write_port
from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import (
    DIVIDE_STAGES,
    DIVIDE_TURN,
    FILL_TURN,
    LOOK_STAGES,
    OVERLAP_EQUAL_FIELDS,
    OVERLAP_FREE_FIELDS,
    PART_STAGES,
    QUOTIENT_BITS,
    SHARE_STAGES,
    SOFTMAX_SUMS,
    softmax_parts,
    softmax_span,
)  # fmt: skip
from celosia.hw.spec.scratchpads import scratchpads
from celosia.hw.vector_unit.masks import ones  # ones(n): a mask of the lowest n bits
from celosia.hw.vector_unit.softmax.adder import pair_layout
from celosia.hw.vector_unit.softmax.addresses import TileAddressGenerator, fields_layout
from celosia.hw.vector_unit.softmax.divider import TO_DIVISION
from celosia.hw.vector_unit.softmax.lane import SoftmaxLane
from celosia.hw.vector_unit.softmax.read_scheduler import ReadScheduler
from celosia.hw.vector_unit.softmax.result_writer import ResultWriter
from celosia.hw.vector_unit.softmax.row_max import RowMax
from celosia.hw.vector_unit.softmax.steps import Step, delay, divide_layout, fill_layout, find_layout
from celosia.hw.vector_unit.softmax.sum_addresses import SumAddressGenerator

VIN_STAGES = 2
"""Pipeline registers from a step to the entry that it reads."""


@dataclass(frozen=True)
class DivideSteps:
    """The steps of generator `divide` in the stages of its pipeline, and names for the stages that use them.

    stages : the step n cycles after it was generated, by n.
    entry : the data that vin has returned for the step in `select`, in parts.
    """

    stages: list[Step]
    entry: Any

    @property
    def select(self) -> Step:
        """The step whose bytes are selected from the entry."""
        return self.stages[PART_STAGES - 1]

    @property
    def read_sum(self) -> Step:
        """The step that reads the sum of its row, if it begins one."""
        return self.stages[SHARE_STAGES - 2]

    @property
    def share(self) -> Step:
        """The step whose bytes are replaced by their shares, by table lookup."""
        return self.stages[SHARE_STAGES - 1]

    @property
    def quotient(self) -> Step:
        """The step whose shares enter the dividers."""
        return self.stages[SHARE_STAGES]

    @property
    def result(self) -> Step:
        """The step whose results leave the dividers."""
        return self.stages[-1]


class SoftmaxEngine(wiring.Component):
    """Execute VECTORs with `softmax`. Three tiles of rows are under way at once, of one VECTOR or of two.

    Three address generators read vin, each an entry at a time, or two neighbouring ones (`softmax_span`). In each round
    of `softmax_parts` cycles each of them reads once, in a cycle of its own. The data read is processed during a round,
    one part of `softmax` bytes a cycle. The generators work on three successive tiles:

        find    by row      the newest tile: the largest byte of each row is searched
        fill    by entry    the tile before: its parts go to the lanes of their rows, where their powers are added up
        divide  by row      the oldest tile: each lane looks up the share of a byte and divides it by the row's sum

    Parameters
    ----------
    cfg : Config

    Members
    -------
    fields : In(fields_layout)      Fields of the VECTOR that is offered, valid or not.
    start : In(1)                   That VECTOR is accepted; only while not `busy`, or with `room`.
    room, finish, walked, over, entries, comes : Out        See `SoftmaxProgress` (softmax_tracker.py).
    zero_point, low, high : In      Zero point and limits of results, constant while `busy`; `low` is at most `high`.
    vin : Out(ReadPort)             Reads `softmax_span` entries; must be ready.
    exp : In(WritePort)             LOAD writes powers and shares.
    write : Out(1), addr, data      An entry of results is written.
    spare : Out(1)                  If entries are read in pairs: this entry lies behind a row with an odd number of
                                    entries, and must not be written.
    busy : Out(1)                   A softmax is under way.
    halt : In(1)                    Drops everything.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg, self._parts, self._span = cfg, softmax_parts(cfg), softmax_span(cfg)
        pads, fields = scratchpads(cfg), fields_layout(cfg)
        super().__init__({
            "start": In(1), "fields": In(fields), "room": Out(1), "zero_point": In(signed(8)), "low": In(signed(8)),
            "high": In(signed(8)), "vin": Out(read_port(pads["vin"], self._span)), "exp": In(write_port(pads["exp"])),
            "write": Out(1), "addr": Out(fields["dst_base"].shape), "data": Out(pads["out"].width), "finish": Out(1),
            "walked": Out(1), "over": Out(1), "entries": Out(fields["extent_n"].shape), "comes": Out(1),
            "busy": Out(1), "halt": In(1), **({"spare": Out(1)} if self._span > 1 else {}),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        cfg = self._cfg
        find, fill, divide = (TileAddressGenerator(cfg, by_row) for by_row in (True, False, True))
        m.submodules.find, m.submodules.fill, m.submodules.divide = find, fill, divide
        m.submodules.sums = sums = SumAddressGenerator(cfg)
        lanes = [SoftmaxLane(cfg, number) for number in range(cfg.softmax)]
        for number, lane in enumerate(lanes):
            m.submodules[f"lane{number}"] = lane
            m.d.comb += [
                *(getattr(lane.load, name).eq(getattr(self.exp, name)) for name in ("en", "addr", "mask", "data")),
                lane.zero_point.eq(self.zero_point), lane.low.eq(self.low), lane.high.eq(self.high),
            ]  # fmt: skip
        m.d.comb += self.exp.ready.eq(1)
        fields, accepted = self._accept(m, find.idle)
        for walk in (find, fill, divide):
            m.d.comb += [walk.fields.eq(fields), walk.accepted.eq(accepted)]
        beat = self._schedule(m, find, fill, divide, sums.done)
        m.d.comb += self.entries.eq(fields.extent_n)

        last_entry = fields.extent_n - 1
        last_key = Cat(~fields.imm, last_entry)
        # A bit for each byte that the last step of a row reads: the byte belongs to the row.
        inside = Cat(1, ones(Cat(~fields.imm, last_entry[: exact_log2(self._span)])))
        row_max = self._find_largest(m, find, inside)
        self._store_parts(m, fill, beat, lanes)
        self._add_up(m, fill, beat, sums, last_key, lanes)
        steps = self._delay_divide_steps(m, divide, beat)
        self._keep_largest(m, row_max, steps, lanes)
        self._divide(m, steps, inside, lanes)
        self._write(m, fields, accepted, steps, lanes)
        probes(self, find=find, divide=divide, beat=beat, steps=steps.stages, fields=fields)
        return ResetInserter(self.halt)(m)

    def _accept(self, m: Module, idle: Value) -> tuple[Any, Signal]:
        """Accept a VECTOR, and while it runs a second one, whose rows then overlap with its last tiles.

        The second is accepted with `room`: its fields are `alike` (OVERLAP_EQUAL_FIELDS), and generator `find` is
        `free` for it. Returns the fields of the last one, and whether it was accepted in the cycle before.

        idle: generator `find` has no VECTOR left.
        """
        fields = Reg(self.fields.shape())
        accepted = Signal()
        free = Signal()
        alike = Reg()
        second = Signal()
        m.d.comb += [free.eq(~second & idle & ~self.finish), self.room.eq(self.busy & free & alike)]
        m.d.sync += [
            accepted.eq(self.start),
            alike.eq(Cat(fields[name] == self.fields[name] for name in OVERLAP_EQUAL_FIELDS).all()),
        ]  # fmt: skip
        with m.If(self.start):
            m.d.sync += [self.busy.eq(1), second.eq(self.busy)]
        with m.Elif(self.finish):
            m.d.sync += [self.busy.eq(second), second.eq(0)]
        # OVERLAP_FREE_FIELDS may change once the generators have copied them, the others only while not `busy`.
        with m.If(~self.busy):
            m.d.sync += [fields[name].eq(self.fields[name]) for name in OVERLAP_EQUAL_FIELDS]
        with m.If(~self.busy | free):
            m.d.sync += [fields[name].eq(self.fields[name]) for name in OVERLAP_FREE_FIELDS]
        probes(self, second=second, alike=alike)
        return fields, accepted

    def _schedule(
        self, m: Module, find: TileAddressGenerator, fill: TileAddressGenerator, divide: TileAddressGenerator,
        summed: Value,
    ) -> Value:  # fmt: skip
        """Connect the scheduler, by which the address generators read vin in turn, and report their progress.

        `find` has the port in all cycles that are no turn of the others, as the scheduler lets it read in every cycle
        during the first tile. The tracker of softmaxes needs `over`, `walked` and `comes`, see `SoftmaxProgress`.

        summed: the sums of a tile are complete. Returns the number of the cycle in its round.
        """
        m.submodules.scheduler = scheduler = ReadScheduler(self._cfg)
        beat = scheduler.beat
        for walk, turn in ((find, scheduler.find), (fill, scheduler.fill), (divide, scheduler.divide)):
            m.d.comb += [
                turn.active.eq(walk.active), turn.ends.eq(walk.ends), walk.on.eq(turn.on), walk.begin.eq(turn.begin),
            ]  # fmt: skip
        m.d.comb += [
            scheduler.summed.eq(summed), scheduler.busy.eq(self.busy), self.vin.en.eq(find.on),
            self.vin.addr.eq(find.addr), self.over.eq(divide.on & divide.last),
            self.walked.eq(find.idle & ~find.wrapped), self.comes.eq(divide.comes),
        ]  # fmt: skip
        for turn, walk in ((FILL_TURN, fill), (DIVIDE_TURN, divide)):
            with m.If(beat == turn):
                m.d.comb += [self.vin.en.eq(walk.active), self.vin.addr.eq(walk.addr)]
        return beat

    def _register_entry(self, m: Module, read: Value, name: str) -> Any:
        """Return a register of the last entry that a generator has read, in parts, to be processed during a round.

        The port itself has the data of another generator in the next cycle.
        read: the generator reads in this cycle; the entry is valid VIN_STAGES cycles later. name: prefix of signals.
        """
        came = Signal(name=f"{name}_came")
        entry = Reg(data.ArrayLayout(data.ArrayLayout(8, self._cfg.softmax), self._parts), name=f"{name}_entry")
        m.d.sync += came.eq(read)
        with m.If(came):
            m.d.sync += entry.eq(self.vin.data)
        return entry

    def _find_largest(self, m: Module, find: TileAddressGenerator, inside: Value) -> RowMax:
        """Build the search for the largest byte of each row, and pass it the entries that `find` reads.

        inside: a bit for each byte of a row's last step that belongs to the row.
        """
        m.submodules.row_max = row_max = RowMax(self._span * self._cfg.block_out, len(find.row))
        step = Signal(find_layout(self._cfg))
        m.d.comb += [step.row.eq(find.row), step.first.eq(find.first), step.last.eq(find.last)]
        read = delay(m, "find", Step(find.on, step), VIN_STAGES)[-1]
        m.d.comb += [
            row_max.valid.eq(read.valid), row_max.entry.eq(Value.cast(self._register_entry(m, find.on, "find"))),
            row_max.row.eq(read.payload.row), row_max.first.eq(read.payload.first),
            row_max.last.eq(read.payload.last),
            row_max.inside.eq(inside | (~read.payload.last).replicate(len(inside))),
        ]  # fmt: skip
        return row_max

    def _store_parts(self, m: Module, fill: TileAddressGenerator, beat: Value, lanes: list[SoftmaxLane]) -> None:
        """Pass each part that `fill` reads to the lane of its row, which stores it in one of two buffers.

        beat: number of the cycle in its round, which is also the part's number. The lanes add up the other buffer.
        """
        buffer = Signal()
        of_lane = exact_log2(len(lanes))
        m.d.sync += buffer.eq(buffer ^ (fill.on & fill.last_row))
        step = Signal(fill_layout(self._cfg))
        m.d.comb += [step.row.eq(fill.row), step.part.eq(beat), step.buffer.eq(buffer)]
        stages = delay(m, "fill", Step(fill.active, step), PART_STAGES)
        select, keep = stages[PART_STAGES - 1], stages[PART_STAGES]
        entry = self._register_entry(m, fill.active & (beat == FILL_TURN), "fill")
        part = Reg(data.ArrayLayout(8, len(lanes)), name="fill_part")
        m.d.sync += part.eq(entry[select.payload.part])
        for number, lane in enumerate(lanes):
            m.d.comb += [
                lane.part.eq(part), lane.keep.eq(keep.valid & (keep.payload.row[:of_lane] == number)),
                lane.kept_at.eq(Value.cast(keep.payload)[of_lane:]),
            ]  # fmt: skip

    def _add_up(
        self, m: Module, fill: TileAddressGenerator, beat: Value, sums: SumAddressGenerator, last_key: Value,
        lanes: list[SoftmaxLane],
    ) -> None:  # fmt: skip
        """Drive the addition of powers in the lanes, which starts when the first entry of a tile's last row is read.

        beat: number of the cycle in its round. last_key: number of a row's last element.
        """
        element = Signal(data.StructLayout({"first": 1, "nothing": 1}))
        slot = Signal(data.StructLayout({"slot": len(sums.slot)}))
        m.d.comb += [
            sums.last_key.eq(last_key), sums.start.eq(fill.active & (beat == FILL_TURN) & fill.first & fill.last_row),
            element.first.eq(sums.first), element.nothing.eq(sums.nothing), slot.slot.eq(sums.slot),
        ]  # fmt: skip
        added = delay(m, "sum", Step(sums.look, element), LOOK_STAGES)[-1].payload
        complete = delay(m, "complete", Step(sums.last, slot), LOOK_STAGES + SOFTMAX_SUMS)[-1]
        for lane in lanes:
            m.d.comb += [
                lane.look_at.eq(sums.place), lane.byte.eq(sums.byte), lane.tile.eq(sums.tile), lane.slot.eq(sums.slot),
                lane.first.eq(added.first), lane.nothing.eq(added.nothing), lane.complete.eq(complete.valid),
                lane.sum.eq(complete.payload.slot),
            ]  # fmt: skip

    def _delay_divide_steps(self, m: Module, divide: TileAddressGenerator, beat: Value) -> DivideSteps:
        """Return the steps of `divide`, a part of an entry each, in all stages of the pipeline.

        beat: number of the cycle in its round.
        """
        step = Signal(divide_layout(self._cfg))
        count = self._parts // self._span
        m.d.comb += [
            step.row.eq(divide.row), step.part.eq(beat - DIVIDE_TURN), step.first.eq(divide.first),
            step.last.eq(divide.last), step.whole.eq(beat[: exact_log2(count)] == (DIVIDE_TURN - 1) % count),
            step.end.eq((beat == DIVIDE_TURN - 1) & divide.ends & ~divide.more),
        ]  # fmt: skip
        entry = self._register_entry(m, divide.active & (beat == DIVIDE_TURN), "divide")
        return DivideSteps(delay(m, "divide", Step(divide.active, step), SHARE_STAGES + DIVIDE_STAGES), entry)

    def _keep_largest(self, m: Module, row_max: RowMax, steps: DivideSteps, lanes: list[SoftmaxLane]) -> None:
        """Pass the largest byte of each row to the lane that adds up its powers, and store it for the division.

        All lanes need it inverted (`less`) when they divide parts of the row.
        """
        m.submodules.largest_bytes = memory = Memory(shape=8, depth=1 << len(row_max.number), init=[])
        put = memory.write_port()
        of_row = memory.read_port(domain="comb")
        less = Reg(8)
        m.d.comb += [
            put.en.eq(row_max.done), put.addr.eq(row_max.number), put.data.eq(~row_max.largest),
            of_row.addr.eq(steps.select.payload.row),
        ]  # fmt: skip
        m.d.sync += less.eq(of_row.data)
        for lane in lanes:
            m.d.comb += [
                lane.put_largest.eq(row_max.done), lane.number.eq(row_max.number), lane.largest.eq(row_max.largest),
                lane.less.eq(less),
            ]  # fmt: skip

    def _divide(self, m: Module, steps: DivideSteps, inside: Value, lanes: list[SoftmaxLane]) -> None:
        """Drive the divisions in the lanes: bytes of the part, the row's sum as divisor, and which bytes count.

        The divisor's mantissa is delayed to every step of the division. inside: see `_find_largest`.
        """
        part = Reg(data.ArrayLayout(8, len(lanes)), name="divide_part")
        m.d.sync += part.eq(steps.entry[steps.select.payload.part])
        of_lane = exact_log2(len(lanes))
        row_begins = Signal()
        divisor = Reg(pair_layout)
        before, share = steps.read_sum, steps.share.payload
        m.d.sync += row_begins.eq(before.valid & before.payload.first & (before.payload.part == 0))
        totals = data.View(data.ArrayLayout(pair_layout, len(lanes)), Cat(lane.total for lane in lanes))
        with m.If(row_begins):
            m.d.sync += divisor.eq(totals[share.row[:of_lane]])
        divisors = [divisor.m]
        for stage in range(1, TO_DIVISION + QUOTIENT_BITS):
            divisors.append(Reg(divisor.m.shape(), name=f"divisor{stage}"))
            m.d.sync += divisors[-1].eq(divisors[-2])
        beyond = Reg(len(lanes))
        inside_of_part = data.View(data.ArrayLayout(len(lanes), self._parts), inside)[share.part]
        m.d.sync += beyond.eq(Mux(share.last, ~inside_of_part, 0))
        for number, lane in enumerate(lanes):
            m.d.comb += [
                lane.element.eq(part[number]), lane.wanted.eq(share.row[of_lane:]),
                lane.take.eq(steps.quotient.valid), lane.e.eq(divisor.e), lane.beyond.eq(beyond[number]),
                *(of.eq(stage) for of, stage in zip(lane.divisors, divisors[TO_DIVISION:], strict=True)),
            ]  # fmt: skip

    def _write(self, m: Module, fields: Any, accepted: Value, steps: DivideSteps, lanes: list[SoftmaxLane]) -> None:
        """Build the writer, which collects results of the lanes and writes complete entries.

        fields, accepted: see `_accept`.
        """
        m.submodules.writer = writer = ResultWriter(self._cfg)
        m.d.comb += [
            writer.fields.eq(fields), writer.accepted.eq(accepted), writer.valid.eq(steps.result.valid),
            writer.step.eq(steps.result.payload),
            *(byte.eq(lane.result) for byte, lane in zip(writer.results, lanes, strict=True)),
            self.write.eq(writer.write), self.addr.eq(writer.addr), self.data.eq(writer.data),
            self.finish.eq(writer.finish),
        ]  # fmt: skip
        if self._span > 1:
            m.d.comb += self.spare.eq(writer.spare)
