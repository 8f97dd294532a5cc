"""Double pumping: DSP blocks with a clock of twice the rate, and the phase of that clock."""

from __future__ import annotations

from amaranth import Cat, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.signals import Reg
from celosia.hw.spec.blocks import Blocks, Dsp

FAST = "fast"
"""Name of the clock domain with twice the clock of `sync`. Each edge of `sync` is also one of `fast`."""


def pumps(platform: object, pump: int) -> Dsp | None:
    """Return the DSP block that makes two products in a cycle of `sync`; None if `pump` is 1 or the platform has none.

    None also means that the hardware has no clock domain `fast`.
    """
    dsp = platform.dsp if isinstance(platform, Blocks) else None
    return dsp if pump == 2 and dsp in (Dsp.e1, Dsp.e2) else None


class DoublePumpedClock(wiring.Component):
    """Tell pairs of products which half of a cycle of `sync` the fast clock is in.

    A register of `sync` toggles in each cycle. If it has changed since the last edge of `fast`, the cycle has just
    begun. So the phase is right after one cycle, without a reset, whatever the registers held before.

    Members
    -------
    moves : In(2)       Enables of the second and the third stage of pairs.
    halves : Out(2)     Bit 0 is 1 in the first half of each cycle of `sync`, bit 1 in the second. Registers of `fast`.
    late : Out(2)       `moves`, half a cycle later. Registers of `fast`.
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
