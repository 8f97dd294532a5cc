"""Softmax of rows of int8, bit for bit as onnxruntime's QLinearSoftmax computes it."""

from __future__ import annotations

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
    FIND_TURN,
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
from celosia.hw.vector_unit.masks import ones
from celosia.hw.vector_unit.softmax.adder import pair_layout
from celosia.hw.vector_unit.softmax.divider import TO_DIVISION
from celosia.hw.vector_unit.softmax.lane import SoftmaxLane
from celosia.hw.vector_unit.softmax.largest import RowMax
from celosia.hw.vector_unit.softmax.sums import ExpAccumulator
from celosia.hw.vector_unit.softmax.walk import TILES, TileAddressGenerator, fields_layout, row_bits


def step_layout(cfg: Config) -> data.StructLayout:
    """A part of what is read at once and divided.

    row: in its tile, and above that the tile modulo TILES. part: its number. first, last: what was read is the first or
    last of its row. whole: the part is the last one of an entry. end: and that the last one of the instruction.
    """
    return data.StructLayout({
        "row": row_bits(cfg) + exact_log2(TILES), "part": exact_log2(softmax_parts(cfg)), "first": 1, "last": 1,
        "whole": 1, "end": 1,
    })  # fmt: skip


class SoftmaxEngine(wiring.Component):
    """Runs VECTORs with `softmax`, three tiles of rows at once: of one the quotients, of the next one the sums, of the
    one behind that the largest bytes. They may be tiles of two VECTORs whose rows are alike.

    Three walks read vin, an entry at once, or two neighbours where a beat would be too short for all walks else. Each
    keeps what it has read for as many cycles as that has parts of `softmax` bytes, a beat; they read in different
    cycles of it.

        find        by row      the largest byte of each row
        fill        by entry    parts, to the lanes of their rows, where they are added up
        divide      by row      parts, of which each lane looks up the share of a byte and divides it by the row's sum

    Members
    -------
    fields : In(fields_layout)      What is offered, valid or not.
    start : In(1)                   It is valid, and taken: while not `busy`, or where there is `room`.
    room : Out(1)                   For what is offered, beside the one under way, if it was in the cycle before, too,
                                    and what is not among `fields` is alike as well.
    zero_point, low, high : In      Of the results, while `busy`; `low` is at most `high`.
    vin : Out(ReadPort)             Of so many entries; must be ready.
    exp : In(WritePort)             Through which LOAD writes powers.
    write : Out(1), addr, data      A result, an entry. Where entries are read in pairs there is `spare` : Out(1), too:
                                    it is none, but what lies behind a row of an odd number of them.
    finish : Out(1)                 With the last one of a VECTOR.
    walked : Out(1)                 All rows have been looked at once, none of which lies beyond the end of vin.
    over : Out(1)                   A row of `entries` : Out entries of vin has been read for the last time.
    comes : Out(1)                  The next ones are those of the next VECTOR.
    busy : Out(1)                   One is under way.
    halt : In(1)                    Drops everything.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg, self._parts, self._span = cfg, softmax_parts(cfg), softmax_span(cfg)
        pads, fields = scratchpads(cfg), fields_layout(cfg)
        self._lanes = [SoftmaxLane(cfg, lane) for lane in range(cfg.softmax)]
        self._find, self._fill, self._divide = (TileAddressGenerator(cfg, by_row) for by_row in (True, False, True))
        super().__init__({
            "start": In(1), "fields": In(fields), "room": Out(1), "zero_point": In(signed(8)), "low": In(signed(8)),
            "high": In(signed(8)), "vin": Out(read_port(pads["vin"], self._span)), "exp": In(write_port(pads["exp"])),
            "write": Out(1), "addr": Out(fields["dst_base"].shape), "data": Out(pads["out"].width), "finish": Out(1),
            "walked": Out(1), "over": Out(1), "entries": Out(fields["extent_n"].shape), "comes": Out(1),
            "busy": Out(1), "halt": In(1), **({"spare": Out(1)} if self._span > 1 else {}),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.sums = sums = ExpAccumulator(self._cfg)
        m.submodules.largest = largest = RowMax(self._span * self._cfg.block_out, len(self._find.row))
        for number, lane in enumerate(self._lanes):
            m.submodules[f"lane{number}"] = lane
            m.d.comb += [
                getattr(lane.load, name).eq(getattr(self.exp, name)) for name in ("en", "addr", "mask", "data")
            ]
        self._take(m)
        entries = self._taken.extent_n - 1
        inside = Cat(1, ones(Cat(~self._taken.imm, entries[: exact_log2(self._span)])))
        m.d.comb += [sums.last_key.eq(Cat(~self._taken.imm, entries)), self.exp.ready.eq(1)]
        beat = self._walks(m, sums.done)
        self._search(m, largest, inside)
        self._keep(m, beat)
        self._add_up(m, sums, beat)
        marks, divides = self._steps(m, beat)
        self._look_up(m, largest, beat, marks, divides)
        self._quotients(m, marks, divides, inside)
        self._write(m, marks, divides)
        probes(self, beat=beat, marks=marks, divides=divides)
        return ResetInserter(self.halt)(m)

    def _later(self, m: Module, value: Value, name: str, stages: int, fresh: bool = True) -> list[Any]:
        """`value`, and what it was up to so many cycles ago. fresh: 0 after a halt."""
        shape = value.shape()
        later: list[Any] = [value]
        for stage in range(1, stages + 1):
            later.append((Signal if fresh else Reg)(shape, name=f"{name}{stage}"))
            m.d.sync += later[-1].eq(later[-2])
        return later

    def _take(self, m: Module) -> None:
        """Instructions: `taken` is the last one, `took` the cycle behind that in which it came."""
        self._taken, self._took = taken, took = Reg(self.fields.shape(), name="taken"), Signal(name="took")
        free = Signal()
        alike = Reg()
        second = Signal()
        m.d.comb += [free.eq(~second & self._find.through & ~self.finish), self.room.eq(self.busy & free & alike)]
        m.d.sync += [
            took.eq(self.start), alike.eq(Cat(taken[name] == self.fields[name] for name in OVERLAP_EQUAL_FIELDS).all()),
        ]  # fmt: skip
        with m.If(self.start):
            m.d.sync += [self.busy.eq(1), second.eq(self.busy)]
        with m.Elif(self.finish):
            m.d.sync += [self.busy.eq(second), second.eq(0)]
        # A walk has a copy of what is an instruction's own; there is room when all have come to the last one.
        with m.If(~self.busy):
            m.d.sync += [taken[name].eq(self.fields[name]) for name in OVERLAP_EQUAL_FIELDS]
        with m.If(~self.busy | free):
            m.d.sync += [taken[name].eq(self.fields[name]) for name in OVERLAP_FREE_FIELDS]
        probes(self, second=second, alike=alike)

    def _walks(self, m: Module, summed: Value) -> Signal:
        """Who reads in which cycle of a beat, and when a tile begins. Returns the number of the cycle.

        While a tile is filled, the largest bytes of the next one are found. Those of the first tile are found before
        anything else begins, so that each cycle is theirs.
        """
        m.submodules.find, m.submodules.fill, m.submodules.divide = walks = self._find, self._fill, self._divide
        find, fill, divide = walks
        beat = Signal(exact_log2(self._parts))
        ahead = Signal()
        found = Signal()
        begin = Signal()
        finds = find.on & find.ends
        for walk in walks:
            m.d.comb += [walk.fields.eq(self._taken), walk.took.eq(self._took)]
        m.d.comb += [
            find.on.eq(find.active & (beat == FIND_TURN)), fill.on.eq(fill.active & (beat == self._parts - 1)),
            divide.on.eq(divide.active & (beat == DIVIDE_TURN - 1)),
            begin.eq(Mux(ahead, finds, found & (beat == self._parts - 1) & (fill.ends | ~fill.active))),
            find.begin.eq(begin | ~(found | finds)), fill.begin.eq(begin), divide.begin.eq(summed),
            self.vin.en.eq(find.on), self.vin.addr.eq(find.addr), self.over.eq(divide.on & divide.last),
            self.walked.eq(find.through & ~find.wrapped), self.entries.eq(self._taken.extent_n),
            self.comes.eq(divide.comes),
        ]  # fmt: skip
        m.d.sync += beat.eq(Mux(ahead, Mux(begin, FILL_TURN, FIND_TURN), beat + 1))
        with m.If(~self.busy):
            m.d.sync += ahead.eq(1)
        with m.Elif(begin):
            m.d.sync += ahead.eq(0)
        m.d.sync += found.eq((found | finds) & ~begin)
        for turn, walk in ((FILL_TURN, fill), (DIVIDE_TURN, divide)):
            with m.If(beat == turn):
                m.d.comb += [self.vin.en.eq(walk.active), self.vin.addr.eq(walk.addr)]
        return beat

    def _entry(self, m: Module, read: Value, name: str) -> Signal:
        """What vin gives, two cycles after `read`, and until it gives something else."""
        came, entry = Signal(name=f"{name}_came"), Reg(len(self.vin.data), name=f"{name}_entry")
        m.d.sync += came.eq(read)
        with m.If(came):
            m.d.sync += entry.eq(self.vin.data)
        return entry

    def _part(self, m: Module, entry: Signal, part: Value) -> Signal:
        bytes_ = Reg(8 * self._cfg.softmax, name=f"{entry.name}_part")
        m.d.sync += bytes_.eq(entry.word_select(part, len(bytes_)))
        return bytes_

    def _search(self, m: Module, largest: RowMax, inside: Signal) -> None:
        """Entries to the search for the largest byte, and that to the lanes."""
        find = self._find
        comes = self._later(m, find.on, "finds", 2)[-1]
        first, last, row = (
            self._later(m, getattr(find, name), f"find_{name}", 2, fresh=False)[-1] for name in ("first", "last", "row")
        )
        m.d.comb += [
            largest.valid.eq(comes), largest.entry.eq(self._entry(m, find.on, "find")), largest.row.eq(row),
            largest.inside.eq(inside | (~last).replicate(len(inside))), largest.first.eq(first), largest.last.eq(last),
        ]  # fmt: skip
        for lane in self._lanes:
            m.d.comb += [
                lane.found.eq(largest.found), lane.number.eq(largest.number), lane.largest.eq(largest.largest),
            ]  # fmt: skip
        probes(self, find=find)

    def _keep(self, m: Module, beat: Signal) -> None:
        """Each part of an entry to the lane of its row, while the buffer's other half is added up."""
        fill = self._fill
        buffer = Signal()
        of_lane = exact_log2(self._cfg.softmax)
        m.d.sync += buffer.eq(buffer ^ (fill.on & fill.bottom))
        keeps = self._later(m, fill.active, "keeps", PART_STAGES)
        places = self._later(m, Cat(fill.row, beat, buffer), "place", PART_STAGES, fresh=False)
        entry = self._entry(m, fill.active & (beat == FILL_TURN), "fill")
        part = self._part(m, entry, places[PART_STAGES - 1][len(fill.row) :][: len(beat)])
        for number, lane in enumerate(self._lanes):
            place = places[-1]
            m.d.comb += [
                lane.part.eq(part), lane.keep.eq(keeps[-1] & (place[:of_lane] == number)),
                lane.kept_at.eq(place[of_lane:]),
            ]  # fmt: skip

    def _add_up(self, m: Module, sums: ExpAccumulator, beat: Signal) -> None:
        """Elements to the adders, as soon as the first entry of a tile's last row is on its way."""
        fill = self._fill
        first, nothing = (
            self._later(m, getattr(sums, name), f"sum_{name}", LOOK_STAGES, fresh=False)[-1]
            for name in ("first", "nothing")
        )
        complete = self._later(m, sums.last, "complete", LOOK_STAGES + SOFTMAX_SUMS)[-1]
        slot = self._later(m, sums.slot, "sum_slot", LOOK_STAGES + SOFTMAX_SUMS, fresh=False)[-1]
        m.d.comb += sums.start.eq(fill.active & (beat == FILL_TURN) & fill.first & fill.bottom)
        for lane in self._lanes:
            m.d.comb += [
                lane.look_at.eq(sums.place), lane.byte.eq(sums.byte), lane.tile.eq(sums.tile), lane.slot.eq(sums.slot),
                lane.first.eq(first), lane.nothing.eq(nothing), lane.complete.eq(complete), lane.sum.eq(slot),
            ]  # fmt: skip

    def _steps(self, m: Module, beat: Signal) -> tuple[list[Any], list[Any]]:
        """What is known of a part that is divided in each stage, and whether there is one."""
        divide, stages = self._divide, SHARE_STAGES + DIVIDE_STAGES
        step = Signal(step_layout(self._cfg))
        each = self._parts // self._span
        m.d.comb += [
            step.row.eq(divide.row), step.part.eq(beat - DIVIDE_TURN), step.first.eq(divide.first),
            step.last.eq(divide.last), step.whole.eq(beat[: exact_log2(each)] == (DIVIDE_TURN - 1) % each),
            step.end.eq((beat == DIVIDE_TURN - 1) & divide.ends & ~divide.more),
        ]  # fmt: skip
        probes(self, divide=divide)
        return self._later(m, step, "step", stages, fresh=False), self._later(m, divide.active, "divides", stages)

    def _look_up(self, m: Module, largest: RowMax, beat: Signal, marks: list[Any], divides: list[Any]) -> None:
        """Elements to the dividers, each row's with its largest byte, and its sum as their divisor."""
        m.submodules.largest_bytes = memory = Memory(shape=8, depth=1 << len(largest.number), init=[])
        put = memory.write_port()
        of_row = memory.read_port(domain="comb")
        less = Reg(8)
        entry = self._entry(m, self._divide.active & (beat == DIVIDE_TURN), "divide")
        part = self._part(m, entry, marks[PART_STAGES - 1].part)
        m.d.comb += [
            put.en.eq(largest.found), put.addr.eq(largest.number), put.data.eq(~largest.largest),
            of_row.addr.eq(marks[PART_STAGES - 1].row),
        ]  # fmt: skip
        m.d.sync += less.eq(of_row.data)
        row = marks[SHARE_STAGES - 1].row
        of_lane = exact_log2(self._cfg.softmax)
        leaves = Signal()
        before = marks[SHARE_STAGES - 2]
        m.d.sync += leaves.eq(divides[SHARE_STAGES - 2] & before.first & (before.part == 0))
        self._divisor = Reg(pair_layout)
        for number, lane in enumerate(self._lanes):
            m.d.comb += [
                lane.element.eq(part.word_select(number, 8)), lane.less.eq(less), lane.wanted.eq(row[of_lane:]),
            ]  # fmt: skip
        with m.If(leaves):
            totals = Cat(lane.total for lane in self._lanes)
            m.d.sync += Value.cast(self._divisor).eq(totals.word_select(row[:of_lane], pair_layout.size))

    def _quotients(self, m: Module, marks: list[Any], divides: list[Any], inside: Signal) -> None:
        """Each row's divisor goes through the stages beside its shares."""
        count = self._cfg.softmax
        divisors = self._later(m, self._divisor.m, "divisor", TO_DIVISION + QUOTIENT_BITS - 1, fresh=False)
        step = marks[SHARE_STAGES - 1]
        beyond = Reg(count)
        m.d.sync += beyond.eq(Mux(step.last, ~inside.word_select(step.part, count), 0))
        for number, lane in enumerate(self._lanes):
            m.d.comb += [
                lane.take.eq(divides[SHARE_STAGES]), lane.e.eq(self._divisor.e), lane.beyond.eq(beyond[number]),
                *(of.eq(divisor) for of, divisor in zip(lane.divisors, divisors[TO_DIVISION:])),
                lane.zero_point.eq(self.zero_point), lane.low.eq(self.low), lane.high.eq(self.high),
            ]  # fmt: skip

    def _write(self, m: Module, marks: list[Any], divides: list[Any]) -> None:
        """Results, as soon as an entry is complete."""
        step, comes, f = marks[-1], divides[-1], self._taken
        line = Reg(len(f.dst_x))
        turns = Reg()
        end = Reg()
        due = Signal()
        waits = Signal()
        begins = Signal()
        turn = step.last & step.part[exact_log2(self._parts // self._span) :].all()
        with m.If(comes):
            m.d.sync += self.data.eq(Cat(self.data, *(lane.result for lane in self._lanes))[-len(self.data) :])
        m.d.sync += [self.write.eq(comes & step.whole), turns.eq(turn), end.eq(step.end)]
        if self._span > 1:
            m.d.sync += self.spare.eq(turn & f.extent_n[0])
        m.d.comb += [
            self.finish.eq(self.write & end), begins.eq((self._took | waits) & (~due | self.finish)),
        ]  # fmt: skip
        m.d.sync += [waits.eq((self._took | waits) & ~begins), due.eq(begins | (due & ~self.finish))]
        target = Signal.like(line)
        m.d.comb += target.eq(Mux(turns, line, self.addr) + Mux(turns, f.dst_x, f.dst_n))
        with m.If(begins):
            m.d.sync += [self.addr.eq(f.dst_base), line.eq(f.dst_base)]
        with m.Elif(self.write):
            m.d.sync += self.addr.eq(target)
            with m.If(turns):
                m.d.sync += line.eq(target)
