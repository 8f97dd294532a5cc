"""Top module of the accelerator: its parts and how they are connected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from amaranth import Cat, ClockDomain, ClockSignal, DomainRenamer, Module, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.control import REGISTER_BITS, Control
from celosia.hw.dae_pipeline.fetch import Fetch
from celosia.hw.dae_pipeline.fifo import RegisteredFifo
from celosia.hw.dae_pipeline.load import Load
from celosia.hw.dae_pipeline.readmux import ReadMux
from celosia.hw.dae_pipeline.scratchpad import (
    AccScratchpad,
    HalvedScratchpad,
    Scratchpad,
    WindowScratchpad,
    WriteArbiter,
)
from celosia.hw.dae_pipeline.store import Store
from celosia.hw.dae_pipeline.tokens import DependencyGate
from celosia.hw.event_trace import EventTrace
from celosia.hw.gemm_core.gemm import Gemm
from celosia.hw.lib.axi import Axi4, Axi4Read, AxiLite
from celosia.hw.lib.layout import INDEX_BITS, UNITS, PerUnit
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Unit
from celosia.hw.spec.pipeline import ISSUE_DEPTH
from celosia.hw.spec.scratchpads import scratchpads
from celosia.hw.vector_unit.vector import Vector

SCRATCHPADS = ("inp", "wgt", "vin", "par", "tap", "out", "acc")
"""Scratchpads that are components of the top module. The others lie inside the unit that uses them: lut and exp in
VECTOR, book in LOAD."""


class State(IntEnum):
    """Activity of a unit in a cycle. If several hold, BUSY goes before MEMORY, and MEMORY before TOKEN."""

    IDLE = 0
    BUSY = 1
    MEMORY = 2
    """A started instruction waits for memory or a scratchpad port."""
    TOKEN = 3
    """The unit's next instruction waits for a token."""


class UnitTrace(wiring.Signature):
    """Events and activity of a unit, for simulation.

    start, done : Out(1), with start_index, done_index : Out(32)    An instruction starts, or is done, in this cycle.
    state : Out(State)      What the unit does in this cycle.
    """

    def __init__(self) -> None:
        super().__init__({
            "start": Out(1), "start_index": Out(INDEX_BITS), "done": Out(1), "done_index": Out(INDEX_BITS),
            "state": Out(State),
        })  # fmt: skip


def build_scratchpad(cfg: Config, name: str) -> wiring.Component:
    """Build the component of scratchpad `name`: its memories and their ports."""
    if name == "acc":
        return AccScratchpad(cfg)
    pad = scratchpads(cfg)[name]
    if name == "vin" and cfg.taps:
        return WindowScratchpad(pad.depth, pad.width, pad.grain, cfg.taps)
    if pad.spread:
        return HalvedScratchpad(pad.depth, pad.width, pad.grain, pad.pieces)
    return Scratchpad(pad.depth, pad.width, pad.grain)


class Accelerator(wiring.Component):
    """The accelerator of a Config.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    s_axil : In(AxiLite)    Control registers, `hw/spec/regs.py`.
    m_axi : Out(Axi4)       Memory.
    m_axi1 : Out(Axi4Read)  The second read port to memory, where the Config has two.
    irq : Out(1)            1 while a run is done, if enabled.
    idle, busy, error : Out(1)      Exactly one is 1, for the lights of a board. busy: a run is under way. error: the
                            last run ended in an error. idle: it did not, or there was none.
    trace : Out(PerUnit)    A UnitTrace of each unit, for simulation.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        second = {"m_axi1": Out(Axi4Read(cfg.bus_bytes))} if cfg.ports == 2 else {}
        super().__init__({
            "s_axil": In(AxiLite(REGISTER_BITS)), "m_axi": Out(Axi4(cfg.bus_bytes)), **second, "irq": Out(1),
            "idle": Out(1), "busy": Out(1), "error": Out(1), "trace": Out(PerUnit(lambda opcode: UnitTrace())),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        cfg = self._cfg
        m = Module()
        control = self._connect_host(m)
        fetch, tokens, readmux = Fetch(cfg), DependencyGate(cfg), ReadMux(cfg.bus_bytes)
        load, gemm, vector, store = Load(cfg), Gemm(cfg), Vector(cfg), Store(cfg)
        units: tuple[Any, ...] = (load, gemm, vector, store)
        pads: dict[str, Any] = {name: build_scratchpad(cfg, name) for name in SCRATCHPADS if name in scratchpads(cfg)}
        for name, part in {
            "fetch": fetch, "tokens": tokens, "readmux": readmux, **dict(zip(UNITS, units)), **pads,
        }.items():  # fmt: skip
            m.submodules[name] = DomainRenamer("pipeline")(part)

        wiring.connect(m, fetch.bus, readmux.fetch)
        self._connect_instructions(m, fetch, tokens, units)
        read_beats = self._connect_memory(m, readmux, load, store)
        self._connect_scratchpads(m, pads, load, gemm, vector, store)
        self._connect_control(m, control, fetch, tokens, units)
        m.d.comb += [
            control.read_beat.eq(Cat(read_beats)),
            control.write_beat.eq(store.write_beat),
            control.write_answer.eq(store.write_answer),
        ]
        self._drive_unit_traces(m, units, tokens)
        if cfg.trace_depth:
            self._connect_event_trace(m, control)
        return m

    def _connect_host(self, m: Module) -> Control:
        """Build the register file and run control, and the clock domains `core` and `pipeline`. Returns the control.

        `core` (control, event trace) is reset with the FPGA. `pipeline` (everything else) is also reset by each start
        of a run.
        """
        # Reset comes from a register, so that no logic depends on a pin: better timing, and Verilator need not evaluate
        # every next state again whenever an input changes (1.5 times the cycles a second).
        reset = Signal(init=1)
        pipeline_reset = Signal(init=1)  # equal to `control.clear`; a register of its own because of its fan-out
        m.d.sync += reset.eq(0)
        m.domains.core, m.domains.pipeline = core, pipeline = ClockDomain("core"), ClockDomain("pipeline")
        m.submodules.control = control = DomainRenamer("core")(Control(self._cfg))
        m.d.sync += pipeline_reset.eq(control.clear_next)
        wiring.connect(m, wiring.flipped(self.s_axil), control.axil)
        m.d.comb += [
            self.irq.eq(control.irq),
            self.busy.eq(control.busy),
            self.error.eq(control.error & ~control.busy),
            self.idle.eq(~control.busy & ~control.error),
            core.clk.eq(ClockSignal()),
            core.rst.eq(reset),
            pipeline.clk.eq(ClockSignal()),
            pipeline.rst.eq(pipeline_reset),
        ]
        return control

    def _connect_instructions(self, m: Module, fetch: Fetch, tokens: DependencyGate, units: Sequence[Any]) -> None:
        """Connect fetch to the dependency gate, and the gate to the units through an issue queue for each.

        The queues cut the combinational paths between the semaphores and the units.
        """
        wiring.connect(m, fetch.queues, tokens.queues)
        for name, unit, passed, done in zip(UNITS, units, tokens.passed.each, tokens.done.each):
            issue_queue = RegisteredFifo(passed.payload.shape(), ISSUE_DEPTH)
            m.submodules[f"issue_{name}"] = DomainRenamer("pipeline")(issue_queue)
            wiring.connect(m, passed, issue_queue.i)
            wiring.connect(m, issue_queue.o, unit.instr)
            wiring.connect(m, unit.done, done)

    def _connect_memory(self, m: Module, readmux: ReadMux, load: Load, store: Store) -> list[Value]:
        """Connect fetch, LOAD and STORE to the memory ports. Returns, for each port, the pulse of a beat read."""
        first_bus, *other_buses = load.buses
        wiring.connect(m, first_bus, readmux.load)
        wiring.connect(m, readmux.axi, wiring.flipped(self.m_axi.read))
        wiring.connect(m, store.axi, wiring.flipped(self.m_axi.write))
        read_beats = [readmux.read_beat]
        for bus in other_buses:
            m.submodules.readmux1 = second_mux = DomainRenamer("pipeline")(ReadMux(self._cfg.bus_bytes))
            wiring.connect(m, bus, second_mux.load)
            wiring.connect(m, second_mux.axi, wiring.flipped(self.m_axi1))
            read_beats.append(second_mux.read_beat)
        return read_beats

    def _connect_scratchpads(
        self, m: Module, pads: Mapping[str, Any], load: Load, gemm: Gemm, vector: Vector, store: Store
    ) -> None:
        """Connect LOAD -> GEMM -> VECTOR -> STORE through the scratchpads."""
        connect, acc = wiring.connect, pads["acc"]
        for name, port in load.pads.items():
            if name in vector.writes:
                self._connect_writers(m, name, pads[name], port, vector.writes[name])
            elif name not in ("lut", "exp", "acc"):
                connect(m, port, pads[name].write)
        if scratchpads(self._cfg)["wgt"].spread:
            connect(m, load.near_wgt, pads["wgt"].near)
        connect(m, load.lut, vector.lut)
        if self._cfg.softmax:
            connect(m, load.exp, vector.exp)
        connect(m, load.acc, acc.load_write)
        connect(m, gemm.inp, pads["inp"].read)
        connect(m, gemm.wgt, pads["wgt"].read)
        connect(m, gemm.acc_read, acc.gemm_read)
        connect(m, gemm.acc_write, acc.gemm_write)
        m.d.comb += vector.claims.eq(gemm.claims)
        connect(m, vector.acc_read, acc.vector_read)
        if self._cfg.int32:
            connect(m, vector.acc_write, acc.vector_write)
        for name, port in vector.reads.items():
            connect(m, port, pads[name].read)
        connect(m, vector.out, pads["out"].write)
        connect(m, store.out, pads["out"].read)

    def _connect_writers(self, m: Module, name: str, pad: Any, load: Any, vector: Any) -> None:
        """Connect LOAD and VECTOR to the write port of scratchpad `name`, inp or vin, through an arbiter.

        pad: its component. load, vector: the write ports of the units.
        """
        spec, out_spec = scratchpads(self._cfg)[name], scratchpads(self._cfg)["out"]
        arbiter = WriteArbiter(spec.address_bits, spec.width, spec.grain, spec.width // out_spec.width)
        m.submodules[f"{name}_arbiter"] = arbiter
        wiring.connect(m, vector, arbiter.vector)
        wiring.connect(m, load, arbiter.load)
        wiring.connect(m, arbiter.write, pad.write)

    def _connect_control(
        self, m: Module, control: Control, fetch: Fetch, tokens: DependencyGate, units: Sequence[Any]
    ) -> None:
        """Connect run control to fetch and the units: DMA limits, start, halt, errors, and inputs of counters."""
        load, _, _, store = units
        for part in (fetch, load, store):
            m.d.comb += [part.dma_base.eq(control.dma_base), part.dma_size.eq(control.dma_size)]
        for part, error in zip((fetch, *units), control.errors):
            m.d.comb += part.halt.eq(control.halt)
            wiring.connect(m, part.error, error)
        m.d.comb += [
            fetch.run.eq(control.run),
            fetch.instr_addr.eq(control.instr_addr),
            fetch.instr_count.eq(control.instr_count),
            control.finished.eq(fetch.finished & ~Cat(unit.instr.valid for unit in units).any()),
            control.fetch_idle.eq(fetch.idle),
            control.idle.eq(Cat(unit.idle for unit in units)),
            control.active.eq(Cat(unit.active for unit in units)),
            control.stalled.eq(Cat(unit.stalled for unit in units)),
            control.wait_token.eq(tokens.wait_token),
            control.oldest.eq(tokens.oldest),
        ]

    def _drive_unit_traces(self, m: Module, units: Sequence[Any], tokens: DependencyGate) -> None:
        """Drive port `trace`: starts, ends and activity of each unit, for simulators and the event trace."""
        for unit, waits_for_token, unit_trace in zip(units, tokens.wait_token, self.trace.each):
            m.d.comb += [
                unit_trace.start.eq(unit.instr.valid & unit.instr.ready),
                unit_trace.start_index.eq(unit.instr.payload.index),
                unit_trace.done.eq(unit.done.valid),
                unit_trace.done_index.eq(unit.done.payload.index),
            ]
            with m.If(unit.active):
                m.d.comb += unit_trace.state.eq(State.BUSY)
            with m.Elif(unit.stalled):
                m.d.comb += unit_trace.state.eq(State.MEMORY)
            with m.Elif(waits_for_token):
                m.d.comb += unit_trace.state.eq(State.TOKEN)

    def _connect_event_trace(self, m: Module, control: Control) -> None:
        """Build the event trace: it records starts and ends of instructions, and the host reads it by registers."""
        m.submodules.event_trace = trace = DomainRenamer("core")(EventTrace(self._cfg))
        for unit, unit_trace in zip(Unit, self.trace.each):
            starts, ends = trace.pulses[2 * unit : 2 * unit + 2]
            m.d.comb += [
                starts.valid.eq(unit_trace.start),
                starts.payload.index.eq(unit_trace.start_index),
                ends.valid.eq(unit_trace.done),
                ends.payload.index.eq(unit_trace.done_index),
            ]
        m.d.comb += trace.clear.eq(control.clear)
        wiring.connect(m, trace.registers, control.trace)
