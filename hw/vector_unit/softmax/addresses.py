"""The addresses of the entries of vin that a softmax reads."""

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
"""Entries that are kept of each row for the adders: one is added up while the other is being filled."""
TILES = 4
"""Tiles whose largest bytes are kept: they are found for one, while one or two are added up and one is divided."""


def fields_layout(cfg: Config) -> data.StructLayout:
    """The fields of an instruction that say where its rows lie, and how long they are."""
    widths = {field.name: field.width for field in formats(cfg)[Opcode.VECTOR].fields} | {
        "imm": exact_log2(cfg.block_out)
    }
    return data.StructLayout({name: widths[name] for name in (*OVERLAP_FREE_FIELDS, *OVERLAP_EQUAL_FIELDS)})


def row_bits(cfg: Config) -> int:
    """Return the bits of a row's number in its tile."""
    return exact_log2(tile_rows(cfg))


def row_number_bits(cfg: Config) -> int:
    """Return the bits of a row's number in its tile, and of the tile's number modulo TILES above it."""
    return row_bits(cfg) + exact_log2(TILES)


class TileAddressGenerator(wiring.Component):
    """Generate the addresses of a softmax's entries, in tiles of SUMS * softmax rows.

        by row      for row: for entry      the rows that there are
        by entry    for entry: for row      as many rows in each tile; its steps take more than a cycle each

    A step is an entry, or a pair of neighbours where the Config reads two at once (`softmax_span`).

    Parameters
    ----------
    cfg : Config
    by_row : whether the order is by row.

    Members
    -------
    accepted : In(1)        Pulse: an instruction has been accepted. It starts when its predecessor is through. At most
                            two are held.
    fields : In(fields_layout)      Of the instruction that starts next.
    comes : Out(1)          Pulse: that instruction starts.
    idle : Out(1)           No instruction is held.
    wrapped : Out(1)        By row: the addresses have gone from the end of vin to its beginning.
    begin : In(1)           A tile begins in the next cycle, if one is due.
    active : Out(1)         There is a step.
    on : In(1)              The step is over; the next one follows.
    addr : Out              Address of the step's entry.
    row : Out               Number of its row in the tile; by row, the tile's number modulo TILES is above it.
    first, last : Out(1)    The entry is its row's first or last one.
    last_row : Out(1)       The row is the tile's last one.
    ends : Out(1)           The step is the tile's last one.
    more : Out(1)           Another tile follows.
    """

    def __init__(self, cfg: Config, by_row: bool) -> None:
        self._by_row, self._in_tile, self._span = by_row, row_bits(cfg), softmax_span(cfg)
        super().__init__({
            "accepted": In(1), "fields": In(fields_layout(cfg)), "comes": Out(1), "idle": Out(1), "wrapped": Out(1),
            "begin": In(1), "active": Out(1), "on": In(1), "addr": Out(scratchpads(cfg)["vin"].address_bits),
            "row": Out(row_number_bits(cfg) if by_row else row_bits(cfg)),
            "first": Out(1), "last": Out(1), "last_row": Out(1), "ends": Out(1), "more": Out(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        over = Signal()
        due = Signal()
        waits = Signal()
        comes = self.comes
        m.d.comb += [
            self.ends.eq(self.last & self.last_row), over.eq(self.on & self.ends),
            comes.eq((self.accepted | waits) & (~due | (over & ~self.more))),
            self.idle.eq(~(self.accepted | waits | due)),
        ]  # fmt: skip
        m.d.sync += waits.eq((self.accepted | waits) & ~comes)
        with m.If(comes):
            m.d.sync += due.eq(1)
        with m.Elif(over):
            m.d.sync += due.eq(self.more)
        with m.If(self.begin):
            m.d.sync += self.active.eq(comes | Mux(over, self.more, due))
        with m.Elif(over):
            m.d.sync += self.active.eq(0)
        self._entries(m, comes, self.on & (self.last_row | self._by_row))
        self._rows(m, comes, self.on & (self.last | (not self._by_row)), over)
        (self._addresses_by_row if self._by_row else self._addresses_by_entry)(m, comes)
        probes(self, due=due, waits=waits)
        return m

    def _entries(self, m: Module, comes: Value, on: Value) -> None:
        """Drive `first` and `last`, the marks of a row's first and last entry: registers, computed a step ahead."""
        entries = (self.fields.extent_n + self._span - 1) >> exact_log2(self._span)
        left = Reg(EXTENT_BITS)
        with m.If(comes | (on & self.last)):
            m.d.sync += [left.eq(entries), self.first.eq(1), self.last.eq(entries == 1)]
        with m.Elif(on):
            m.d.sync += [left.eq(left - 1), self.first.eq(0), self.last.eq(left == 2)]
        probes(self, left=left)

    def _rows(self, m: Module, comes: Value, on: Value, over: Value) -> None:
        """Drive `row`, `last_row` and `more`: the row's number in its tile, and whether other rows and tiles follow."""
        last = self.fields.extent_x - 1
        others = Reg(EXTENT_BITS)
        end, tiles = others[: self._in_tile], others[self._in_tile :]
        row, tile = self.row[: self._in_tile], self.row[self._in_tile :]
        m.d.comb += self.last_row.eq(row.all() | (~self.more & (row == end) & self._by_row))
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
        """Return the stride from one read of a row to the next: between entries, or pairs of neighbouring entries."""
        return fields.a_n if self._span == 1 else Const(self._span)

    def _addresses_by_row(self, m: Module, comes: Value) -> None:
        """Drive `addr` in the order by row: entries of a row, then the next row, whatever tile it belongs to."""
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
        """Drive `addr` in the order by entry: one entry of all rows of a tile, then the next entry of all rows.

        The next tile begins one row behind the first entry of this tile's last row.
        """
        (line, lowest, target), f = (Reg(len(self.addr), name=n) for n in ("line", "lowest", "target")), self.fields
        start, down = Mux(self.last_row, line, self.addr), ~self.last_row | self.ends
        # A step before it is over, it is known what follows.
        m.d.sync += target.eq(Mux(self.ends, lowest, start) + Mux(down, f.a_x, self._next(f)))
        with m.If(self.first):
            m.d.sync += lowest.eq(self.addr)
        with m.If(comes):
            m.d.sync += [self.addr.eq(f.a_base), line.eq(f.a_base)]
        with m.Elif(self.on):
            m.d.sync += self.addr.eq(target)
            with m.If(self.last_row):
                m.d.sync += line.eq(target)
