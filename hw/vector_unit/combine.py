"""Reductions of operand A over windows, and the binary operation of A and B."""

from __future__ import annotations

from amaranth import Cat, Const, Module, Mux, Shape, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import BinaryOp, ReduceOp, is_supported
from celosia.hw.spec.pipeline import FACTOR_BITS
from celosia.hw.vector_unit.norm.factors import SPARE_BITS
from celosia.hw.vector_unit.norm.moments import VALUE_BITS


class Combine(wiring.Component):
    """One lane of stages `offset`, `reduce` and `binary`: reduce A + a_offset, and combine it with B + b_offset.

    All values wrap at 32 bits.

    Parameters
    ----------
    cfg : Config, which says which reductions and operations the hardware has.
    vin : shape of a lane of vin.

    Members
    -------
    acc, vin : In         The lane's values from the scratchpads: A is one of them, or A is acc and B is vin.
    enable : In(3)        Bit i enables the registers of the i-th stage.
    last : In(2)          In `offset` and `reduce`: the item ends its reduction, so that its B is read with it.
    a_vin : In(1)         In `offset`: A comes from vin, else from acc.
    a_offset : In         In `offset`: added to A.
    first : In(1)         In `reduce`: the item begins its reduction.
    reduce_op : In        In `reduce`: the reduction.
    b_vin : In(1)         In `reduce`: B comes from vin, else it is `b_constant`.
    b_offset : In         In `reduce`: added to B from vin.
    b_constant : In       In `reduce`: imm + b_offset.
    binary_op : In        In `binary`: the operation that combines A and B.
    twice : In(1)         With `norm`, in `offset`: the value from vin is doubled.
    norm, pairs : In      With `norm`, in `reduce`: the low 16 bits are shifted up by 2 * `pairs`.
    times, rest : In      With `norm`, in `binary`: MUL multiplies by 24 unsigned bits of B instead of 16 signed ones,
                          adds `rest`, and drops the lowest SPARE_BITS of the result.
    residual : Out        In `reduce`: B from vin, without offset.
    v : Out               The result, in stage `requantise`.
    """

    def __init__(self, cfg: Config, vin: Shape) -> None:
        self._cfg = cfg
        super().__init__({
            "acc": In(signed(32)), "vin": In(vin), "enable": In(3), "last": In(2),
            "a_vin": In(1), "a_offset": In(signed(VALUE_BITS + 2 if cfg.norm else 9)),
            "first": In(1), "reduce_op": In(ReduceOp), "b_offset": In(signed(9)),
            "binary_op": In(BinaryOp), "b_vin": In(1), "b_constant": In(signed(32)),
            "residual": Out(signed(8)), "v": Out(signed(32)),
            **(dict(norm=In(1), twice=In(1), pairs=In(3), times=In(1), rest=In(signed(35))) if cfg.norm else {}),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        a = Reg(signed(32))
        reduced = Reg(signed(32))
        v = Reg(signed(32))
        residual = Reg(signed(8))
        b = Reg(signed(32))
        m.d.comb += [self.residual.eq(residual), self.v.eq(v)]

        with m.If(self.enable[0]):
            vin = Mux(self.twice, self.vin << 1, self.vin) if self._cfg.norm else self.vin
            m.d.sync += a.eq(Mux(self.a_vin, vin, self.acc) + self.a_offset)
            with m.If(self.last[0]):
                m.d.sync += residual.eq(self.vin)

        with m.If(self.enable[1]):
            with m.If(self.first):
                m.d.sync += reduced.eq(a)
            with m.Elif(self.reduce_op == ReduceOp.ADD):
                m.d.sync += reduced.eq(reduced + a)
            with m.Elif((a < reduced) == self._is_min()):
                m.d.sync += reduced.eq(a)
            if self._cfg.norm:
                with m.If(self.norm):
                    m.d.sync += reduced[:16].eq(a[:16] << (self.pairs << 1))
            with m.If(self.last[1]):
                m.d.sync += b.eq(Mux(self.b_vin, residual + self.b_offset, self.b_constant))

        results = {
            BinaryOp.ADD: reduced + b,
            BinaryOp.MAX: Mux(reduced < b, b, reduced),
            BinaryOp.MIN: Mux(reduced < b, reduced, b),
            BinaryOp.MUL: self._multiply(reduced, b),
            BinaryOp.SHR: reduced >> b[:5],
            BinaryOp.BYTE: reduced.word_select(b[:2], 8).as_signed(),
        }
        with m.If(self.enable[2]):
            m.d.sync += v.eq(reduced)
            with m.Switch(self.binary_op):
                for op, result in results.items():
                    if is_supported(self._cfg, op):
                        with m.Case(op):
                            m.d.sync += v.eq(result)
        return m

    def _multiply(self, reduced: Value, b: Value) -> Value:
        """Return the signed product of the low 16 bits of `reduced` and `b`.

        With norms, the same DSP block also multiplies 16 by 24 bits (a factor of the norm) and adds `rest`. Other
        products are then shifted up by SPARE_BITS, which are dropped again at the end.
        """
        a, times = reduced[:16].as_signed(), b[:16].as_signed()
        if not self._cfg.norm:
            return a * times
        wide = Mux(self.times, Cat(b[:FACTOR_BITS], 0).as_signed(), times << SPARE_BITS)
        return (a * wide + self.rest) >> SPARE_BITS

    def _is_min(self) -> Value:
        """Return whether the reduction is a minimum; always 0 if the Config does not support it."""
        return self.reduce_op == ReduceOp.MIN if is_supported(self._cfg, ReduceOp.MIN) else Const(0)
