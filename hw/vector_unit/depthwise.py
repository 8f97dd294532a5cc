"""Sum of the products of a depthwise convolution."""

from __future__ import annotations

import operator

from amaranth import Module, Mux, Shape, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.signals import Reg
from celosia.hw.spec.pipeline import TAP_STAGES
from celosia.hw.vector_unit.multiply import logic_product


class DepthwiseSum(wiring.Component):
    """One lane of stages `tap`, `product` and `acc`: sum of products of entries of vin and taps; or the first entry.

    `vector.py` lists the stages of the pipeline.

    Parameters
    ----------
    taps : number of entries that are multiplied by taps and added in a cycle.
    lane : number of the lane. Multipliers alternate between DSP blocks and LUTs, as the array needs most DSP blocks.

    Members
    -------
    entries, taps : In(array)       Stage `tap`: the lane's byte of each entry of vin, and the weight for it.
    weigh : In(1)                   Stage `tap`: multiply by the weights; else the result is the first entry.
    enable : In(3)                  Bit i enables the registers of the i-th stage.
    sum : Out(signed)               Stage `offset`: the result.
    """

    def __init__(self, taps: int, lane: int) -> None:
        self._taps, self._lane = taps, lane
        bytes_ = data.ArrayLayout(signed(8), taps)
        super().__init__({
            "entries": In(bytes_), "taps": In(bytes_), "weigh": In(1), "enable": In(TAP_STAGES),
            "sum": Out(depthwise_shape(taps)),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        products = []
        for number in range(self._taps):
            entry, tap = (Reg(signed(8), name=f"{name}{number}") for name in ("entry", "tap"))
            # `keep`: synthesis must not move a product of LUTs into a DSP block that adds, whose operand has 48 bits.
            in_logic = (self._lane + number) % 2 != 0
            product = Reg(signed(16), name=f"product{number}", attrs={"keep": 1} if in_logic else {})
            times = logic_product if in_logic else operator.mul
            with m.If(self.enable[0]):
                m.d.sync += entry.eq(self.entries[number])
                m.d.sync += tap.eq(Mux(self.weigh, self.taps[number], int(number == 0)))
            with m.If(self.enable[1]):
                m.d.sync += product.eq(times(entry, tap))
            products.append(product)
        total = Reg(self.sum.shape())
        m.d.comb += self.sum.eq(total)
        with m.If(self.enable[2]):
            m.d.sync += total.eq(sum(products[1:], products[0]))
        return m


def depthwise_shape(taps: int) -> Shape:
    """Return the shape of a sum of `taps` products; with 0 taps that of a byte of vin."""
    return signed(16 + (taps - 1).bit_length() if taps else 8)
