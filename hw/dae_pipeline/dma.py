"""DMA engines: they read and write rows of DRAM bytes by AXI bursts.

A row is `bytes` consecutive bytes from `offset`, relative to `dma_base`, which is a multiple of 4096. A row that ends
beyond `dma_size` is refused as a whole: none of it reaches the bus, nor does any later row before `halt`. Beats are
whole words of the bus, so the first and the last beat of a row may also hold bytes outside of the row.
"""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.dae_pipeline.fifo import StreamFifo
from celosia.hw.lib.axi import ADDR_BITS, BURST_INCR, CACHE_NORMAL, RESP_OKAY, Axi4Write, ReadBus, burst_layout
from celosia.hw.lib.layout import ERROR_BITS, Pulse
from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.pipeline import BURST_BOUNDARY, MAX_BURST, MAX_OUTSTANDING_BURSTS, READ_BUFFER_BEATS
from celosia.hw.spec.regs import Error

OFFSET_BITS = 32
"""Width of a byte offset from the DMA base."""


def row_layout(bytes_bits: int) -> data.StructLayout:
    """Return the layout of a row of at least one byte to read or write. final: the last row of an instruction."""
    return data.StructLayout({"offset": OFFSET_BITS, "bytes": bytes_bits, "final": 1})


split_layout = data.StructLayout({"burst": burst_layout, "row_end": 1, "final": 1, "refused": 1})
"""A burst of a row. row_end: the last one of its row. final: the last one of a final row. refused: it stands for all
bursts of a refused row, and must not reach the bus."""


class BurstSplitter(wiring.Component):
    """Cut rows into legal AXI bursts, one a cycle.

    Parameters
    ----------
    bus_bytes : int     Bytes of a beat.
    bytes_bits : int    Width of a row's count of bytes.

    Members
    -------
    row : In(stream)                Rows to cut.
    split : Out(stream)             Their bursts, in order; `refused` for a row beyond `dma_size`.
    dma_base, dma_size : In         Address at which DRAM begins, and how many bytes of it may be used.
    halt : In(1)                    Accepts no new row, and drops the rest of the present one.
    """

    def __init__(self, bus_bytes: int, bytes_bits: int) -> None:
        self._bus_bytes = bus_bytes
        super().__init__({
            "row": In(stream.Signature(row_layout(bytes_bits))),
            "split": Out(stream.Signature(split_layout)),
            "dma_base": In(ADDR_BITS),
            "dma_size": In(OFFSET_BITS),
            "halt": In(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        word_bits = (self._bus_bytes - 1).bit_length()
        page_bits = (BURST_BOUNDARY // self._bus_bytes - 1).bit_length()
        burst_bits = (MAX_BURST - 1).bit_length()

        valid = Signal()
        refused = Reg()
        final = Reg()
        stuck = Signal()
        word = Reg(OFFSET_BITS - word_bits)  # number of the next beat's bus word
        left = Reg(OFFSET_BITS - word_bits)  # beats of the row after the next one

        # Beats of the burst less one, and whether it is the last one of its row: computed a burst ahead.
        length = Reg(burst_bits)
        ends = Reg()

        def burst(word: Value, left: Value) -> list[object]:
            """Return assignments of the burst that begins at `word`: to the end of page or row, or MAX_BURST beats.

            left: beats of the row from `word` on, less one.
            """
            beats_to_page_end = ~word[:page_bits]
            longest = Mux(beats_to_page_end[burst_bits:].any(), MAX_BURST - 1, beats_to_page_end[:burst_bits])
            is_last = ~left[burst_bits:].any() & (left[:burst_bits] <= longest)
            return [length.eq(Mux(is_last, left[:burst_bits], longest)), ends.eq(is_last)]

        last = Signal()
        m.d.comb += [
            last.eq(ends | refused | self.halt),
            self.split.valid.eq(valid),
            self.split.payload.burst.addr.eq(self.dma_base + (word << word_bits)),
            self.split.payload.burst.len.eq(length),
            self.split.payload.row_end.eq(last),
            self.split.payload.final.eq(last & final),
            self.split.payload.refused.eq(refused),
            self.row.ready.eq((~valid | (self.split.ready & last)) & ~self.halt & ~stuck & ~(valid & refused)),
        ]
        row = self.row.payload
        next_word = Signal.like(word)
        next_left = Signal.like(left)
        with m.If(self.split.ready & valid):
            m.d.sync += [valid.eq(~last), stuck.eq(refused)]
        with m.If(self.halt):
            m.d.sync += stuck.eq(0)
        with m.If(self.row.valid & self.row.ready):
            m.d.sync += valid.eq(1)
        # Behind the last burst, registers are loaded from `row`, valid or not: only their enables wait for handshakes.
        with m.If(~valid | last):
            m.d.comb += next_word.eq(row.offset >> word_bits)
            m.d.comb += next_left.eq((row.offset[:word_bits] + row.bytes - 1) >> word_bits)
        with m.Else():
            m.d.comb += [next_word.eq(word + length + 1), next_left.eq(left - length - 1)]
        with m.If(~valid | self.split.ready):
            m.d.sync += [word.eq(next_word), left.eq(next_left), *burst(next_word, next_left)]
            with m.If(~valid | last):
                m.d.sync += [refused.eq(row.offset + row.bytes > self.dma_size), final.eq(row.final)]
        probes(
            self, word=word, left=left, valid=valid, refused=refused, length=length, ends=ends, final=final, stuck=stuck
        )
        return m


def beat_layout(bus_bytes: int) -> data.StructLayout:
    """Return the layout of a beat that was read. error: a code of `regs.Error`. last: the last beat of its row.

    A refused row gives one beat with the error ADDRESS.
    """
    return data.StructLayout({"data": 8 * bus_bytes, "error": ERROR_BITS, "last": 1})


class ReadEngine(wiring.Component):
    """Read rows; their beats come in order, one a cycle once the first has arrived.

    A burst is requested only when the engine has room for all of its beats, so that it never stalls the bus.

    Parameters
    ----------
    bus_bytes : int     Bytes of a beat.
    bytes_bits : int    Width of a row's count of bytes.
    outstanding : int   Largest number of bursts under way at once.
    room : int          Beats that the engine can hold.

    Members
    -------
    row : In(stream)            Rows to read.
    beat : Out(stream)          Their beats, in order.
    bus : Out(ReadBus)          The read channel.
    dma_base, dma_size : In     Where DRAM begins, and how many bytes of it may be read.
    halt : In(1)                Outstanding beats are received and dropped.
    idle : Out(1)               No row is left, and no beat is outstanding or held.
    """

    def __init__(
        self,
        bus_bytes: int,
        bytes_bits: int = OFFSET_BITS,
        outstanding: int = MAX_OUTSTANDING_BURSTS,
        room: int = READ_BUFFER_BEATS,
    ) -> None:
        self._bus_bytes, self._bytes_bits = bus_bytes, bytes_bits
        self._outstanding, self._room = outstanding, room
        super().__init__({
            "row": In(stream.Signature(row_layout(bytes_bits))),
            "beat": Out(stream.Signature(beat_layout(bus_bytes))),
            "bus": Out(ReadBus(bus_bytes)),
            "dma_base": In(ADDR_BITS),
            "dma_size": In(OFFSET_BITS),
            "halt": In(1),
            "idle": Out(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.splitter = splitter = BurstSplitter(self._bus_bytes, self._bytes_bits)
        wiring.connect(m, wiring.flipped(self.row), splitter.row)
        m.d.comb += [
            splitter.dma_base.eq(self.dma_base),
            splitter.dma_size.eq(self.dma_size),
            splitter.halt.eq(self.halt),
        ]
        split, request, response = splitter.split, self.bus.request, self.bus.response

        # Bursts under way, in order.
        order_layout = data.StructLayout({"row_end": 1, "refused": 1})
        m.submodules.order = order = StreamFifo(order_layout, self._outstanding)
        free = Signal(range(self._room + 1), init=self._room)  # beats of room that is neither in use nor reserved
        may_ask = Signal()
        m.d.comb += [
            may_ask.eq(split.valid & order.i.ready & (free > split.payload.burst.len)),
            request.valid.eq(may_ask & ~split.payload.refused),
            request.payload.eq(split.payload.burst),
            split.ready.eq(may_ask & (request.ready | split.payload.refused) & order.i.ready),
            order.i.valid.eq(split.valid & split.ready),
            order.i.payload.row_end.eq(split.payload.row_end),
            order.i.payload.refused.eq(split.payload.refused),
        ]

        # Beats that have arrived, and the one that stands for a refused row.
        m.submodules.beats = beats = StreamFifo(beat_layout(self._bus_bytes), self._room, block_ram=True)
        oldest = order.o.payload
        refused = order.o.valid & oldest.refused
        m.d.comb += [
            response.ready.eq(order.o.valid & ~oldest.refused),
            beats.i.valid.eq((response.valid & response.ready) | refused),
            beats.i.payload.data.eq(response.payload.data),
            beats.i.payload.last.eq(refused | (response.payload.last & oldest.row_end)),
            beats.i.payload.error.eq(Mux(refused, Error.ADDRESS, Mux(response.payload.error, Error.READ, Error.NONE))),
            order.o.ready.eq((response.valid & response.payload.last) | oldest.refused),
            self.beat.payload.eq(beats.o.payload),
            self.beat.valid.eq(beats.o.valid & ~self.halt),
            beats.o.ready.eq(self.beat.ready | self.halt),
        ]

        claimed = Signal(range(MAX_BURST + 1))
        freed = Signal()
        m.d.comb += freed.eq(beats.o.valid & beats.o.ready)
        with m.If(split.valid & split.ready):
            m.d.comb += claimed.eq(Mux(split.payload.refused, 1, split.payload.burst.len + 1))
        with m.If(freed | (claimed != 0)):
            m.d.sync += free.eq(free + freed - claimed)
        m.d.comb += self.idle.eq(~split.valid & (free == self._room))
        probes(self, splitter=splitter, order=order, beats=beats, free=free, split=split)
        return m


def write_beat_layout(bus_bytes: int) -> data.StructLayout:
    """Return the layout of a beat to write. strobe: a bit for each byte that is written."""
    return data.StructLayout({"data": 8 * bus_bytes, "strobe": bus_bytes})


answer_layout = data.StructLayout({"error": ERROR_BITS, "final": 1})
"""Result of writes that `WriteEngine` reports. error: a code of `regs.Error`. final: all writes of an instruction, up
to its final row, have ended."""


class WriteEngine(wiring.Component):
    """Write rows of bytes to DRAM.

    Parameters
    ----------
    bus_bytes : int     Bytes of a beat.
    bytes_bits : int    Width of a row's count of bytes.
    outstanding : int   Largest number of bursts under way at once.

    Members
    -------
    row : In(stream)            Rows to write.
    beat : In(stream)           The beats of all rows, in order; strobes cut the first and the last one of a row.
    answer : Out(Pulse)         `answer_layout`: a pulse when the last response of a `final` row has come, and a pulse
                                with an error for each burst that failed (WRITE) or refused row (ADDRESS). In the order
                                of the bursts.
    axi : Out(Axi4Write)        The write channels.
    dma_base, dma_size : In     Where DRAM begins, and how many bytes of it may be written.
    halt : In(1)                Bursts whose address is out are filled up with beats that write nothing.
    idle : Out(1)               No row is left, and no response is outstanding.
    """

    def __init__(
        self, bus_bytes: int, bytes_bits: int = OFFSET_BITS, outstanding: int = MAX_OUTSTANDING_BURSTS
    ) -> None:
        self._bus_bytes, self._bytes_bits, self._outstanding = bus_bytes, bytes_bits, outstanding
        super().__init__({
            "row": In(stream.Signature(row_layout(bytes_bits))),
            "beat": In(stream.Signature(write_beat_layout(bus_bytes))),
            "answer": Out(Pulse(answer_layout)),
            "axi": Out(Axi4Write(bus_bytes)),
            "dma_base": In(ADDR_BITS),
            "dma_size": In(OFFSET_BITS),
            "halt": In(1),
            "idle": Out(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.splitter = splitter = BurstSplitter(self._bus_bytes, self._bytes_bits)
        wiring.connect(m, wiring.flipped(self.row), splitter.row)
        m.d.comb += [
            splitter.dma_base.eq(self.dma_base),
            splitter.dma_size.eq(self.dma_size),
            splitter.halt.eq(self.halt),
        ]

        order_layout = data.StructLayout({"final": 1, "refused": 1})
        m.submodules.lengths = lengths = StreamFifo(4, self._outstanding)
        m.submodules.order = order = StreamFifo(order_layout, self._outstanding)
        split, axi = splitter.split, self.axi
        self._send_addresses(m, split, lengths, order)
        self._send_data(m, lengths)
        self._report_responses(m, order)
        m.d.comb += self.idle.eq(~Cat(split.valid, axi.awvalid, axi.wvalid, order.o.valid).any())
        probes(self, splitter=splitter, lengths=lengths, split=split, order=order)
        return m

    def _send_addresses(self, m: Module, split: stream.Interface, lengths: StreamFifo, order: StreamFifo) -> None:
        """Pass each burst to AW, to queue `lengths` for W and to queue `order` for B, in the same cycle.

        After that AW and W proceed independently of each other, as AXI demands.
        """
        axi = self.axi
        refused = split.payload.refused
        aw_free = ~axi.awvalid | axi.awready
        m.d.comb += [
            split.ready.eq(order.i.ready & (refused | (lengths.i.ready & aw_free))),
            lengths.i.valid.eq(split.valid & split.ready & ~refused),
            lengths.i.payload.eq(split.payload.burst.len),
            order.i.valid.eq(split.valid & split.ready),
            order.i.payload.final.eq(split.payload.final),
            order.i.payload.refused.eq(refused),
        ]
        burst = Reg(burst_layout)
        with m.If(aw_free):
            m.d.sync += axi.awvalid.eq(lengths.i.valid)
            with m.If(lengths.i.valid):
                m.d.sync += burst.eq(split.payload.burst)
        m.d.comb += [
            axi.awaddr.eq(burst.addr),
            axi.awlen.eq(burst.len),
            axi.awsize.eq((self._bus_bytes - 1).bit_length()),
            axi.awburst.eq(BURST_INCR),
            axi.awcache.eq(CACHE_NORMAL),
        ]

    def _send_data(self, m: Module, lengths: StreamFifo) -> None:
        """Send beats to W, and mark the last one of each burst. lengths: beats of each burst, less one."""
        axi = self.axi
        count = Signal(4)
        w_free = Signal()
        w_load = Signal()
        w_last = Signal()
        word = Signal.like(axi.wdata, name="word", reset_less=True)
        strobe = Signal.like(axi.wstrb, name="strobe", reset_less=True)
        m.d.comb += [
            axi.wdata.eq(word),
            axi.wstrb.eq(strobe),
            w_free.eq(~axi.wvalid | axi.wready),
            w_load.eq(w_free & lengths.o.valid & (self.beat.valid | self.halt)),
            w_last.eq(count == lengths.o.payload),
            self.beat.ready.eq(w_free & lengths.o.valid & ~self.halt),
            lengths.o.ready.eq(w_load & w_last),
        ]
        with m.If(w_free):
            m.d.sync += axi.wvalid.eq(w_load)
        with m.If(w_load):
            m.d.sync += [
                count.eq(Mux(w_last, 0, count + 1)),
                word.eq(self.beat.payload.data),
                strobe.eq(Mux(self.halt, 0, self.beat.payload.strobe)),
                axi.wlast.eq(w_last),
            ]
        probes(self, count=count, w_load=w_load)

    def _report_responses(self, m: Module, order: StreamFifo) -> None:
        """Report responses of B and refused rows through `answer`. order: the bursts that await a response."""
        axi = self.axi
        refused_now = order.o.valid & order.o.payload.refused
        answered = Signal()
        failed = axi.bresp != RESP_OKAY
        m.d.comb += [
            axi.bready.eq(order.o.valid & ~order.o.payload.refused),
            answered.eq(axi.bvalid & axi.bready),
            order.o.ready.eq(answered | refused_now),
        ]
        m.d.sync += self.answer.valid.eq(~self.halt & (refused_now | (answered & (failed | order.o.payload.final))))
        m.d.sync += self.answer.payload.final.eq(order.o.payload.final)
        m.d.sync += self.answer.payload.error.eq(Mux(refused_now, Error.ADDRESS, Mux(failed, Error.WRITE, Error.NONE)))
