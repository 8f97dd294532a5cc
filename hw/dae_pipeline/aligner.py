"""Aligner between the beats of rows and chunks, which lie anywhere in the beats."""

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


def position_layout(bus_bytes: int) -> data.StructLayout:
    """Position of a chunk in the bus words of its row.

    first: the byte of its bus word at which it begins. stop: the one at which the next chunk begins. crosses: it
    reaches into the next word. final: it ends at the byte of a word at which the row ends.
    """
    word_bits = exact_log2(bus_bytes)
    return data.StructLayout({"first": word_bits, "stop": word_bits + 1, "crosses": 1, "final": 1})


def aligned_row_layout(bus_bytes: int) -> data.StructLayout:
    """Row to cut into chunks. chunk: position of its first chunk. last: byte of a bus word at which the row ends.

    shift: log2 of the bytes of a chunk, which is as many bytes as LOAD or STORE moves at once: a step of an element.
    """
    word_bits = exact_log2(bus_bytes)
    return data.StructLayout({
        "chunk": position_layout(bus_bytes), "last": word_bits, "shift": word_bits.bit_length(),
    })  # fmt: skip


def chunk_stop(bus_bytes: int, first: Value, shift: Value) -> Value:
    """Return where a chunk of 2^shift bytes ends that begins at byte `first`."""
    word_bits = exact_log2(bus_bytes)
    return first[:word_bits] + (1 << shift)[: word_bits + 1]


def chunk_position(bus_bytes: int, first: Value, stop: Value, last: Value) -> Value:
    """Return the `position_layout` of the chunk from byte `first` to `stop`, in a row that ends at byte `last`."""
    word_bits = exact_log2(bus_bytes)
    final = (stop - 1)[:word_bits] == last[:word_bits]
    return Cat(first[:word_bits], stop[: word_bits + 1], stop[word_bits] & stop[:word_bits].any(), final)


class Aligner(wiring.Component):
    """Cuts the beats of rows into chunks: the first bytes of a chunk may lie anywhere in a beat.

    A beat with an error gives a chunk with it.

    Parameters
    ----------
    bus_bytes : int    Bytes of a beat.

    Members
    -------
    row : In(stream)    `aligned_row_layout` of each row; the bytes of a chunk divide those of the row.
    beat : In(stream)   The beats of all rows, in order.
    chunk : Out(stream) The chunks of all rows, in order; `data` in the low bytes.
    """

    def __init__(self, bus_bytes: int) -> None:
        self._bus_bytes = bus_bytes
        super().__init__({
            "row": In(stream.Signature(aligned_row_layout(bus_bytes))),
            "beat": In(stream.Signature(beat_layout(bus_bytes))),
            "chunk": Out(stream.Signature(data.StructLayout({"data": 8 * bus_bytes, "error": ERROR_BITS}))),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        bus_bytes, word_bits = self._bus_bytes, exact_log2(self._bus_bytes)
        row, beat = self.row.payload, self.beat.payload
        # The oldest beat is held here, the one after it is `beat`.
        held = Reg(beat_layout(bus_bytes))
        holds = Signal()
        inside = Signal()
        following = Reg(position_layout(bus_bytes))  # found a chunk ahead
        present = Signal(position_layout(bus_bytes))
        next_beat = Signal()
        crosses = Signal()
        row_end = Signal()
        take = Signal()
        m.d.comb += [
            present.eq(Mux(inside, following, row.chunk)),
            next_beat.eq(present.stop[word_bits]),  # the chunk reaches the end of the held beat,
            crosses.eq(present.crosses),  # and beyond
            row_end.eq(present.final & Mux(crosses, beat.last, held.last)),
            self.chunk.valid.eq(self.row.valid & holds & (~crosses | self.beat.valid | (held.error != Error.NONE))),
            self.chunk.payload.data.eq(Cat(held.data, beat.data) >> (present.first << 3)),
            self.chunk.payload.error.eq(Mux(crosses & (held.error == Error.NONE), beat.error, held.error)),
            take.eq(self.chunk.valid & self.chunk.ready),
            self.row.ready.eq(take & row_end),
            self.beat.ready.eq(~holds | (take & (row_end | next_beat))),
        ]
        with m.If(take):
            stop = chunk_stop(bus_bytes, present.stop, row.shift)
            position = chunk_position(bus_bytes, present.stop, stop, row.last)
            m.d.sync += [inside.eq(~row_end), following.eq(position)]
        with m.If(self.beat.ready):
            m.d.sync += holds.eq(self.beat.valid & ~(take & row_end & crosses))
            with m.If(self.beat.valid):
                m.d.sync += held.eq(beat)
        probes(self, following=following, inside=inside, holds=holds, held=held)
        return m
