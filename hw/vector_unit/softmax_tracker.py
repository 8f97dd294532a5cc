"""Track the softmaxes under way, and decide which instructions may overlap with them."""

from __future__ import annotations

from amaranth import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.layout import instruction_layout
from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import EXTENT_BITS, ASource, BSource, Destination, Opcode
from celosia.hw.spec.pipeline import SOFTMAX_OFFER_CYCLES
from celosia.hw.vector_unit.constants import constants_layout
from celosia.hw.vector_unit.war_hazard import WarHazardTracker

_RESULTS = ("to", "zero_point", "clip_lo", "clip_hi")
"""Constants that two overlapping softmaxes must have in common, as the engine uses them for the results of both."""


class SoftmaxProgress(wiring.Signature):
    """State of the softmax engine, for `SoftmaxTracker`.

    Members
    -------
    room : Out(1)       The engine can accept a second softmax, and the VECTOR offered in the cycle before has the same
                        row length and strides as the one under way.
    finish : Out(1)     The oldest softmax writes its last entry.
    walked : Out(1)     All rows have been searched for their largest bytes, and no row wraps at the end of vin.
    over : Out(1)       A row has been read for the last time.
    entries : Out       Number of entries of each row.
    comes : Out(1)      The rows that are read for the last time from now on are those of the next softmax.
    """

    def __init__(self) -> None:
        super().__init__({
            "room": Out(1), "finish": Out(1), "walked": Out(1), "over": Out(1), "entries": Out(EXTENT_BITS),
            "comes": Out(1),
        })  # fmt: skip


class SoftmaxTracker(wiring.Component):
    """Keep the constants of the softmaxes under way, at most two, and decide which instructions may overlap with them.

    While a single softmax is under way, these may start: a second softmax with equal strides, row lengths and constants
    of results; an instruction that reads acc and writes OUT, if the softmax does not write OUT; and an instruction that
    overwrites the softmax's rows in place (`WarHazardTracker`).

    Parameters
    ----------
    cfg : Config

    Members
    -------
    instr : In, offered : In(1)     The instruction that is offered to the vector unit, and whether it is valid.
    constants : In                  Constants of that instruction.
    spare : In                      The set of constants in no use, which holds `constants` of the cycle before.
    waits : In(1)                   That instruction is offered, and not accepted.
    starts : In(1)                  That instruction is a softmax, and starts.
    engine : In(SoftmaxProgress)    State of the softmax engine.
    loads, accept, writes : In(1)   See `WarHazardTracker`.
    halt : In(1)                    Drops all softmaxes.
    under_way : Out(1)              At least one softmax is under way.
    oldest : Out                    Constants of the oldest softmax.
    blocks_start : Out(1)           The instruction offered must wait for a softmax.
    blocks_step : Out(1)            No step may be issued in the next cycle.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        constants = constants_layout(cfg)
        super().__init__({
            "instr": In(instruction_layout(cfg, Opcode.VECTOR)), "offered": In(1), "constants": In(constants),
            "spare": In(constants), "waits": In(1), "starts": In(1), "engine": In(SoftmaxProgress()), "loads": In(1),
            "accept": In(1), "writes": In(1), "halt": In(1), "under_way": Out(1), "oldest": Out(constants),
            "blocks_start": Out(1), "blocks_step": Out(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        fields = self.instr.fields
        count = Signal(2)
        single = self.under_way & ~count[1]
        m.d.sync += count.eq(count + self.starts - self.engine.finish)
        with m.If(self.starts):
            m.d.sync += self.under_way.eq(1)
        with m.Elif(self.engine.finish & ~count[1]):
            m.d.sync += self.under_way.eq(0)
        with m.If(self.halt):
            m.d.sync += [count.eq(0), self.under_way.eq(0)]

        oldest = self._keep_constants(m, count)
        follows: Value = Const(0)
        if self._cfg.forward:
            m.submodules.war_hazard = war_hazard = WarHazardTracker(self._cfg)
            m.d.comb += [
                war_hazard.fields.eq(fields), war_hazard.waits.eq(self.waits & single),
                war_hazard.under_way.eq(self.under_way),
                *(getattr(war_hazard, name).eq(getattr(self, name))
                  for name in ("starts", "loads", "accept", "writes", "halt")),
                *(getattr(war_hazard, name).eq(getattr(self.engine, name))
                  for name in ("walked", "over", "entries", "comes")),
                self.blocks_step.eq(war_hazard.blocks),
            ]  # fmt: skip
            follows = war_hazard.follows
            probes(self, war_hazard=war_hazard)
        acc_to_out = (fields.destination == Destination.OUT) & ~oldest.to[Destination.OUT]
        acc_to_out &= (fields.a_source == ASource.ACC) & (fields.b_source != BSource.VIN)
        acc_to_out_may_start = ~count[1] & (acc_to_out | follows)
        may_start = Mux(fields.softmax, self._second_may_start(m, single, oldest), acc_to_out_may_start)
        m.d.comb += self.blocks_start.eq(self.under_way & ~may_start)
        probes(self, count=count)
        return m

    def _keep_constants(self, m: Module, count: Signal) -> Signal:
        """Keep and return the constants of the oldest softmax.

        count: number of softmaxes under way. A second one differs only in `post` and `index`, which have own registers.
        """
        oldest = Reg(self.oldest.shape())
        second = {name: Reg(oldest[name].shape(), name=f"second_{name}") for name in ("post", "index")}
        m.d.comb += self.oldest.eq(oldest)
        with m.If(~self.under_way):
            m.d.sync += oldest.eq(self.constants)
        with m.Elif(self.engine.finish):
            m.d.sync += [oldest[name].eq(value) for name, value in second.items()]
        with m.If(~count[1]):
            m.d.sync += [second["post"].eq(self.instr.fields.post), second["index"].eq(self.instr.index)]
        return oldest

    def _second_may_start(self, m: Module, single: Value, oldest: Signal) -> Value:
        """Return whether the softmax that is offered may overlap with the single one under way.

        It must have been offered for SOFTMAX_OFFER_CYCLES cycles: one to copy its constants to `spare`, and one to
        compare them.
        """
        is_offered = Signal()
        alike = Reg()
        was_offered = [Signal(name=f"was_offered{i}") for i in range(SOFTMAX_OFFER_CYCLES)]
        m.d.comb += is_offered.eq(self.offered & single)
        m.d.sync += Cat(was_offered).eq(Cat(is_offered, *(before & is_offered for before in was_offered[:-1])))
        m.d.sync += alike.eq(Cat(self.spare[name] == oldest[name] for name in _RESULTS).all())
        return self.engine.room & alike & was_offered[-1]
