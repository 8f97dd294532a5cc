"""Addresses of the entries of vin that a softmax reads."""

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
"""Entries of each row of a tile that the lanes buffer: one is added up while the other is filled."""
TILES = 4
"""Tiles whose largest bytes are kept: one is searched, while one or two are added up and one is divided."""


def fields_layout(cfg: Config) -> data.StructLayout:
    """Return the layout of the fields of a VECTOR that say where the rows of a softmax lie and how long they are."""
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
    """Generate the addresses of a softmax's entries, tile by tile of `tile_rows` rows, in one of two orders:

        by row      for each row, for each entry: the last tile has only the rows that there are
        by entry    for each entry, for each row: every tile has all rows; a step takes more than one cycle

    A step reads an entry, or a pair of neighbouring entries if the Config reads two at once (`softmax_span`).

    Parameters
    ----------
    cfg : Config
    by_row : whether the order is by row, else by entry.

    Members
    -------
    accepted : In(1)        Pulse: a VECTOR is accepted. It starts here when the previous one has no tiles left. At most
                            two are under way.
    fields : In(fields_layout)      Fields of the VECTOR that starts next, and of the present one.
    comes : Out(1)          Pulse: the next VECTOR starts.
    idle : Out(1)           No VECTOR is under way.
    wrapped : Out(1)        By row: the addresses have wrapped from the end of vin to its beginning.
    begin : In(1)           The next tile, if there is one, begins in the next cycle.
    active : Out(1)         The outputs below describe a step.
    on : In(1)              The step ends with this cycle, and the next one follows.
    addr : Out              Address of the step's (first) entry.
    row : Out               Number of its row in the tile; by row, the tile's number modulo TILES is above it.
    first, last : Out(1)    The step is its row's first or last one.
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
        self._track_entries(m, comes, self.on & (self.last_row | self._by_row))
        self._track_rows(m, comes, self.on & (self.last | (not self._by_row)), over)
        (self._generate_by_row if self._by_row else self._generate_by_entry)(m, comes)
        probes(self, due=due, waits=waits)
        return m

    def _track_entries(self, m: Module, comes: Value, on: Value) -> None:
        """Drive `first` and `last`, the flags of a row's first and last step: registers, computed a step ahead.

        comes: a VECTOR starts. on: the next step is another entry, in either order.
        """
        entries = (self.fields.extent_n + self._span - 1) >> exact_log2(self._span)
        left = Reg(EXTENT_BITS)
        with m.If(comes | (on & self.last)):
            m.d.sync += [left.eq(entries), self.first.eq(1), self.last.eq(entries == 1)]
        with m.Elif(on):
            m.d.sync += [left.eq(left - 1), self.first.eq(0), self.last.eq(left == 2)]
        probes(self, left=left)

    def _track_rows(self, m: Module, comes: Value, on: Value, over: Value) -> None:
        """Drive `row`, `last_row` and `more`: the row's number in its tile, and whether other rows and tiles follow.

        comes: a VECTOR starts. on: the next step is in another row. over: the tile ends with this cycle.
        """
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

    def _step_stride(self, fields: Any) -> Value:
        """Return the address stride from one step of a row to the next: a_n, or 2 for pairs of neighbouring entries."""
        return fields.a_n if self._span == 1 else Const(self._span)

    def _generate_by_row(self, m: Module, comes: Value) -> None:
        """Drive `addr` in the order by row: entries of a row, then the next row, whatever tile it belongs to."""
        line = Reg(len(self.addr))
        target = Signal(len(self.addr) + 1)
        f = self.fields
        follows = ~self.ends | self.more
        # A pair may wrap between its two entries. If the row has an odd number of entries, the second entry of its last
        # pair does not belong to it.
        within = self.addr.all() & ~(self.last & f.extent_n[0]) if self._span > 1 else Const(0)
        m.d.comb += target.eq(Mux(self.last, line, self.addr) + Mux(self.last, f.a_x, self._step_stride(f)))
        with m.If(comes):
            m.d.sync += [self.addr.eq(f.a_base), line.eq(f.a_base), self.wrapped.eq(0)]
        with m.Elif(self.on):
            m.d.sync += [self.addr.eq(target), self.wrapped.eq(self.wrapped | (follows & target[-1]) | within)]
            with m.If(self.last):
                m.d.sync += line.eq(target)
        probes(self, line=line)

    def _generate_by_entry(self, m: Module, comes: Value) -> None:
        """Drive `addr` in the order by entry: one entry of all rows of a tile, then the next entry of all rows.

        The next tile begins one row behind the first entry of this tile's last row.
        """
        (line, lowest, target), f = (Reg(len(self.addr), name=n) for n in ("line", "lowest", "target")), self.fields
        start, down = Mux(self.last_row, line, self.addr), ~self.last_row | self.ends
        # The next address is computed a cycle ahead, as a step takes more than one cycle.
        m.d.sync += target.eq(Mux(self.ends, lowest, start) + Mux(down, f.a_x, self._step_stride(f)))
        with m.If(self.first):
            m.d.sync += lowest.eq(self.addr)
        with m.If(comes):
            m.d.sync += [self.addr.eq(f.a_base), line.eq(f.a_base)]
        with m.Elif(self.on):
            m.d.sync += self.addr.eq(target)
            with m.If(self.last_row):
                m.d.sync += line.eq(target)
