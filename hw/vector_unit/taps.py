"""Products of entries of vin and taps, and their sum."""

from __future__ import annotations

import operator

from amaranth import Module, Mux, Shape, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.signals import Reg
from celosia.hw.spec.pipeline import TAP_STAGES
from celosia.hw.vector_unit.multiply import logic_product


class Taps(wiring.Component):
    """One lane of stages 1 to 3 with taps: the sum of entries, each times its tap; or the first entry.

    Parameters
    ----------
    taps : how many.
    lane : its number. Of the multipliers half are DSP blocks, in turn, for a device has few of them beside the array's.

    Members
    -------
    entries, taps : In      8 bits of each. Stage 1.
    weigh : In(1)           Stage 1: whether the taps count.
    enable : In(3)          Bit i lets stage 1 + i take an item.
    sum : Out(signed)       The item in stage 4.
    """

    def __init__(self, taps: int, lane: int) -> None:
        self._taps, self._lane = taps, lane
        super().__init__({
            "entries": In(8 * taps), "taps": In(8 * taps), "weigh": In(1), "enable": In(TAP_STAGES),
            "sum": Out(tap_sum(taps)),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        products = []
        for number in range(self._taps):
            entry, tap = (Reg(signed(8), name=f"{name}{number}") for name in ("entry", "tap"))
            # What LUTs give is not kept in a DSP block, whose operand has 48 bits, most of them the sign.
            in_logic = (self._lane + number) % 2 != 0
            product = Reg(signed(16), name=f"product{number}", attrs={"keep": 1} if in_logic else {})
            times = logic_product if in_logic else operator.mul
            with m.If(self.enable[0]):
                m.d.sync += entry.eq(self.entries.word_select(number, 8))
                m.d.sync += tap.eq(Mux(self.weigh, self.taps.word_select(number, 8), int(number == 0)))
            with m.If(self.enable[1]):
                m.d.sync += product.eq(times(entry, tap))
            products.append(product)
        total = Reg(self.sum.shape())
        m.d.comb += self.sum.eq(total)
        with m.If(self.enable[2]):
            m.d.sync += total.eq(sum(products[1:], products[0]))
        return m


def tap_sum(taps: int) -> Shape:
    """What Taps gives; without taps an entry of vin as it is."""
    return signed(16 + (taps - 1).bit_length() if taps else 8)
