"""One lane of the exact requantiser: a pipelined `sim.reference.requantise` for results that end in an int8."""

from __future__ import annotations

from functools import partial

from amaranth import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

STAGES = 5
"""Registers between the operands and the result."""

RESULT_BITS = 10

param_layout = data.StructLayout({"bias": signed(32), "multiplier": 24, "shift": 6, "unused": 2})
"""What an entry of par holds for one channel."""

# Fixed point of a quotient that does not saturate: 8 bits before the point and 26 behind it, then one bit that is set
# where anything was cut off. A float32 of 0.5 or more has no bit below 2^-25 and half of its last one is 2^-26.
_INT, _FRACTION = 8, 26


def _smear(m: Module, value: Value) -> Value:
    """`value` with every bit below its leading one set."""
    step = 1
    while step < len(value):
        wider = Signal(len(value))
        m.d.comb += wider.eq(value | (value >> step))
        value, step = wider, 2 * step
    return value


class Requantise(wiring.Component):
    """(v + bias) * multiplier / 2^shift, rounded as a product of float32 and then to an integer, ties to even.

    Equal to `sim.reference.requantise` where its result lies between -256 and 256; beyond, the result is -256 or 256,
    which no zero point brings back into an int8. Operands enter stage 0 and `result` is valid STAGES steps later.

    Members
    -------
    enable : In(STAGES)     Bit i lets stage i take what the stage before it holds.
    bypass : In(1)          Stage 0: the result is v itself, saturated; `param` is ignored.
    v : In(signed(32))      Stage 0.
    param : In(par)         Stage 0: bias, multiplier (any 24 bits) and shift of the channel.
    result : Out(signed)    RESULT_BITS wide.
    """

    def __init__(self) -> None:
        super().__init__({
            "enable": In(STAGES), "bypass": In(1), "v": In(signed(32)), "param": In(param_layout),
            "result": Out(signed(RESULT_BITS)),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        register = partial(Signal, reset_less=True)

        # 0: sum and magnitude. A bypass multiplies by 2^23 / 2^23.
        total = Signal(signed(32))
        negative0, magnitude, multiplier0, shift0 = register(), register(32), register(24), register(6)
        m.d.comb += total.eq(self.v + Mux(self.bypass, 0, self.param.bias))
        with m.If(self.enable[0]):
            m.d.sync += [
                negative0.eq(total[31]),
                magnitude.eq(Mux(total[31], -total, total)),
                multiplier0.eq(Mux(self.bypass, 1 << 23, self.param.multiplier)),
                shift0.eq(Mux(self.bypass, 23, self.param.shift)),
            ]

        # 1: the conversion to float32 keeps 24 significant bits; the `drop` bits rounded off lessen the shift. Where
        # the shift runs out, the product is at least 2^23 and saturates, or is 0.
        odd, drop, rounded, kept, less = Signal(), Signal(4), Signal(32), Signal(25), Signal(4)
        negative1, significand, multiplier1, shift1 = register(), register(24), register(24), register(6)
        below = _smear(m, magnitude[24:])  # `drop` ones
        pairs, fours = Signal(8), Signal(8)
        m.d.comb += [
            pairs.eq(below - ((below >> 1) & 0x55)),
            fours.eq((pairs & 0x33) + ((pairs >> 2) & 0x33)),
            drop.eq(fours[:4] + fours[4:]),
            odd.eq((magnitude[:9] & (below + 1)).any() & below[0]),
            rounded.eq(magnitude + (below >> 1) + odd),
            kept.eq(rounded >> drop),
            less.eq(drop + kept[24]),  # the rounding may carry into a 25th bit; the others are 0 then
        ]
        with m.If(self.enable[1]):
            m.d.sync += [
                negative1.eq(negative0),
                significand.eq(Cat(kept[:23], kept[23] | kept[24])),
                multiplier1.eq(multiplier0),
                shift1.eq(Mux(shift0 > less, shift0 - less, 0)),
            ]

        # 2: the product.
        negative2, product, shift2 = register(), register(48), register(6)
        with m.If(self.enable[2]):
            m.d.sync += [negative2.eq(negative1), product.eq(significand * multiplier1), shift2.eq(shift1)]

        # 3: the shift to fixed point, in two ranges so that 64 bits do.
        small, amount, wide, shifted, mask, over = Signal(), Signal(6), Signal(64), Signal(64), Signal(64), Signal()
        negative3, quotient = register(), register(_INT + _FRACTION + 1)
        m.d.comb += [
            small.eq(shift2[4:] == 0),
            amount.eq(Cat(shift2[:4], shift2[4:] - ~small)),
            wide.eq(Mux(small, product << _FRACTION, product << (_FRACTION - 16))),
            shifted.eq(wide >> amount),
            mask.eq((Const(1, 64) << amount) - 1),
            over.eq(shifted[_INT + _FRACTION :].any() | (small & product[64 - _FRACTION :].any())),
        ]
        with m.If(self.enable[3]):
            m.d.sync += [
                negative3.eq(negative2),
                quotient.eq(Mux(over, -1, Cat((wide & mask).any(), shifted[: _INT + _FRACTION]))),
            ]

        # 4: to the nearest integer. Half a unit in the last place of the float32 is 2^-24 of the leading one: an odd
        # quotient goes up from that much below one half, an even one only beyond that much above it.
        point = _FRACTION + 1
        slack, total4, nearest = Signal(signed(_INT + 4)), Signal(_INT + point + 1), Signal(_INT + 1)
        below = _smear(m, quotient[point - 1 :])
        m.d.comb += [
            slack.eq((below ^ (below >> 1)) << 2),
            total4.eq(quotient + (1 << (point - 1)) + Mux(quotient[point], slack, ~slack)),
            nearest.eq(total4[point:]),
        ]
        with m.If(self.enable[4]):
            m.d.sync += self.result.eq(Mux(negative3, -nearest, nearest))
        return m
