"""Queue for values that skip stages of the pipeline."""

from __future__ import annotations

from amaranth import Module, Signal
from amaranth.hdl import ShapeLike
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.probes import probes
from celosia.hw.spec.pipeline import ring_places


class DelayQueue(wiring.Component):
    """Hold a value of each item while it skips stages of the pipeline, instead of a register in each of them.

    Parameters
    ----------
    shape : shape of a value.
    stages : number of stages that it skips, at least two. The queue has an entry for an item in each stage.

    Members
    -------
    clear : In(1)           Empties the queue.
    push : In(1), i : In    Value `i` enters: its item leaves the stage that computes it.
    pop : In(1)             The oldest value is removed: its item leaves the stage that uses it.
    o : Out                 The oldest value, a register; valid two cycles after its push.
    """

    def __init__(self, shape: ShapeLike, stages: int) -> None:
        self._shape, self._places = shape, ring_places(stages)
        super().__init__({"clear": In(1), "push": In(1), "i": In(shape), "pop": In(1), "o": Out(shape)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.ring = ring = Memory(shape=self._shape, depth=self._places, init=[])
        to = ring.write_port()
        of = ring.read_port(domain="comb")
        head, tail, next_tail = (Signal(range(self._places), name=name) for name in ("head", "tail", "next_tail"))
        oldest = Signal.like(of.data, reset_less=True)
        m.d.comb += [to.en.eq(self.push), to.addr.eq(head), to.data.eq(self.i), of.addr.eq(next_tail)]
        m.d.comb += [next_tail.eq(tail + self.pop), self.o.eq(oldest)]
        m.d.sync += [head.eq(head + self.push), tail.eq(next_tail), oldest.eq(of.data)]
        with m.If(self.clear):
            m.d.sync += [head.eq(0), tail.eq(0)]
        probes(self, head=head, tail=tail, ring=ring)
        return m
