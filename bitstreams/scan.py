"""Wrap a design into shift registers, so that five pins suffice on a device that has no use for its ports."""

from __future__ import annotations

from amaranth import Cat, Module, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.dae_pipeline.scratchpad import AccScratchpad, Scratchpad
from celosia.hw.gemm_core.gemm import Gemm
from celosia.hw.lib.layout import load_port, read_port, unit_members
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode
from celosia.hw.spec.scratchpads import scratchpads


class Scanned(wiring.Component):
    """A component whose inputs come from a shift register, and whose outputs are sampled into another one.

    Synthesis cannot optimise any of it away, and each of its paths lies between registers, as behind an interconnect.
    So size and timing are realistic, but nothing useful can run on it. Ports of the simulation's event trace (`trace`)
    stay open.

    Parameters
    ----------
    component : the component to wrap.

    Members
    -------
    scan_in : In(1)     Enters the chain while `shift`.
    shift : In(1)       1: the chain moves by one bit. 0: its second half takes the outputs of the cycle before.
    scan_out : Out(1)   Leaves the chain.
    """

    def __init__(self, component: wiring.Component) -> None:
        self._component = component
        super().__init__({"scan_in": In(1), "shift": In(1), "scan_out": Out(1)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.component = component = self._component
        ports: dict[wiring.Flow, list[Value]] = {In: [], Out: []}
        for path, member, value in component.signature.flatten(component):
            if path[0] != "trace":
                ports[member.flow].append(Value.cast(value))
        driven, sampled = (Signal(len(Cat(ports[flow])), name=flow.name, reset_less=True) for flow in (In, Out))
        outputs = Signal.like(sampled, name="outputs")
        m.d.comb += [Cat(ports[In]).eq(driven), self.scan_out.eq(sampled[-1])]
        m.d.sync += outputs.eq(Cat(ports[Out]))
        with m.If(self.shift):
            m.d.sync += Cat(driven, sampled).eq(Cat(self.scan_in, driven, sampled))
        with m.Else():
            m.d.sync += sampled.eq(outputs)
        return m


class GemmCore(wiring.Component):
    """The gemm unit with its scratchpads, without the rest of the accelerator, to measure the core's size and clock.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    Those of every unit, see `layout.unit_members`, and:
    inp, wgt, acc : In(WritePort)   Fill the scratchpads.
    result : In(ReadPort)           Reads acc.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        super().__init__({
            **unit_members(cfg, Opcode.GEMM),
            **{name: In(load_port(cfg, scratchpads(cfg)[name])) for name in ("inp", "wgt", "acc")},
            "result": In(read_port(scratchpads(cfg)["acc"])),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        cfg = self._cfg
        m.submodules.gemm = gemm = Gemm(cfg)
        m.submodules.acc = acc = AccScratchpad(cfg)
        for name in ("inp", "wgt"):
            spec = scratchpads(cfg)[name]
            pad = Scratchpad(spec.depth, spec.width, spec.grain)
            m.submodules[name] = pad
            wiring.connect(m, wiring.flipped(getattr(self, name)), pad.write)
            wiring.connect(m, getattr(gemm, name), pad.read)
        wiring.connect(m, gemm.acc_read, acc.gemm_read)
        wiring.connect(m, gemm.acc_write, acc.gemm_write)
        wiring.connect(m, wiring.flipped(self.acc), acc.load_write)
        wiring.connect(m, wiring.flipped(self.result), acc.vector_read)
        for name in unit_members(cfg, Opcode.GEMM):
            inner, outer = getattr(gemm, name), getattr(self, name)
            if gemm.signature.members[name].is_signature:
                wiring.connect(m, inner, wiring.flipped(outer))
            elif gemm.signature.members[name].flow is Out:
                m.d.comb += outer.eq(inner)
            else:
                m.d.comb += inner.eq(outer)
        return m
