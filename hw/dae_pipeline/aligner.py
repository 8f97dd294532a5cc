"""Aligner: cuts the beats of rows into chunks, which may begin at any byte of a beat."""

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
    """Return the layout of the position of a chunk within bus words.

    first: number of its first byte in its bus word. stop: number of the byte behind it, counted in the same word.
    crosses: it reaches into the next word. final: its last byte has the same number in its word as the row's last byte,
    so it ends the row if that word is the row's last.
    """
    word_bits = exact_log2(bus_bytes)
    return data.StructLayout({"first": word_bits, "stop": word_bits + 1, "crosses": 1, "final": 1})


def aligned_row_layout(bus_bytes: int) -> data.StructLayout:
    """Return the layout of a row that is to be cut into chunks.

    chunk: position of its first chunk. last: number of the row's last byte in its bus word. shift: log2 of the bytes of
    a chunk, which one step of LOAD moves.
    """
    word_bits = exact_log2(bus_bytes)
    return data.StructLayout({
        "chunk": position_layout(bus_bytes), "last": word_bits, "shift": word_bits.bit_length(),
    })  # fmt: skip


def chunk_stop(bus_bytes: int, first: Value, shift: Value) -> Value:
    """Return `stop` of the position of a chunk of 2^shift bytes that begins at byte `first`."""
    word_bits = exact_log2(bus_bytes)
    return first[:word_bits] + (1 << shift)[: word_bits + 1]


def chunk_position(bus_bytes: int, first: Value, stop: Value, last: Value) -> Value:
    """Return the `position_layout` of the chunk from byte `first` to `stop`, in a row that ends at byte `last`."""
    word_bits = exact_log2(bus_bytes)
    final = (stop - 1)[:word_bits] == last[:word_bits]
    return Cat(first[:word_bits], stop[: word_bits + 1], stop[word_bits] & stop[:word_bits].any(), final)


class Aligner(wiring.Component):
    """Cut the beats of rows into chunks, which may begin at any byte of a beat and cross into the next one.

    The error of a beat passes to a chunk of that beat.

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
        following = Reg(position_layout(bus_bytes))  # computed a chunk ahead
        present = Signal(position_layout(bus_bytes))
        next_beat = Signal()
        crosses = Signal()
        row_end = Signal()
        take = Signal()
        m.d.comb += [
            present.eq(Mux(inside, following, row.chunk)),
            next_beat.eq(present.stop[word_bits]),  # the chunk reaches the end of the held beat
            crosses.eq(present.crosses),  # the chunk reaches into the next beat
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
