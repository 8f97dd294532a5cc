"""Sum of two products: the cell of the array.

With `packed` in the Config, two products with a common factor share one multiplication, as in Xilinx' white paper
WP486, so that a DSP48E1 with its 25 x 18 bits makes two products:

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
"""Distance in bits between two products in one multiplication: the width of a sum of two products of int8."""
FACTORS_BITS = 9
"""Width of the sum of two int8 factors."""
_LOW_BITS = 7
"""Low bits that are 0 in the correction, a multiple of 128 (see `packed_weights`)."""


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
    """Sum of two products, weights0 * factor0 + weights1 * factor1, one in each cycle, PAIR_STAGES cycles later.

    On platform `Blocks` it is two DSP blocks. Those of Xilinx form a cascade: the second block adds the first one's sum
    to its product. So its operands pass one register more. On other platforms it is made of registers and `*`, with the
    same latency.

    With `pump` = 2 it is one block of Xilinx in clock domain `fast`, with the same sums in the same cycles. Paths
    between the two clocks go from register to register, through one multiplexer at most.

    Parameters
    ----------
    packed : bool      Each multiplication makes two products, those of two weights with one factor.
    pump : int         2: one DSP block makes both multiplications, on platforms that can (`pump.pumps`).

    Members
    -------
    moves : In         Bit i enables the registers of stage i: operands; first product; its sum with the correction,
                       and the second product; the sum of both.
    weights0, weights1 : In    int8, or `packed_weights`.
    factor0, factor1 : In      int8.
    factors : In       factor0 + factor1, a cycle after them. Used if packed.
    halves, late : In  From a `DoublePumpedClock`, only with `pump` = 2.
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
            self._build_pumped(m, pumped)
        elif dsp is None or (dsp is Dsp.mult18 and len(self.weights0) > WIDTH):
            self._build_from_registers(m)
        elif dsp is Dsp.mult18:
            self._build_from_multipliers(m)
        else:
            self._build_cascade(m, dsp)
        return m

    def _build_from_multipliers(self, m: Module) -> None:
        """Build the pair from two blocks without a cascade (Lattice's): both multiply in the same cycle, logic adds."""
        *block_moves, both = self.moves
        products = Signal(signed(2 * WIDTH), name="product0"), Signal(signed(2 * WIDTH), name="product1")
        m.submodules.first = mult18x18(self.weights0, self.factor0, block_moves, products[0])
        m.submodules.second = mult18x18(self.weights1, self.factor1, block_moves, products[1])
        total = Signal.like(self.sum, name="total", reset_less=True)
        with m.If(both):
            m.d.sync += total.eq(products[0] + products[1])
        m.d.comb += self.sum.eq(total)

    def _build_cascade(self, m: Module, dsp: Dsp) -> None:
        """Build the pair from two blocks with a cascade: the second block adds its product to the first one's sum."""
        enter, first, second, both = self.moves
        cascade, total, corrected, beyond = (
            Signal(48, name=name) for name in ("cascade", "total", "corrected", "beyond")
        )
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

    def _build_pumped(self, m: Module, dsp: Dsp) -> None:
        """Build the pair from one block at twice the clock, which makes both products one after the other.

        Edges of `fast` at which registers take values, counted from the edge after which the operands are held:
        1, 2: weights in the block, one factor after the other in `factor`.  2, 3: operands of the multiplier.
        3, 4: products.  4: first product + correction.  5: sum of both.  6, also an edge of `sync`: `total`.
        """
        enter, first, second, both = self.moves
        operands = self.weights0, self.weights1, self.factor0, self.factor1
        held = [Reg(operand.shape(), name=f"kept{number}") for number, operand in enumerate(operands)]
        with m.If(enter):
            m.d.sync += [register.eq(operand) for register, operand in zip(held, operands)]
        factor = Reg(signed(8))
        with m.If(first):
            m.d.fast += factor.eq(Mux(self.halves[1], held[3], held[2]))
        correction = None
        if self._packed:
            # The correction, 2^16 - 128 * factors, minus the block's two carries. As -x is ~x + 1, its upper bits are
            # ~factors, and its lower bits 128 - 2.
            above = Reg(FACTORS_BITS + 1)
            with m.If(first):
                m.d.sync += above.eq(Cat(~self.factors, self.factors[-1]))
            correction = Cat(Const((1 << _LOW_BITS) - 2, _LOW_BITS), above, Const(0, 1))
        result = Signal(48)
        m.submodules.block = pumped_dsp48(
            dsp, (held[0], held[1]), factor, correction, int(self._packed), self.halves,
            (first, self.late[0], second, self.late[1]), result,
        )  # fmt: skip
        total = Signal.like(self.sum, name="total", reset_less=True)
        with m.If(both):
            m.d.sync += total.eq(result)
        m.d.comb += self.sum.eq(total)

    def _build_from_registers(self, m: Module) -> None:
        """Build the pair from registers and `*`, for simulation and for platforms without a supported DSP block."""

        def registered(stage: int, value: ValueCastable | Value, name: str) -> Signal:
            """Return a register of `stage` that takes `value` when that stage is enabled."""
            register = Reg(Value.cast(value).shape(), name=name)
            with m.If(self.moves[stage]):
                m.d.sync += register.eq(value)
            return register

        operands = [
            registered(0, value, name)
            for name, value in (
                ("weights0_0", self.weights0), ("factor0_0", self.factor0),
                ("weights1_0", self.weights1), ("factor1_0", self.factor1),
            )
        ]  # fmt: skip
        product0 = registered(1, operands[0] * operands[1], "product0")
        skewed = registered(1, operands[2], "weights1_1"), registered(1, operands[3], "factor1_1")
        start = product0
        if self._packed:
            factors = registered(1, self.factors, "factors_1")
            start = (product0 + (1 << (SPACING - 1)) - (factors << _LOW_BITS))[: len(self.sum)].as_signed()
        corrected = registered(2, start, "corrected")
        product1 = registered(2, skewed[0] * skewed[1], "product1")
        m.d.comb += self.sum.eq(registered(3, (corrected + product1)[: len(self.sum)].as_signed(), "total"))
