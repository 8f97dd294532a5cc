"""Prove that the bits of a norm's inverse root and quotient are right, and that the remainders are right.

A product of all bits is too hard for a solver. Therefore the proof computes products bit by bit along with the
hardware.
For a root r, as far as its bits are known, p = r * word. One more bit d changes p to 2 p + d word. The remainder of a
number after r^2 word counts four times as much in the next step: four times the remainder without d (4 p + word).
"""

from __future__ import annotations

from amaranth import Cat, Mux, Signal

from celosia.hw.spec.pipeline import ROOT_BITS
from celosia.hw.vector_unit.norm.moments import VALUE_BITS
from celosia.hw.vector_unit.norm.root import InverseRoot
from celosia.hw.vector_unit.norm.variance import NormVariance
from proofs.declare import Mutant, prove
from proofs.harness import Harness, implies

WIDE = 64
"""Number of bits in which no computed product wraps."""


def root() -> Harness:
    """A bit of the root is 1 if 2^82 minus the known part is at least (2 r + 1)^2 word.

    So (2 r)^2 word fits into 2^82, and (2 r + 2)^2 word does not, or just so. The bound of r word, the root of r^2 word
    times word, that follows from these two is arithmetic without hardware, and is assumed.
    """
    h = Harness()
    m, dut = h.m, InverseRoot()
    inside = h.add(dut)
    step, fits, left, part = (inside[name] for name in ("step", "fits", "left", "part"))
    h.assume(implies(dut.take, ((step == 0) | dut.done) & (dut.word[30:] != 0)))
    names = ("word", "beyond", "p", "bits", "most")  # beyond: 2^82 without (2 r)^2 word
    word, beyond, p, bits, most = (Signal(WIDE, name=f"counted_{name}") for name in names)
    wanted = Signal(WIDE)
    m.d.comb += wanted.eq((p << 2) + word)
    for signal, first, then in (
        (word, dut.word, word), (p, 0, (p << 1) + Mux(fits, word, 0)), (bits, dut.root, (bits << 1) + fits),
        (beyond, 1 << 32, (beyond - Mux(fits, wanted, 0)) << 2), (most, 1 << 31, most << 1),
    ):  # fmt: skip
        m.d.sync += signal.eq(Mux(dut.take, first, Mux(step == 0, signal, then)))
    known = (step != 0) & (step <= ROOT_BITS)
    h.assume(implies(known, p <= most))
    for i in range(ROOT_BITS):
        h.ensure(implies(step == i + 1, most == 1 << 31 + i), f"place{i}")
    h.ensure(implies(known, (word[30:] != 0) & (word < 1 << 32)), "word")
    h.ensure(implies(known, (inside["word"] == word) & (inside["thrice"] == 3 * word)), "kept")
    h.ensure(implies(known, beyond <= (p << 3) + (word << 2)), "beyond")
    h.ensure(implies(known, (left == beyond) & (part == wanted)), "left")
    h.ensure(implies(known, fits == (wanted <= beyond)), "bit")
    h.ensure(implies(known | dut.done, (dut.root ^ bits)[:ROOT_BITS] == 0), "root")
    return h


def mean() -> Harness:
    """The quotient of 2 sum + count, with 2^9 count added, and its remainder are right.

    The bits of the quotient subtract terms, each half of the one before; terms and remainder add up to the dividend,
    and the remainder is less than the last term. The sum is assumed to be such that no mean exceeds the range of
    values.
    """
    h = Harness()
    m, dut = h.m, NormVariance()
    inside = h.add(dut, constant=("count",))
    step, rest, divisor, quotient = (inside[name] for name in ("step", "rest", "divisor", "quotient"))
    first, last = 2, 2 + VALUE_BITS  # steps in which bits are found, and behind them
    dividend, taken, bits = Signal(24), Signal(24), Signal(VALUE_BITS)
    bit, added = ~inside["less"][-1], dut.count << VALUE_BITS
    total = (dut.sum << 1) + dut.count + added
    h.assume(implies(dut.take, ((step == 0) | dut.done) & (total >= 0) & (total < added << 1)))
    with m.If(dut.take):
        m.d.sync += [dividend.eq(total), taken.eq(0), bits.eq(quotient)]
    with m.Elif((step >= first) & (step < last)):
        m.d.sync += [taken.eq(taken + Mux(bit, divisor, 0)), bits.eq(Cat(bit, bits[:-1]))]
    h.ensure(implies(step != 0, (dividend[0] == dut.count[0]) & (quotient == bits)), "bits")
    h.ensure(implies(step == 1, (rest + added - dividend)[: len(rest)] == 0), "added")
    h.ensure(implies(step == 1, (taken == 0) & (dividend < added << 1) & (divisor == added)), "begins")
    for number in range(VALUE_BITS + 1):
        here = step == first + number if number < VALUE_BITS else step >= last
        h.ensure(implies(here, divisor == added >> number), f"divisor{number}")
        h.ensure(implies(here, (rest < (added << 1) >> number) & (taken[0] == 0)), f"less{number}")
    h.ensure(implies(step >= first, rest + taken == dividend), "all")
    h.ensure(implies(step >= last, dut.mean == bits.as_unsigned() - (1 << VALUE_BITS - 1)), "mean")
    h.ensure(implies(step >= last, (dut.rest << 1) + dut.count == rest), "rest")
    h.ensure(implies(step >= last, (dut.rest << 1 < dut.count) & (dut.rest << 1 >= -dut.count)), "nearest")
    return h


FILE = "vector_unit/norm/variance.py"
prove(
    "norm's mean",
    Mutant(FILE, "Cat(~less[-1], quotient[:-1])", "Cat(less[-1], quotient[:-1])"),
    Mutant(FILE, "(self.sum << 1) + self.count)", "self.sum << 1)"),
    Mutant(FILE, "divisor.eq(self.count << VALUE_BITS)", "divisor.eq(self.count << VALUE_BITS - 1)"),
    Mutant(FILE, "divisor.eq(divisor >> 1)", "divisor.eq(divisor)"),
    depth=1,
)(mean)
FILE = "vector_unit/norm/root.py"
prove(
    "norm's inverse root",
    Mutant(FILE, "twice + thrice, twice - word", "twice + thrice, twice"),
    Mutant(FILE, "left.eq(1 << 32)", "left.eq(1 << 31)"),
    Mutant(FILE, "(self.word << 1) + self.word", "self.word << 1"),
    Mutant(FILE, "Cat(fits, self.root[:-1])", "Cat(~fits, self.root[:-1])"),
    depth=1,
)(root)
