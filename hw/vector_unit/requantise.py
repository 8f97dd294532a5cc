"""Requantiser of one lane: `sim.functional.reference.requantise`, bit for bit, as a pipeline for int8 results."""

from __future__ import annotations

from amaranth import Cat, Const, Module, Mux, Shape, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.pipeline import REQUANTISE_STAGES
from celosia.hw.spec.scratchpads import PAR_FIELDS
from celosia.hw.vector_unit.masks import ones  # ones(n): a mask of the lowest n bits
from celosia.hw.vector_unit.multiply import LOW_BITS, logic_product

RESULT_BITS = 10
"""Width of a result, from -256 to 256."""

param_layout = data.FlexibleLayout(
    64, {name: data.Field(Shape(part.width, part.signed), part.offset) for name, part in PAR_FIELDS.items()}
)
"""The parameters of one channel in an entry of par."""

_INT, _FRACTION = 8, 26
"""Integer and fraction bits of a quotient that does not saturate; a sticky bit behind them tells if a lower bit was 1.
26 are enough: a float32 of 0.5 or more has no bit below 2^-25, and half of that bit is 2^-26."""


def _fill_below_leading_one(m: Module, value: Value) -> Value:
    """Return `value` with every bit below its leading one set, in a logarithmic number of ORs.

    The leading one says how finely float32, in which onnxruntime requantises, has rounded the value.
    """
    step = 1
    while step < len(value):
        wider = Signal(len(value))
        m.d.comb += wider.eq(value | (value >> step))
        value, step = wider, 2 * step
    return value


class Requantise(wiring.Component):
    """Compute (v + bias) * multiplier / 2^shift, rounded to float32 and then to an integer, ties to even.

    Equal to `sim.functional.reference.requantise` between -256 and 256. Larger results saturate to -256 or 256, which
    no zero point brings back into an int8. Operands enter stage 0; `result` is valid REQUANTISE_STAGES stages later.

    Members
    -------
    enable : In(REQUANTISE_STAGES)     Bit i enables the registers of stage i.
    bypass : In(1)          Stage 0: the result is v itself, saturated; `param` is ignored.
    v : In(signed(32))      Stage 0: the value.
    param : In(par)         Stage 0: bias, multiplier (any 24 bits) and shift of the channel.
    result : Out(signed)    The result, RESULT_BITS wide.
    """

    def __init__(self) -> None:
        super().__init__({
            "enable": In(REQUANTISE_STAGES), "bypass": In(1), "v": In(signed(32)), "param": In(param_layout),
            "result": Out(signed(RESULT_BITS)),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        # Values that are passed from stage to stage: the sign, and shift and multiplier as far as they are used.
        negative = [Reg(name=f"negative{stage}") for stage in range(REQUANTISE_STAGES - 1)]
        shift = [Reg(6, name=f"shift{stage}") for stage in range(5)]
        multiplier = [Reg(24, name=f"multiplier{stage}") for stage in range(3)]
        for stage in range(1, REQUANTISE_STAGES - 1):
            with m.If(self.enable[stage]):
                m.d.sync += negative[stage].eq(negative[stage - 1])
        for stage in (1, 2, 4):
            with m.If(self.enable[stage]):
                m.d.sync += shift[stage].eq(shift[stage - 1])

        magnitude = self._build_sum(m, negative[0], multiplier[0], shift[0])
        significand, less = self._build_float(m, magnitude, multiplier)
        product = self._build_product(m, significand, less, multiplier[2], shift)
        nearest = self._build_rounding(m, *self._build_shift(m, product, shift[4]))
        result = Reg(self.result.shape())
        m.d.comb += self.result.eq(result)
        with m.If(self.enable[7]):
            m.d.sync += result.eq(Mux(negative[6], -nearest, nearest))
        probes(
            self, significand=significand, product=product, negative=negative, magnitude=magnitude,
            multiplier=multiplier, shift=shift, less=less, nearest=nearest,
        )  # fmt: skip
        return m

    def _build_sum(self, m: Module, negative: Signal, multiplier: Signal, shift: Signal) -> Signal:
        """Build stage 0: add the bias, and split the sum into sign and magnitude. Returns the magnitude.

        negative, multiplier, shift: registers of this stage to drive. With `bypass` there is no bias, the multiplier is
        2^23 and the shift 23.
        """
        total = Signal(signed(32))
        magnitude = Reg(32)
        m.d.comb += total.eq(self.v + Mux(self.bypass, 0, self.param.bias))
        with m.If(self.enable[0]):
            m.d.sync += [
                negative.eq(total[31]),
                magnitude.eq(Mux(total[31], -total, total)),
                multiplier.eq(Mux(self.bypass, 1 << 23, self.param.multiplier)),
                shift.eq(Mux(self.bypass, 23, self.param.shift)),
            ]
        return magnitude

    def _build_float(self, m: Module, magnitude: Signal, multiplier: list[Signal]) -> tuple[Signal, Signal]:
        """Build stages 1 and 2: convert to float32, which rounds to 24 significant bits, ties to even.

        magnitude: the integer. multiplier: registers of the multiplier by stage. Returns the significant bits, and the
        number of lower bits that were rounded off.
        """
        integer = Reg(32)
        drop = Reg(4)
        half = Reg(8)
        with m.If(self.enable[1]):
            m.d.sync += [integer.eq(magnitude), multiplier[1].eq(multiplier[0]), drop.eq(0), half.eq(0)]
            for bits in range(1, 9):
                with m.If(magnitude[23 + bits]):  # the last assignment holds
                    below = 1 << (bits - 1)
                    m.d.sync += [drop.eq(bits), half.eq(Mux(magnitude[bits], below, below - 1))]
        kept = Signal(25)
        significand = Reg(24)
        less = Reg(4)
        m.d.comb += kept.eq((integer + half)[:32] >> drop)
        with m.If(self.enable[2]):
            m.d.sync += [
                significand.eq(Cat(kept[:23], kept[23] | kept[24])),
                less.eq(drop + kept[24]),  # the rounding may carry into a 25th bit; the others are 0 then
                multiplier[2].eq(multiplier[1]),
            ]
        probes(self, integer=integer, drop=drop, half=half)
        return significand, less

    def _build_product(
        self, m: Module, significand: Signal, less: Signal, multiplier: Signal, shift: list[Signal]
    ) -> Signal:
        """Build stages 3 and 4: multiply by the multiplier, LOW_BITS of it in logic and the others in one DSP block.

        less: number of bits that were rounded off, which is subtracted from the shift. If the shift is smaller than
        that, it becomes 0: the product is then at least 2^23 and saturates, or is 0. Returns the product.
        """
        by_low = Reg(24 + LOW_BITS)
        by_high = Reg(48 - LOW_BITS)
        product = Reg(48)
        with m.If(self.enable[3]):
            m.d.sync += [
                by_low.eq(logic_product(significand, multiplier[:LOW_BITS])),
                by_high.eq(significand * multiplier[LOW_BITS:]),
                shift[3].eq(Mux(shift[2] > less, shift[2] - less, 0)),
            ]
        with m.If(self.enable[4]):
            m.d.sync += product.eq(Cat(by_low[:LOW_BITS], by_high + by_low[LOW_BITS:]))
        probes(self, by_low=by_low, by_high=by_high)
        return product

    def _build_shift(self, m: Module, product: Signal, shift: Signal) -> tuple[Signal, Signal]:
        """Build stage 5: divide by 2^shift, first shifting by bytes, then by single bits.

        Returns the quotient, a fixed-point number with _INT and _FRACTION bits and a sticky bit, and whether it has
        bits above, so that it saturates.
        """
        bits, by_bits, by_bytes = _INT + _FRACTION, shift[:3], shift[3:]
        # moved: the product shifted by bytes, with 7 bits above the quotient for the shift by single bits.
        # below, above: whether any bit lies below, or above, `moved`.
        moved = Signal(bits + 7)
        below = Signal()
        above = Signal()
        quotient = Reg(bits + 1)
        over = Reg()
        with m.Switch(by_bytes):
            for number in range(8):
                with m.Case(number):
                    m.d.comb += moved.eq((product << _FRACTION) >> (8 * number))
        ends = [8 * number - _FRACTION for number in range(8)]  # end of the bits below, for each shift by bytes
        lows = [product[max(0, end - 8) : end].any() if end > 0 else Const(0) for end in ends[1:]]
        highs = [product[end + len(moved) :][:8].any() for end in ends[:-1]]
        m.d.comb += [
            below.eq((Cat(lows) & ones(by_bytes)).any()),
            above.eq((Cat(highs) & ~ones(by_bytes)).any()),
        ]
        with m.If(self.enable[5]):
            m.d.sync += [
                quotient.eq(Cat(below | (moved[:7] & ones(by_bits)).any(), (moved >> by_bits)[:bits])),
                over.eq(above | (moved[bits:] & ~ones(by_bits)).any()),
            ]
        return quotient, over

    def _build_rounding(self, m: Module, quotient: Signal, over: Signal) -> Signal:
        """Build stage 6: round to the nearest integer, at most 256. over: the quotient saturates.

        The reference first rounds the quotient to float32. That makes a tie of any quotient within half a unit in the
        last place of a tie; `slack` is that half unit, 2^-24 of the leading one. Ties go to even. So an odd integer
        part is rounded up from 1/2 - slack on, and an even one only above 1/2 + slack.
        """
        point = _FRACTION + 1
        slack = Signal(signed(_INT + 4))
        rounded = Signal(_INT + point + 1)
        nearest = Reg(_INT + 1)
        below = _fill_below_leading_one(m, quotient[point - 1 :])
        m.d.comb += [
            slack.eq((below ^ (below >> 1)) << 2),
            rounded.eq(quotient + (1 << (point - 1)) + Mux(quotient[point], slack, ~slack)),
        ]
        with m.If(self.enable[6]):
            m.d.sync += nearest.eq(Mux(over, 1 << _INT, rounded[point:]))
        probes(self, quotient=quotient, over=over)
        return nearest
