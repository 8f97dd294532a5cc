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
"""Blocks that report errors. If several do in one cycle, the error of the first one in this order counts."""


class Control(wiring.Component):
    """Register file and run control.

    A run is one cycle of `clear`, then `run` until `finished` and everything is idle. The first error, an abort by the
    host, the watchdog, or a lease that runs out raises `halt`, which stays until the `clear` of the next run. A halted
    run ends when everything is idle, or when the watchdog expires again. In the latter case memory still owes
    responses. The next run would take them for its own, so it cannot start before they have come (STUCK).

    Parameters
    ----------
    cfg : Config

    Members
    -------
    axil : In(AxiLite)          The registers of `hw/spec/regs.py`.
    irq : Out(1)                1 while a run is done, if enabled.
    busy, error : Out(1)        busy: a run is under way. error: this run, or else the last one, was halted.
    clear, run, halt : Out(1)   States of a run, for fetch and the units; see above.
    clear_next : Out(1)         `clear` comes in the next cycle.
    instr_addr, instr_count, dma_base, dma_size : Out     Values of the registers.
    finished : In(1)            Every instruction has left its queue.
    fetch_idle : In(1)          Fetch has nothing in flight.
    idle, wait_token : In(4)    A bit for each unit.
    active, stalled : In        A bit for each unit; LOAD has one for each port to memory.
    errors : In(Pulse)          An error of each of ERROR_SOURCES: fetch and the units.
    oldest : In                 Number of the instruction that `error_index` names after watchdog, lease or abort.
    read_beat, write_beat : In  A beat is transferred on AXI in this cycle; a bit for each port.
    write_answer : In(1)        A response to a write burst arrives.
    trace : In(TraceRegisters)  Registers of the event trace, if the Config has a `trace_depth`.
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
        start, abort, renewed = self._build_bus(m, values, locked=busy | stuck)
        code = Signal(ERROR_BITS)
        index = Signal(INDEX_BITS)
        runs = Signal(32)
        m.d.comb += [self.irq.eq(done & values["irq_enable"][0]), self.busy.eq(busy), self.error.eq(self.halt)]
        self._drive_registers(m, values, Cat(busy, done, stuck) | (code << STATUS_ERROR_SHIFT), index, runs)
        self._build_counters(m, values, busy)
        expired = self._build_timer(m, "watchdog", values["watchdog"], self._register_progress(m))
        lapsed = self._build_timer(m, "lease", values["lease"], renewed)
        finished, all_idle, errors = self._register_end_reasons(m)
        m.d.sync += self.clear.eq(self.clear_next)  # `clear` and `halt` are registers because of their fan-out
        with m.FSM():
            with m.State("IDLE"), m.If(start):
                m.d.sync += [done.eq(0), code.eq(0), index.eq(0), runs.eq(runs + 1)]
                m.d.comb += self.clear_next.eq(1)
                m.next = "CLEAR"
            with m.State("CLEAR"):  # still halted, else units would go on with leftovers of the previous run
                m.d.comb += busy.eq(1)
                m.d.sync += self.halt.eq(0)
                m.next = "RUN"  # no abort can come yet: it takes a cycle, and the last write was the start
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
            with m.State("HALT"):  # `all_idle` is a cycle late, and not yet that of a halted unit
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

    def _drive_registers(self, m: Module, values: dict[str, Signal], status: Value, index: Value, runs: Value) -> None:
        """Drive the registers that the host only reads, and connect the ports that carry values of the others.

        values: each register's signal by name. status, index, runs: values of `status`, `error_index` and `runs`.
        """
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

    def _register_progress(self, m: Module) -> Signal:
        """Return whether any unit or memory port made progress in the cycle before, which restarts the watchdog.

        It is a register, since the inputs arrive late in a cycle and the watchdog's counter depends on it.
        """
        moves = self.active.any() | self.read_beat.any() | self.write_beat | self.write_answer
        moved = Signal()
        m.d.sync += moved.eq(moves)
        return moved

    def _register_end_reasons(self, m: Module) -> tuple[Signal, Signal, list[Any]]:
        """Return the inputs that end a run: `finished`, whether all is idle, and the error of each of ERROR_SOURCES.

        They are copies in registers, a cycle late, since the inputs arrive late in a cycle and have a large fan-out.
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

    def _build_bus(self, m: Module, values: dict[str, Signal], locked: Value) -> tuple[Value, Value, Value]:
        """Build the AXI4-Lite subordinate. Returns pulses: the host starts a run, aborts it, renews its lease.

        values: each register's signal by name. locked: writes to registers of Access.SETUP have no effect.
        """
        bus = self.axil
        write = Signal()
        read = Signal()
        reading = Signal()  # a read accepts its address in one cycle and answers in the next
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
        answer = self._read_selected_register(m, values, read)
        with m.If(reading):
            m.d.sync += [bus.rvalid.eq(1), bus.rdata.eq(answer)]
        m.d.sync += reading.eq(read)

        start = Signal()
        abort = Signal()
        aborted = Signal()
        renewed = Signal()
        m.d.sync += aborted.eq(abort)  # a register: the pulse comes late, and many registers depend on it
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

    def _read_selected_register(self, m: Module, values: dict[str, Signal], read: Value) -> Value:
        """Return the value of the register that the last read has selected. read: a read's address is accepted.

        The address is compared with that of every register, and one bit for each register keeps the result. The value
        is then an AND and an OR over all registers, which is faster than a decoder behind the address.
        """
        selected = {name: Reg(name=f"asks_{name}") for name in self._present}
        with m.If(read):
            m.d.sync += [bit.eq(self.axil.araddr[2:] == REGISTERS[name].offset // 4) for name, bit in selected.items()]
        probes(self, asked=selected)
        return reduce(or_, (Mux(bit, values[name], 0) for name, bit in selected.items()))

    def _build_timer(self, m: Module, name: str, limit: Value, progress: Value) -> Value:
        """Build a timer. Returns a pulse whenever `limit` cycles of a run have passed without `progress`.

        name: prefix of its signals. limit: cycles; 0 turns the timer off.
        """
        idle = Signal(32, name=f"{name}_idle")
        expired = Signal(name=f"{name}_expired")
        moved = Signal(name=f"{name}_moved")
        restart = moved | expired | self.clear
        m.d.sync += [
            moved.eq(progress),  # a register: `progress` comes late in a cycle, and resets 32 registers
            expired.eq((limit != 0) & (idle >= limit) & ~restart),
            idle.eq(Mux(restart, 0, idle + 1)),
        ]
        probes(self, idle=idle)
        return expired

    def _build_counters(self, m: Module, values: dict[str, Signal], busy: Value) -> None:
        """Build the 64-bit counters of `regs.COUNTERS`, which count while `busy`.

        Counters of beats and of LOAD have an input for each memory port, so they may count two in a cycle.
        """
        ports = self._cfg.ports
        inputs: dict[str, Value] = {
            "cycles": Const(1),
            "read_beats": self.read_beat,
            "write_beats": self.write_beat,
        }
        for unit in Unit:
            name = unit.name.lower()
            unit_bits = slice(0, ports) if unit == Unit.LOAD else slice(unit + ports - 1, unit + ports)
            inputs[f"{name}_busy"] = self.active[unit_bits]
            inputs[f"{name}_wait_token"] = self.wait_token[unit]
            inputs[f"{name}_wait_memory"] = self.stalled[unit_bits]
        is_counting = busy & ~self.clear  # units still show leftovers of the previous run during `clear`
        for name in COUNTERS:
            counter = Signal(64, name=f"counter_{name}")
            # A register, as it enables 64 others and its inputs come late in a cycle.
            counting = Signal(len(inputs[name]), name=f"counting_{name}")
            m.d.sync += counting.eq(Mux(busy if name == "cycles" else is_counting, inputs[name], 0))
            with m.If(self.clear):
                m.d.sync += counter.eq(0)
            with m.Elif(counting.any()):
                m.d.sync += counter.eq(counter + Mux(counting.all(), len(counting), 1))
            m.d.comb += Cat(values[f"{name}_lo"], values[f"{name}_hi"]).eq(counter)
