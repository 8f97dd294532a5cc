"""The order in which a softmax goes through its rows."""

from __future__ import annotations

from amaranth import Module, Mux, Signal, Value
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


class SoftmaxSteps(wiring.Component):
    """Takes rows in tiles, and those three times: for their largest byte, their sum, and their results.

        largest     for row: for entry
        fill        for entry: for part: for row    as long as a sum of all rows' part takes, whatever there are of rows
        divide      for row: for entry: for part

    Members
    -------
    idle : In(1), fields : In(fields_layout)    What is offered while no instruction is under way is one, where `start`.
    start : In(1)           Steps begin two cycles later.
    summed : In(1)          The sums of a tile are complete.
    largest, fill, divide : Out(1)      There is a step, and what for.
    step : Out(step_layout)
    read : Out(1), addr : Out           The entry of a step is read, or is the one that was read last.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        super().__init__({
            "idle": In(1), "start": In(1), "fields": In(fields_layout(cfg)), "summed": In(1), "largest": Out(1),
            "fill": Out(1), "divide": Out(1), "step": Out(step_layout(cfg)), "read": Out(1),
            "addr": Out(scratchpads(cfg)["vin"].address_bits),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        step, go = self.step, _Moves()
        row, part, buffer = (Signal.like(getattr(step, name)) for name in ("row", "part", "buffer"))
        last_part = Reg(len(part))
        ends_row, first = self._entries(m, go)
        ends_tile, present, full = self._rows(m, go, row)
        self._addresses(m, go)
        ends_entry, end_of_tile = part == (1 << len(part)) - 1, row == (1 << len(row)) - 1
        m.d.comb += [
            step.row.eq(row), step.part.eq(part), step.buffer.eq(buffer), step.first.eq(first), step.last.eq(ends_row),
            step.opens.eq(self.fill & first & (part == 0) & ends_tile), step.whole.eq(ends_entry),
            step.end.eq(ends_entry & ends_row & ends_tile & ~full),
        ]  # fmt: skip
        with m.If(self.idle):
            m.d.sync += last_part.eq((~self.fields.imm)[len(self.fields.imm) - len(part) :])
        with m.FSM():
            with m.State("IDLE"), m.If(self.start):
                m.next = "BEGIN"
            with m.State("BEGIN"):
                m.d.comb += [go.begin.eq(1), go.again.eq(1), go.next_row.eq(1)]
                m.next = "LARGEST"
            with m.State("LARGEST"):
                m.d.comb += [self.largest.eq(1), self.read.eq(1), go.by_x.eq(ends_row), go.anew.eq(ends_row)]
                m.d.comb += [go.on.eq(1), go.next_entry.eq(1), go.next_row.eq(ends_row)]
                m.d.sync += row.eq(row + ends_row)
                with m.If(ends_row & ends_tile):
                    m.d.comb += go.again.eq(1)
                    m.d.sync += row.eq(0)
                    m.next = "FILL"
            with m.State("FILL"):
                m.d.comb += [self.fill.eq(present), self.read.eq(present), go.on.eq(1), go.by_x.eq(~end_of_tile)]
                m.d.comb += [go.anew.eq(end_of_tile), go.back.eq(end_of_tile & ~ends_entry)]
                m.d.comb += go.next_entry.eq(end_of_tile & ends_entry)
                m.d.sync += [row.eq(row + 1), part.eq(part + end_of_tile), buffer.eq(buffer + end_of_tile)]
                with m.If(ends_tile & ends_row & (part == last_part)):
                    m.d.comb += [go.again.eq(1), go.next_row.eq(1)]
                    m.d.sync += [row.eq(0), part.eq(0), buffer.eq(0)]
                    m.next = "SUM"
            with m.State("SUM"), m.If(self.summed):
                m.next = "DIVIDE"
            with m.State("DIVIDE"):
                ends = ends_entry & ends_row
                m.d.comb += [self.divide.eq(1), self.read.eq(part == 0), go.by_x.eq(ends_row), go.anew.eq(ends_row)]
                m.d.comb += [go.on.eq(ends_entry), go.next_entry.eq(ends_entry), go.next_row.eq(ends)]
                m.d.sync += [part.eq(part + 1), row.eq(row + ends)]
                with m.If(ends & ends_tile):
                    m.d.comb += go.next_tile.eq(1)
                    m.d.sync += row.eq(0)
                    m.next = "IDLE"
                    with m.If(full):
                        m.next = "LARGEST"
        return m

    def _entries(self, m: Module, go: _Moves) -> tuple[Signal, Signal]:
        """Whether this is a row's last entry, and whether its first: registers, found a step ahead."""
        others, behind, ends_row, first = Reg(EXTENT_BITS), Reg(EXTENT_BITS), Reg(), Reg()
        with m.If(self.idle):
            m.d.sync += others.eq(self.fields.extent_n - 1)
        with m.If(go.next_row):
            m.d.sync += [behind.eq(others), first.eq(1), ends_row.eq(others == 0)]
        with m.Elif(go.next_entry):
            m.d.sync += [behind.eq(behind - 1), first.eq(0), ends_row.eq(behind == 1)]
        return ends_row, first

    def _rows(self, m: Module, go: _Moves, row: Signal) -> tuple[Value, Value, Signal]:
        """Whether a row is the tile's last one, whether there is such a row, and whether other tiles follow."""
        last, full = Reg(EXTENT_BITS), Reg()
        tiles = last[len(row) :]
        with m.If(self.idle):
            m.d.sync += last.eq(self.fields.extent_x - 1)
        with m.If(go.begin):
            m.d.sync += full.eq(tiles.any())
        with m.If(go.next_tile):
            m.d.sync += [tiles.eq(tiles - 1), full.eq(tiles != 1)]
        end = last[: len(row)]
        return (row == (1 << len(row)) - 1) | (~full & (row == end)), full | (row <= end), full

    def _addresses(self, m: Module, go: _Moves) -> None:
        """Where the tile begins, the line of entries that is gone through, and the next one."""
        base, line, a_n, a_x, target = (Reg(len(self.addr), name=n) for n in ("base", "line", "a_n", "a_x", "target"))
        m.d.comb += target.eq(Mux(go.anew, line, self.addr) + Mux(go.by_x, a_x, a_n))
        with m.If(go.again):
            m.d.sync += [self.addr.eq(base), line.eq(base)]
        with m.Elif(go.back):
            m.d.sync += self.addr.eq(line)
        with m.Elif(go.on):
            m.d.sync += self.addr.eq(target)
            with m.If(go.anew):
                m.d.sync += line.eq(target)
        with m.If(self.idle):
            m.d.sync += [base.eq(self.fields.a_base), a_n.eq(self.fields.a_n), a_x.eq(self.fields.a_x)]
        with m.If(go.next_tile):
            m.d.sync += base.eq(target)


class _Moves:
    """What comes behind a step. again: the tile's first entry; back: the line's; on: another one, `by_x` or `a_n`
    further than this one or, `anew`, than the line, which then begins there. next_entry, next_row: of a row, or the
    next row's first. next_tile: that begins where `on` leads. begin: the first step of all."""

    def __init__(self) -> None:
        self.again, self.back, self.on, self.by_x, self.anew = (
            Signal(name=n) for n in ("again", "back", "on", "by_x", "anew")
        )
        self.next_entry, self.next_row, self.next_tile = (Signal(name=f"next_{n}") for n in ("entry", "row", "tile"))
        self.begin = Signal(name="begin")
