"""Event trace: a ring buffer of the starts and ends of instructions, for the host, in Configs with a `trace_depth`."""

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
"""Events of one kind and unit that can wait for the ring buffer, which stores one a cycle; more are dropped."""
FIRST_CYCLE = 2
"""Number of the cycle after `clear`; the cycle in which the host starts the run has number 0."""
SOURCES = tuple(f"{unit}_{kind}" for unit in UNITS for kind in ("start", "done"))
"""Sources of events: start and end in each unit. The index of a source is the lowest TRACE_INDEX_SHIFT bits of an
event: bit TRACE_DONE, then the unit."""


class EventTrace(wiring.Component):
    """Record the last `trace_depth` events of a run: which instruction started or ended, and in which cycle.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    clear : In(1)                   Begins a run: drops all events, and sets the cycle to FIRST_CYCLE.
    pulses : In(Pulse)              One for each of SOURCES: the number of an instruction that starts, or is done, in
                                    this cycle.
    registers : Out(TraceRegisters)     Registers of the host:
        at                          Selects an event: its number modulo `trace_depth`.
        event, cycle                The selected event and its time, two cycles after `at`; see `spec/regs.py`.
        count                       Events recorded since `clear`, with those that newer ones have overwritten.
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
            is_next = waiting[number] & ~waiting[:number].any()
            m.d.comb += [
                queue.i.valid.eq(pulse.valid),
                queue.i.payload.event.eq(Cat(Const(number, TRACE_INDEX_SHIFT), pulse.payload.index)),
                queue.i.payload.cycle.eq(now),
                waiting[number].eq(queue.o.valid),
                queue.o.ready.eq(is_next),
            ]
            with m.If(is_next):
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
