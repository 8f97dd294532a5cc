"""Sums of a row's bytes, and of their squares."""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.signals import Reg
from celosia.hw.spec.pipeline import MAX_NORM_ELEMENTS
from celosia.hw.vector_unit.multiply import logic_product

VALUE_BITS = 9
"""Of a byte with its offset."""
SUM_BITS, SQUARES_BITS = 20, 28
"""Of what a row of MAX_NORM_ELEMENTS values from -256 to 255 adds up to."""
assert 1 << SUM_BITS == 2 * 256 * MAX_NORM_ELEMENTS and 1 << SQUARES_BITS == 2 * 256**2 * MAX_NORM_ELEMENTS


class NormMoments(wiring.Component):
    """Adds up some neighbouring bytes of a row in a cycle.

    Parameters
    ----------
    lanes : how many, a power of two.

    Members
    -------
    valid : In(1)               Bytes come, all of one row.
    first, last : In(1)         The row's first ones, or last.
    bytes_ : In(8 * lanes), inside : In(lanes)      Those that count.
    offset : In(signed)         Added to each; it stays.
    found : Out(1)              A row is through: 3 cycles and one for each level of a tree of adders behind its last
                                bytes.
    sum, squares : Out          Of that row, in this cycle.
    """

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        super().__init__({
            "valid": In(1), "first": In(1), "last": In(1), "bytes_": In(8 * lanes), "inside": In(lanes),
            "offset": In(signed(VALUE_BITS)), "found": Out(1), "sum": Out(signed(SUM_BITS)),
            "squares": Out(SQUARES_BITS),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        values = [Reg(signed(VALUE_BITS), name=f"value{lane}") for lane in range(self._lanes)]
        for lane, value in enumerate(values):
            byte = self.bytes_.word_select(lane, 8).as_signed()
            m.d.sync += value.eq(Mux(self.inside[lane], byte + self.offset, 0))
        marks = self._later(m, Cat(self.valid, self.first, self.last), 0)
        terms: list[tuple[Value, Value]] = [(value, self._square(value)) for value in values]
        level = 0
        while True:
            level += 1
            kept = [[Reg(part.shape(), name=f"{name}{level}_{number}") for name, part in zip(("sum", "squares"), term)]
                    for number, term in enumerate(terms)]  # fmt: skip
            m.d.sync += [to.eq(part) for pair, term in zip(kept, terms) for to, part in zip(pair, term)]
            marks = self._later(m, marks, level)
            if len(kept) == 1:
                break
            terms = [(a + c, b + d) for (a, b), (c, d) in zip(kept[::2], kept[1::2])]
        (total, squares), (valid, first, last) = kept[0], marks
        with m.If(valid):
            m.d.sync += [
                self.sum.eq(Mux(first, 0, self.sum) + total),
                self.squares.eq(Mux(first, 0, self.squares) + squares),
            ]
        m.d.sync += self.found.eq(valid & last)
        return m

    def _later(self, m: Module, marks: Value, stage: int) -> Signal:
        """What belongs to a stage, in the next one."""
        after = Signal(len(marks), name=f"marks{stage}")
        m.d.sync += after.eq(marks)
        return after

    def _square(self, value: Signal) -> Value:
        """It is not negative: the bit of its sign falls away."""
        wide = Cat(value, value[-1]).as_signed()
        return logic_product(value, wide)[: 2 * VALUE_BITS - 1].as_unsigned()
