"""Inverse square root, one bit a cycle."""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.pipeline import ROOT_BITS
from celosia.hw.vector_unit.norm.variance import WORD_BITS

_LEFT_BITS = 60
"""Width of `left`, which is multiplied by four in each step."""


class InverseRoot(wiring.Component):
    """Compute the largest `root` of ROOT_BITS bits with root^2 * word <= 2^82, one bit a cycle, highest bit first.

    `left` is 2^82 - root^2 * word for the bits computed so far, multiplied by four in each step. The next bit is 1 if
    `left` is at least `part` = (4 * root + 1) * word. The next `part` is twice that, plus 3 * word after a 1, or minus
    `word` after a 0.

    Members
    -------
    take : In(1), word : In         A word comes; only when the previous root is done.
    done : Out(1), root : Out       Pulse: `root` is valid, ROOT_BITS + 1 cycles after `take`.
    """

    def __init__(self) -> None:
        super().__init__({"take": In(1), "word": In(WORD_BITS), "done": Out(1), "root": Out(ROOT_BITS)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        step = Signal(range(ROOT_BITS + 2))
        word = Reg(WORD_BITS)
        thrice = Reg(WORD_BITS + 2)
        left = Reg(_LEFT_BITS)
        part = Reg(_LEFT_BITS)
        rest = Signal(signed(_LEFT_BITS + 1))
        fits = Signal()
        m.d.comb += [rest.eq(left - part), fits.eq(~rest[-1]), self.done.eq(step == ROOT_BITS + 1)]
        with m.If(self.take):
            m.d.sync += [step.eq(1), left.eq(1 << 32), part.eq(self.word), word.eq(self.word)]
            m.d.sync += thrice.eq((self.word << 1) + self.word)
        with m.Else():
            twice = part << 1
            m.d.sync += [
                step.eq(Mux(self.done, 0, step + (step != 0))),
                left.eq(Mux(fits, rest[:_LEFT_BITS], left) << 2),
                part.eq(Mux(fits, twice + thrice, twice - word)),
            ]
            with m.If(~self.done):
                m.d.sync += self.root.eq(Cat(fits, self.root[:-1]))
        probes(self, step=step, fits=fits, left=left, part=part, word=word, thrice=thrice)
        return m
