"""Reductions over windows, and the binary operation."""

from __future__ import annotations

from amaranth import Const, Module, Mux, Shape, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.config import Config
from celosia.hw.isa import BinaryOp, ReduceOp, has
from celosia.hw.signals import Reg


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
    residual : Out        B of the item in stage 2, without offset.
    v : Out               The item in stage 4.
    """

    def __init__(self, cfg: Config, vin: Shape) -> None:
        self._cfg = cfg
        super().__init__({
            "acc": In(signed(32)), "vin": In(vin), "enable": In(3), "last": In(2),
            "a_vin": In(1), "a_offset": In(signed(9)),
            "first": In(1), "reduce_op": In(ReduceOp), "b_offset": In(signed(9)),
            "binary_op": In(BinaryOp), "b_vin": In(1), "b_constant": In(signed(32)),
            "residual": Out(signed(8)), "v": Out(signed(32)),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        a, reduced, v = Reg(signed(32)), Reg(signed(32)), Reg(signed(32))
        residual, b = Reg(signed(8)), Reg(signed(32))
        m.d.comb += [self.residual.eq(residual), self.v.eq(v)]

        with m.If(self.enable[0]):
            m.d.sync += a.eq(Mux(self.a_vin, self.vin, self.acc) + self.a_offset)
            with m.If(self.last[0]):
                m.d.sync += residual.eq(self.vin)

        with m.If(self.enable[1]):
            with m.If(self.first):
                m.d.sync += reduced.eq(a)
            with m.Elif(self.reduce_op == ReduceOp.ADD):
                m.d.sync += reduced.eq(reduced + a)
            with m.Elif((a < reduced) == self._is_min()):
                m.d.sync += reduced.eq(a)
            with m.If(self.last[1]):
                m.d.sync += b.eq(Mux(self.b_vin, residual + self.b_offset, self.b_constant))

        results = {
            BinaryOp.ADD: reduced + b,
            BinaryOp.MAX: Mux(reduced < b, b, reduced),
            BinaryOp.MIN: Mux(reduced < b, reduced, b),
            BinaryOp.MUL: reduced[:16].as_signed() * b[:16].as_signed(),
            BinaryOp.SHR: reduced >> b[:5],
            BinaryOp.BYTE: reduced.word_select(b[:2], 8).as_signed(),
        }
        with m.If(self.enable[2]):
            m.d.sync += v.eq(reduced)
            with m.Switch(self.binary_op):
                for op, result in results.items():
                    if has(self._cfg, op):
                        with m.Case(op):
                            m.d.sync += v.eq(result)
        return m

    def _is_min(self) -> Value:
        return self.reduce_op == ReduceOp.MIN if has(self._cfg, ReduceOp.MIN) else Const(0)
