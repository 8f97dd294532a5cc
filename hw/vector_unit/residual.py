"""rescale_add: the addition of a rescaled residual to the int8 result."""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.signals import Reg
from celosia.hw.spec.pipeline import ADD_STAGES
from celosia.hw.vector_unit.masks import ones  # ones(n): a mask of the lowest n bits
from celosia.hw.vector_unit.multiply import LOW_BITS, logic_product

_LOW = LOW_BITS + 8
"""Width of the product of an int8 and the low LOW_BITS of a scale."""
BIAS = 1 << _LOW
"""Added to the sum of two such products, which makes it unsigned, so that no sign must be extended to 48 bits. The
constant `scale_c` is reduced by it."""
_NEAR = 9
"""Width of a result before it is rounded and clipped."""


class RescaleAdd(wiring.Component):
    """One lane of rescale_add: (v * scale_v + residual * scale_b + scale_c) / 2^shift, ties to even, clipped.

    Items without a residual pass unchanged.

    Members
    -------
    v, residual : In      Stage 0, which is `add`: the int8 result, and the residual.
    enable : In           Bit i enables the registers of stage i.
    add : In              Bit i: the item that enters stage i has a residual.
    passed : In           Stage 5: the result of an item without a residual.
    scale_v, scale_b : In Stage 0: the factors.
    scale_c : In          Stage 2: the constant, less BIAS.
    bytes, bits : In      Stages 3 and 4: the shift, by bytes and then by bits.
    low, high : In        Stage 5: the limits of the result.
    result : Out          The result, a register behind stage 5.
    """

    def __init__(self) -> None:
        super().__init__({
            "v": In(signed(8)), "residual": In(signed(8)), "enable": In(ADD_STAGES), "add": In(ADD_STAGES),
            "scale_v": In(signed(32)), "scale_b": In(signed(32)), "scale_c": In(signed(49)),
            "bytes": In(3), "bits": In(3), "low": In(signed(8)), "high": In(signed(8)), "passed": In(signed(8)),
            "result": Out(signed(8)),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        # The sum is below 2^47 + 2 * 2^38 in magnitude. One more bit behind the point stands for a half.
        of_v = Reg(signed(33))
        of_b = Reg(signed(33))
        low_v = Reg(_LOW)
        low_b = Reg(_LOW)
        by_low = Signal(_LOW + 1)
        scaled = Reg(signed(LOW_BITS + 34))
        total = Reg(signed(50))
        near = Reg(signed(_NEAR))
        up = Reg()
        nearest = Signal(signed(10))
        result = Reg(signed(8))
        m.d.comb += self.result.eq(result)

        # A DSP block takes 25 bits of a scale, and the sum.
        with m.If(self.enable[0] & self.add[0]):
            m.d.sync += [
                of_v.eq(self.v * self.scale_v[LOW_BITS:].as_signed()),
                of_b.eq(self.residual * self.scale_b[LOW_BITS:].as_signed()),
                low_v.eq(_add_half_bias(logic_product(self.v, self.scale_v[:LOW_BITS]))),
                low_b.eq(_add_half_bias(logic_product(self.residual, self.scale_b[:LOW_BITS]))),
            ]
        m.d.comb += by_low.eq(low_v + low_b)
        with m.If(self.enable[1] & self.add[1]):
            m.d.sync += scaled.eq(Cat(by_low[:LOW_BITS], of_v + by_low[LOW_BITS:] + of_b).as_signed())
        with m.If(self.enable[2] & self.add[2]):
            m.d.sync += total.eq((scaled + self.scale_c) << 1)

        # The sum shifted by bytes. moved: its lowest bits, enough for a result after the shift by bits. negative: its
        # sign. wide: it has bits above `moved` that differ from the sign. lost: a bit that was shifted out was 1.
        moved = Reg(_NEAR + 8)
        negative = Reg()
        wide = Reg()
        lost = Reg()
        sign = total[-1]
        differs_from_sign = [(total[low : low + 8] ^ sign.replicate(8)).any() for low in range(len(moved), 49, 8)]
        byte_is_nonzero = [total[low : low + 8].any() for low in range(0, 50, 8)]
        with m.If(self.enable[3] & self.add[3]):
            m.d.sync += [
                moved.eq(total >> (self.bytes << 3)),
                negative.eq(sign),
                wide.eq((Cat(differs_from_sign) & ~ones(self.bytes)).any()),
                lost.eq((Cat(byte_is_nonzero) & ones(self.bytes)).any()),
            ]

        shifted = Signal(_NEAR + 1)
        below = ones(self.bits)
        above_near = moved[_NEAR:] ^ negative.replicate(8)  # bits that may lie above `near` and differ from the sign
        beyond = wide | (above_near & Cat(~below, 1)).any()
        m.d.comb += shifted.eq(moved >> self.bits)
        with m.If(self.enable[4] & self.add[4]):
            m.d.sync += [
                up.eq(shifted[0] & (shifted[1] | lost | (moved[:7] & below).any())),
                near.eq(Mux(beyond, Mux(negative, -256, 255), shifted[1:].as_signed())),
            ]

        m.d.comb += nearest.eq(near + up)
        with m.If(self.enable[5]):
            with m.If(~self.add[5]):
                m.d.sync += result.eq(self.passed)
            with m.Elif(nearest > self.high):
                m.d.sync += result.eq(self.high)
            with m.Elif(nearest < self.low):
                m.d.sync += result.eq(self.low)
            with m.Else():
                m.d.sync += result.eq(nearest)
        return m


def _add_half_bias(product: Value) -> Value:
    """Return `product` plus half of BIAS, which inverts its sign bit."""
    return Cat(product[: _LOW - 1], ~product[_LOW - 1])
