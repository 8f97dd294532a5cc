"""Write the results of a softmax, entry by entry."""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import softmax_parts, softmax_span
from celosia.hw.spec.scratchpads import scratchpads
from celosia.hw.vector_unit.softmax.addresses import fields_layout
from celosia.hw.vector_unit.softmax.steps import divide_layout


class ResultWriter(wiring.Component):
    """Collect the results of an entry's parts and write the entry, row by row.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    fields : In(fields_layout)      Fields of the last VECTOR that was accepted: where its results are written.
    accepted : In(1)                A VECTOR has been accepted in the cycle before.
    valid : In(1), step : In(divide_layout)     The results of a part are valid; `step` describes the part.
    results : In(array)             Those results, a byte of each lane.
    write : Out(1), addr, data : Out            An entry is written.
    spare : Out(1)                  The entry lies behind a row with an odd number of entries, and must not be written.
    finish : Out(1)                 The entry is the last one of its VECTOR.
    """

    def __init__(self, cfg: Config) -> None:
        self._span, self._parts = softmax_span(cfg), softmax_parts(cfg)
        fields = fields_layout(cfg)
        super().__init__({
            "fields": In(fields), "accepted": In(1), "valid": In(1), "step": In(divide_layout(cfg)),
            "results": In(data.ArrayLayout(8, cfg.softmax)),
            "write": Out(1), "addr": Out(fields["dst_base"].shape), "data": Out(scratchpads(cfg)["out"].width),
            "spare": Out(1), "finish": Out(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        fields, step = self.fields, self.step
        row_ends = Reg()
        end = Reg()
        last_of_row = step.last & step.part[exact_log2(self._parts // self._span) :].all()
        with m.If(self.valid):
            m.d.sync += self.data.eq(Cat(self.data, Value.cast(self.results))[-len(self.data) :])
        m.d.sync += [self.write.eq(self.valid & step.whole), row_ends.eq(last_of_row), end.eq(step.end)]
        if self._span > 1:
            m.d.sync += self.spare.eq(last_of_row & fields.extent_n[0])

        # The next VECTOR waits until the last entry of the one before it is written.
        under_way = Signal()
        waits = Signal()
        begins = Signal()
        m.d.comb += [
            self.finish.eq(self.write & end), begins.eq((self.accepted | waits) & (~under_way | self.finish)),
        ]  # fmt: skip
        m.d.sync += [
            waits.eq((self.accepted | waits) & ~begins), under_way.eq(begins | (under_way & ~self.finish)),
        ]  # fmt: skip

        line = Reg(len(fields.dst_x))  # address of the row's first entry
        next_addr = Signal.like(line)
        m.d.comb += next_addr.eq(Mux(row_ends, line, self.addr) + Mux(row_ends, fields.dst_x, fields.dst_n))
        with m.If(begins):
            m.d.sync += [self.addr.eq(fields.dst_base), line.eq(fields.dst_base)]
        with m.Elif(self.write):
            m.d.sync += self.addr.eq(next_addr)
            with m.If(row_ends):
                m.d.sync += line.eq(next_addr)
        return m
