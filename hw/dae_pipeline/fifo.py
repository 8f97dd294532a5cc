"""A first-in-first-out buffer between two streams."""

from __future__ import annotations

from amaranth import Module, Mux, Signal, Value
from amaranth.hdl import ShapeLike
from amaranth.lib import fifo, stream, wiring
from amaranth.lib.wiring import In, Out


class StreamFifo(wiring.Component):
    """Holds up to `depth` payloads, at least two. What it offers comes from registers, not from a memory's output.

    block_ram: the memory is read a cycle ahead, as block RAM asks for; a payload takes two cycles through it, not one.

    Members: i, o : stream; empty : Out(1), there is nothing inside.
    """

    def __init__(self, shape: ShapeLike, depth: int, block_ram: bool = False) -> None:
        self._depth = depth
        self._block_ram = block_ram
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape)), "empty": Out(1)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        width = len(Value.cast(self.i.payload))
        if self._block_ram:
            m.submodules.fifo = queue = fifo.SyncFIFOBuffered(width=width, depth=self._depth)
            m.d.comb += [
                queue.w_en.eq(self.i.valid),
                queue.r_en.eq(self.o.ready),
                Value.cast(self.o.payload).eq(queue.r_data),
                self.o.valid.eq(queue.r_rdy),
                self.empty.eq(queue.level == 0),
            ]
        else:
            # The oldest payload is in a register, those after it wait behind.
            m.submodules.fifo = queue = fifo.SyncFIFO(width=width, depth=self._depth - 1)
            oldest, holds, free = Signal(width, reset_less=True), Signal(), Signal()
            m.d.comb += [
                free.eq(~holds | self.o.ready),
                queue.w_en.eq(self.i.valid & (queue.r_rdy | ~free)),
                queue.r_en.eq(free),
                Value.cast(self.o.payload).eq(oldest),
                self.o.valid.eq(holds),
                self.empty.eq(~holds),
            ]
            with m.If(free):
                m.d.sync += [
                    holds.eq(queue.r_rdy | self.i.valid),
                    oldest.eq(Mux(queue.r_rdy, queue.r_data, self.i.payload)),
                ]
        m.d.comb += [queue.w_data.eq(self.i.payload), self.i.ready.eq(queue.w_rdy)]
        return m
