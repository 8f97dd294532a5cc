"""Clock of twice the rate for DSP blocks: which half of a cycle it is, without a reset that both clocks know."""

from __future__ import annotations

from amaranth import Cat, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.signals import Reg
from celosia.hw.spec.blocks import Blocks, Dsp

FAST = "fast"
"""The clock domain: twice the clock of `sync`, from the same source, so that each edge of `sync` is one of its own."""


def pumps(platform: object, pump: int) -> Dsp | None:
    """Return the DSP block that makes two products in a cycle of `sync`; None if the Config or the platform has none.

    None also means that there is no clock domain `fast`.
    """
    dsp = platform.dsp if isinstance(platform, Blocks) else None
    return dsp if pump == 2 and dsp in (Dsp.e1, Dsp.e2) else None


class DoublePumpedClock(wiring.Component):
    """Phase of the fast clock within a cycle of `sync`, for the pairs of products.

    A register of `sync` changes in each of its cycles. What has changed since the last edge of `fast` has done so in
    the first half of a cycle. So it is right a cycle after the clocks have begun, whatever registers held before.

    Members
    -------
    moves : In(2)       Enables of the second and the third stage of pairs.
    halves : Out(2)     Bit 0: 1 in the first half of each cycle of `sync`; bit 1: in the second. Registers of `fast`.
    late : Out(2)       `moves`, half a cycle later, likewise.
    """

    def __init__(self) -> None:
        super().__init__({"moves": In(2), "halves": Out(2), "late": Out(2)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        turn = Reg()
        seen = Reg()
        halves = Reg(2)
        late = Reg(2)
        m.d.sync += turn.eq(~turn)
        changed = turn ^ seen
        m.d.fast += [seen.eq(turn), halves.eq(Cat(~changed, changed)), late.eq(self.moves)]
        m.d.comb += Cat(self.halves, self.late).eq(Cat(halves, late))
        return m
