"""First-in-first-out buffers between two streams."""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.hdl import ShapeLike
from amaranth.lib import fifo, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg


def _increment(number: Value) -> Value:
    """Return number + 1, for a few bits, as logic: a carry chain could not share look-up tables with other logic."""
    return Cat(bit ^ number[:i].all() for i, bit in enumerate(number))


def _decrement(number: Value) -> Value:
    """Return number - 1, as logic for the same reason as `_increment`."""
    return Cat(bit ^ ~number[:i].any() for i, bit in enumerate(number))


class StreamFifo(wiring.Component):
    """FIFO in a memory, with a latency of one cycle, or two with `block_ram`.

    Parameters
    ----------
    shape : ShapeLike   Shape of a payload.
    depth : int         Payloads that it holds at most.
    block_ram : bool    The memory is read a cycle ahead, as block RAM demands, and `o` comes from a register.

    Members
    -------
    i : In(stream)      Payloads that enter.
    o : Out(stream)     The oldest payload.
    empty : Out(1)      The queue holds no payload.
    """

    def __init__(self, shape: ShapeLike, depth: int, block_ram: bool = False) -> None:
        self._depth = depth
        self._block_ram = block_ram
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape)), "empty": Out(1)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        kind = fifo.SyncFIFOBuffered if self._block_ram else fifo.SyncFIFO
        m.submodules.fifo = queue = kind(width=len(Value.cast(self.i.payload)), depth=self._depth)
        # Many depend on `ready`. If the level is a register whose highest bit says full, `ready` needs no logic.
        full_is_a_bit = not self._block_ram and self._depth & (self._depth - 1) == 0
        m.d.comb += [
            queue.w_data.eq(self.i.payload),
            queue.w_en.eq(self.i.valid),
            self.i.ready.eq(~queue.level[-1] if full_is_a_bit else queue.w_rdy),
            Value.cast(self.o.payload).eq(queue.r_data),
            self.o.valid.eq(queue.r_rdy),
            queue.r_en.eq(self.o.ready),
            self.empty.eq(queue.level == 0),
        ]
        probes(self, queue=queue)
        return m


class RegisteredFifo(wiring.Component):
    """FIFO whose oldest payload is in a register, so that no path of its reader begins in a memory.

    Its latency is one cycle.

    Parameters
    ----------
    shape : ShapeLike   Shape of a payload.
    depth : int         Payloads that it holds at most, two or more.

    Members
    -------
    i : In(stream)      Payloads that enter.
    o : Out(stream)     The oldest payload.
    """

    def __init__(self, shape: ShapeLike, depth: int) -> None:
        self._depth = depth
        self._places = depth - 1  # entries of the ring buffer, which holds all payloads but the oldest one
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape))})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        head = Reg(len(Value.cast(self.i.payload)))
        holds = Signal()
        free = Signal()
        level = Signal(range(self._places + 1))
        produce = Signal(range(self._places))
        consume = Signal(range(self._places))
        push = Signal()
        pop = Signal()
        # Many depend on `ready`. If the highest bit of the level says full, `ready` needs no logic.
        full_is_a_bit = self._places & (self._places - 1) == 0
        m.submodules.ring = ring = Memory(shape=len(head), depth=self._places, init=[])
        to = ring.write_port()
        of = ring.read_port(domain="comb")
        m.d.comb += [
            self.i.ready.eq(~level[-1] if full_is_a_bit else level != self._places),
            free.eq(~holds | self.o.ready),
            pop.eq(free & (level != 0)),
            push.eq(self.i.valid & self.i.ready & ~(free & (level == 0))),
            # A payload that bypasses the ring is written, too, and overwritten later: `en` need not wait for `free`.
            to.en.eq(self.i.ready),
            to.addr.eq(produce),
            to.data.eq(self.i.payload),
            of.addr.eq(consume),
            self.o.valid.eq(holds),
            Value.cast(self.o.payload).eq(head),
        ]
        m.d.sync += level.eq(Mux(push == pop, level, Mux(push, _increment(level), _decrement(level))))
        for pointer, moves in ((produce, push), (consume, pop)):
            with m.If(moves):
                m.d.sync += pointer.eq(Mux(pointer == self._places - 1, 0, _increment(pointer)))
        with m.If(free):
            m.d.sync += [holds.eq((level != 0) | self.i.valid), head.eq(Mux(level != 0, of.data, self.i.payload))]
        probes(self, produce=produce, consume=consume, level=level, ring=ring, holds=holds, head=head, of=of)
        return m
