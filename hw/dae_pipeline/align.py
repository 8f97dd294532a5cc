"""From the beats of rows to units that lie anywhere in them."""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.dae_pipeline.dma import beat_layout
from celosia.hw.lib.layout import ERROR_BITS
from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.regs import Error


class Aligner(wiring.Component):
    """Cuts the beats of rows into units: the first bytes of a unit may lie anywhere in a beat.

    A beat with an error gives a unit with it.

    Parameters
    ----------
    bus_bytes : int    Bytes of a beat.

    Members
    -------
    row : In(stream)    One for each row: the position of its first unit (`facts`); the byte of the bus word at which
                        the row ends; log2 of the bytes of a unit, which divide the row.
    beat : In(stream)   The beats of all rows, in order.
    unit : Out(stream)  The units of all rows, in order; `data` in the low bytes.
    """

    def __init__(self, bus_bytes: int) -> None:
        self._bus_bytes = bus_bytes
        word_bits = exact_log2(bus_bytes)
        # Of a unit: its first byte in its bus word, where the next one begins, whether it reaches into the next word,
        # and whether it ends where the row's last unit does in its word. Known a unit ahead.
        self._facts = data.StructLayout({"first": word_bits, "stop": word_bits + 1, "crosses": 1, "final": 1})
        self.row_layout = data.StructLayout({"unit": self._facts, "last": word_bits, "shift": word_bits.bit_length()})
        super().__init__({
            "row": In(stream.Signature(self.row_layout)),
            "beat": In(stream.Signature(beat_layout(bus_bytes))),
            "unit": Out(stream.Signature(data.StructLayout({"data": 8 * bus_bytes, "error": ERROR_BITS}))),
        })  # fmt: skip

    def stop(self, first: Value, shift: Value) -> Value:
        """Where the unit that begins at place `first` ends."""
        word_bits = exact_log2(self._bus_bytes)
        return first[:word_bits] + (1 << shift)[: word_bits + 1]

    def facts(self, first: Value, stop: Value, last: Value) -> Value:
        """Of the unit from place `first` to `stop`, in a row that ends at place `last`."""
        word_bits = exact_log2(self._bus_bytes)
        final = (stop - 1)[:word_bits] == last[:word_bits]
        return Cat(first[:word_bits], stop[: word_bits + 1], stop[word_bits] & stop[:word_bits].any(), final)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        word_bits = exact_log2(self._bus_bytes)
        row, beat = self.row.payload, self.beat.payload
        # The oldest beat is held here, the one after it is `beat`.
        held = Reg(beat_layout(self._bus_bytes))
        holds = Signal()
        inside = Signal()
        following = Reg(self._facts)
        present = Signal(self._facts)
        next_beat = Signal()
        crosses = Signal()
        row_end = Signal()
        take = Signal()
        m.d.comb += [
            present.eq(Mux(inside, following, row.unit)),
            next_beat.eq(present.stop[word_bits]),  # the unit reaches the end of the held beat,
            crosses.eq(present.crosses),  # and beyond
            row_end.eq(present.final & Mux(crosses, beat.last, held.last)),
            self.unit.valid.eq(self.row.valid & holds & (~crosses | self.beat.valid | (held.error != Error.NONE))),
            self.unit.payload.data.eq(Cat(held.data, beat.data) >> (present.first << 3)),
            self.unit.payload.error.eq(Mux(crosses & (held.error == Error.NONE), beat.error, held.error)),
            take.eq(self.unit.valid & self.unit.ready),
            self.row.ready.eq(take & row_end),
            self.beat.ready.eq(~holds | (take & (row_end | next_beat))),
        ]
        with m.If(take):
            stop = self.stop(present.stop, row.shift)
            m.d.sync += [inside.eq(~row_end), following.eq(self.facts(present.stop, stop, row.last))]
        with m.If(self.beat.ready):
            m.d.sync += holds.eq(self.beat.valid & ~(take & row_end & crosses))
            with m.If(self.beat.valid):
                m.d.sync += held.eq(beat)
        probes(self, following=following, inside=inside, holds=holds, held=held)
        return m
