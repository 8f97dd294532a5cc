"""The accelerator: the parts and how they are connected."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from amaranth import Cat, ClockDomain, ClockSignal, DomainRenamer, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.axi import Axi4, Axi4Read, AxiLite, connect_part
from celosia.hw.config import Config
from celosia.hw.control import ERROR_SOURCES, REGISTER_BITS, Control
from celosia.hw.dae_pipeline.fetch import Fetch
from celosia.hw.dae_pipeline.fifo import HeadFifo
from celosia.hw.dae_pipeline.load import Load
from celosia.hw.dae_pipeline.readmux import ReadMux
from celosia.hw.dae_pipeline.scratchpad import AccScratchpad, Scratchpad, WindowScratchpad, WriteArbiter
from celosia.hw.dae_pipeline.store import Store
from celosia.hw.dae_pipeline.tokens import Tokens
from celosia.hw.event_trace import EventTrace
from celosia.hw.gemm_core.gemm import Gemm
from celosia.hw.isa import Unit
from celosia.hw.layout import INDEX_BITS
from celosia.hw.pipeline import ISSUE
from celosia.hw.scratchpads import scratchpads
from celosia.hw.vector_unit.vector import Vector

UNITS = tuple(unit.name.lower() for unit in Unit)
SCRATCHPADS = ("inp", "wgt", "vin", "par", "tap", "out", "acc")
"""Those that are a part each; lut is in the vector unit."""


class State(IntEnum):
    """What a unit does in a cycle; the first of several counts."""

    IDLE = 0
    BUSY = 1
    MEMORY = 2
    """Held up by memory."""
    TOKEN = 3
    """Its next instruction waits for a token."""


def scratchpad(cfg: Config, name: str) -> wiring.Component:
    if name == "acc":
        return AccScratchpad(cfg)
    pad = scratchpads(cfg)[name]
    if name == "vin" and cfg.taps:
        return WindowScratchpad(pad.depth, pad.width, pad.grain, cfg.taps)
    return Scratchpad(pad.depth, pad.width, pad.grain)


class Accelerator(wiring.Component):
    """One accelerator.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    s_axil : In(AxiLite)    Control registers, `hw/regs.py`.
    m_axi : Out(Axi4)       Memory.
    m_axi1 : Out(Axi4Read)  The second read port to memory, where the Config has two.
    irq : Out(1)            1 while a run is done, if enabled.
    idle, busy, error : Out(1)      One of them is 1, for the lights of a board: the last run, if any, ended well; a run
                            is under way; the last run ended in an error.
    trace_<unit>_start, trace_<unit>_done : Out(1), with trace_<unit>_..._index : Out(32)
                            An instruction starts, or is done, in this cycle; for simulation.
    trace_<unit>_state : Out(2)     What the unit does in this cycle, a `State`; for simulation.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        trace = {
            f"trace_{unit}_{event}{suffix}": Out(bits)
            for unit in UNITS
            for event in ("start", "done")
            for suffix, bits in (("", 1), ("_index", INDEX_BITS))
        } | {f"trace_{unit}_state": Out(State) for unit in UNITS}
        second = {"m_axi1": Out(Axi4Read(cfg.bus_bytes))} if cfg.ports == 2 else {}
        super().__init__({
            "s_axil": In(AxiLite(REGISTER_BITS)), "m_axi": Out(Axi4(cfg.bus_bytes)), **second, "irq": Out(1),
            "idle": Out(1), "busy": Out(1), "error": Out(1), **trace,
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        cfg = self._cfg
        m = Module()
        connect = wiring.connect

        # Reset comes from a register, so that no logic hangs on a pin: better timing, and Verilator need not look at
        # every next state again whenever an input changes (1.5 times the cycles a second).
        reset = Signal(init=1)
        pipeline_reset = Signal(init=1)  # with `control.clear`: a register of its own, for it leads to every other one
        m.d.sync += reset.eq(0)
        m.domains.core, m.domains.pipeline = core, pipeline = ClockDomain("core"), ClockDomain("pipeline")

        # Registers, and the life of a run. A run begins with a reset of everything else.
        m.submodules.control = control = DomainRenamer("core")(Control(cfg))
        m.d.sync += pipeline_reset.eq(control.clears)
        connect(m, wiring.flipped(self.s_axil), control.axil)
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

        fetch, tokens, readmux = Fetch(cfg), Tokens(cfg), ReadMux(cfg.bus_bytes)
        load, gemm, vector, store = Load(cfg), Gemm(cfg), Vector(cfg), Store(cfg)
        units: tuple[wiring.Component, ...] = (load, gemm, vector, store)
        pads: dict[str, Any] = {name: scratchpad(cfg, name) for name in SCRATCHPADS if name in scratchpads(cfg)}
        for name, part in {
            "fetch": fetch, "tokens": tokens, "readmux": readmux, **dict(zip(UNITS, units)), **pads,
        }.items():  # fmt: skip
            m.submodules[name] = DomainRenamer("pipeline")(part)

        # Instructions: memory -> fetch -> gates -> units. A queue behind each gate parts the paths of semaphores from
        # those within the units.
        connect(m, fetch.bus, readmux.fetch)
        for name, unit in zip(UNITS, units):
            passed = getattr(tokens, f"instr_{name}")
            issue = HeadFifo(passed.payload.shape(), ISSUE)
            m.submodules[f"issue_{name}"] = DomainRenamer("pipeline")(issue)
            connect(m, getattr(fetch, f"queue_{name}"), getattr(tokens, f"queue_{name}"))
            connect(m, passed, issue.i)
            connect(m, issue.o, unit.instr)
            connect(m, unit.done, getattr(tokens, f"done_{name}"))

        # Data: memory -> load -> gemm -> vector -> store -> memory.
        connect(m, load.bus, readmux.load)
        connect_part(m, readmux.axi, self.m_axi)
        read_beats = [readmux.read_beat]
        if cfg.ports == 2:
            m.submodules.readmux1 = readmux1 = DomainRenamer("pipeline")(ReadMux(cfg.bus_bytes))
            connect(m, load.bus1, readmux1.load)
            connect(m, readmux1.axi, wiring.flipped(self.m_axi1))
            read_beats.append(readmux1.read_beat)
        acc = pads["acc"]
        for name in ("wgt", "par", "tap"):
            if name in pads:
                connect(m, getattr(load, name), pads[name].write)
        for name in ("inp", "vin"):
            self._connect_writers(m, name, pads[name], load, vector)
        connect(m, load.lut, vector.lut)
        connect(m, load.acc, acc.load_write)
        connect(m, gemm.inp, pads["inp"].read)
        connect(m, gemm.wgt, pads["wgt"].read)
        connect(m, gemm.acc_read, acc.gemm_read)
        connect(m, gemm.acc_write, acc.gemm_write)
        m.d.comb += vector.claims.eq(gemm.claims)
        connect(m, vector.acc_read, acc.vector_read)
        connect(m, vector.acc_write, acc.vector_write)
        for name in ("vin", "par", "tap"):
            if name in pads:
                connect(m, getattr(vector, name), pads[name].read)
        connect(m, vector.out, pads["out"].write)
        connect(m, store.out, pads["out"].read)
        connect_part(m, store.axi, self.m_axi)

        # Control and what it hears of.
        for part in (fetch, load, store):
            m.d.comb += [part.dma_base.eq(control.dma_base), part.dma_size.eq(control.dma_size)]
        for part in (fetch, *units):
            m.d.comb += part.halt.eq(control.halt)
        for source, part in zip(ERROR_SOURCES, (fetch, *units)):
            connect(m, part.error, getattr(control, f"error_{source}"))
        m.d.comb += [
            fetch.run.eq(control.run),
            fetch.instr_addr.eq(control.instr_addr),
            fetch.instr_count.eq(control.instr_count),
            control.finished.eq(fetch.finished & ~Cat(unit.instr.valid for unit in units).any()),
            control.fetch_quiet.eq(fetch.quiet),
            control.quiet.eq(Cat(unit.quiet for unit in units)),
            control.active.eq(Cat(unit.active for unit in units)),
            control.held.eq(Cat(unit.held for unit in units)),
            control.wait_token.eq(tokens.wait_token),
            control.oldest.eq(tokens.oldest),
            control.read_beat.eq(Cat(read_beats)),
            control.write_beat.eq(store.write_beat),
            control.write_answer.eq(store.write_answer),
        ]
        for number, (name, unit) in enumerate(zip(UNITS, units)):
            m.d.comb += [
                getattr(self, f"trace_{name}_start").eq(unit.instr.valid & unit.instr.ready),
                getattr(self, f"trace_{name}_start_index").eq(unit.instr.payload.index),
                getattr(self, f"trace_{name}_done").eq(unit.done.valid),
                getattr(self, f"trace_{name}_done_index").eq(unit.done.payload.index),
            ]
            with m.If(unit.active):
                m.d.comb += getattr(self, f"trace_{name}_state").eq(State.BUSY)
            with m.Elif(unit.held):
                m.d.comb += getattr(self, f"trace_{name}_state").eq(State.MEMORY)
            with m.Elif(tokens.wait_token[number]):
                m.d.comb += getattr(self, f"trace_{name}_state").eq(State.TOKEN)
        if cfg.trace_depth:
            self._connect_trace(m, control)
        return m

    def _connect_trace(self, m: Module, control: Control) -> None:
        """What simulation sees of instructions, to the ring of the host."""
        m.submodules.event_trace = trace = DomainRenamer("core")(EventTrace(self._cfg))
        for name in UNITS:
            for event in ("start", "done"):
                pulse = getattr(trace, f"{name}_{event}")
                m.d.comb += [
                    pulse.valid.eq(getattr(self, f"trace_{name}_{event}")),
                    pulse.payload.index.eq(getattr(self, f"trace_{name}_{event}_index")),
                ]
        m.d.comb += [
            trace.clear.eq(control.clear),
            trace.at.eq(control.trace_at),
            control.trace_event.eq(trace.event),
            control.trace_cycle.eq(trace.cycle),
            control.trace_count.eq(trace.count),
        ]

    def _connect_writers(self, m: Module, name: str, pad: wiring.Component, load: Load, vector: Vector) -> None:
        """LOAD, and where the Config says so VECTOR, to a scratchpad that holds activations."""
        cfg = self._cfg
        if not cfg.forward:
            wiring.connect(m, getattr(load, name), pad.write)
            return
        of, out = scratchpads(cfg)[name], scratchpads(cfg)["out"]
        arbiter = WriteArbiter(of.address_bits, of.width, of.grain, of.width // out.width)
        m.submodules[f"{name}_arbiter"] = arbiter
        wiring.connect(m, getattr(vector, f"{name}_write"), arbiter.vector)
        wiring.connect(m, getattr(load, name), arbiter.load)
        wiring.connect(m, arbiter.write, pad.write)
