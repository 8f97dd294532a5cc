"""The order in which a softmax goes through its rows."""

from __future__ import annotations

from amaranth import Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.config import Config
from celosia.hw.isa import EXTENT_BITS, Opcode, formats
from celosia.hw.pipeline import SUMS
from celosia.hw.scratchpads import scratchpads
from celosia.hw.signals import Reg

BUFFERS = 4
"""Parts of rows in front of the adders: one of which keys are added up, and those that are being filled."""


def fields_layout(cfg: Config) -> data.StructLayout:
    """What of an instruction says where the rows lie and how long they are."""
    names = ("extent_n", "extent_x", "a_base", "a_n", "a_x", "dst_base", "dst_n", "dst_x")
    widths = {field.name: field.width for field in formats(cfg)[Opcode.VECTOR].fields}
    return data.StructLayout({name: widths[name] for name in names} | {"imm": exact_log2(cfg.block_out)})


def step_layout(cfg: Config) -> data.StructLayout:
    """A step: an entry of VIN on its way.

    row: in its tile. part: which of the parts of `softmax` bytes counts. buffer: where it is put. first, last: the
    entry is its row's first or last one. opens: with it the first part of all rows of the tile is there. whole: the
    part is the last one of the entry. end: and that the last one of the instruction.
    """
    parts = cfg.block_out // cfg.softmax
    return data.StructLayout({
        "row": exact_log2(SUMS * cfg.softmax), "part": exact_log2(parts), "buffer": exact_log2(BUFFERS),
        "first": 1, "last": 1, "opens": 1, "whole": 1, "end": 1,
    })  # fmt: skip


class Steps(wiring.Component):
    """Takes rows in tiles, and those three times: for their largest byte, their sum, and their results.

        largest     for row: for entry
        fill        for entry: for part: for row    as long as a sum of all rows' part takes, whatever there are of rows
        divide      for row: for entry: for part

    Members
    -------
    start : In(1), fields : In(fields_layout)   An instruction, when none is under way.
    summed : In(1)          The sums of a tile are complete.
    largest, fill, divide : Out(1)      There is a step, and what for.
    step : Out(step_layout)
    read : Out(1), addr : Out           The entry of a step is read, or is the one that was read last.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        super().__init__({
            "start": In(1), "fields": In(fields_layout(cfg)), "summed": In(1), "largest": Out(1), "fill": Out(1),
            "divide": Out(1), "step": Out(step_layout(cfg)), "read": Out(1),
            "addr": Out(scratchpads(cfg)["vin"].address_bits),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        step, bits = self.step, len(self.addr)
        tile = 1 << len(step.row)
        # Of the rows that are left the last one's number; `full`: there are more than a tile has.
        rows, full = Reg(EXTENT_BITS), Reg()
        group, last_group, last_part = Reg(EXTENT_BITS), Reg(EXTENT_BITS), Reg(len(step.part))
        row, part, buffer = Reg(len(step.row)), Reg(len(step.part)), Reg(len(step.buffer))
        left = Signal(EXTENT_BITS)
        left_rows = rows[: len(row)]
        ends_row, ends_tile, ends_entry = (
            group == last_group,
            (row == tile - 1) | (~full & (row == left_rows)),
            Signal(),
        )
        m.d.comb += [
            ends_entry.eq(part == (1 << len(part)) - 1),
            step.row.eq(row), step.part.eq(part), step.buffer.eq(buffer), step.first.eq(group == 0),
            step.last.eq(ends_row), step.opens.eq(self.fill & (group == 0) & (part == 0) & ends_tile),
            step.whole.eq(ends_entry), step.end.eq(ends_entry & ends_row & ends_tile & ~full),
        ]  # fmt: skip

        # Addresses: where a tile begins, the line of entries that is gone through, and the next one.
        base, line, a_n, a_x = (Reg(bits, name=name) for name in ("base", "line", "a_n", "a_x"))
        anew, by_x, goes, turns, again = Signal(), Signal(), Signal(), Signal(), Signal()
        target = Signal(bits)
        m.d.comb += target.eq(Mux(anew, line, self.addr) + Mux(by_x, a_x, a_n))
        with m.If(again):
            m.d.sync += [self.addr.eq(base), line.eq(base)]
        with m.Elif(turns):
            m.d.sync += [self.addr.eq(line)]
        with m.Elif(goes):
            m.d.sync += self.addr.eq(target)
            with m.If(anew):
                m.d.sync += line.eq(target)

        with m.FSM():
            with m.State("IDLE"), m.If(self.start):
                f = self.fields
                m.d.comb += left.eq(f.extent_x - 1)
                m.d.sync += [
                    rows.eq(left), full.eq(left[len(row) :].any()), last_group.eq(f.extent_n - 1),
                    last_part.eq((~f.imm)[len(f.imm) - len(part) :]), row.eq(0), group.eq(0), part.eq(0), buffer.eq(0),
                    self.addr.eq(f.a_base), line.eq(f.a_base), base.eq(f.a_base), a_n.eq(f.a_n), a_x.eq(f.a_x),
                ]  # fmt: skip
                m.next = "LARGEST"
            with m.State("LARGEST"):
                m.d.comb += [self.largest.eq(1), self.read.eq(1), goes.eq(1), by_x.eq(ends_row), anew.eq(ends_row)]
                m.d.sync += group.eq(Mux(ends_row, 0, group + 1))
                with m.If(ends_row):
                    m.d.sync += row.eq(row + 1)
                    with m.If(ends_tile):
                        m.d.comb += again.eq(1)
                        m.d.sync += row.eq(0)
                        m.next = "FILL"
            with m.State("FILL"):
                m.d.comb += [self.fill.eq(full | (row <= left_rows)), self.read.eq(self.fill), goes.eq(1), by_x.eq(1)]
                m.d.sync += row.eq(row + 1)
                with m.If(row == tile - 1):
                    m.d.sync += [part.eq(part + 1), buffer.eq(buffer + 1)]
                    m.d.comb += [anew.eq(1), by_x.eq(0), turns.eq(~ends_entry)]
                    with m.If(ends_entry):
                        m.d.sync += group.eq(group + 1)
                with m.If(ends_tile & ends_row & (part == last_part)):
                    m.d.comb += again.eq(1)
                    m.d.sync += [row.eq(0), part.eq(0), group.eq(0), buffer.eq(0)]
                    m.next = "SUM"
            with m.State("SUM"), m.If(self.summed):
                m.next = "DIVIDE"
            with m.State("DIVIDE"):
                m.d.comb += [self.divide.eq(1), self.read.eq(part == 0), goes.eq(ends_entry)]
                m.d.comb += [by_x.eq(ends_row), anew.eq(ends_row)]
                m.d.sync += part.eq(part + 1)
                with m.If(ends_entry):
                    m.d.sync += group.eq(Mux(ends_row, 0, group + 1))
                    with m.If(ends_row):
                        m.d.sync += row.eq(row + 1)
                        with m.If(ends_tile):
                            m.d.comb += left.eq(rows - tile)
                            m.d.sync += [row.eq(0), rows.eq(left), full.eq(left[len(row) :].any()), base.eq(target)]
                            m.next = "IDLE"
                            with m.If(full):
                                m.next = "LARGEST"
        return m
