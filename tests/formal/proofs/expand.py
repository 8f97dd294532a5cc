"""Packed weights: factors go to the weights behind them, wherever packs begin and end, and multiply them.

That rows have the bytes of whole packs, and a step of an entry that is expanded writes two places, the RTL tests say.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from amaranth import Mux, Signal, Value, signed

from celosia.hw.config import Config
from celosia.hw.dae_pipeline.expand import FACTOR_BITS, PackFactors, WeightExpander
from celosia.hw.packing import packing
from celosia.hw.pipeline import EXPAND_STAGES
from celosia.hw.regs import Error
from proofs.declare import Mutant, prove
from proofs.harness import Harness, implies

CONFIGS = {
    "several channels in a unit": Config(block_in=4, block_out=4, weight_bits=4, wgt_depth=8),
    "a channel in a unit": Config(block_in=16, block_out=4, weight_bits=4, wgt_depth=8),
    "a channel in several units": Config(block_in=32, block_out=4, bus_bytes=4, weight_bits=4, wgt_depth=8),
    "several units of factors": Config(block_in=64, block_out=16, bus_bytes=4, weight_bits=4, wgt_depth=8),
}


def expanded(cfg: Config) -> Harness:
    """A byte, any, of what is written: its weight times its factor, or the byte that has come; three cycles later,
    to the same places."""
    h = Harness()
    dut, p = WeightExpander(cfg), packing(cfg)
    h.add(dut)
    lanes, word = 2 * p.unit, dut.write.data[: 8 * p.unit]
    at = h.constant(range(len(dut.wgt.data) // 8), "at")
    lane = Signal(range(lanes))
    weight, factor, byte = Signal(signed(4)), Signal(FACTOR_BITS + 1), Signal(8)
    h.m.d.comb += [
        lane.eq(at[: len(lane)]),
        weight.eq(word.word_select(lane, 4).as_signed()),
        factor.eq(dut.factors.word_select(lane // (lanes // p.unit_factors), FACTOR_BITS) + 1),
        byte.eq(Mux(dut.expand, weight * factor.as_unsigned(), word.word_select(lane % p.unit, 8))),
    ]
    h.assume(at < len(dut.wgt.data) // 8)

    def later(value: Any, name: str) -> Any:
        for stage in range(EXPAND_STAGES):
            value = h.register(value, f"{name}{stage}")
        return value

    begun = later(1, "begun")
    h.ensure(implies(begun, dut.wgt.data.word_select(at, 8) == later(byte, "byte")), "byte")
    h.ensure(dut.wgt.en == later(dut.write.en, "en"), "en")
    for name in ("addr", "mask"):
        h.ensure(implies(begun, getattr(dut.wgt, name) == later(getattr(dut.write, name), name)), name)
    return h


def factors(cfg: Config) -> Harness:
    """Of a pack's factors one, any, is followed from the unit that brings it to the units whose weights have it. Units
    wait as long as they like; others come between packs, not within. One with an error passes, and ends the run: what
    follows it is not looked at."""
    h = Harness()
    dut, p = PackFactors(cfg), packing(cfg)
    inside = h.add(dut)
    ahead, behind = p.units
    at, followed = Signal(range(ahead + behind)), h.constant(range(p.groups), "followed")
    number = at - ahead
    takes, failed = dut.unit.valid & dut.unit.ready & dut.packed, Signal()
    error = dut.unit.payload.error
    h.m.d.sync += failed.eq(failed | (takes & (error != Error.NONE)))
    h.assume(~failed)
    h.m.d.sync += at.eq(Mux(takes, Mux(at == ahead + behind - 1, 0, at + 1), at))
    h.assume(followed < p.groups)
    h.assume(implies((at != 0) & ~dut.packed, ~dut.rest.ready))
    fits = 2 * p.unit  # numbers of four bits in a unit
    home, place = followed // fits, followed % fits
    known = Signal(FACTOR_BITS)
    comes = takes & (at == home) & (at < ahead)
    h.m.d.sync += known.eq(Mux(comes, dut.unit.payload.data.word_select(place, FACTOR_BITS), known))
    is_factors = dut.packed & (at < ahead) & (error == Error.NONE)
    h.ensure(dut.rest.valid == (dut.unit.valid & ~is_factors), "rest")
    h.ensure(implies(is_factors, dut.unit.ready), "factors_are_taken")
    h.ensure(implies(~is_factors, dut.unit.ready == dut.rest.ready), "weights_wait")
    same = Value.cast(dut.rest.payload) == Value.cast(dut.unit.payload)
    h.ensure(implies(dut.rest.valid, same), "weights_as_they_are")
    of_entry = p.weights // p.entries
    for part in range(p.unit_factors):
        group = Signal(range(p.groups), name=f"group{part}")
        h.m.d.comb += group.eq(number[: len(at)] * fits % of_entry // p.run + part)
        own = dut.rest.valid & dut.packed & (at >= ahead) & (group == followed)
        h.ensure(implies(own, dut.factors.word_select(part, FACTOR_BITS) == known), f"factor{part}")
    # What makes it inductive.
    h.ensure(at < ahead + behind, "inside")
    h.ensure(inside["begins"] == (at < ahead), "begins")
    h.ensure(inside["word"] == Mux(at < ahead, at, 0), "word")
    h.ensure(inside["number"] == Mux(at < ahead, 0, number[: len(at)]), "number")
    for i, word in enumerate(inside["words"]):
        here = (home == i) & (at > i)
        h.ensure(implies(here, word.word_select(place, FACTOR_BITS) == known), f"held{i}")
    return h


FILE = "dae_pipeline/expand.py"
for name, cfg in CONFIGS.items():
    prove(
        f"packed weights are expanded, {name}",
        Mutant(FILE, "(0, 1, 2, 3, 0, 1, -2, -1)", "(0, 1, 2, 3, 0, 1, -1, -2)"),
        Mutant(FILE, "[weight[:2]]", "[weight[1:3]]"),
        Mutant(FILE, "times * (k + 1) & 255", "times * k & 255"),
        Mutant(FILE, "plain.eq(Mux(self.expand, 0, data_))", "plain.eq(data_)"),
        *((Mutant(FILE, "tables[lane * len(tables) // lanes]", "tables[0]"),) if packing(cfg).unit_factors > 1 else ()),
        depth=EXPAND_STAGES,
        script=("proc -norom",),  # of a memory induction would not know the content
    )(partial(expanded, cfg))
    parts, short = packing(cfg).groups // packing(cfg).unit_factors, sum(packing(cfg).units) < 12
    prove(
        f"factors go to their weights, {name}",
        Mutant(FILE, "begins.eq(word != ahead - 1)", "begins.eq(1)"),
        *((Mutant(FILE, "begins.eq(number == behind - 1)", "begins.eq(number == behind - 2)"),) if short else ()),
        Mutant(FILE, "& (self.unit.payload.error == Error.NONE)", ""),
        Mutant(FILE, "takes = self.packed & begins", "takes = begins"),
        *((Mutant(FILE, "(number % last) >>", "((number + 1) % last) >>"),) if parts > 1 else ()),
        *((Mutant(FILE, "Mux(word == i, self", "Mux(word == 0, self"),) if packing(cfg).units[0] > 1 else ()),
        depth=1,
    )(partial(factors, cfg))
