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
"""Those that are a part each; lut and exp are in the vector unit."""


class State(IntEnum):
    """Activity of a unit in a cycle; the first of several counts."""

    IDLE = 0
    BUSY = 1
    MEMORY = 2
    """Held up by memory."""
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


def scratchpad(cfg: Config, name: str) -> wiring.Component:
    """Build the memories of a scratchpad of `cfg`, with their ports."""
    if name == "acc":
        return AccScratchpad(cfg)
    pad = scratchpads(cfg)[name]
    if name == "vin" and cfg.taps:
        return WindowScratchpad(pad.depth, pad.width, pad.grain, cfg.taps)
    kind = HalvedScratchpad if pad.spread else Scratchpad
    return kind(pad.depth, pad.width, pad.grain)


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
    idle, busy, error : Out(1)      One of them is 1, for the lights of a board: the last run, if any, ended well; a run
                            is under way; the last run ended in an error.
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
        pads: dict[str, Any] = {name: scratchpad(cfg, name) for name in SCRATCHPADS if name in scratchpads(cfg)}
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
        self._show(m, units, tokens)
        if cfg.trace_depth:
            self._connect_trace(m, control)
        return m

    def _connect_host(self, m: Module) -> Control:
        """Connect the host's registers, and the life of a run, which begins with a reset of everything else."""
        # Reset comes from a register, so that no logic hangs on a pin: better timing, and Verilator need not look at
        # every next state again whenever an input changes (1.5 times the cycles a second).
        reset = Signal(init=1)
        pipeline_reset = Signal(init=1)  # with `control.clear`: a register of its own, for it leads to every other one
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
        """Connect fetch -> gates -> units. A queue behind each gate parts the paths of semaphores from those within a
        unit."""
        wiring.connect(m, fetch.queues, tokens.queues)
        for name, unit, passed, done in zip(UNITS, units, tokens.passed.each, tokens.done.each):
            issue = RegisteredFifo(passed.payload.shape(), ISSUE_DEPTH)
            m.submodules[f"issue_{name}"] = DomainRenamer("pipeline")(issue)
            wiring.connect(m, passed, issue.i)
            wiring.connect(m, issue.o, unit.instr)
            wiring.connect(m, unit.done, done)

    def _connect_memory(self, m: Module, readmux: ReadMux, load: Load, store: Store) -> list[Value]:
        """Connect LOAD and STORE to memory. Returns the pulses of beats that are read."""
        near, *others = load.buses
        wiring.connect(m, near, readmux.load)
        wiring.connect(m, readmux.axi, wiring.flipped(self.m_axi.read))
        wiring.connect(m, store.axi, wiring.flipped(self.m_axi.write))
        read_beats = [readmux.read_beat]
        for bus in others:
            m.submodules.readmux1 = second = DomainRenamer("pipeline")(ReadMux(self._cfg.bus_bytes))
            wiring.connect(m, bus, second.load)
            wiring.connect(m, second.axi, wiring.flipped(self.m_axi1))
            read_beats.append(second.read_beat)
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
        """Connect LOAD and VECTOR to a scratchpad that holds activations."""
        of, out = scratchpads(self._cfg)[name], scratchpads(self._cfg)["out"]
        arbiter = WriteArbiter(of.address_bits, of.width, of.grain, of.width // out.width)
        m.submodules[f"{name}_arbiter"] = arbiter
        wiring.connect(m, vector, arbiter.vector)
        wiring.connect(m, load, arbiter.load)
        wiring.connect(m, arbiter.write, pad.write)

    def _connect_control(
        self, m: Module, control: Control, fetch: Fetch, tokens: DependencyGate, units: Sequence[Any]
    ) -> None:
        """Connect control to all parts."""
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

    def _show(self, m: Module, units: Sequence[Any], tokens: DependencyGate) -> None:
        """Connect the traces of units, for simulation."""
        for unit, waits, shown in zip(units, tokens.wait_token, self.trace.each):
            m.d.comb += [
                shown.start.eq(unit.instr.valid & unit.instr.ready),
                shown.start_index.eq(unit.instr.payload.index),
                shown.done.eq(unit.done.valid),
                shown.done_index.eq(unit.done.payload.index),
            ]
            with m.If(unit.active):
                m.d.comb += shown.state.eq(State.BUSY)
            with m.Elif(unit.stalled):
                m.d.comb += shown.state.eq(State.MEMORY)
            with m.Elif(waits):
                m.d.comb += shown.state.eq(State.TOKEN)

    def _connect_trace(self, m: Module, control: Control) -> None:
        """Connect the traces of units to the ring of the host."""
        m.submodules.event_trace = trace = DomainRenamer("core")(EventTrace(self._cfg))
        for unit, shown in zip(Unit, self.trace.each):
            starts, ends = trace.pulses[2 * unit : 2 * unit + 2]
            m.d.comb += [
                starts.valid.eq(shown.start),
                starts.payload.index.eq(shown.start_index),
                ends.valid.eq(shown.done),
                ends.payload.index.eq(shown.done_index),
            ]
        m.d.comb += trace.clear.eq(control.clear)
        wiring.connect(m, trace.registers, control.trace)
