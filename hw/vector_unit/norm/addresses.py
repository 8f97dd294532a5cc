"""Addresses of the entries of vin that a norm reads to compute the factors of its rows."""

from __future__ import annotations

from amaranth import Const, Module, Mux, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode, formats
from celosia.hw.spec.pipeline import MIN_NORM_ROW_CYCLES, norm_parts
from celosia.hw.spec.scratchpads import scratchpads

WALKED = ("extent_n", "extent_x", "a_base", "a_n", "a_x")
"""Fields of a VECTOR with `norm` that say where its rows lie."""


def norm_fields(cfg: Config, *names: str) -> data.StructLayout:
    """Return the layout of the fields `names` of a VECTOR."""
    widths = {field.name: field.width for field in formats(cfg)[Opcode.VECTOR].fields}
    return data.StructLayout({name: widths[name] for name in names})


class NormAddressGenerator(wiring.Component):
    """Generate the addresses of a norm's entries, row by row, one part of `cfg.norm` elements a cycle.

    A row begins at least MIN_NORM_ROW_CYCLES cycles after the previous one, as later parts of the engine take so long.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    fields : In, start : In(1)      Pulse: the rows that `fields` describe begin in the next cycle.
    active : Out(1)                 The other outputs describe a part.
    number : Out                    Number of the part in its entry.
    addr : Out                      Address of the entry.
    first, last : Out(1)            The part is the first or last one of its row.
    ends : Out(1)                   The entry is the last one of its row.
    read : Out(1)                   The part is the first one of its entry, which is to be read.
    """

    def __init__(self, cfg: Config) -> None:
        self._parts = norm_parts(cfg)
        super().__init__({
            "fields": In(norm_fields(cfg, *WALKED)), "start": In(1), "active": Out(1),
            "number": Out(exact_log2(self._parts)), "addr": Out(scratchpads(cfg)["vin"].address_bits),
            "first": Out(1), "last": Out(1), "ends": Out(1), "read": Out(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        fields, number = self.fields, self.number
        held = Reg(fields.shape())
        begins = Signal()
        over = Signal()
        whole: Value = number.all() if self._parts > 1 else Const(1)
        first = Reg()  # the entry is the first one of its row
        m.d.comb += [
            self.read.eq(self.active & ~number.any()), self.first.eq(first & ~number.any()),
            self.last.eq(self.ends & whole), over.eq(self.active & self.last),
        ]  # fmt: skip
        if self._parts > 1:
            with m.If(self.active):
                m.d.sync += number.eq(number + 1)
        self._pace_rows(m, held, over, begins)
        line = Reg(len(self.addr))
        entries = Reg(len(fields.extent_n))
        next_line = (line + held.a_x)[: len(line)]
        with m.If(self.start):
            m.d.sync += [held.eq(fields), line.eq(fields.a_base), self.addr.eq(fields.a_base)]
        with m.Elif(over):
            m.d.sync += [line.eq(next_line), self.addr.eq(next_line)]
        with m.Elif(self.active & whole):
            m.d.sync += self.addr.eq(self.addr + held.a_n)
        with m.If(self.start | over):
            count = Mux(self.start, fields.extent_n, held.extent_n)
            m.d.sync += [entries.eq(count), first.eq(1), self.ends.eq(count == 1)]
        with m.Elif(self.active & whole):
            m.d.sync += [entries.eq(entries - 1), first.eq(0), self.ends.eq(entries == 2)]
        return m

    def _pace_rows(self, m: Module, held: data.View[data.StructLayout], over: Signal, begins: Signal) -> None:
        """Drive `active`, and pulse `begins` when the next row begins: after the present one, but not too early.

        over: the last part of a row is processed in this cycle.
        """
        left = Reg(len(self.fields.extent_x))
        cycles = Reg(range(MIN_NORM_ROW_CYCLES))
        waits = Signal()
        more = Signal()
        time = Signal()
        m.d.comb += [
            more.eq(left != 0), time.eq(cycles == MIN_NORM_ROW_CYCLES - 1), begins.eq(((over & more) | waits) & time),
        ]  # fmt: skip
        with m.If(self.start | begins):
            m.d.sync += [self.active.eq(1), waits.eq(0), cycles.eq(0)]
            m.d.sync += left.eq(Mux(self.start, self.fields.extent_x, left) - 1)
        with m.Else():
            m.d.sync += cycles.eq(cycles + ~time)
            with m.If(over):
                m.d.sync += [self.active.eq(0), waits.eq(more)]
