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

BUFFERS = 2
"""Entries of each row in front of the adders: one that is added up, and one that is being filled."""
TILES = 4
"""Whose rows' largest bytes are kept: of one tile they are found, while one or two are added up and one is divided."""


def fields_layout(cfg: Config) -> data.StructLayout:
    """What of an instruction says where the rows lie and how long they are."""
    names = ("extent_n", "extent_x", "a_base", "a_n", "a_x", "dst_base", "dst_n", "dst_x")
    widths = {field.name: field.width for field in formats(cfg)[Opcode.VECTOR].fields}
    return data.StructLayout({name: widths[name] for name in names} | {"imm": exact_log2(cfg.block_out)})


def row_bits(cfg: Config) -> int:
    """Of a row's number in its tile."""
    return exact_log2(SUMS * cfg.softmax)


class TileWalk(wiring.Component):
    """Goes through rows in tiles of SUMS * softmax.

        by row      for row: for entry      those rows that there are
        by entry    for entry: for row      as many rows in each tile; its steps take more than a cycle each

    Members
    -------
    idle : In(1), fields : In(fields_layout)    What is offered while no instruction is under way may be one.
    set_up : In(1)          The cycle behind that.
    begin : In(1)           A tile begins in the next cycle, if one is due.
    active : Out(1)         There is a step.
    on : In(1)              It is over, the next one follows.
    addr : Out              Of its entry.
    row : Out               In the tile; by row, the tile's number modulo TILES is above it.
    first, last : Out(1)    The entry is its row's first or last one.
    bottom : Out(1)         The row is the tile's last one.
    ends : Out(1)           The step is.
    more : Out(1)           Another tile follows.
    """

    def __init__(self, cfg: Config, by_row: bool) -> None:
        self._by_row, self._in_tile = by_row, row_bits(cfg)
        super().__init__({
            "idle": In(1), "fields": In(fields_layout(cfg)), "set_up": In(1), "begin": In(1), "active": Out(1),
            "on": In(1), "addr": Out(scratchpads(cfg)["vin"].address_bits),
            "row": Out(self._in_tile + by_row * exact_log2(TILES)),
            "first": Out(1), "last": Out(1), "bottom": Out(1), "ends": Out(1), "more": Out(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        over, due = Signal(), Reg()
        m.d.comb += [self.ends.eq(self.last & self.bottom), over.eq(self.on & self.ends)]
        with m.If(self.idle):
            m.d.sync += due.eq(1)
        with m.Elif(over):
            m.d.sync += due.eq(self.more)
        with m.If(self.begin):
            m.d.sync += self.active.eq(Mux(over, self.more, due))
        with m.Elif(over):
            m.d.sync += self.active.eq(0)
        self._entries(m, self.on & (self.bottom | self._by_row))
        self._rows(m, self.on & (self.last | (not self._by_row)), over)
        (self._addresses_by_row if self._by_row else self._addresses_by_entry)(m)
        return m

    def _entries(self, m: Module, on: Value) -> None:
        """Whether this is a row's first entry, and whether its last: registers, found a step ahead."""
        others, behind = Reg(EXTENT_BITS), Reg(EXTENT_BITS)
        with m.If(self.idle):
            m.d.sync += others.eq(self.fields.extent_n - 1)
        with m.If(self.set_up | (on & self.last)):
            m.d.sync += [behind.eq(others), self.first.eq(1), self.last.eq(others == 0)]
        with m.Elif(on):
            m.d.sync += [behind.eq(behind - 1), self.first.eq(0), self.last.eq(behind == 1)]

    def _rows(self, m: Module, on: Value, over: Value) -> None:
        """Whether a row is the tile's last one, and whether other tiles follow."""
        others = Reg(EXTENT_BITS)
        end, tiles = others[: self._in_tile], others[self._in_tile :]
        row, tile = self.row[: self._in_tile], self.row[self._in_tile :]
        m.d.comb += self.bottom.eq(row.all() | (~self.more & (row == end) & self._by_row))
        with m.If(self.idle):
            m.d.sync += others.eq(self.fields.extent_x - 1)
        with m.Elif(over):
            m.d.sync += tiles.eq(tiles - 1)
        with m.If(self.set_up):
            m.d.sync += self.more.eq(tiles.any())
        with m.Elif(over):
            m.d.sync += self.more.eq(tiles[1:].any())
        with m.If(over):
            m.d.sync += [row.eq(0), tile.eq(tile + 1)]
        with m.Elif(on):
            m.d.sync += row.eq(row + 1)

    def _addresses_by_row(self, m: Module) -> None:
        """A tile begins where the next row does."""
        line, a_n, a_x, target = (Reg(len(self.addr), name=n) for n in ("line", "a_n", "a_x", "target"))
        m.d.comb += target.eq(Mux(self.last, line, self.addr) + Mux(self.last, a_x, a_n))
        with m.If(self.idle):
            f = self.fields
            m.d.sync += [self.addr.eq(f.a_base), line.eq(f.a_base), a_n.eq(f.a_n), a_x.eq(f.a_x)]
        with m.Elif(self.on):
            m.d.sync += self.addr.eq(target)
            with m.If(self.last):
                m.d.sync += line.eq(target)

    def _addresses_by_entry(self, m: Module) -> None:
        """A tile begins one row behind the last one's first entry."""
        line, lowest, a_n, a_x, target = (
            Reg(len(self.addr), name=n) for n in ("line", "lowest", "a_n", "a_x", "target")
        )
        start, down = Mux(self.bottom, line, self.addr), ~self.bottom | self.ends
        # A step before it is over, it is known what follows.
        m.d.sync += target.eq(Mux(self.ends, lowest, start) + Mux(down, a_x, a_n))
        with m.If(self.first):
            m.d.sync += lowest.eq(self.addr)
        with m.If(self.idle):
            f = self.fields
            m.d.sync += [self.addr.eq(f.a_base), line.eq(f.a_base), a_n.eq(f.a_n), a_x.eq(f.a_x)]
        with m.Elif(self.on):
            m.d.sync += self.addr.eq(target)
            with m.If(self.bottom):
                m.d.sync += line.eq(target)
