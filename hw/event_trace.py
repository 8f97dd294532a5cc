"""Ring of the starts and ends of instructions, which the host reads, in hardware with a `trace_depth`."""

from __future__ import annotations

from amaranth import Cat, Const, Module, Mux, ResetInserter, Signal
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from celosia.hw.dae_pipeline.fifo import RegisteredFifo
from celosia.hw.lib.layout import INDEX_BITS, UNITS, Pulse, TraceRegisters
from celosia.hw.spec.config import Config
from celosia.hw.spec.regs import TRACE_INDEX_SHIFT

QUEUE_DEPTH = 8
"""Events of each kind and unit that wait for the ring, which takes one a cycle; further ones are dropped."""
FIRST_CYCLE = 2
"""Cycle that follows `clear`, counted from the one in which the host starts the run."""
SOURCES = tuple(f"{unit}_{kind}" for unit in UNITS for kind in ("start", "done"))
"""In the order of the lowest bits of an entry: `TRACE_DONE`, and the unit from `TRACE_UNIT_SHIFT` on."""


class EventTrace(wiring.Component):
    """The last `trace_depth` events of a run.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    clear : In(1)                   Begins a run: nothing is kept, and cycles count from FIRST_CYCLE.
    pulses : In(Pulse)              One for each of SOURCES: the number of an instruction that starts, or is done, in
                                    this cycle.
    registers : Out(TraceRegisters)     Those of the host:
        at                          Number of an entry of the ring; the number of an event modulo `trace_depth`.
        event, cycle                That entry, as the registers say, two cycles later.
        count                       Events that have been written, over older ones where there were more than entries.
    """

    def __init__(self, cfg: Config) -> None:
        self._depth = cfg.trace_depth
        number = data.StructLayout({"index": INDEX_BITS})
        super().__init__({
            "clear": In(1), "pulses": In(Pulse(number)).array(len(SOURCES)), "registers": Out(TraceRegisters()),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        host = self.registers
        now = Signal(32)
        place = Signal(range(self._depth))
        entry = Signal(data.StructLayout({"event": 32, "cycle": 32}))
        waiting = Signal(len(SOURCES))
        for number, (source, pulse) in enumerate(zip(SOURCES, self.pulses)):
            queue = RegisteredFifo(entry.shape(), QUEUE_DEPTH)
            m.submodules[source] = ResetInserter(self.clear)(queue)
            turn = waiting[number] & ~waiting[:number].any()
            m.d.comb += [
                queue.i.valid.eq(pulse.valid),
                queue.i.payload.event.eq(Cat(Const(number, TRACE_INDEX_SHIFT), pulse.payload.index)),
                queue.i.payload.cycle.eq(now),
                waiting[number].eq(queue.o.valid),
                queue.o.ready.eq(turn),
            ]
            with m.If(turn):
                m.d.comb += entry.eq(queue.o.payload)
        m.d.sync += now.eq(now + 1)
        with m.If(waiting.any()):
            m.d.sync += [host.count.eq(host.count + 1), place.eq(Mux(place == self._depth - 1, 0, place + 1))]
        with m.If(self.clear):
            m.d.sync += [now.eq(FIRST_CYCLE), place.eq(0), host.count.eq(0)]
        for name, value in (("event", host.event), ("cycle", host.cycle)):
            m.submodules[f"{name}_ring"] = ring = Memory(shape=32, depth=self._depth, init=[])
            write = ring.write_port()
            read = ring.read_port()
            m.d.comb += [
                write.en.eq(waiting.any()),
                write.addr.eq(place),
                write.data.eq(entry[name]),
                read.addr.eq(host.at),
                value.eq(read.data),
            ]
        return m
