"""Reductions over windows, and the binary operation."""

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
    """One lane of stages 1 to 3: v = reduction of (A + a_offset), combined with B + b_offset. All wraps at 32 bits.

    Stages are those of a Config without taps, here and below.

    Parameters
    ----------
    cfg : Config, which says what reductions and operations there are.
    vin : shape of what comes from vin.

    Members
    -------
    acc, vin : In         What the scratchpads gave: A from one of them, or A from acc and B from vin.
    enable : In(3)        Bit i lets stage 1 + i take an item.
    last : In(2)          Stages 1 and 2: the item ends its reduction, so that its B is there.
    a_vin, a_offset       Stage 1.
    first, reduce_op, b_offset, b_vin, b_constant   Stage 2; b_constant is imm + b_offset.
    binary_op             Stage 3.
    twice                 Stage 1, with `norm`: what vin gave counts twice.
    norm, pairs           Stage 2, with `norm`: what is there is to be shifted by so many pairs of bits, as 16 bits;
    times, rest           stage 3: MUL takes 24 bits of b instead of 16, none of them a sign, and leaves out SPARE_BITS
                          of the product and `rest`.
    residual : Out        B of the item in stage 2, without offset.
    v : Out               The item in stage 4.
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
            BinaryOp.MUL: self._product(reduced, b),
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

    def _product(self, reduced: Value, b: Value) -> Value:
        """One DSP block makes both: of a norm 16 bits times the 24 of its row's factor, and what is to be added."""
        a, times = reduced[:16].as_signed(), b[:16].as_signed()
        if not self._cfg.norm:
            return a * times
        wide = Mux(self.times, Cat(b[:FACTOR_BITS], 0).as_signed(), times << SPARE_BITS)
        return (a * wide + self.rest) >> SPARE_BITS

    def _is_min(self) -> Value:
        return self.reduce_op == ReduceOp.MIN if is_supported(self._cfg, ReduceOp.MIN) else Const(0)
