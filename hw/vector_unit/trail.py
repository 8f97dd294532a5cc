"""What goes from acc to vin beside a softmax: to places that this does not read any more."""

from __future__ import annotations

from typing import Any

from amaranth import Module, Mux, Signal, Value

from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import EXTENT_BITS, ASource, BSource, Destination
from celosia.hw.spec.scratchpads import scratchpads


class HazardTracker:
    """An instruction that writes entries of vin one behind another, the first of them not behind the first one of the
    rows of the only softmax under way, whose entries lie one behind another, too. What lies in front of the row that is
    divided is read no more, so that its steps wait for rows.

    follows: what is offered is such a one, if it was in the cycle before. trails: so is the instruction whose loops
    run, and it began beside that softmax. Of softmaxes, walked: they have looked at all their rows, none of which lies
    beyond the end of vin, that is, at its beginning. entries: of a row. over: one has been read for the last time.
    comes: the next one is another softmax's.
    """

    def __init__(self, cfg: Config) -> None:
        bits = scratchpads(cfg)["vin"].address_bits
        self.follows, self.trails = Signal(name="follows"), Signal(name="trails")
        self.entries = Signal(EXTENT_BITS, name="row_entries")
        self.walked = Signal(name="rows_walked")
        self.over, self.comes = Signal(name="row_over"), Signal(name="rows_come")
        self._base, self._in_line = Reg(bits, name="rows_base"), Reg(name="rows_in_line")
        self._in_front = Reg(bits + 1, name="in_front")
        self._free, self._gap = Signal(bits + 1, name="free"), Signal(bits + 1, name="gap")

    def offer(self, m: Module, unit: Any, single: Value, starts: Value) -> None:
        """Looks at what `unit` is offered. single: a softmax is under way alone; starts: what is offered is one, and is
        taken."""
        f, base = unit.instr.payload.fields, self._base
        with m.If(starts):
            m.d.sync += [base.eq(f.a_base), self._in_line.eq((f.a_n == 1) & (f.a_x == f.extent_n))]
        of_acc = (f.destination == Destination.VIN) & (f.a_source == ASource.ACC) & (f.b_source != BSource.VIN)
        in_line = (f.extent_n == 1) & (f.extent_y == 1) & (f.dst_x == 1) & (f.dst_base <= base)
        waits = unit.instr.valid & ~unit.instr.ready & single & self.walked & self._in_line
        m.d.sync += [
            self.follows.eq(waits & of_acc & in_line & ~unit.halt), self._in_front.eq(base - f.dst_base[: len(base)]),
        ]  # fmt: skip

    def count(self, m: Module, next_one: Value, accept: Value, output: Value) -> None:
        """Entries that may be written: those in front of the rows, and of the rows. next_one: loops take another
        instruction, if one is offered: accept. output: the step of an entry is taken."""
        more = Mux(self.over, self.entries, 0)
        free = Signal.like(self._free)
        m.d.comb += free.eq(Mux(self.comes, 0, self._free + more))
        m.d.sync += self._free.eq(free)
        with m.If(next_one):
            m.d.sync += [self.trails.eq(accept & self.follows), self._gap.eq(self._in_front + free)]
        with m.Else():
            m.d.sync += self._gap.eq(self._gap + more - output)

    def blocks(self, next_one: Value, alone: Value, output: Value) -> Value:
        """Whether no step may be taken in the next cycle: not in the first one, in which entries are counted."""
        none = ~self.over & ((self._gap == 0) | ((self._gap == 1) & output))
        return Mux(next_one, self.follows, self.trails & alone & none)
