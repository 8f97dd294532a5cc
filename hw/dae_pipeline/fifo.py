"""A first-in-first-out buffer between two streams."""

from __future__ import annotations

from amaranth import Module, Value
from amaranth.hdl import ShapeLike
from amaranth.lib import fifo, stream, wiring
from amaranth.lib.wiring import In, Out


class StreamFifo(wiring.Component):
    """Holds up to `depth` payloads. block_ram: the memory is read a cycle ahead, as block RAM asks for."""

    def __init__(self, shape: ShapeLike, depth: int, block_ram: bool = False) -> None:
        self._depth = depth
        self._block_ram = block_ram
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape))})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        kind = fifo.SyncFIFOBuffered if self._block_ram else fifo.SyncFIFO
        m.submodules.fifo = queue = kind(width=len(Value.cast(self.i.payload)), depth=self._depth)
        m.d.comb += [
            queue.w_data.eq(self.i.payload),
            queue.w_en.eq(self.i.valid),
            self.i.ready.eq(queue.w_rdy),
            Value.cast(self.o.payload).eq(queue.r_data),
            self.o.valid.eq(queue.r_rdy),
            queue.r_en.eq(self.o.ready),
        ]
        return m
