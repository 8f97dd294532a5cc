"""Control registers on AXI4-Lite, the state of a run, its errors, watchdog, lease and counters."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

from amaranth import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.axi import ADDR_BITS, AxiLite
from celosia.hw.lib.layout import ERROR_BITS, INDEX_BITS, UNITS, Pulse, TraceRegisters, error_layout
from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.sources import sources_identity
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Unit
from celosia.hw.spec.regs import (
    CONTROL_ABORT,
    CONTROL_START,
    COUNTERS,
    MAGIC,
    REGISTERS,
    STATUS_ERROR_SHIFT,
    TRACE_PREFIX,
    Access,
    Error,
)

REGISTER_BITS = 12
"""Width of a register's byte address; registers fill a page of 4 KB."""

ERROR_SOURCES = ("fetch", *UNITS)
"""Blocks that report errors. Of several errors in one cycle, that of the first block here counts."""


class Control(wiring.Component):
    """Register file and run control.

    A run: `clear` for one cycle, then `run` until `finished` and everything is idle. The first error, or the host, or
    its lease that runs out, raises `halt`, which stays until the next run is cleared; the run ends when everything is
    idle, or after the watchdog's time once more. What memory then owes would be taken for answers to the next run,
    which does not start before.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    axil : In(AxiLite)          The registers of `hw/spec/regs.py`.
    irq : Out(1)                While done, if enabled.
    busy, error : Out(1)        A run is under way; the last one ended in an error, or this one will.
    clear, run, halt : Out(1)   To the pipeline.
    clear_next : Out(1)         `clear` comes in the next cycle.
    instr_addr, instr_count, dma_base, dma_size : Out     Values of the registers.
    finished : In(1)            Every instruction has left its queue.
    fetch_idle : In(1)          Fetch has nothing in flight.
    idle, wait_token : In(4)    A bit for each unit.
    active, stalled : In        A bit for each unit; LOAD has one for each port to memory.
    errors : In(Pulse)          Of each of ERROR_SOURCES: fetch and the units.
    oldest : In                 Number of the instruction that a watchdog error names.
    read_beat, write_beat : In  A beat is passed on AXI in this cycle; a bit for each port.
    write_answer : In(1)        A response to a burst of writes is passed.
    trace : In(TraceRegisters)  Where the Config has a `trace_depth`.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        units = len(Unit)
        self._present = {
            name: register
            for name, register in REGISTERS.items()
            if cfg.trace_depth or not name.startswith(TRACE_PREFIX)
        }
        super().__init__({
            "axil": In(AxiLite(REGISTER_BITS)),
            "irq": Out(1),
            "busy": Out(1),
            "error": Out(1),
            "clear_next": Out(1),
            "clear": Out(1),
            "run": Out(1),
            "halt": Out(1),
            "instr_addr": Out(32),
            "instr_count": Out(32),
            "dma_base": Out(ADDR_BITS),
            "dma_size": Out(32),
            "finished": In(1),
            "fetch_idle": In(1),
            "idle": In(units),
            "active": In(units + cfg.ports - 1),
            "stalled": In(units + cfg.ports - 1),
            "wait_token": In(units),
            "oldest": In(INDEX_BITS),
            "read_beat": In(cfg.ports),
            "write_beat": In(1),
            "write_answer": In(1),
            "errors": In(Pulse(error_layout)).array(len(ERROR_SOURCES)),
            **({"trace": In(TraceRegisters())} if cfg.trace_depth else {}),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        values = {name: Signal(32, name=f"value_{name}") for name in self._present}
        busy = Signal()
        done = Signal()
        stuck = Signal()
        start, abort, renewed = self._registers(m, values, locked=busy | stuck)
        code = Signal(ERROR_BITS)
        index = Signal(INDEX_BITS)
        runs = Signal(32)
        m.d.comb += [self.irq.eq(done & values["irq_enable"][0]), self.busy.eq(busy), self.error.eq(self.halt)]
        self._values(m, values, Cat(busy, done, stuck) | (code << STATUS_ERROR_SHIFT), index, runs)
        self._counters(m, values, busy)
        expired = self._timer(m, "watchdog", values["watchdog"], self._progress(m))
        lapsed = self._timer(m, "lease", values["lease"], renewed)
        finished, all_idle, errors = self._end_reasons(m)
        m.d.sync += self.clear.eq(self.clear_next)  # it and `halt` are registers: they lead to many others
        with m.FSM():
            with m.State("IDLE"), m.If(start):
                m.d.sync += [done.eq(0), code.eq(0), index.eq(0), runs.eq(runs + 1)]
                m.d.comb += self.clear_next.eq(1)
                m.next = "CLEAR"
            with m.State("CLEAR"):  # halted still, or units would take what is left of the run before
                m.d.comb += busy.eq(1)
                m.d.sync += self.halt.eq(0)
                m.next = "RUN"  # no abort comes here: it takes a cycle, and the write before was the start
            with m.State("RUN"):
                m.d.comb += [busy.eq(1), self.run.eq(1)]
                with m.If(finished & all_idle):
                    m.d.sync += done.eq(1)
                    m.next = "IDLE"
                for reason, ends in ((Error.WATCHDOG, expired), (Error.LEASE, lapsed), (Error.ABORTED, abort)):
                    with m.Elif(ends):
                        m.d.sync += [code.eq(reason), index.eq(self.oldest), self.halt.eq(1)]
                        m.next = "HALT"
                for error in reversed(errors):  # the last assignment counts
                    with m.If(error.valid):
                        m.d.sync += [code.eq(error.code), index.eq(error.index), self.halt.eq(1)]
                        m.next = "HALT"
            with m.State("HALT"):  # `all_idle` does not know of `halt` yet
                m.d.comb += busy.eq(1)
                m.next = "DRAIN"
            with m.State("DRAIN"):
                m.d.comb += busy.eq(1)
                with m.If(expired):
                    m.d.sync += done.eq(1)
                    m.next = "STUCK"
                with m.If(all_idle):
                    m.d.sync += done.eq(1)
                    m.next = "IDLE"
            with m.State("STUCK"):
                m.d.comb += stuck.eq(1)
                with m.If(all_idle):
                    m.next = "IDLE"
        probes(
            self, values=values, busy=busy, stuck=stuck, lapsed=lapsed, finished=finished, all_idle=all_idle,
            start=start, abort=abort,
        )  # fmt: skip
        return m

    def _values(self, m: Module, values: dict[str, Signal], status: Value, index: Value, runs: Value) -> None:
        """Drive the registers that the host only reads, and the ports that carry values of the others."""
        m.d.comb += [
            self.instr_addr.eq(values["instr_addr"]),
            self.instr_count.eq(values["instr_count"]),
            self.dma_base.eq(Cat(values["dma_base_lo"], values["dma_base_hi"])),
            self.dma_size.eq(values["dma_size"]),
            values["magic"].eq(MAGIC),
            values["identity"].eq(self._cfg.identity),
            values["sources"].eq(sources_identity()),
            values["status"].eq(status),
            values["error_index"].eq(index),
            values["runs"].eq(runs),
        ]
        if self._cfg.trace_depth:
            m.d.comb += [
                values["trace_count"].eq(self.trace.count),
                self.trace.at.eq(values["trace_at"]),
                values["trace_event"].eq(self.trace.event),
                values["trace_cycle"].eq(self.trace.cycle),
            ]

    def _progress(self, m: Module) -> Signal:
        """Return whether any unit or memory port made progress in the cycle before: a sign of life for the watchdog.

        It is a register, since the inputs arrive late in a cycle and the watchdog's counter depends on it.
        """
        moves = self.active.any() | self.read_beat.any() | self.write_beat | self.write_answer
        moved = Signal()
        m.d.sync += moved.eq(moves)
        return moved

    def _end_reasons(self, m: Module) -> tuple[Signal, Signal, list[Any]]:
        """Return `finished`, whether fetch and all units are idle, and the error of each of ERROR_SOURCES.

        All are registers, a cycle late, since they arrive late in a cycle and many registers depend on them.
        """
        finished = Signal()
        all_idle = Signal()
        errors = []
        error_pulse = data.StructLayout({"valid": 1, **error_layout.members})
        m.d.sync += [finished.eq(self.finished), all_idle.eq(self.fetch_idle & self.idle.all())]
        for source, pulse in zip(ERROR_SOURCES, self.errors):
            error = Signal(error_pulse, name=f"failed_{source}")
            m.d.sync += error.eq(Cat(pulse.valid, pulse.payload))
            errors.append(error)
        return finished, all_idle, errors

    def _registers(self, m: Module, values: dict[str, Signal], locked: Value) -> tuple[Value, Value, Value]:
        """Build the AXI4-Lite subordinate. Returns the pulses that start a run, end one, and renew its lease.

        locked: registers of Access.SETUP keep their values.
        """
        bus = self.axil
        write = Signal()
        read = Signal()
        reading = Signal()  # a read takes its address in one cycle and gives its answer in the next
        awake = Signal()  # 0 during reset
        m.d.sync += awake.eq(1)
        m.d.comb += [
            write.eq(awake & bus.awvalid & bus.wvalid & (~bus.bvalid | bus.bready)),
            read.eq(awake & bus.arvalid & ~reading & (~bus.rvalid | bus.rready)),
            bus.awready.eq(write),
            bus.wready.eq(write),
            bus.arready.eq(read),
        ]
        with m.If(bus.bready):
            m.d.sync += bus.bvalid.eq(0)
        with m.If(write):
            m.d.sync += bus.bvalid.eq(1)
        with m.If(bus.rready):
            m.d.sync += bus.rvalid.eq(0)
        answer = self._selected_register(m, values, read)
        with m.If(reading):
            m.d.sync += [bus.rvalid.eq(1), bus.rdata.eq(answer)]
        m.d.sync += reading.eq(read)

        start = Signal()
        abort = Signal()
        aborted = Signal()
        renewed = Signal()
        m.d.sync += aborted.eq(abort)  # a register, for it comes late, and leads to what is kept of an error
        with m.Switch(bus.awaddr[2:]):
            for register in self._present.values():
                if register.access != Access.READ:
                    with m.Case(register.offset // 4), m.If(write & ~(locked & (register.access == Access.SETUP))):
                        if register.name == "control":
                            m.d.comb += abort.eq((bus.wdata & CONTROL_ABORT).any() & bus.wstrb[0])
                            m.d.comb += start.eq((bus.wdata & CONTROL_START).any() & bus.wstrb[0] & ~abort)
                        else:
                            if register.name == "lease":
                                m.d.comb += renewed.eq(1)
                            for byte in range(4):
                                with m.If(bus.wstrb[byte]):
                                    m.d.sync += (
                                        values[register.name].word_select(byte, 8).eq(bus.wdata.word_select(byte, 8))
                                    )
        probes(self, reading=reading, read=read, write=write)
        return start, aborted, renewed

    def _selected_register(self, m: Module, values: dict[str, Signal], read: Value) -> Value:
        """Return the value of the register that the last read has selected.

        A read compares its address with that of every register, and keeps the results as one bit for each register.
        The value then takes one AND and an OR over all registers, which is faster than a decoder behind the address.
        """
        asked = {name: Reg(name=f"asks_{name}") for name in self._present}
        with m.If(read):
            m.d.sync += [bit.eq(self.axil.araddr[2:] == REGISTERS[name].offset // 4) for name, bit in asked.items()]
        probes(self, asked=asked)
        return reduce(or_, (Mux(bit, values[name], 0) for name, bit in asked.items()))

    def _timer(self, m: Module, name: str, limit: Value, progress: Value) -> Value:
        """Return a pulse whenever `limit` cycles of a run have passed without progress. A `limit` of 0 turns it off."""
        idle = Signal(32, name=f"{name}_idle")
        expired = Signal(name=f"{name}_expired")
        moved = Signal(name=f"{name}_moved")
        restart = moved | expired | self.clear
        m.d.sync += [
            moved.eq(progress),  # registers: `progress` comes late, and resets 32 others
            expired.eq((limit != 0) & (idle >= limit) & ~restart),
            idle.eq(Mux(restart, 0, idle + 1)),
        ]
        probes(self, idle=idle)
        return expired

    def _counters(self, m: Module, values: dict[str, Signal], busy: Value) -> None:
        """Build the 64-bit counters, which count while `busy`. With two ports to memory, some count two in a cycle."""
        ports = self._cfg.ports
        counts: dict[str, Value] = {
            "cycles": Const(1),
            "read_beats": self.read_beat,
            "write_beats": self.write_beat,
        }
        for unit in Unit:
            name = unit.name.lower()
            own = slice(0, ports) if unit == Unit.LOAD else slice(unit + ports - 1, unit + ports)
            counts[f"{name}_busy"] = self.active[own]
            counts[f"{name}_wait_token"] = self.wait_token[unit]
            counts[f"{name}_wait_memory"] = self.stalled[own]
        counted = busy & ~self.clear  # when units still show what was left of the run before
        for name in COUNTERS:
            counter = Signal(64, name=f"counter_{name}")
            # A register: the enable of 64 others, and its inputs come late.
            counting = Signal(len(counts[name]), name=f"counting_{name}")
            m.d.sync += counting.eq(Mux(busy if name == "cycles" else counted, counts[name], 0))
            with m.If(self.clear):
                m.d.sync += counter.eq(0)
            with m.Elif(counting.any()):
                m.d.sync += counter.eq(counter + Mux(counting.all(), len(counting), 1))
            m.d.comb += Cat(values[f"{name}_lo"], values[f"{name}_hi"]).eq(counter)
