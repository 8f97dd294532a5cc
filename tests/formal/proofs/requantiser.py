"""Prove that the requantiser equals its specification for all sums, multipliers and shifts.

A solver cannot multiply 24 by 24 bits, so the multiplication is cut out: Yosys puts any value in its place. Two facts
are assumed of this value. It is 0 if a factor is 0. It is at least 2^23 if the multiplier is not 0 and the significand
has all its 24 bits. The real product is such a value, so a fact that holds for all of them holds for it. Each case has
some of the shifts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from amaranth import Cat, Module, Mux, Signal, Value, signed

from celosia.hw.spec.pipeline import REQUANTISE_STAGES
from celosia.hw.vector_unit.requantise import Requantise
from proofs.declare import Method, Mutant, prove
from proofs.harness import Harness, implies

CUT = ("cutpoint t:$mul",)
GROUP = 4
"""Number of shifts in a case; they begin with the case's number."""
LIMIT = 256
"""The result saturates at this value, from which no zero point leads back into int8."""


def excess(m: Module, value: Value, name: str) -> Signal:
    """Return the number of significant bits of `value` beyond 24."""
    bits = Signal(6, name=f"{name}_excess")
    for i in range(24, len(value)):
        with m.If(value[i]):
            m.d.comb += bits.eq(i - 23)
    return bits


def half_even(m: Module, value: Value, shift: Value, slack: Value | int, name: str) -> Signal:
    """Return value / 2^shift, rounded to nearest with ties to even; values within `slack` of a tie count as ties."""
    width = 66  # of shifts up to 63, too
    floor, fraction, half = (Signal(width, name=f"{name}_{part}") for part in ("floor", "fraction", "half"))
    distance = Signal(signed(width), name=f"{name}_distance")
    tie, up, result = Signal(name=f"{name}_tie"), Signal(name=f"{name}_up"), Signal(width, name=f"{name}_rounded")
    m.d.comb += [
        floor.eq(value >> shift),
        fraction.eq(value - (floor << shift)[:width]),
        half.eq(((1 << shift) >> 1)[:width]),
        distance.eq(fraction - half),
        tie.eq((distance <= slack) & (-distance <= slack)),
        up.eq((shift != 0) & Mux(tie, floor[0], distance > 0)),
        result.eq(floor + up),
    ]
    return result


def as_reference(m: Module, product: Value, shift: Value) -> Signal:
    """Round as step 3 of `sim.reference.requantise`: once, with half a unit of the 24th significant bit as slack."""
    bits = excess(m, product, "product")
    slack = Signal(len(product))
    m.d.comb += slack.eq(((1 << bits) >> 1)[: len(product)])
    return half_even(m, product, shift, slack, "nearest")


def as_float32(m: Module, product: Value, shift: Value) -> Signal:
    """Round as float32 does: the product to 24 significant bits, and that to an integer."""
    bits = excess(m, product, "product")
    single = Signal(len(product) + 1)
    m.d.comb += single.eq(half_even(m, product, bits, 0, "single") << bits)
    return half_even(m, single, shift, 0, "nearest")


def lane(rounding: Callable[[Module, Value, Value], Signal], case: int) -> Harness:
    """An item that enters in cycle 0 and moves in each cycle has the right result, among any other items."""
    h = Harness()
    m = h.m
    dut = Requantise()
    inside = h.add(dut)
    cycle = Signal(4)
    m.d.sync += cycle.eq(cycle + 1)
    for stage in range(REQUANTISE_STAGES):
        h.assume(implies(cycle == stage, dut.enable[stage]))
    v, bypass, param = (
        h.constant(shape, f"item_{name}") for name, shape in (("v", signed(32)), ("bypass", 1), ("param", 62))
    )
    h.assume(implies(cycle == 0, Cat(dut.v == v, dut.bypass == bypass, Value.cast(dut.param)[:62] == param).all()))
    bias, multiplier, shift = param[:32].as_signed(), param[32:56], param[56:62]
    h.assume(~bypass & (shift >= case) & (shift < case + GROUP))

    # The sum as float32.
    total, magnitude = Signal(signed(32)), Signal(32)
    m.d.comb += [total.eq(v + bias), magnitude.eq(Mux(total < 0, -total, total))]
    lost = excess(m, magnitude, "sum")
    rounded = Signal(33)
    m.d.comb += rounded.eq(half_even(m, magnitude, lost, 0, "sum") << lost)
    less = excess(m, rounded, "rounded")
    significand = inside["significand"]
    h.ensure(implies(cycle == 3, (significand << less)[:40] == rounded), "significand")

    # The product, of which not much is known.
    factor, product = Signal(24), Signal(48)
    with m.If(cycle == 3):
        m.d.sync += factor.eq(significand)
    with m.If(cycle == 5):
        m.d.sync += product.eq(inside["product"])
    either = (factor == 0) | (multiplier == 0)
    cut = inside["product"]
    h.assume(implies((cycle == 5) & either, cut == 0))
    h.assume(implies((cycle == 5) & ~either & factor[23], cut >= (1 << 23)))
    exact = Signal(57)
    m.d.comb += exact.eq(product << less)

    nearest = rounding(m, exact, shift)
    wanted = Signal(signed(10))
    m.d.comb += wanted.eq(Mux(nearest > LIMIT, LIMIT, nearest))
    h.ensure(implies(cycle == REQUANTISE_STAGES, dut.result == Mux(total < 0, -wanted, wanted)), "result")
    return h


def bypass() -> Harness:
    """If the requantiser is bypassed, the result is v itself, saturated."""
    h = Harness()
    dut = Requantise()
    inside = h.add(dut)
    h.assume(dut.bypass & dut.enable.all())
    v: Value = dut.v
    for stage in range(REQUANTISE_STAGES):
        v = h.register(v, f"v{stage}")
    started = h.register(1, "started")
    for stage in range(REQUANTISE_STAGES - 1):
        started = h.register(started, f"started{stage}")
    factor = h.register(h.register(inside["significand"], "factor0"), "factor1")
    h.assume(inside["product"] == factor << 23)
    wanted = Mux(v > LIMIT, LIMIT, Mux(v < -LIMIT, -LIMIT, v))
    h.ensure(implies(started, dut.result == wanted), "result")
    return h


REGISTERS = (
    ("negative.0", "magnitude", "multiplier.0", "shift.0"),
    ("negative.1", "integer", "drop", "half", "multiplier.1", "shift.1"),
    ("negative.2", "significand", "less", "multiplier.2", "shift.2"),
    ("negative.3", "by_low", "by_high", "shift.3"),
    ("negative.4", "product", "shift.4"),
    ("negative.5", "quotient", "over"),
    ("negative.6", "nearest"),
    ("result",),
)
"""The registers of each stage."""


def pauses() -> Harness:
    """A stage that is not enabled keeps its registers, so pauses only delay an item."""
    h = Harness()
    dut = Requantise()
    inside = h.add(dut)
    for stage, names in enumerate(REGISTERS):
        held = Cat(dut.result if name == "result" else inside[name] for name in names)
        before = h.register(held, f"held{stage}")
        h.ensure(h.register(dut.enable[stage], f"enabled{stage}", init=1) | (held == before), f"stage{stage}")
    return h


FILE = "vector_unit/requantise.py"
for name, rounding in (("float32", as_float32), ("sim.reference", as_reference)):
    prove(
        f"requantiser equals {name}",
        Mutant(FILE, "Mux(magnitude[bits], below, below - 1)", "below"),
        Mutant(FILE, "Mux(quotient[point], slack, ~slack)", "Mux(quotient[point], slack, slack)"),
        Mutant(FILE, "Mux(over, 1 << _INT, rounded[point:])", "rounded[point:]"),
        method=Method.BOUNDED,
        depth=REQUANTISE_STAGES + 1,
        reach=REQUANTISE_STAGES + 1,
        script=CUT,
        cases=range(0, 64, GROUP),
        sample=(48,),
        planted=44,
    )(partial(lane, rounding))
prove(
    "requantiser bypassed",
    Mutant(FILE, "Mux(self.bypass, 0, self.param.bias)", "self.param.bias"),
    depth=REQUANTISE_STAGES + 1,
    script=CUT,
)(bypass)
prove(
    "requantiser paused",
    Mutant(FILE, "with m.If(self.enable[3]):", "with m.If(self.enable[3] | self.enable[4]):"),
    depth=1,
)(pauses)
