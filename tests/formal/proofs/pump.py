"""Prove that two cycles of a pair of products in one DSP block at twice the clock equal one cycle of the accelerator.

A cycle here is one of the fast clock; registers of the other clock change at the end of every second one. Registers may
hold anything at first, and either of the two cycles may come first, because an induction begins in any state.

A solver cannot multiply 25 by 18 bits, so the multiplier is any function. Two arbitrary pairs of operands have
arbitrary products, the same ones whenever they occur; the products of other operands are free. The proof follows these
two pairs. The rest of the block, its registers, multiplexers and adder, is modelled after UG479.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from amaranth import Cat, Elaboratable, EnableInserter, Module, Mux, Signal, Value, signed
from amaranth.hdl import DomainRenamer, Fragment, Instance
from amaranth.lib import wiring
from amaranth.lib.wiring import Out

from celosia.hw.gemm_core.pair import FACTORS_BITS, SPACING, Pair
from celosia.hw.gemm_core.pump import DoublePumpedClock
from celosia.hw.spec.blocks import Blocks, Dsp
from celosia.hw.spec.pipeline import PAIR_STAGES
from proofs.declare import Mutant, prove
from proofs.harness import Harness, implies

LEFT, RIGHT, PRODUCT, SUM = 25, 18, 43, 48
"""Bits of the block's operands, its product and its sum."""
SETTLED = 2
"""Number of cycles of the slower clock until a pump knows the halves."""


class Both(wiring.Component):
    """A pair with its pump."""

    def __init__(self, packed: bool) -> None:
        self.pair, self.pump = Pair(packed, pump=2), DoublePumpedClock()
        members = self.pair.signature.members.items()
        super().__init__({name: each for name, each in members if name not in ("halves", "late")})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.pair, m.submodules.pump = self.pair, self.pump
        for name, member in self.signature.members.items():
            inner, outer = getattr(self.pair, name), getattr(self, name)
            m.d.comb += outer.eq(inner) if member.flow is Out else inner.eq(outer)
        m.d.comb += [self.pair.halves.eq(self.pump.halves), self.pair.late.eq(self.pump.late)]
        m.d.comb += self.pump.moves.eq(self.moves[1:])
        return m


class Block(Elaboratable):
    """A model of a DSP48E1 in place of an instance: with D next to A, in clock domain `fast`.

    product: the product of `left` and `right`, which the harness provides.
    """

    def __init__(self, instance: Any) -> None:
        self._parameters = dict(instance.parameters)
        self._ports = {name: Value.cast(value) for name, (value, _) in instance.ports.items()}
        self.left, self.right = Signal(signed(LEFT)), Signal(signed(RIGHT))
        self.product = Signal(signed(PRODUCT))

    def elaborate(self, platform: object) -> Module:
        m = Module()
        port = self._ports
        a, d, b = self._register(m, "A", "CEA2", LEFT), self._register(m, "D", "CED", LEFT), self.right
        m.d.comb += b.eq(self._register(m, "B", "CEB2", RIGHT))
        inmode, opmode = self._register(m, "INMODE", "CEINMODE", 5), self._register(m, "OPMODE", "CECTRL", 7)
        assert self._parameters["ADREG"] == self._parameters["MREG"] == self._parameters["PREG"] == 1
        assert self._parameters["USE_DPORT"] == "TRUE"
        chosen = (Mux(inmode[1], 0, a) + Mux(inmode[2], d, 0))[:LEFT].as_signed()
        with m.If(port["CEAD"]):
            m.d.fast += self.left.eq(chosen)
        multiplied = Signal(signed(PRODUCT))
        with m.If(port["CEM"]):
            m.d.fast += multiplied.eq(self.product)
        c = self._register(m, "C", "CEC", SUM)
        p = port["P"]
        z = Signal(signed(SUM))
        with m.Switch(opmode[4:]):
            with m.Case(0b010):
                m.d.comb += z.eq(p)
            with m.Case(0b011):
                m.d.comb += z.eq(c)
        with m.If(port["CEP"]):
            m.d.fast += p.eq(z + multiplied + port["CARRYIN"])
        return m

    def _register(self, m: Module, name: str, enable: str, width: int) -> Value:
        """Return the value of a port, behind its register if the block has one there."""
        value = self._ports[name][:width].as_signed()
        if not self._parameters[f"{name}REG"]:
            return value
        register = Signal(signed(width), name=f"{name}_kept", reset_less=True)
        with m.If(self._ports[enable]):
            m.d.fast += register.eq(value)
        return register


def with_model(fragment: Any) -> Block:
    """Replace the instance below `fragment` by a `Block`, and return the block."""
    for number, (part, name, where) in enumerate(fragment.subfragments):
        if isinstance(part, Instance):
            block = Block(part)
            fragment.subfragments[number] = (Fragment.get(block, None), name, where)
            return block
        if part.subfragments:
            return with_model(part)
    raise AssertionError("no DSP block")


def two_are_one(packed: bool) -> Harness:
    """The sum of operands that enter in a slow cycle is there PAIR_STAGES cycles later, until the next sum."""
    h = Harness()
    dut = Both(packed)
    fragment = Fragment.get(dut, Blocks(Dsp.e1))
    pair = fragment.subfragments[0][0]
    block = with_model(pair)
    edge = Signal()  # the slower clock's registers move at the end of this cycle
    h.m.d.sync += edge.eq(~edge)
    slower = EnableInserter({"sync": edge})(fragment)
    h.m.submodules.dut = DomainRenamer({"fast": "sync"})(slower)

    def kept(value: Any, name: str, enable: Any = 1) -> Signal:
        """Return a register of the slower clock."""
        register = Signal(Value.cast(value).shape(), name=name)
        with h.m.If(edge & enable):
            h.m.d.sync += register.eq(value)
        return register

    def held(port: Any, name: str) -> Any:
        """Drive an input with any value that changes with the slower clock only."""
        value = h.any(Value.cast(port).shape(), name)
        h.assume(h.register(edge, f"{name}_may_change", init=1) | (value == h.register(value, f"{name}_before")))
        h.m.d.comb += port.eq(value)
        return value

    enters = h.any(1, "enters")
    h.assume(h.register(edge, "enters_may_change", init=1) | (enters == h.register(enters, "enters_before")))
    moves = [enters]
    for stage in range(1, PAIR_STAGES):
        moves.append(kept(moves[-1], f"moves{stage}"))
    weights = [held(dut.weights0, "weights0"), held(dut.weights1, "weights1")]
    factors = [held(dut.factor0, "factor0"), held(dut.factor1, "factor1")]
    together = kept((factors[0] + factors[1])[:FACTORS_BITS].as_signed(), "together", enters)
    h.m.d.comb += [dut.moves.eq(Cat(moves)), dut.factors.eq(together)]

    # The multiplier: of these operands the products are known.
    left = [h.constant(weights[0].shape(), f"left{number}") for number in range(2)]
    right = [h.constant(signed(8), f"right{number}") for number in range(2)]
    products = [h.constant(signed(PRODUCT), f"product{number}") for number in range(2)]
    same = (left[0] == left[1]) & (right[0] == right[1])
    h.assume(implies(same, products[0] == products[1]))
    is_first, is_second = ((block.left == each) & (block.right == by) for each, by in zip(left, right))
    anything = h.any(signed(PRODUCT), "anything")
    h.m.d.comb += block.product.eq(Mux(is_first, products[0], Mux(is_second, products[1], anything)))

    # The cycles since the operands that are followed have entered, which they do not before the halves are known.
    old: Any = 1
    for number in range(2 * SETTLED):
        old = h.register(old, f"old{number}")
    these = Cat(value == wanted for value, wanted in zip((*weights, *factors), (*left, *right))).all()
    mine = enters & these & old
    for stage in range(1, PAIR_STAGES):
        mine = kept(mine, f"mine{stage}")
    there = kept(mine, "there", moves[-1])
    total = products[0] + products[1]
    if packed:
        total = total + (1 << (SPACING - 1)) - ((right[0] + right[1]) << 7)
    h.ensure(implies(there, dut.sum == total[: len(dut.sum)].as_signed()), "sum")
    return h


PAIR, BLOCK, PUMP = "gemm_core/pair.py", "gemm_core/dsp48.py", "gemm_core/pump.py"
MUTANTS = (
    Mutant(PUMP, "changed = turn ^ seen", "changed = ~(turn ^ seen)"),
    Mutant(PUMP, "late.eq(self.moves)", "late.eq(self.moves[::-1])"),
    Mutant(PAIR, "kept[3], kept[2])", "kept[2], kept[3])"),
    Mutant(BLOCK, '"AD": chosen,', '"AD": product,', near="operands, chosen, product, total = moves"),
)
for packed, more in {
    True: (
        Mutant(PAIR, "(1 << _LOW_BITS) - 2", "(1 << _LOW_BITS) - 1"),
        Mutant(PAIR, "Cat(~self.factors, self.factors[-1])", "Cat(~self.factors, ~self.factors[-1])"),
        Mutant(BLOCK, "Cat(first, Const(1, 1)", "Cat(second, Const(1, 1)", near="first, second = halves"),
    ),
    False: (Mutant(BLOCK, "Cat(Const(0, 1), second,", "Cat(Const(0, 1), first,", near="first, second = halves"),),
}.items():
    prove(
        f"two cycles of a pumped pair are one, {'' if packed else 'not '}packed", *MUTANTS, *more,
        depth=2 * (SETTLED + PAIR_STAGES) + 4, reach=2 * (SETTLED + PAIR_STAGES) + 12,
    )(partial(two_are_one, packed))  # fmt: skip
