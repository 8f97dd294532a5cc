"""1 / sqrt, a bit of it a cycle."""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.pipeline import ROOT_BITS
from celosia.hw.vector_unit.norm.variance import WORD_BITS

_LEFT_BITS = 60
"""Of what is left of 2^82, in which a step counts four times what the one before does."""


class InverseRoot(wiring.Component):
    """The largest root of ROOT_BITS with root^2 word <= 2^82.

    `left` is what root^2 word leaves of it. A bit more of the root takes (2 root + bit) word away, `part`: where there
    is as much it is one, and `part` has three times the word more in the next step, else once the word less.

    Members
    -------
    take : In(1), word : In         A word comes; the one before is done.
    done : Out(1), root : Out       ROOT_BITS + 1 cycles behind `take`, for this cycle.
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
