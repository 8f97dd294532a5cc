"""Softmax of rows of int8, bit for bit as onnxruntime's QLinearSoftmax computes it."""

from __future__ import annotations

from typing import Any

from amaranth import Cat, Const, Elaboratable, Module, Mux, ResetInserter, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.config import Config
from celosia.hw.layout import read_port, write_port
from celosia.hw.pipeline import DIVIDE_STAGES, LOOK_STAGES, PART_STAGES, QUOTIENT_BITS, largest_stages
from celosia.hw.scratchpads import scratchpads
from celosia.hw.signals import Reg
from celosia.hw.vector_unit.masks import ones
from celosia.hw.vector_unit.softmax.adder import pair_layout
from celosia.hw.vector_unit.softmax.divider import TO_DIVISION
from celosia.hw.vector_unit.softmax.lane import SoftmaxLane
from celosia.hw.vector_unit.softmax.largest import RowLargest
from celosia.hw.vector_unit.softmax.steps import SoftmaxSteps, fields_layout
from celosia.hw.vector_unit.softmax.sums import SoftmaxSums


class SoftmaxEngine(wiring.Component):
    """Runs one VECTOR with `softmax` at a time.

    A step of `SoftmaxSteps` goes through the stages

        read            memory gives an entry
        entry
        part            the bytes of it that count; kept in a lane, where they are to be added up
        element         in each lane
        found, power    what the table has for it
        share           of each lane, divided by the row's sum
        result          DIVIDE_STAGES later

    Members
    -------
    fields : In(fields_layout)      What is offered while not `busy` is taken, valid or not.
    start : In(1)                   It is valid.
    zero_point, low, high : In      Of the results, while `busy`; `low` is at most `high`.
    vin : Out(ReadPort)             Must be ready.
    exp : In(WritePort)             Through which LOAD writes powers.
    write : Out(1), addr, data      A result, an entry.
    finish : Out(1)                 With the last one.
    busy : Out(1)
    halt : In(1)                    Drops everything.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        pads, fields = scratchpads(cfg), fields_layout(cfg)
        self._lanes = [SoftmaxLane(cfg, lane) for lane in range(cfg.softmax)]
        super().__init__({
            "start": In(1), "fields": In(fields), "zero_point": In(signed(8)), "low": In(signed(8)),
            "high": In(signed(8)), "vin": Out(read_port(pads["vin"])), "exp": In(write_port(pads["exp"])),
            "write": Out(1), "addr": Out(fields["dst_base"].shape), "data": Out(pads["out"].width), "finish": Out(1),
            "busy": Out(1), "halt": In(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.steps, m.submodules.sums = steps, sums = SoftmaxSteps(self._cfg), SoftmaxSums(self._cfg)
        for number, lane in enumerate(self._lanes):
            m.submodules[f"lane{number}"] = lane
        m.d.comb += [
            steps.idle.eq(~self.busy), steps.start.eq(self.start), steps.fields.eq(self.fields),
            steps.summed.eq(sums.done),
            sums.set.eq(~self.busy), sums.last_key.eq(Cat(~self.fields.imm, self.fields.extent_n - 1)),
            self.vin.en.eq(steps.read), self.vin.addr.eq(steps.addr), self.exp.ready.eq(1),
        ]  # fmt: skip
        with m.If(self.start):
            m.d.sync += self.busy.eq(1)
        with m.Elif(self.finish):
            m.d.sync += self.busy.eq(0)
        marks = self._marks(m, steps)
        divide = self._later(m, steps.divide, "divide", len(marks) - 1)
        inside = Reg(self._cfg.block_out)
        with m.If(~self.busy):
            m.d.sync += inside.eq(Cat(1, ones(~self.fields.imm)))
        self._parts(m, steps, marks, divide, inside)
        self._add_up(m, sums, marks, divide)
        self._divide(m, marks, divide, inside)
        self._write(m, marks, divide)
        return ResetInserter(self.halt)(m)

    def _later(self, m: Module, value: Value, name: str, stages: int, fresh: bool = True) -> list[Any]:
        """`value`, and what it was up to so many cycles ago. fresh: 0 after a halt."""
        shape = value.shape()
        later: list[Any] = [value]
        for stage in range(1, stages + 1):
            later.append((Signal if fresh else Reg)(shape, name=f"{name}{stage}"))
            m.d.sync += later[-1].eq(later[-2])
        return later

    def _marks(self, m: Module, steps: SoftmaxSteps) -> list[Any]:
        """What is known of the step in each stage."""
        return self._later(m, steps.step, "step", PART_STAGES + LOOK_STAGES + DIVIDE_STAGES, fresh=False)

    def _parts(self, m: Module, steps: SoftmaxSteps, marks: list[Any], divide: list[Any], inside: Signal) -> None:
        """Entries, to the search for the largest byte, and parts of them to the lanes."""
        cfg, step = self._cfg, marks[2]
        count, slot_at = cfg.softmax, exact_log2(cfg.softmax)
        largest, fill = (
            self._later(m, steps.largest, "largest", 2), self._later(m, steps.fill, "fill", PART_STAGES),
        )  # fmt: skip
        entry, part = Reg(8 * cfg.block_out), Reg(8 * count)
        m.submodules.largest = unit = RowLargest(cfg.block_out, len(step.row))
        with m.If(largest[1] | fill[1] | divide[1]):
            m.d.sync += entry.eq(self.vin.data)
        with m.If(fill[2] | divide[2]):
            m.d.sync += part.eq(entry.word_select(step.part, 8 * count))
        m.d.comb += [
            unit.valid.eq(largest[2]), unit.entry.eq(entry), unit.row.eq(step.row),
            unit.inside.eq(inside | (~step.last).replicate(len(inside))),
            unit.first.eq(step.first), unit.last.eq(step.last),
        ]  # fmt: skip
        row = marks[PART_STAGES].row
        for number, lane in enumerate(self._lanes):
            m.d.comb += [
                lane.part.eq(part),
                lane.keep.eq(fill[PART_STAGES] & (row[:slot_at] == number)),
                lane.kept_at.eq(Cat(row[slot_at:], marks[PART_STAGES].buffer)),
                lane.found.eq(unit.found), lane.number.eq(unit.number), lane.largest.eq(unit.largest),
                lane.load.en.eq(self.exp.en), lane.load.addr.eq(self.exp.addr), lane.load.mask.eq(self.exp.mask),
                lane.load.data.eq(self.exp.data),
            ]  # fmt: skip

    def _add_up(self, m: Module, sums: SoftmaxSums, marks: list[Any], divide: list[Any]) -> None:
        """Elements to the lanes: kept ones to be added up, or the part's own to be divided."""
        opens = self._later(m, marks[0].opens, "opens", largest_stages(self._cfg))
        added = self._later(m, sums.look, "added", LOOK_STAGES)
        first = self._later(m, sums.first, "first", LOOK_STAGES, fresh=False)
        m.d.comb += sums.start.eq(opens[-1])
        # A row's sum leaves the ring with its first step; behind that of the last lane the ring shows the next sums.
        stage = PART_STAGES + LOOK_STAGES - 2
        step, leaves, turns, of_lane = marks[stage], Signal(), Signal(), Reg(exact_log2(self._cfg.softmax))
        lane_bits = step.row[: len(of_lane)]
        begins = divide[stage] & step.first & (step.part == 0)
        m.d.sync += [leaves.eq(begins), turns.eq(begins & (lane_bits + 1 == self._cfg.softmax)), of_lane.eq(lane_bits)]
        for number, lane in enumerate(self._lanes):
            own_row = Cat(Const(number, len(of_lane)), sums.slot)
            m.d.comb += [
                lane.look.eq(sums.look | divide[PART_STAGES]), lane.divide.eq(divide[PART_STAGES]),
                lane.look_at.eq(sums.place), lane.byte.eq(sums.byte),
                lane.row.eq(Mux(divide[PART_STAGES], marks[PART_STAGES].row, own_row)),
                lane.step.eq(added[-1] | turns), lane.first.eq(first[-1] & ~turns), lane.nothing.eq(turns),
            ]  # fmt: skip
        totals = Cat(lane.total for lane in self._lanes)
        self._divisor = Reg(pair_layout)
        with m.If(leaves):
            m.d.sync += Value.cast(self._divisor).eq(totals.word_select(of_lane, pair_layout.size))

    def _divide(self, m: Module, marks: list[Any], divide: list[Any], inside: Signal) -> None:
        """Each row's divisor goes through the stages beside its shares."""
        count, start = self._cfg.softmax, PART_STAGES + LOOK_STAGES
        divisors = self._later(m, self._divisor.m, "divisor", TO_DIVISION + QUOTIENT_BITS - 1, fresh=False)
        step, beyond = marks[start - 1], Reg(count)
        m.d.sync += beyond.eq(Mux(step.last, ~inside.word_select(step.part, count), 0))
        for number, lane in enumerate(self._lanes):
            m.d.comb += [
                lane.take.eq(divide[start]), lane.e.eq(self._divisor.e), lane.beyond.eq(beyond[number]),
                *(of.eq(divisor) for of, divisor in zip(lane.divisors, divisors[TO_DIVISION:])),
                lane.zero_point.eq(self.zero_point), lane.low.eq(self.low), lane.high.eq(self.high),
            ]  # fmt: skip

    def _write(self, m: Module, marks: list[Any], divide: list[Any]) -> None:
        """Results, as soon as an entry is complete."""
        step, comes, f = marks[-1], divide[-1], self.fields
        line, next_x, next_n, turns, end = (
            Reg(len(f.dst_x)), Reg(len(f.dst_x)), Reg(len(f.dst_x)), Reg(), Reg(),
        )  # fmt: skip
        with m.If(comes):
            m.d.sync += self.data.eq(Cat(self.data, *(lane.result for lane in self._lanes))[-len(self.data) :])
        m.d.sync += [self.write.eq(comes & step.whole), turns.eq(step.last), end.eq(step.end)]
        m.d.comb += self.finish.eq(self.write & end)
        target = Signal.like(line)
        m.d.comb += target.eq(Mux(turns, line, self.addr) + Mux(turns, next_x, next_n))
        with m.If(self.write):
            m.d.sync += self.addr.eq(target)
            with m.If(turns):
                m.d.sync += line.eq(target)
        with m.If(~self.busy):
            m.d.sync += [self.addr.eq(f.dst_base), line.eq(f.dst_base), next_x.eq(f.dst_x), next_n.eq(f.dst_n)]
