"""The order in which a softmax goes through its rows."""

from __future__ import annotations

from typing import Any

from amaranth import Const, Module, Mux, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import EXTENT_BITS, Opcode, formats
from celosia.hw.spec.pipeline import OVERLAP_EQUAL_FIELDS, OVERLAP_FREE_FIELDS, softmax_span, tile_rows
from celosia.hw.spec.scratchpads import scratchpads

BUFFERS = 2
"""Entries of each row in front of the adders: one that is added up, and one that is being filled."""
TILES = 4
"""Whose rows' largest bytes are kept: of one tile they are found, while one or two are added up and one is divided."""


def fields_layout(cfg: Config) -> data.StructLayout:
    """What of an instruction says where the rows lie and how long they are."""
    widths = {field.name: field.width for field in formats(cfg)[Opcode.VECTOR].fields} | {
        "imm": exact_log2(cfg.block_out)
    }
    return data.StructLayout({name: widths[name] for name in (*OVERLAP_FREE_FIELDS, *OVERLAP_EQUAL_FIELDS)})


def row_bits(cfg: Config) -> int:
    """Of a row's number in its tile."""
    return exact_log2(tile_rows(cfg))


class TileAddressGenerator(wiring.Component):
    """Goes through rows in tiles of SOFTMAX_SUMS * softmax, by entries, or by pairs of neighbours if it takes both.

        by row      for row: for entry      those rows that there are
        by entry    for entry: for row      as many rows in each tile; its steps take more than a cycle each

    Members
    -------
    took : In(1)            An instruction has been taken; it comes when the one before it is through, one of both here.
    fields : In(fields_layout)      Its own, until it comes.
    comes : Out(1)          It does.
    through : Out(1)        None is here.
    wrapped : Out(1)        By row: it has gone from the end of vin to its beginning.
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
        self._by_row, self._in_tile, self._span = by_row, row_bits(cfg), softmax_span(cfg)
        super().__init__({
            "took": In(1), "fields": In(fields_layout(cfg)), "comes": Out(1), "through": Out(1), "wrapped": Out(1),
            "begin": In(1), "active": Out(1), "on": In(1), "addr": Out(scratchpads(cfg)["vin"].address_bits),
            "row": Out(self._in_tile + by_row * exact_log2(TILES)),
            "first": Out(1), "last": Out(1), "bottom": Out(1), "ends": Out(1), "more": Out(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        over = Signal()
        due = Signal()
        waits = Signal()
        comes = self.comes
        m.d.comb += [
            self.ends.eq(self.last & self.bottom), over.eq(self.on & self.ends),
            comes.eq((self.took | waits) & (~due | (over & ~self.more))), self.through.eq(~(self.took | waits | due)),
        ]  # fmt: skip
        m.d.sync += waits.eq((self.took | waits) & ~comes)
        with m.If(comes):
            m.d.sync += due.eq(1)
        with m.Elif(over):
            m.d.sync += due.eq(self.more)
        with m.If(self.begin):
            m.d.sync += self.active.eq(comes | Mux(over, self.more, due))
        with m.Elif(over):
            m.d.sync += self.active.eq(0)
        self._entries(m, comes, self.on & (self.bottom | self._by_row))
        self._rows(m, comes, self.on & (self.last | (not self._by_row)), over)
        (self._addresses_by_row if self._by_row else self._addresses_by_entry)(m, comes)
        probes(self, due=due, waits=waits)
        return m

    def _entries(self, m: Module, comes: Value, on: Value) -> None:
        """Whether this is a row's first entry, and whether its last: registers, found a step ahead."""
        entries = (self.fields.extent_n + self._span - 1) >> exact_log2(self._span)
        left = Reg(EXTENT_BITS)
        with m.If(comes | (on & self.last)):
            m.d.sync += [left.eq(entries), self.first.eq(1), self.last.eq(entries == 1)]
        with m.Elif(on):
            m.d.sync += [left.eq(left - 1), self.first.eq(0), self.last.eq(left == 2)]
        probes(self, left=left)

    def _rows(self, m: Module, comes: Value, on: Value, over: Value) -> None:
        """Whether a row is the tile's last one, and whether other tiles follow."""
        last = self.fields.extent_x - 1
        others = Reg(EXTENT_BITS)
        end, tiles = others[: self._in_tile], others[self._in_tile :]
        row, tile = self.row[: self._in_tile], self.row[self._in_tile :]
        m.d.comb += self.bottom.eq(row.all() | (~self.more & (row == end) & self._by_row))
        with m.If(comes):
            m.d.sync += [others.eq(last), self.more.eq(last[self._in_tile : EXTENT_BITS].any())]
        with m.Elif(over):
            m.d.sync += [tiles.eq(tiles - 1), self.more.eq(tiles[1:].any())]
        with m.If(over):
            m.d.sync += [row.eq(0), tile.eq(tile + 1)]
        with m.Elif(on):
            m.d.sync += row.eq(row + 1)
        probes(self, others=others)

    def _next(self, fields: Any) -> Value:
        """From an entry of a row to the next one that is read, or from a pair; it is of neighbours."""
        return fields.a_n if self._span == 1 else Const(self._span)

    def _addresses_by_row(self, m: Module, comes: Value) -> None:
        """A tile begins where the next row does."""
        line = Reg(len(self.addr))
        target = Signal(len(self.addr) + 1)
        f = self.fields
        follows = ~self.ends | self.more
        # Of two neighbours the second one may lie there alone, if it is the row's.
        within = self.addr.all() & ~(self.last & f.extent_n[0]) if self._span > 1 else Const(0)
        m.d.comb += target.eq(Mux(self.last, line, self.addr) + Mux(self.last, f.a_x, self._next(f)))
        with m.If(comes):
            m.d.sync += [self.addr.eq(f.a_base), line.eq(f.a_base), self.wrapped.eq(0)]
        with m.Elif(self.on):
            m.d.sync += [self.addr.eq(target), self.wrapped.eq(self.wrapped | (follows & target[-1]) | within)]
            with m.If(self.last):
                m.d.sync += line.eq(target)
        probes(self, line=line)

    def _addresses_by_entry(self, m: Module, comes: Value) -> None:
        """A tile begins one row behind the last one's first entry."""
        (line, lowest, target), f = (Reg(len(self.addr), name=n) for n in ("line", "lowest", "target")), self.fields
        start, down = Mux(self.bottom, line, self.addr), ~self.bottom | self.ends
        # A step before it is over, it is known what follows.
        m.d.sync += target.eq(Mux(self.ends, lowest, start) + Mux(down, f.a_x, self._next(f)))
        with m.If(self.first):
            m.d.sync += lowest.eq(self.addr)
        with m.If(comes):
            m.d.sync += [self.addr.eq(f.a_base), line.eq(f.a_base)]
        with m.Elif(self.on):
            m.d.sync += self.addr.eq(target)
            with m.If(self.bottom):
                m.d.sync += line.eq(target)
