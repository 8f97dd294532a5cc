"""What is found of the rows of a norm before its first step is taken, and kept for its steps."""

from __future__ import annotations

from amaranth import Cat, Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.lib.layout import read_port
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import MAX_NORM_ROWS
from celosia.hw.spec.scratchpads import scratchpads
from celosia.hw.vector_unit.masks import ones
from celosia.hw.vector_unit.norm.factors import NormFactors, row_layout
from celosia.hw.vector_unit.norm.moments import NormMoments
from celosia.hw.vector_unit.norm.root import InverseRoot
from celosia.hw.vector_unit.norm.variance import NormVariance
from celosia.hw.vector_unit.norm.walk import WALKED, NormAddressGenerator, norm_fields

_KEPT = ("imm", "a_offset", "centre", "scale_c")


class NormEngine(wiring.Component):
    """Of each row its sums, its variance, the inverse root of that and the factors of its lanes, each while the one
    before it is done with the row in front. It takes `norm_cycles`.

    Members
    -------
    fields : In                 Of a VECTOR with `norm`.
    start : In(1)               It is there: while not `busy`.
    vin : Out(ReadPort)         Must be ready. While `busy` nothing else reads.
    busy : Out(1)               Not all rows are through; ends : Out(1): from the next cycle on they are.
    takes : In(1)               A step of the VECTOR is taken, row by row, entries around that;
    number : Out                of this row.
    wanted : In, row : Out(row_layout)      What is kept of a row.
    halt : In(1)                Drops everything.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        number = exact_log2(MAX_NORM_ROWS)
        super().__init__({
            "fields": In(norm_fields(cfg, *WALKED, *_KEPT)), "start": In(1),
            "vin": Out(read_port(scratchpads(cfg)["vin"])), "busy": Out(1), "ends": Out(1), "takes": In(1),
            "number": Out(number), "wanted": In(number), "row": Out(row_layout), "halt": In(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.walk, m.submodules.moments = walk, moments = (
            NormAddressGenerator(self._cfg),
            NormMoments(self._cfg.norm),
        )
        m.submodules.variance, m.submodules.root = variance, root = NormVariance(), InverseRoot()
        m.submodules.factors = factors = NormFactors()
        # Whether one comes is known late in its cycle: but for `busy` it begins in the next one.
        self._taken, self._took = taken, took = Reg(self.fields.shape(), name="taken"), Signal(name="took")
        m.d.sync += took.eq(self.start)
        with m.If(~self.busy):
            m.d.sync += taken.eq(self.fields)
        m.d.comb += [
            walk.start.eq(took), *(walk.fields[name].eq(taken[name]) for name in WALKED),
            self.vin.en.eq(walk.read), self.vin.addr.eq(walk.addr),
        ]  # fmt: skip
        self._add_up(m, walk, moments)
        m.d.comb += [
            variance.take.eq(moments.found), variance.sum.eq(Mux(taken.centre, moments.sum, 0)),
            variance.squares.eq(moments.squares), variance.epsilon.eq(taken.scale_c),
            root.take.eq(variance.done), root.word.eq(variance.word),
            factors.take.eq(root.done), factors.root.eq(root.root), factors.offset.eq(taken.a_offset),
        ]  # fmt: skip
        for name in ("mean", "rest", "places"):
            found = getattr(variance, name)
            beside = Reg(found.shape(), name=name)
            with m.If(variance.done):
                m.d.sync += beside.eq(found)
            m.d.comb += getattr(factors, name).eq(beside)
        self._count(m, variance, factors)
        self._keep(m, factors)
        return ResetInserter(self.halt)(m)

    def _add_up(self, m: Module, walk: NormAddressGenerator, moments: NormMoments) -> None:
        """A part of an entry, two cycles behind its step; but for the first one nothing is read then."""
        valid = Signal(name="part_valid")
        lanes = self._cfg.norm
        imm = self._taken.imm[: exact_log2(self._cfg.block_out)]
        inside = Cat(1, ones(~imm))
        number = Reg(len(walk.number), name="part_number")
        ends = Reg()
        marks = Reg(2)
        m.d.sync += [
            valid.eq(walk.active), number.eq(walk.number), ends.eq(walk.ends), marks.eq(Cat(walk.first, walk.last)),
            moments.valid.eq(valid), Cat(moments.first, moments.last).eq(marks),
            moments.bytes_.eq(self.vin.data.word_select(number, 8 * lanes)),
            moments.inside.eq(inside.word_select(number, lanes) | (~ends).replicate(lanes)),
        ]  # fmt: skip
        m.d.comb += moments.offset.eq(self._taken.a_offset)

    def _count(self, m: Module, variance: NormVariance, factors: NormFactors) -> None:
        """The lanes of a row; and shifted up until the highest bit is 1, a bit a cycle, before they are wanted so."""
        count = Reg(len(variance.count))
        high = Reg(len(factors.count))
        spare = Reg(len(factors.spare))
        all_lanes = Signal(len(count))
        m.d.comb += [
            all_lanes.eq((self._taken.extent_n << exact_log2(self._cfg.block_out)) - self._taken.imm),
            variance.count.eq(count), factors.count.eq(high), factors.spare.eq(spare),
        ]  # fmt: skip
        with m.If(self._took):
            m.d.sync += [count.eq(all_lanes), high.eq(all_lanes), spare.eq(0)]
        with m.Elif(~high[-1]):
            m.d.sync += [high.eq(high << 1), spare.eq(spare + 1)]

    def _keep(self, m: Module, factors: NormFactors) -> None:
        m.submodules.rows = rows = Memory(shape=row_layout, depth=MAX_NORM_ROWS, init=[])
        put = rows.write_port()
        get = rows.read_port(domain="comb")
        last = Reg(len(self.number), name="last_number")
        at = Signal(len(self.number))
        m.d.comb += [
            put.en.eq(factors.done), put.addr.eq(at), put.data.eq(factors.row), get.addr.eq(self.wanted),
            self.row.eq(get.data), self.ends.eq(factors.done & (at == last)),
        ]  # fmt: skip
        with m.If(self.start):
            m.d.sync += self.busy.eq(1)
        with m.Elif(self.ends):
            m.d.sync += self.busy.eq(0)
        with m.If(self._took):
            m.d.sync += [at.eq(0), self.number.eq(0), last.eq(self._taken.extent_x - 1)]
        with m.Elif(factors.done):
            m.d.sync += at.eq(at + 1)
        with m.If(self.takes):
            m.d.sync += self.number.eq(Mux(self.number == last, 0, self.number + 1))
