"""The rescaled residual that is added to the int8 result."""

from __future__ import annotations

from functools import partial

from amaranth import Cat, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.pipeline import ADD_STAGES
from celosia.hw.vector_unit.multiply import LOW_BITS, logic_product

_REGISTER = partial(Signal, reset_less=True)


class RescaleAdd(wiring.Component):
    """One lane of rescale_add: (v * scale_v + residual * scale_b + scale_c) / 2^shift, ties to even, clipped; or v.

    Members
    -------
    v, residual : In      Stage 0, which is `add`.
    enable : In           Bit i lets stage i take an item.
    add : In              Whether the item there is to be computed.
    passed : In           Stage 5: the result for an item that is not.
    scale_v, scale_b      Stage 0; scale_c: stage 2; bytes and bits, by which to shift: stages 3 and 4.
    low, high             Stage 5.
    result : Out          The item behind it.
    """

    def __init__(self) -> None:
        super().__init__({
            "v": In(signed(8)), "residual": In(signed(8)), "enable": In(ADD_STAGES), "add": In(ADD_STAGES),
            "scale_v": In(signed(32)), "scale_b": In(signed(32)), "scale_c": In(signed(48)),
            "bytes": In(3), "bits": In(3), "low": In(signed(8)), "high": In(signed(8)), "passed": In(signed(8)),
            "result": Out(signed(8)),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        # The sum is below 2^47 + 2 * 2^38 in magnitude. One more bit, so that there is a half behind the point.
        of_v, of_b = _REGISTER(signed(33)), _REGISTER(signed(33))
        low_v, low_b, by_low = (
            _REGISTER(signed(LOW_BITS + 8)),
            _REGISTER(signed(LOW_BITS + 8)),
            Signal(signed(LOW_BITS + 9)),
        )
        scaled = _REGISTER(signed(LOW_BITS + 34))
        total, moved, lost = _REGISTER(signed(50)), _REGISTER(signed(50)), _REGISTER()
        shifted, floor = Signal(signed(50)), Signal(signed(49))
        near, up, nearest = _REGISTER(signed(9)), _REGISTER(), Signal(signed(10))

        # A DSP block takes 25 bits of a scale, and the sum.
        with m.If(self.enable[0] & self.add[0]):
            m.d.sync += [
                of_v.eq(self.v * self.scale_v[LOW_BITS:].as_signed()),
                of_b.eq(self.residual * self.scale_b[LOW_BITS:].as_signed()),
                low_v.eq(logic_product(self.v, self.scale_v[:LOW_BITS])),
                low_b.eq(logic_product(self.residual, self.scale_b[:LOW_BITS])),
            ]
        m.d.comb += by_low.eq(low_v + low_b)
        with m.If(self.enable[1] & self.add[1]):
            m.d.sync += scaled.eq(Cat(by_low[:LOW_BITS], of_v + by_low[LOW_BITS:].as_signed() + of_b).as_signed())
        with m.If(self.enable[2] & self.add[2]):
            m.d.sync += total.eq((scaled + self.scale_c) << 1)

        with m.If(self.enable[3] & self.add[3]):
            m.d.sync += moved.eq(total >> (self.bytes << 3))
            with m.Switch(self.bytes):
                for number in range(8):
                    with m.Case(number):
                        m.d.sync += lost.eq(total[: 8 * number].any())

        below = (1 << self.bits) - 1
        m.d.comb += [shifted.eq(moved >> self.bits), floor.eq(shifted >> 1)]
        with m.If(self.enable[4] & self.add[4]):
            m.d.sync += up.eq(shifted[0] & (shifted[1] | lost | (moved[:7] & below).any()))
            with m.If(floor[8:].all() | ~floor[8:].any()):
                m.d.sync += near.eq(floor)
            with m.Else():
                m.d.sync += near.eq(Mux(floor < 0, -256, 255))

        m.d.comb += nearest.eq(near + up)
        with m.If(self.enable[5]):
            with m.If(~self.add[5]):
                m.d.sync += self.result.eq(self.passed)
            with m.Elif(nearest > self.high):
                m.d.sync += self.result.eq(self.high)
            with m.Elif(nearest < self.low):
                m.d.sync += self.result.eq(self.low)
            with m.Else():
                m.d.sync += self.result.eq(nearest)
        return m
