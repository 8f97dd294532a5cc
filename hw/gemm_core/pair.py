"""Sum of two products: the cell of the array.

Where the Config says `packed`, two products with a common factor share one multiplication, as in Xilinx' white paper
WP486, so that a DSP48E1 with its 25 x 18 bits counts twice:

    (a * 2^17 + b + 128) * c  =  a*c * 2^17  +  b*c + 128*c        a, b, c: int8

b + 128 is b with its top bit flipped and has no sign, so the left factor is a concatenation that fits 25 bits. Products
are added in pairs, with 2^16 - 128*(c0 + c1) on top: then the lower 17 bits are b0*c0 + b1*c1 + 2^16, which is never
negative and below 2^17, and the bits above them a0*c0 + a1*c1.
"""

from __future__ import annotations

from amaranth import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.hdl import ValueCastable
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.gemm_core.dsp48 import CASCADE, MINUS_C, NOTHING, dsp48, pumped_dsp48
from celosia.hw.gemm_core.mult18 import WIDTH, mult18x18
from celosia.hw.gemm_core.pump import pumps
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.blocks import Blocks, Dsp
from celosia.hw.spec.pipeline import PAIR_STAGES

SPACING = 17
"""Bits between two products in one multiplication: a sum of two products of int8 takes them all."""
FACTORS_BITS = 9
"""Bits of the sum of two factors."""
_LOW_BITS = 7
"""Bits below the correction, which is a multiple of 128 (see `packed_weights`)."""


def weight_bits(packed: bool) -> int:
    """Return the width of the left factor of a multiplication: one weight, or two packed ones."""
    return SPACING + 8 if packed else 8


def packed_weights(high: Value, low: Value) -> Value:
    """Pack two int8 weights into one left factor, SPACING bits apart, by wiring alone.

    The factor is high * 2^SPACING + low + 128: inverting low's sign bit adds 128, and makes it a number without sign,
    so that no adder is needed. The correction of `Pair` subtracts 128 times the other factor again.
    """
    return Cat(low[:7], ~low[7], Const(0, SPACING - 8), high).as_signed()


class Pair(wiring.Component):
    """The sum of two products of weights and factors, which is there PAIR_STAGES cycles after them; a new one in each
    cycle.

    On the platform `Blocks` it is two DSP blocks. Those of Xilinx are a cascade: the second adds the first one's sum to
    its product, within their column, so that its operands go through a register more. Else it has the same registers.

    Pumped, it is one block of Xilinx in clock domain `fast`, with the same sums in the same cycles, if each stage moves
    with its data. All between the clocks goes from a register to a register, through a multiplexer at most.

    Parameters
    ----------
    packed : bool      Two products share a multiplication.
    pump : int         2: a DSP block makes both products, on platforms that have such (`pump.pumps`).

    Members
    -------
    moves : In         Bit i: the registers of stage i take what comes: operands; first product; its sum with the
                       correction and second product; sum of both.
    weights0, weights1 : In    int8, or `packed_weights`.
    factor0, factor1 : In      int8.
    factors : In       factor0 + factor1, a cycle after them. Read if packed.
    halves, late : In  From a `Pump`. There where `pump` is 2, and read where it pumps.
    sum : Out          Packed, bits below SPACING are the sum of the lower products and 2^16, the bits above, signed,
                       that of the higher ones.
    """

    def __init__(self, packed: bool, pump: int = 1) -> None:
        self._packed, self._pump = packed, pump
        weights = signed(weight_bits(packed))
        super().__init__({
            "moves": In(PAIR_STAGES),
            "weights0": In(weights), "weights1": In(weights), "factor0": In(signed(8)), "factor1": In(signed(8)),
            "factors": In(signed(FACTORS_BITS)),
            **({"halves": In(2), "late": In(2)} if pump == 2 else {}),
            "sum": Out(signed(2 * SPACING if packed else SPACING)),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        dsp = platform.dsp if isinstance(platform, Blocks) else None
        if (pumped := pumps(platform, self._pump)) is not None:
            self._pumped(m, pumped)
        elif dsp is None or (dsp is Dsp.mult18 and len(self.weights0) > WIDTH):
            self._registers(m)
        elif dsp is Dsp.mult18:
            self._multipliers(m)
        else:
            self._cascade(m, dsp)
        return m

    def _multipliers(self, m: Module) -> None:
        """Build the pair from two blocks without a cascade: both multiply in the same cycle, and logic adds."""
        *inside, both = self.moves
        products = Signal(signed(2 * WIDTH), name="product0"), Signal(signed(2 * WIDTH), name="product1")
        m.submodules.first = mult18x18(self.weights0, self.factor0, inside, products[0])
        m.submodules.second = mult18x18(self.weights1, self.factor1, inside, products[1])
        total = Signal.like(self.sum, name="total", reset_less=True)
        with m.If(both):
            m.d.sync += total.eq(products[0] + products[1])
        m.d.comb += self.sum.eq(total)

    def _cascade(self, m: Module, dsp: Dsp) -> None:
        """Build the pair from two blocks with a cascade: the second block adds its product to the first one's sum."""
        enter, first, second, both = self.moves
        cascade, total, corrected, beyond = (Signal(48, name=n) for n in ("cascade", "total", "corrected", "beyond"))
        # The correction, 128 * factors - 2^16, has the bits of the factors' sum, its sign inverted, and a sign of 1.
        correction = Cat(Const(0, _LOW_BITS), self.factors, ~self.factors[-1], Const(1, 1)) if self._packed else None
        m.submodules.first = dsp48(
            dsp, self.weights0, self.factor0, (enter, first, second), MINUS_C if self._packed else NOTHING,
            corrected, cascade, c=correction,
        )  # fmt: skip
        m.submodules.second = dsp48(
            dsp, self.weights1, self.factor1, (enter, first, second, both), CASCADE, total, beyond,
            pcin=cascade,
        )  # fmt: skip
        m.d.comb += self.sum.eq(total)

    def _pumped(self, m: Module, dsp: Dsp) -> None:
        """Build the pair from one block at twice the clock, which makes both products one after the other.

        At the edges of `fast`, the first one of which is that at which operands are kept:
        1, 2: weights in the block, factors in their register.  2, 3: each at the multiplier.  3, 4: products.
        4: the first one and the correction.  5: both.  6, which is one of `sync` again: the sum.
        """
        enter, first, second, both = self.moves
        operands = self.weights0, self.weights1, self.factor0, self.factor1
        kept = [Reg(each.shape(), name=f"kept{number}") for number, each in enumerate(operands)]
        with m.If(enter):
            m.d.sync += [register.eq(each) for register, each in zip(kept, operands)]
        factor = Reg(signed(8))
        with m.If(first):
            m.d.fast += factor.eq(Mux(self.halves[1], kept[3], kept[2]))
        correction = None
        if self._packed:
            # 2^16 - 128 * factors, less the two carries: -x is not x and 1, and 128 is 126 and two.
            above = Reg(FACTORS_BITS + 1)
            with m.If(first):
                m.d.sync += above.eq(Cat(~self.factors, self.factors[-1]))
            correction = Cat(Const((1 << _LOW_BITS) - 2, _LOW_BITS), above, Const(0, 1))
        result = Signal(48)
        m.submodules.block = pumped_dsp48(
            dsp, (kept[0], kept[1]), factor, correction, int(self._packed), self.halves,
            (first, self.late[0], second, self.late[1]), result,
        )  # fmt: skip
        total = Signal.like(self.sum, name="total", reset_less=True)
        with m.If(both):
            m.d.sync += total.eq(result)
        m.d.comb += self.sum.eq(total)

    def _registers(self, m: Module) -> None:
        """Build the pair from registers and `*`, for platforms without DSP blocks of their own and for simulation."""

        def after(stage: int, value: ValueCastable | Value, name: str) -> Signal:
            """Return a register of `stage`, which takes `value` when data move to that stage."""
            register = Reg(Value.cast(value).shape(), name=name)
            with m.If(self.moves[stage]):
                m.d.sync += register.eq(value)
            return register

        operands = [
            after(0, value, name)
            for name, value in (
                ("weights0_0", self.weights0), ("factor0_0", self.factor0),
                ("weights1_0", self.weights1), ("factor1_0", self.factor1),
            )
        ]  # fmt: skip
        product0 = after(1, operands[0] * operands[1], "product0")
        skewed = after(1, operands[2], "weights1_1"), after(1, operands[3], "factor1_1")
        start = product0
        if self._packed:
            factors = after(1, self.factors, "factors_1")
            start = (product0 + (1 << (SPACING - 1)) - (factors << _LOW_BITS))[: len(self.sum)].as_signed()
        corrected = after(2, start, "corrected")
        product1 = after(2, skewed[0] * skewed[1], "product1")
        m.d.comb += self.sum.eq(after(3, (corrected + product1)[: len(self.sum)].as_signed(), "total"))
