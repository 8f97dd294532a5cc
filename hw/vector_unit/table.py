"""Look-up tables of 256 bytes, which every lane of the vector unit can read in every cycle."""

from __future__ import annotations

from amaranth import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.layout import write_port
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.scratchpads import scratchpads


class Tables(wiring.Component):
    """Memories of the look-up tables: each lane has a copy of all tables, as each reads another address.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    load : In(WritePort)      LOAD writes tables; an entry is one table. `mask` selects one grain or, for padding, all
                              grains, which are written one a cycle; `ready` then comes with the last one.
    enable : In(1)            Reads; `value` stays until the next read.
    table : In                Number of the table, the same for all lanes.
    index : In(array)         Index in the table, a byte for each lane.
    value : Out(array)        The byte read for each lane, one cycle after `enable`.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        self._pad = scratchpads(cfg)["lut"]
        super().__init__({
            "load": In(write_port(self._pad)), "enable": In(1), "table": In(self._pad.address_bits),
            "index": In(data.ArrayLayout(8, cfg.lanes)), "value": Out(data.ArrayLayout(8, cfg.lanes)),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        cfg, load = self._cfg, self.load
        grain, rows, tables = self._pad.grain, self._pad.width // self._pad.grain, self._pad.depth
        row_bits, byte_bits = (rows - 1).bit_length(), (grain // 8 - 1).bit_length()

        # left: grains of the last write that are still to be written, lowest first. many: that write has all grains.
        # over: it is complete, and is accepted if `held`, that is, if the writer has offered it all the time. An error
        # resets the writer, but not a write that has begun.
        left = Signal(rows)
        many = Signal()
        over = Signal()
        held = Signal()
        whole = load.mask[0] & load.mask[1] if rows > 1 else Const(0)  # no mask but that of padding has two neighbours
        entry = Signal.like(load.addr, name="entry", reset_less=True)
        rows_of_entry = Signal(data.ArrayLayout(grain, rows), reset_less=True)
        row = Signal(row_bits)
        # `left` is one grain, or all grains from some grain on: the lowest one has no neighbour below it.
        rest = (left & (left << 1))[:rows]
        lowest = left & ~rest
        m.d.comb += [
            load.ready.eq(Mux(many, over & held, ~whole)),
            *(
                row[bit].eq((lowest & sum(1 << i for i in range(rows) if i >> bit & 1)).any())
                for bit in range(row_bits)
            ),
        ]
        m.d.sync += [
            left.eq(Mux(many, rest, Mux(load.en, load.mask, 0))),
            many.eq(Mux(many, ~over, load.en & whole)),
            over.eq(many & ~over & ~rest.any()),
            held.eq(load.en & (held | ~many)),
        ]
        with m.If(~many):
            m.d.sync += [entry.eq(load.addr), rows_of_entry.eq(load.data)]

        def address(table_row: Signal, table: Signal) -> Cat:
            """Return the address of row `table_row` of table number `table` in each lane's memory."""
            return Cat(table_row, table) if tables > 1 else Cat(table_row)

        enable = Signal()
        place = Signal.like(Cat(address(row, entry)))
        write = Reg(grain)
        m.d.sync += [enable.eq(left.any()), place.eq(address(row, entry)), write.eq(rows_of_entry[row])]
        for lane in range(cfg.lanes):
            index = self.index[lane]
            memory = Memory(shape=data.ArrayLayout(8, grain // 8), depth=tables * rows, init=[])
            m.submodules[f"lane{lane}"] = memory
            to = memory.write_port()
            of = memory.read_port()
            byte = Reg(byte_bits, name=f"byte{lane}")
            m.d.comb += [
                to.en.eq(enable),
                to.addr.eq(place),
                to.data.eq(write),
                of.en.eq(self.enable),
                of.addr.eq(address(index[byte_bits:], self.table)),
                self.value[lane].eq(of.data[byte]),
            ]
            with m.If(self.enable):
                m.d.sync += byte.eq(index)
        return m
